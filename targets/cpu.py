"""CPU: x86-64 (AVX2, AVX-512) and arm64 (NEON), through LLVM; kernels in `schedules/cpu`."""

import difflib
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen

from ..artifact.errors import CompileError
from ..artifact.host import KNOWN_FEATURES, host_features, host_platform
from ..schedules.cpu.attention import query_tile
from ..schedules.cpu.isa import isa_of
from ..schedules.cpu.lowering import cpu_handlers
from ..schedules.passes.lower_operators import lower_operators
from .target import CompileTarget

ARM_NAMES = ("cortex-", "neoverse-", "apple-", "ampere", "a64fx", "oryon", "generic-arm64")
ACTIVATIONS = ("auto", "int8", "int16", "float32")


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """`arch` is an LLVM CPU name (`znver4`, `x86-64-v3`, `cortex-a76`); None is this machine.

    `activations` is how the inputs of quantized linear layers are rounded: int8 (fastest prefill),
    int16 (two int8 terms: decodes as fast, as exact as floats) or float32; auto takes int16 where
    the instruction set has integer dot products. CompileError for an unknown name.
    """
    if activations not in ACTIVATIONS:
        raise CompileError(
            f"activations '{activations}' is unknown; choose {', '.join(ACTIVATIONS)}"
        )
    spec = _host_spec() if arch is None else _spec(arch)
    target = tvm.target.Target(spec)
    isa = isa_of(target)
    if activations in ("int8", "int16") and not isa.has_vnni512:
        raise CompileError(
            f"{activations} activations need AVX-512 VNNI, which {spec['mcpu']} lacks; "
            "leave --activations out"
        )
    mode: Any = activations
    if activations == "auto":
        mode = "int16" if isa.has_vnni512 else "float32"
    features = {str(name) for name in codegen.llvm_get_cpu_features(target)}
    return CompileTarget(
        name="cpu",
        spec=spec,
        library_suffix="so",
        platform=_platform(spec),
        required_features=frozenset(features & KNOWN_FEATURES),
        lower=lambda module, names: lower_operators(module, names, cpu_handlers(isa, mode)),
        export=_export,
        kv_dtype=lambda dtype: "float32" if dtype == "float32" else "float16",
        constants={"isa": isa.name, "activations": mode},
        model_constants=lambda config: {
            "query_tile": query_tile(config.num_attention_heads, config.num_key_value_heads)
        },
    )


def _platform(spec: dict[str, Any]) -> str:
    triple = spec.get("mtriple")
    return host_platform() if triple is None else f"linux-{triple.partition('-')[0]}"


def _host_spec() -> dict[str, Any]:
    """This machine. A virtual machine may hide features of its CPU model: they are turned off."""
    spec: dict[str, Any] = {"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu())}
    present = host_features()
    if present:
        enabled = {str(n) for n in codegen.llvm_get_cpu_features(tvm.target.Target(spec))}
        hidden = sorted((enabled & KNOWN_FEATURES) - present)
        if hidden:
            spec["mattr"] = [f"-{name}" for name in hidden]
    return spec


def _spec(arch: str) -> dict[str, Any]:
    triple = "aarch64-linux-gnu" if arch.startswith(ARM_NAMES) else "x86_64-linux-gnu"
    if arch == "generic-arm64":
        return {"kind": "llvm", "mtriple": triple, "mcpu": "generic", "mattr": ["+neon"]}
    known = [str(name) for name in codegen.llvm_get_cpu_archlist(
        tvm.target.Target({"kind": "llvm", "mtriple": triple})
    )]  # fmt: skip
    if arch not in known:
        nearest = difflib.get_close_matches(arch, known, n=3) or ["x86-64-v3", "cortex-a76"]
        raise CompileError(
            f"unknown CPU '{arch}' for target cpu; did you mean {' or '.join(nearest)}?"
        )
    return {"kind": "llvm", "mtriple": triple, "mcpu": arch}


def _export(executable: Any, path: Path) -> None:
    """Link the library: with this machine's C compiler if it has one, else with LLVM's linker."""
    executable.export_library(str(path))
