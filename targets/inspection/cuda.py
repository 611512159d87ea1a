"""Machine code of NVIDIA GPUs, read by cuobjdump."""

import re
import tempfile
from pathlib import Path

from ...artifact.machine_code import from_text
from ..nvcc import tool_folders
from .elf import Elf
from .library import Library, device_kernels
from .programs import find_program, output_of, version_of
from .report import Finding, KernelUse

INSTALL = "pip install nvidia-cuda-cuobjdump (or bring NVIDIA's CUDA toolkit)"
_ARCH = re.compile(r"^arch = (sm_\w+)")
_FUNCTION = re.compile(r"^ *Function ([\w$]+):")
_USE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_CODE = ".text."
"""A section of code is named after its kernel."""


def inspect(library: Library) -> Finding:
    """The resources of every kernel, for every architecture that there is machine code for.

    ToolMissing without cuobjdump; ValueError if the library holds no code of NVIDIA's.
    """
    program = find_program(("cuobjdump",), "CUDA's kernels", INSTALL, tool_folders())
    named, stream = device_kernels(library.module("cuda"))
    code = from_text(stream.text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        binary = folder / "kernels.fatbin"
        binary.write_bytes(code)
        listing = output_of([program, "-res-usage", str(binary)])
        ptx = output_of([program, "-lptx", str(binary)])
        output_of([program, "-xelf", "all", str(binary)], folder=folder)
        sizes = _code_sizes(folder)
    kernels = tuple(_kernels(listing, sizes))
    arches = sorted({k.arch or "" for k in kernels}, key=_number)
    later = sorted(set(re.findall(r"\.(sm_\w+)\.ptx", ptx)), key=_number)
    facts = [f"machine code for {', '.join(arches)}", f"PTX for {', '.join(later) or 'none'}"]
    faults = [
        f"{arch} lacks kernel {kernel}"
        for arch in arches
        for kernel in sorted(set(named) - {k.name for k in kernels if k.arch == arch})
    ]
    return Finding(version_of([program]), kernels, tuple(facts), tuple(faults))


def _kernels(listing: str, sizes: dict[tuple[str, str], int]) -> list[KernelUse]:
    kernels = []
    arch = name = ""
    for line in listing.splitlines():
        if (match := _ARCH.search(line)) is not None:
            arch = match[1]
        elif (match := _FUNCTION.search(line)) is not None:
            name = match[1]
        elif (match := _USE.search(line)) is not None:
            registers, stack, shared, local = map(int, match.groups())
            kernels.append(
                KernelUse(
                    name,
                    arch,
                    registers=registers,
                    shared_bytes=shared,
                    stack_bytes=stack + local,
                    # What is on a stack need not have been spilled there.
                    spills=0 if stack + local == 0 else None,
                    code_bytes=sizes.get((arch, name)),
                )
            )
    return kernels


def _code_sizes(folder: Path) -> dict[tuple[str, str], int]:
    """(architecture, kernel) → bytes, from the files that cuobjdump extracts."""
    sizes = {}
    for path in folder.glob("*.cubin"):
        arch = path.name.split(".")[-2]
        for section in Elf(path.read_bytes()).sections:
            if section.name.startswith(_CODE):
                sizes[arch, section.name.removeprefix(_CODE)] = section.num_bytes
    return sizes


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch) or 0)
