"""Libraries for macOS: load commands, code signature, and Metal source that clang reads.

Apple's own compiler exists on Macs only. Metal's language is C++, so clang takes it elsewhere, with
a header beside this file for the part of the standard library that kernels use.
"""

import importlib.util
import re
import shutil
import sys
import tempfile
from pathlib import Path

from .library import Library, device_kernels
from .macho import MachO
from .programs import first_line, run_program, version_of
from .report import Finding, KernelUse, ToolMissing

INSTALL = "pip install ziglang (or, as root: apt install clang)"
_HEADERS = Path(__file__).parent / "headers"
_OPTIONS = ("-fsyntax-only", "-std=c++17", "-nostdinc", "-nostdinc++", "-Wno-everything")
_SHARED = re.compile(r"threadgroup ([a-z]+)([234]?) \w+\[(\d+)\]")
_BYTES = {"float": 4, "int": 4, "uint": 4, "half": 2, "short": 2, "ushort": 2}


def inspect(library: Library) -> Finding:
    """The library's load commands and every kernel's source, checked. ToolMissing without clang;
    ValueError if it is no library for macOS, or without kernels."""
    if not isinstance(library.file, MachO):
        raise ValueError("it is no library for macOS")
    compiler = _clang()
    file, faults = library.file, []
    try:
        signature = file.check_signature()
    except ValueError as error:
        signature = "none that holds"
        faults.append(str(error))
    facts = (
        f"{file.cpu} library for {file.platform} or later, {file.num_commands} load commands",
        f"linked with {', '.join(file.libraries)}",
        f"code signature: {signature}",
    )
    _, stream = device_kernels(library.module("metal"))
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(stream.number()):
            name, source = stream.text(), stream.content()
            path = Path(folder, f"{name}.cc")
            path.write_bytes(source)
            code, _, errors = run_program([*compiler, *_OPTIONS, f"-I{_HEADERS}", str(path)])
            if code != 0:
                faults.append(f"{name}: {first_line(errors)}")
            shared = sum(
                _BYTES[scalar] * (4 if lanes == "3" else int(lanes or 1)) * int(length)
                for scalar, lanes, length in _SHARED.findall(source.decode())
            )
            kernels.append(KernelUse(name, shared_bytes=shared, code_bytes=len(source)))
    tool = f"clang {version_of(compiler).rpartition(' ')[2]}"
    return Finding(tool, tuple(kernels), facts, tuple(faults))


def _clang() -> list[str]:
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "clang"]
    if (path := shutil.which("clang++")) is not None:
        return [path]
    raise ToolMissing(f"Metal source is checked by clang, which is not installed; run: {INSTALL}")
