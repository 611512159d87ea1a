"""ROCm: AMD GPUs, through LLVM. Neither ROCm nor its device libraries are needed: kernels call no
function that LLVM cannot write out itself."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import tvm_ffi

from ..schedules.gpu.limits import GpuLimits
from .device_linkers import find_amd_linker
from .gpu import choose_arch, gpu_target, refuse_activations, this_machine
from .linker import Linker
from .target import CompileTarget

ARCHITECTURES = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}
"""MI200, MI300 and RX 7900, and the width of their waves."""
_LIMITS = GpuLimits(max_threads=256, shared_bytes=64 << 10, gemv_words=4, gemv_blocks=256)
_WARNINGS = (
    b"Cannot get maximum number of threads for AMD codegen",
    b"Unable to detect ROCm version",
)
"""What TVM says of each target and kernel where there is no AMD device."""


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """`arch` is an LLVM name (`gfx1100`), gfx942 if None. CompileError if it is unknown, or without
    a linker for it and for this machine."""
    refuse_activations("rocm", activations)
    chosen = choose_arch("rocm", arch, ARCHITECTURES, "gfx942")
    linker = find_amd_linker()
    # The bitcode files that TVM links into kernels: these need none.
    register = tvm_ffi.register_global_func
    register("tvm_callback_rocm_bitcode_path", lambda: tvm_ffi.convert([]), override=True)
    register("tvm_callback_rocm_link", lambda code: _link(linker, bytes(code)), override=True)
    spec = {
        "kind": "rocm",
        "mcpu": chosen,
        "mtriple": "amdgcn-amd-amdhsa-hcc",
        "thread_warp_size": ARCHITECTURES[chosen],
        "max_num_threads": _LIMITS.max_threads,
        "max_threads_per_block": _LIMITS.max_threads,
        "max_shared_memory_per_block": _LIMITS.shared_bytes,
    }
    limits = replace(_LIMITS, subgroup=ARCHITECTURES[chosen])
    target = gpu_target("rocm", spec, limits, this_machine())
    constants = {**target.constants, "architectures": (chosen,)}
    return replace(target, compiling=_without_warnings, constants=constants)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keeps back `_WARNINGS`, which TVM's C++ writes."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        try:
            os.dup2(said.fileno(), 2)
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            for line in said:
                if not any(warning in line for warning in _WARNINGS):
                    os.write(2, line)


def _link(linker: Linker, code: bytes) -> bytearray:
    """A code object from a relocatable one."""
    with tempfile.TemporaryDirectory() as folder:
        source, linked = Path(folder, "kernels.o"), Path(folder, "kernels.co")
        source.write_bytes(code)
        linker.link(linked, [str(source)])
        return bytearray(linked.read_bytes())
