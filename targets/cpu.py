"""CPU: x86-64 (AVX2, AVX-512) and arm64 (NEON), through LLVM; kernels in `schedules/cpu`."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen

from ..artifact.errors import CompileError
from ..artifact.host import host_features, host_platform, known_features
from ..relax_models.config import DecoderConfig
from ..schedules.cpu.attention import query_tile
from ..schedules.cpu.attention_state import Heads
from ..schedules.cpu.isa import isa_of
from ..schedules.cpu.linear_inputs import has_planes
from ..schedules.cpu.linear_operator import LinearOperator
from ..schedules.cpu.linear_schedule import LinearSchedule
from ..schedules.cpu.lowering import cpu_handlers
from ..schedules.cpu.one_region import one_region
from ..schedules.cpu.sampling import sampling_functions, workspace_shape
from ..schedules.cpu.tuning.records import cpu_name, cpu_records, tuned_schedule
from ..schedules.passes.count_unscheduled import count_unscheduled
from ..schedules.passes.lower_operators import LoweredModel, lower_operators
from ..schedules.pipeline import CPU_TIR_PIPELINE
from .linker import Linker, find_linker
from .target import CompileTarget

ARM_NAMES = ("cortex-", "neoverse-", "apple-", "ampere", "a64fx", "oryon", "generic-arm64")
ONE_REGION = "EVERYCAST_ONE_REGION"
"""Environment variable: 0 compiles a function for each operator, which can be timed by itself
(`benchmarks/step_profile.py`)."""
ACTIVATIONS = ("auto", "int8", "mixed", "int16", "float32")


def make_target(arch: str | None, *, activations: str = "auto") -> CompileTarget:
    """`arch` is an LLVM CPU name (`znver4`, `x86-64-v3`, `cortex-a76`); None is this machine.

    `activations` is how the inputs of linear layers are rounded: int8 (fastest prefill), int16 (two
    int8 terms, as exact as floats), mixed (the second term for groups of inputs that are far larger
    than others) or float32; auto takes mixed where the instruction set has integer dot products.
    Layers with weights of bfloat16 take one term of bfloat16, two for int16, where the instruction
    set has dot products of those; layers with other float weights take float32.

    Raises CompileError for an unknown name, a CPU without the vector instructions that the kernels
    need, or a machine without a linker.
    """
    if activations not in ACTIVATIONS:
        raise CompileError(
            f"activations '{activations}' is unknown; choose {', '.join(ACTIVATIONS)}"
        )
    spec = _host_spec() if arch is None else _spec(arch)
    target = tvm.target.Target(spec)
    isa = isa_of(target)
    if isa.name == "generic":
        raise CompileError(
            f"{'this CPU' if arch is None else 'CPU'} ({spec['mcpu']}) lacks AVX2 and FMA; the "
            "kernels need x86-64-v3 (Intel Haswell, AMD Zen, or later) or arm64"
        )
    if activations in ("int8", "mixed", "int16") and isa.byte_dot is None:
        raise CompileError(
            f"{activations} activations need dot products of bytes (AVX2, or dotprod on arm64), "
            f"which {spec['mcpu']} lacks; leave --activations out"
        )
    mode: Any = activations
    if activations == "auto":
        mode = "mixed" if isa.byte_dot is not None else "float32"
    features = _llvm_features(target)
    platform = _platform(spec)
    linker = find_linker(platform)
    return CompileTarget(
        name="cpu",
        spec=spec,
        library_suffix="so",
        platform=platform,
        required_features=features & known_features(platform),
        lower=lambda module, names: _lower(module, names, target, mode),
        export=lambda executable, path: _export(executable, path, linker),
        kv_dtype=lambda dtype: "float32" if dtype == "float32" else "float16",
        tir_pipeline=CPU_TIR_PIPELINE,
        constants={"isa": isa.name, "activations": mode},
        model_constants=lambda config: {
            "query_tile": query_tile(_heads(config)),
            "sampling_workspace": workspace_shape(config.vocab_size),
        },
        sampling_functions=sampling_functions,
        has_leading_logits=lambda head: has_planes(head, isa, mode),
    )


def _heads(config: DecoderConfig) -> Heads:
    return Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def linear_operators(
    module: tvm.IRModule, names: Sequence[str], target: CompileTarget
) -> list[LinearOperator]:
    """The different linear operators of a model for a target of `make_target`, those first that
    read the most weights."""
    found: dict[LinearOperator, None] = {}
    isa = isa_of(tvm.target.Target(target.spec))
    mode: Any = target.constants["activations"]
    lower_operators(module, names, cpu_handlers(isa, mode, lambda op: found.setdefault(op)))
    return sorted(found, key=lambda operator: -operator.weight_bytes)


def _lower(
    module: tvm.IRModule, names: Sequence[str], target: tvm.target.Target, mode: Any
) -> LoweredModel:
    isa, num_tuned = isa_of(target), 0
    records = cpu_records(cpu_name(target))

    def choose(operator: LinearOperator) -> LinearSchedule:
        nonlocal num_tuned
        schedule = tuned_schedule(records, operator, isa)
        num_tuned += schedule != operator.default_schedule(isa)
        return schedule

    lowered = lower_operators(module, names, cpu_handlers(isa, mode, choose))
    lowered.schedules = {
        "tuned": num_tuned,
        "hand": sum(lowered.lowered.values()) - num_tuned,
        "default": count_unscheduled(lowered.module),
    }
    is_arm = isa.name == "neon"
    if os.environ.get(ONE_REGION) == "0":
        return lowered
    return one_region(lowered, is_arm=is_arm)


def _platform(spec: dict[str, Any]) -> str:
    triple = spec.get("mtriple")
    return host_platform() if triple is None else f"linux-{triple.partition('-')[0]}"


def _host_spec() -> dict[str, Any]:
    """This machine. LLVM goes by the name of the CPU; a virtual machine may hide some of what that
    CPU can do, or hide the name. What the system reports is right, where it reports anything."""
    spec: dict[str, Any] = {"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu())}
    present = host_features()
    if present:
        assumed = _llvm_features(tvm.target.Target(spec)) & known_features(host_platform())
        changes = [f"-{name}" for name in assumed - present]
        changes += [f"+{name}" for name in present - assumed]
        if changes:
            spec["mattr"] = sorted(changes)
    return spec


def _llvm_features(target: Any) -> frozenset[str]:
    return frozenset(str(name) for name in codegen.llvm_get_cpu_features(target))


def _spec(arch: str) -> dict[str, Any]:
    machine = "aarch64" if arch.startswith(ARM_NAMES) else "x86_64"
    triple = f"{machine}-unknown-linux-gnu"
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


def _export(executable: Any, path: Path, linker: Linker) -> None:
    def link(output: str, objects: list[str], **_: Any) -> None:
        linker.link(Path(output), objects)

    executable.export_library(str(path), fcompile=link)
