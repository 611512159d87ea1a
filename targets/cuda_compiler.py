"""The compiler of CUDA kernels to use here. Standard library only, for `doctor`."""

from typing import Protocol

from ..artifact.errors import CompileError
from .nvcc import find_nvcc
from .nvrtc import INSTALL, find_nvrtc


class CudaCompiler(Protocol):
    """What makes machine code of CUDA C."""

    @property
    def description(self) -> str:
        """Its name, and where it is."""

    def architectures(self) -> tuple[str, ...]:
        """What it can make machine code for (`sm_90`), oldest first."""

    def compile(self, source: str, architectures: tuple[str, ...]) -> bytes:
        """A fat binary with machine code for each architecture, and PTX of the last for later ones.
        CompileError with the compiler's first line if it does not take the source."""


def find_cuda_compiler() -> CudaCompiler:
    """nvcc where it and a C++ compiler are, else NVRTC; CompileError, with the command that brings
    one, if there is neither."""
    try:
        return find_nvcc()
    except CompileError as without_nvcc:
        try:
            return find_nvrtc()
        except CompileError as without_nvrtc:
            if "nvFatbin" in str(without_nvrtc):
                raise
            raise CompileError(
                f"{str(without_nvcc).partition(';')[0]}, or NVRTC; run: {INSTALL} "
                "(or bring NVIDIA's CUDA toolkit)"
            ) from None
