"""NVIDIA's compiler: where it is found, and what it makes. Standard library only, for `doctor`."""

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..artifact.errors import CompileError

INSTALL = "pip install nvidia-cuda-nvcc nvidia-cuda-cccl (or bring NVIDIA's CUDA toolkit)"
_BLACKWELL = 100
_HOST_COMPILERS = ("g++", "gcc", "clang++")
"""nvcc calls one of them, even for kernels alone."""


@dataclass(frozen=True, slots=True)
class Nvcc:
    """A CUDA compiler that is installed here."""

    path: str

    @property
    def description(self) -> str:
        return f"nvcc {self.path}"

    def architectures(self) -> tuple[str, ...]:
        """What it can make machine code for (`sm_90`), oldest first."""
        return _architectures(self.path)

    def compile(self, source: str, architectures: tuple[str, ...]) -> bytes:
        """A fat binary with machine code for each architecture, and PTX of the last for later ones.
        CompileError with the compiler's first error if it does not take the source."""
        with tempfile.TemporaryDirectory() as folder:
            code, binary = Path(folder, "kernels.cu"), Path(folder, "kernels.fatbin")
            code.write_text(source, encoding="utf-8")
            command = [self.path, "-fatbin", "-O3", "-w", "--threads", "0"]
            _run([*command, *_code_options(architectures), "-o", str(binary), str(code)])
            return binary.read_bytes()


def _code_options(architectures: Sequence[str]) -> list[str]:
    """Most of the time goes into what comes before machine code, so that architectures share it:
    those before Blackwell, and those from it on. Their machine code is the same, instruction for
    instruction, as with a front end each; Blackwell's from the older one takes more registers."""
    numbers = [int(name.removeprefix("sm_")) for name in architectures]
    older, newer = ([n for n in numbers if (n >= _BLACKWELL) == is_new] for is_new in (False, True))
    options = []
    for group in filter(None, (older, newer)):
        names = ",".join(f"sm_{n}" for n in group)
        options += ["-gencode", f"arch=compute_{min(group)},code=[{names}]"]
    last = numbers[-1]
    return [*options, "-gencode", f"arch=compute_{last},code=compute_{last}"]


def find_nvcc() -> Nvcc:
    """From CUDA_HOME, the PATH, the usual folder, or NVIDIA's Python packages; CompileError, with
    the command that brings it, if there is none, or no C++ compiler for it."""
    path = shutil.which("nvcc", path=os.pathsep.join(tool_folders()))
    if path is None:
        raise CompileError(f"target cuda needs nvcc, which is not installed; run: {INSTALL}")
    if not any(map(shutil.which, _HOST_COMPILERS)):
        raise CompileError("target cuda needs a C++ compiler beside nvcc; as root: apt install g++")
    return Nvcc(path)


def tool_folders() -> list[str]:
    """Where NVIDIA's programs may be, best first."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    site = Path(sysconfig.get_path("purelib"), "nvidia")
    folders = [str(Path(home, "bin")) for home in homes if home]
    folders += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return folders + sorted(map(str, site.glob("cu*/bin")), reverse=True)


@functools.cache
def _architectures(path: str) -> tuple[str, ...]:
    listed = _run([path, "--list-gpu-code"]).split()
    numbers = sorted({int(name[3:]) for name in listed if name[3:].isdigit()})
    return tuple(f"sm_{number}" for number in numbers)


def _run(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileError(f"nvcc does not start: {error}; run: {INSTALL}") from None
    if run.returncode != 0:
        said = (run.stderr + run.stdout).strip().splitlines()
        lines = [line for line in said if "error" in line] or said or ["no message"]
        raise CompileError(f"nvcc failed (exit code {run.returncode}): {lines[0].strip()}")
    return run.stdout
