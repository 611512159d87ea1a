"""Machine code of CPUs, read by a disassembler."""

import re
from dataclasses import dataclass
from pathlib import Path

from .elf import Elf
from .library import Library
from .programs import find_program, output_of, version_of
from .report import Finding, KernelUse

INSTALL = "apt install binutils (as root; llvm for another processor's libraries)"
_SYMBOL = re.compile(r"^[0-9a-f]+ <([\w.]+)>:$")
_INSTRUCTION = re.compile(r"^ +([0-9a-f]+):\s+(\w.*)")
_FRAME = re.compile(r"^subq?\s+\$(0x[0-9a-f]+|\d+), ?%rsp|^sub\s+sp, sp, #(0x[0-9a-f]+|\d+)")
_LONGEST = 16
"""Bytes of an instruction, at most: more lie between functions."""
_PREFIX = "__tvm_ffi_"
_NAMELESS = "(subroutines)"
"""Kernels that only others call have no names in the library."""


@dataclass(slots=True)
class _Code:
    """What was counted so far of one function."""

    code_bytes: int = 0
    stack_bytes: int = 0
    instructions: int = 0


def inspect(library: Library, path: Path) -> Finding:
    """Code and stack of every function. ToolMissing without a disassembler; CompileError if it
    fails."""
    program = find_program(("llvm-objdump", "objdump"), "machine code of CPUs", INSTALL)
    options = ("--disassemble", "--section=.text", "--no-show-raw-insn")
    listing = output_of([program, *options, str(path)])
    symbols = library.file.symbols if isinstance(library.file, Elf) else {}
    found: dict[str, _Code] = {}
    name, end = "", 0
    start, last = 0, _Code()
    for line in listing.splitlines():
        if (symbol := _SYMBOL.match(line)) is not None:
            name = symbol[1]
            known = symbols.get(name)
            end = known.address + known.num_bytes if known is not None else 0
        elif (instruction := _INSTRUCTION.match(line)) is not None:
            address = int(instruction[1], 16)
            last.code_bytes += min(address - start, _LONGEST)
            start = address
            is_named = end == 0 or address < end
            last = found.setdefault(name if is_named else _NAMELESS, _Code())
            last.instructions += 1
            if (size := _FRAME.match(instruction[2])) is not None:
                last.stack_bytes = max(last.stack_bytes, int(size[1] or size[2], 0))
    kernels = tuple(
        KernelUse(
            name.removeprefix(_PREFIX),
            stack_bytes=code.stack_bytes,
            code_bytes=code.code_bytes,
            instructions=code.instructions,
        )
        for name, code in found.items()
    )
    return Finding(version_of([program]), kernels)
