"""WebGPU: kernels as WGSL in a WebAssembly module, for browsers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm_ffi

from ...artifact.errors import CompileError
from ...native.wasm_runtime import find_emscripten, link_wasm
from ...schedules.gpu.limits import GemmTile, GpuLimits
from ...schedules.pipeline import GPU_TIR_PIPELINE
from ..gpu import choose_arch, lower_for_gpu, query_tile, refuse_activations
from ..target import CompileTarget
from .library import PROMISED_BINDING_BYTES, ChatLibraryBuilder

_HOST = {"kind": "llvm", "mtriple": "wasm32-unknown-unknown-wasm", "vector-width": 128}

_LIMITS = GpuLimits(
    max_threads=256,
    # What WebGPU promises; more would keep blocks from running side by side on small devices.
    shared_bytes=16 << 10,
    # For wide heads, as Gemma's: what WebLLM asks every device for.
    max_shared_bytes=32 << 10,
    # What WebLLM asks every device for; WebGPU promises eight.
    max_buffers=10,
    max_weight_bytes=PROMISED_BINDING_BYTES,
    has_float16=False,
    # One sequence at a time: there are no few rows but of very short prompts.
    gemv_tokens=1,
    gemv_passes=1,
    gemm_tiles=(GemmTile(32, 64, 32, 4, 8), GemmTile(64, 64, 16, 8, 8)),
)
_CHUNK, _CPU_CHUNK = 512, 128
"""Tokens of a prefill step. A browser takes a device for lost that is busy for too long."""
_VARIANTS = {
    "": _LIMITS,
    "f16": replace(_LIMITS, has_float16=True),
    "f16-subgroups": replace(_LIMITS, has_float16=True, subgroup=32),
    "cpu-adapter": replace(_LIMITS, shares_memory=False),
}
"""Architecture → limits. `f16` needs the device's feature shader-f16, `f16-subgroups` subgroups of
32 threads or more beside; `cpu-adapter` is for CPUs that act as GPUs: SwiftShader and llvmpipe,
which browsers fall back to."""


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """Raises CompileError for an unknown `arch`, or where Emscripten is not installed."""
    refuse_activations("webgpu", activations)
    named = {name: limits for name, limits in _VARIANTS.items() if name}
    limits = _VARIANTS[choose_arch("webgpu", arch, named, "")]
    find_emscripten()
    # What a code generator raises keeps its class on the way through TVM.
    tvm_ffi.register_error("CompileError", CompileError)
    return CompileTarget(
        name="webgpu",
        spec={
            "kind": "webgpu",
            "supports_subgroups": limits.subgroup is not None,
            "host": _HOST,
        },
        library_suffix="wasm",
        platform="any",
        required_features=frozenset(),
        lower=lambda module, names: lower_for_gpu(module, names, limits),
        export=_export,
        kv_dtype=lambda dtype: "float16" if limits.has_float16 else "float32",
        tir_pipeline=GPU_TIR_PIPELINE,
        constants={"device": "webgpu"},
        variants=() if arch else tuple(f"webgpu:{name}" for name in named),
        build_library=ChatLibraryBuilder(
            limits,
            _CHUNK if limits.shares_memory else _CPU_CHUNK,
            lambda config: query_tile(config, limits),
        ),
    )


def _export(executable: Any, path: Path) -> None:
    def link(output: str, objects: list[str], **_: Any) -> None:
        link_wasm([Path(name) for name in objects], Path(output))

    link.object_format = "o"  # type: ignore[attr-defined]
    executable.export_library(str(path), fcompile=link)
