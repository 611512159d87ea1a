"""What turns a compiled model's object files into a shared library: a table of linkers.

No C library takes part: the few functions that a model library calls (memcpy, sincosf and TVM's
own) are found in the process that loads it. So any linker that knows the processor will do, and
LLVM's knows all of them. Standard library only: `everycast doctor` reads this too.
"""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..artifact.errors import CompileError
from ..artifact.host import host_platform

_SHARED = ("-shared", "-nostdlib")
APPLE = ("-dynamiclib", "-undefined", "dynamic_lookup", "-install_name", "@rpath/model.dylib")
"""For libraries of macOS. Their install name would be the path of the file while it is built."""
_HOST: tuple[tuple[str, ...], ...] = (
    ("cc", *_SHARED),
    ("gcc", *_SHARED),
    ("clang", *_SHARED),
    ("ld.lld", *_SHARED),
    ("ld", *_SHARED),
)
"""Commands for this machine's own libraries, best first; the output and the objects follow."""
_CROSS: dict[str, tuple[tuple[str, ...], ...]] = {
    f"linux-{machine}": (
        (f"{machine}-linux-gnu-gcc", *_SHARED),
        (f"{machine}-linux-gnu-ld", *_SHARED),
        ("ld.lld", *_SHARED),
    )
    for machine in ("x86_64", "aarch64")
}
"""The same by platform, for libraries of other machines. `clang --target=…` would only call
`ld.lld`, so it is not asked."""
_ZIG = "ziglang"
"""A Python package that brings LLVM's linker: `python -m ziglang ld.lld …`."""


@dataclass(frozen=True, slots=True)
class Linker:
    """A linker that is installed here. `name` is the program, `command` all but its files."""

    name: str
    command: tuple[str, ...]

    def link(self, output: Path, objects: Sequence[str]) -> None:
        """Link `objects` into the shared library `output`; CompileError if that fails."""
        command = [*self.command, "-o", str(output), *objects]
        try:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise CompileError(f"{self.name} does not start: {error}; install it again") from None
        if run.returncode != 0:
            lines = (run.stderr or run.stdout).strip().splitlines() or ["no message"]
            raise CompileError(
                f"{self.name} could not link {output.name} (exit code {run.returncode}): "
                f"{lines[0].strip()}; check the linker, or bring another: pip install {_ZIG}"
            )


def find_linker(platform: str) -> Linker:
    """The linker to use for libraries that load on `platform` (`linux-aarch64`).

    Raises CompileError, naming a command that brings one, if there is none.
    """
    is_host = platform == host_platform()
    commands = _HOST if is_host else _CROSS.get(platform, ())
    if is_host and platform.startswith("macos-"):
        commands = (("cc", *APPLE), ("clang", *APPLE))
    for program, *options in commands:
        if (path := shutil.which(program)) is not None:
            return Linker(program, (path, *options))
    if platform.startswith("linux-") and importlib.util.find_spec(_ZIG) is not None:
        return Linker(_ZIG, (sys.executable, "-m", _ZIG, "ld.lld", *_SHARED))
    raise CompileError(f"no linker for {platform} is installed; run: {install_command(platform)}")


def install_command(platform: str) -> str:
    """What brings a linker for `platform`: without root, or with Debian's packages."""
    if platform.startswith("macos-"):
        return "xcode-select --install"
    package = "gcc" if platform == host_platform() else "lld"
    return f"pip install {_ZIG} (or, as root: apt install {package})"
