"""Code objects of AMD GPUs, read by LLVM's readelf.

The resources of each kernel are in a note that LLVM writes. Source: LLVM, User Guide for AMDGPU
Backend, "Code Object V3 Metadata".
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .elf import Elf
from .library import Library, device_kernels
from .programs import find_program, output_of, version_of
from .report import Finding, KernelUse

INSTALL = "apt install llvm (as root)"
_FIELD = re.compile(r"^    \.(\w+): +(\S+)$")
_TARGET = re.compile(r"amdhsa\.target: .*-(gfx\w+)")


def inspect(library: Library) -> Finding:
    """The resources of every kernel. ToolMissing without llvm-readelf; ValueError if the library
    holds no code object."""
    program = find_program(
        ("llvm-readelf",), "AMD's code objects", INSTALL, ("/opt/rocm/llvm/bin",)
    )
    named, stream = device_kernels(library.module("hip"))
    code = stream.content()
    sizes = {name: symbol.num_bytes for name, symbol in Elf(code).symbols.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.co")
        path.write_bytes(code)
        notes = output_of([program, "--notes", str(path)])
    target = _TARGET.search(notes)
    arch = target[1] if target else None
    records = list(_records(notes))
    kernels = tuple(
        KernelUse(
            record[".name"],
            arch,
            registers=int(record[".vgpr_count"]),
            scalar_registers=int(record[".sgpr_count"]),
            shared_bytes=int(record[".group_segment_fixed_size"]),
            stack_bytes=int(record[".private_segment_fixed_size"]),
            spills=int(record[".vgpr_spill_count"]) + int(record[".sgpr_spill_count"]),
            code_bytes=sizes.get(record[".name"]),
        )
        for record in records
    )
    waves = {record[".wavefront_size"] for record in records}
    facts = (f"code object for {arch}, waves of {', '.join(sorted(waves))}",)
    faults = [f"it lacks kernel {name}" for name in sorted(set(named) - {k.name for k in kernels})]
    return Finding(version_of([program]), kernels, facts, tuple(faults))


def _records(notes: str) -> Iterator[dict[str, str]]:
    """The fields of each kernel: the note is YAML, and a kernel's own fields stand 4 deep."""
    record: dict[str, str] = {}
    for line in notes.splitlines():
        # The first field of a kernel comes behind its dash.
        if line.startswith("  - ") or not line.startswith("  "):
            if ".name" in record:
                yield record
            record = {}
            line = line.replace("  - ", "    ", 1)
        if (match := _FIELD.match(line)) is not None:
            record[f".{match[1]}"] = match[2].strip("'")
    if ".name" in record:
        yield record
