"""What a compile target is, and the table of targets."""

import difflib
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

from ..artifact.errors import CompileError
from ..artifact.tensor_format import TensorFormat
from ..relax_models.config import DecoderConfig
from ..schedules.gpu.limits import GpuLimits
from ..schedules.passes.lower_operators import LoweredModel

TARGETS = {
    "cpu": ".cpu",
    "vulkan": ".vulkan.target",
    "cuda": ".cuda",
    "rocm": ".rocm",
    "metal": ".metal",
    "opencl": ".opencl",
    "webgpu": ".webgpu.target",
}
"""Target name → the module here whose `make_target(arch)` gives it."""


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """One kind of machine. `spec` is the TVM target; `lower` gives a model this target's kernels;
    `constants` are what the engine must know of those kernels."""

    name: str
    spec: dict[str, Any]
    library_suffix: str
    platform: str
    """Where its libraries load, as `artifact.host.host_platform` spells it."""
    required_features: frozenset[str]
    """LLVM names of CPU features without which the library cannot run."""
    lower: Callable[[tvm.IRModule, Sequence[str]], LoweredModel]
    export: Callable[[Any, Path], None]
    kv_dtype: Callable[[str], str]
    """Dtype of the KV pages, from the dtype of the quantization scheme."""
    tir_pipeline: str = "default"
    """TVM's name of the passes from kernels to code."""
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    """What to be in while TVM makes code."""
    constants: dict[str, Any] = field(default_factory=dict)
    page_tensors: Callable[[DecoderConfig], int] = lambda config: 1
    """In how many tensors keys and values lie; they divide the layers."""
    model_constants: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}
    sampling_functions: Callable[[int], dict[str, tvm.tirx.PrimFunc]] = lambda vocab_size: {}
    """From the size of the vocabulary, what turns logits into tokens: name → function."""
    has_leading_logits: Callable[[TensorFormat], bool] = lambda head: False
    """From the format of a model's head, whether to compile `leading_logits`."""
    build_library: Callable[..., Any] | None = None
    """Builds its libraries; None: `library.build_library`, whose arguments it takes."""
    limits: GpuLimits | None = None
    """Of a GPU whose linear layers can be tuned."""
    variants: tuple[str, ...] = ()
    """Targets that are compiled for as well: whoever loads the library chooses among them."""


def find_target(text: str, *, activations: str = "auto") -> CompileTarget:
    """The target `name[:arch]`, such as `cpu` or `cpu:x86-64-v3`; CompileError if unknown."""
    name, _, arch = text.partition(":")
    if name == "all" and arch:
        raise CompileError(f"target all is every target as it comes; leave ':{arch}' out")
    if name not in TARGETS:
        nearest = difflib.get_close_matches(name, TARGETS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "supported: " + ", ".join(TARGETS)
        raise CompileError(f"unknown target '{name}'; {hint}")
    module = importlib.import_module(TARGETS[name], __package__)
    target: CompileTarget = module.make_target(arch or None, activations=activations)
    return target
