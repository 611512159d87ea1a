"""Linkers for what is not this machine's: AMD's code objects, and libraries of macOS.

Standard library only, for `doctor`.
"""

import importlib.util
import shutil
import sys

from ..artifact.errors import CompileError
from ..artifact.host import host_platform
from .linker import APPLE, Linker, find_linker

MACOS = "macos-aarch64"
_ZIG = "ziglang"


def find_amd_linker() -> Linker:
    """LLVM's linker, for code objects; CompileError, with what brings it, if there is none."""
    options = ("--no-undefined", "-shared")
    path = shutil.which("ld.lld")
    if path is not None:
        return Linker("ld.lld", (path, *options))
    if importlib.util.find_spec(_ZIG) is not None:
        return Linker(_ZIG, (sys.executable, "-m", _ZIG, "ld.lld", *options))
    raise CompileError(
        f"target rocm needs ld.lld, which is not installed; run: pip install {_ZIG} "
        "(or, as root: apt install lld)"
    )


def find_macos_linker() -> Linker:
    """What links for macOS on this machine, whatever that is; CompileError as above."""
    if host_platform() == MACOS:
        return find_linker(MACOS)
    if importlib.util.find_spec(_ZIG) is None:
        raise CompileError(
            "target metal needs a linker for macOS, which is not installed; "
            f"run: pip install {_ZIG}"
        )
    command = (sys.executable, "-m", _ZIG, "cc", "-target", "aarch64-macos.13.0")
    return Linker(_ZIG, (*command, *APPLE))
