"""What all GPU targets share: kernels from `schedules/gpu`, a host part on LLVM, one library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm.target import codegen

from ..artifact.errors import CompileError
from ..artifact.host import host_platform, known_features
from ..relax_models.config import DecoderConfig
from ..relax_models.paged_attention import PAGE_SIZE
from ..schedules.gpu.attention import tiling
from ..schedules.gpu.attention_block import AttentionShape
from ..schedules.gpu.limits import GpuLimits
from ..schedules.gpu.linear_operator import LinearOperator
from ..schedules.gpu.linear_schedule import LinearSchedule, default_schedule
from ..schedules.gpu.lowering import gpu_handlers, has_float32_pages
from ..schedules.gpu.sampling import sampling_functions
from ..schedules.gpu.tuning.measure import LinearLayer
from ..schedules.gpu.tuning.records import device_records, tuned_schedule
from ..schedules.passes.count_unscheduled import count_unscheduled
from ..schedules.passes.lower_operators import (
    Handler,
    LoweredModel,
    Lowering,
    lower_operators,
)
from ..schedules.pipeline import GPU_TIR_PIPELINE
from ..schedules.tuning.records import Records
from .linker import Linker, find_linker
from .target import CompileTarget

_HOSTS: Mapping[str, dict[str, Any]] = {
    "linux-x86_64": {"mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64-v3"},
    "linux-aarch64": {
        "mtriple": "aarch64-unknown-linux-gnu", "mcpu": "generic", "mattr": ["+neon"],
    },
    "macos-aarch64": {"mtriple": "arm64-apple-macosx13.0", "mcpu": "apple-m1"},
}  # fmt: skip
"""Platform → what the host part is compiled for: one library for all such machines."""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that a library loads on, and what links for it."""

    platform: str
    link: Callable[[Path, list[str]], None]

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "llvm", **_HOSTS[self.platform]}

    @property
    def features(self) -> frozenset[str]:
        """CPU features that the host part needs, by LLVM's names."""
        found = codegen.llvm_get_cpu_features(tvm.target.Target(self.spec))
        return frozenset(map(str, found)) & known_features(self.platform)


def this_machine() -> Host:
    """CompileError if libraries for GPUs cannot be loaded or linked here."""
    platform = host_platform()
    if platform not in _HOSTS:
        raise CompileError(
            f"libraries for GPUs cannot be built for {platform}; supported: {', '.join(_HOSTS)}"
        )
    linker: Linker = find_linker(platform)
    return Host(platform, linker.link)


def gpu_target(
    name: str,
    spec: dict[str, Any],
    limits: GpuLimits,
    host: Host,
    *,
    library_suffix: str = "so",
) -> CompileTarget:
    """The target of a GPU whose TVM target is `spec`, without a host; `name` is also TVM's name of
    the kind of device."""
    # What a code generator raises keeps its class on the way through TVM.
    tvm_ffi.register_error("CompileError", CompileError)
    return CompileTarget(
        name=name,
        spec={**spec, "host": host.spec},
        library_suffix=library_suffix,
        platform=host.platform,
        required_features=host.features,
        lower=lambda module, names: lower_for_gpu(module, names, limits),
        export=lambda executable, path: _export(executable, path, host),
        kv_dtype=lambda dtype: "float32" if dtype == "float32" else "float16",
        tir_pipeline=GPU_TIR_PIPELINE,
        constants={
            "device": name,
            # What a device must have.
            "device_limits": {
                "threads_per_block": limits.max_threads,
                "shared_bytes_per_block": limits.shared_bytes,
            },
        },
        # Devices limit how large a tensor may be that kernels take.
        page_tensors=lambda config: config.num_hidden_layers,
        model_constants=lambda config: {"query_tile": query_tile(config, limits)},
        sampling_functions=lambda vocab_size: sampling_functions(vocab_size, limits),
        limits=limits,
    )


def tuned_for(target: CompileTarget, device: str) -> CompileTarget:
    """The target with linear layers as tuning found them best on the devices of this name
    (`schedules/tuning/records.py`); CompileError if its records cannot be read."""
    assert target.limits is not None
    limits, records = target.limits, device_records(device)
    return replace(
        target, lower=lambda module, names: lower_for_gpu(module, names, limits, records)
    )


def linear_layers(
    module: tvm.IRModule, names: Sequence[str], target: CompileTarget
) -> list[LinearLayer]:
    """The different linear layers of a model for a target of `gpu_target`, those first that read
    the most weights."""
    assert target.limits is not None
    found: dict[LinearLayer, None] = {}

    def choose(operator: LinearOperator, limits: GpuLimits) -> LinearSchedule:
        found.setdefault(LinearLayer(operator, limits))
        return default_schedule(limits)

    is_exact = has_float32_pages(module)
    handlers = gpu_handlers(target.limits, is_exact=is_exact, choose=choose)
    lower_operators(module, names, handlers)
    return sorted(found, key=lambda layer: -layer.weight_bytes)


def refuse_activations(name: str, activations: str) -> None:
    """CompileError unless activations stay float32, as they do on every GPU."""
    if activations not in ("auto", "float32"):
        raise CompileError(
            f"activations '{activations}' are for target cpu; {name} computes in float32, leave "
            "--activations out"
        )


def choose_arch(name: str, arch: str | None, known: Mapping[str, Any], default: str) -> str:
    """`arch`, or `default` where none is asked for; CompileError if it is not known."""
    if arch is None:
        return default
    if not known:
        raise CompileError(f"target {name} has one library for all devices; leave ':{arch}' out")
    if arch not in known:
        raise CompileError(
            f"unknown architecture '{arch}' for target {name}; supported: {', '.join(known)}"
        )
    return arch


def _attention(config: DecoderConfig) -> AttentionShape:
    # The dtype of the pages does not matter here: shared memory holds them in float32.
    return AttentionShape(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        PAGE_SIZE,
        "float32",
    )


def query_tile(config: DecoderConfig, limits: GpuLimits) -> int:
    """Most tokens of a tile of attention."""
    if not limits.shares_memory:
        return 1
    return tiling(_attention(config), limits).tokens


def lower_for_gpu(
    module: tvm.IRModule,
    names: Sequence[str],
    limits: GpuLimits,
    records: Records | None = None,
) -> LoweredModel:
    """A model with the kernels of a GPU, as `records` say, and the counts of operators with tuned
    ones, with those of the target's limits, and with none that are hand-made."""
    num_tuned, is_tuned = 0, False

    def choose(operator: LinearOperator, limits: GpuLimits) -> LinearSchedule:
        nonlocal is_tuned
        schedule = default_schedule(limits)
        if records is not None:
            schedule = tuned_schedule(records, operator, limits)
        is_tuned = is_tuned or schedule != default_schedule(limits)
        return schedule

    def counted(handler: Handler) -> Handler:
        def lower(lowering: Lowering, op: Mapping[str, Any], args: Sequence[Any]) -> Any:
            nonlocal num_tuned, is_tuned
            is_tuned = False  # an operator may have several kernels
            lowered = handler(lowering, op, args)
            num_tuned += is_tuned
            return lowered

        return lower

    handlers = gpu_handlers(limits, is_exact=has_float32_pages(module), choose=choose)
    lowered = lower_operators(module, names, {k: counted(h) for k, h in handlers.items()})
    lowered.schedules = {
        "tuned": num_tuned,
        "hand": sum(lowered.lowered.values()) - num_tuned,
        "default": count_unscheduled(lowered.module),
    }
    return lowered


def _export(executable: Any, path: Path, host: Host) -> None:
    def link(output: str, objects: list[str], **_: Any) -> None:
        host.link(Path(output), objects)

    executable.export_library(str(path), fcompile=link)
