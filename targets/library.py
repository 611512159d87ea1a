"""Compile a model's graph for a target: one library, and what the engine must know of it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from ..artifact.dtypes import numpy_dtype
from ..artifact.hashing import hash_json
from ..artifact.tensor_format import TensorFormat
from ..quant_schemes.layers import apply_formats
from ..relax_models.config import DecoderConfig
from ..relax_models.decoder import DecoderForCausalLM, page_shape
from ..relax_models.paged_attention import PAGE_SIZE
from ..schedules.pipeline import run_pipeline, with_upper_bounds
from .target import CompileTarget

PREFILL_CHUNK_SIZE = 512
MAX_NUM_SEQUENCE = 64
"""Limits compiled in: most tokens, and most sequences, of one step. Workspace grows with them."""


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """`metadata` is what the library's `_metadata` function returns, as JSON."""

    metadata: dict[str, Any]
    function_memory_bytes: dict[str, int]
    row_parts: Mapping[str, Sequence[int]] | None = None
    """Tensors that the library takes in parts, and the rows of each part: the weights must be
    listed so (`artifact.tensor_parts`). None: it does not matter how they are listed."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page over all layers."""
        layers, _, *rest = self.metadata["page_shape"]
        num_values: int = math.prod((self.metadata["page_tensors"], layers, *rest))
        return num_values * numpy_dtype(self.metadata["kv_dtype"]).itemsize


def build_library(
    config: DecoderConfig,
    formats: Mapping[str, TensorFormat],
    target: CompileTarget,
    path: Path,
    *,
    scheme_dtype: str,
    context_window_size: int,
    dump_ir: Path | None = None,
) -> BuiltLibrary:
    """Write the library of this model for `target` to `path`."""
    kv_dtype = target.kv_dtype(scheme_dtype)
    page_tensors = target.page_tensors(config)
    graph = export_graph(
        config, formats, kv_dtype, page_tensors, has_leading_logits=target.has_leading_logits
    )
    lowered = target.lower(*graph)
    bounds = {
        "num_tokens": PREFILL_CHUNK_SIZE,
        "num_tiles": PREFILL_CHUNK_SIZE,
        "num_sequences": MAX_NUM_SEQUENCE,
        "num_rows": MAX_NUM_SEQUENCE,
        "num_blocks": -(-context_window_size // PAGE_SIZE),
    }
    bundled = relax.transform.BundleModelParams()(with_upper_bounds(lowered.module, bounds))
    with target.compiling():
        tvm_target = tvm.target.Target(target.spec)
    planned = run_pipeline(bundled, tvm_target, dump_ir=dump_ir)
    memory = planned_bytes(planned)
    metadata = {
        "config_hash": config_hash(config),
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "context_window_size": context_window_size,
        "prefill_chunk_size": PREFILL_CHUNK_SIZE,
        "max_num_sequence": MAX_NUM_SEQUENCE,
        "page_size": PAGE_SIZE,
        "kv_dtype": kv_dtype,
        "page_tensors": page_tensors,
        "page_shape": page_shape(config, -1, page_tensors),
        "parameters": [asdict(parameter) for parameter in lowered.parameters],
        "parameters_in_one_buffer": lowered.in_one_buffer,
        "lowered_operators": lowered.lowered,
        "schedules": lowered.schedules,
        **lowered.notes,
        "function_memory_bytes": memory,
        **target.constants,
        **target.model_constants(config),
    }
    for name, func in target.sampling_functions(config.vocab_size).items():
        planned[name] = func
    compile_planned(planned, metadata, target, path)
    return BuiltLibrary(metadata, memory)


def compile_planned(
    planned: tvm.IRModule, metadata: dict[str, Any], target: CompileTarget, path: Path
) -> None:
    """Write the library of a module that the pipeline is through with, with its metadata."""
    planned["_metadata"] = constant_function("_metadata", json.dumps(metadata))
    with target.compiling(), tvm.transform.PassContext(opt_level=3):
        executable = tvm.compile(
            planned,
            tvm.target.Target(target.spec),
            relax_pipeline=tvm.transform.Sequential([]),
            tir_pipeline=target.tir_pipeline,
        )
    target.export(executable, path)


def export_graph(
    config: DecoderConfig,
    formats: Mapping[str, TensorFormat],
    kv_dtype: str,
    page_tensors: int = 1,
    *,
    has_leading_logits: Callable[[TensorFormat], bool] = lambda head: False,
) -> tuple[tvm.IRModule, list[str]]:
    """The model's functions before any target, and its parameters' names in order."""
    model = DecoderForCausalLM(config, kv_dtype=kv_dtype, page_tensors=page_tensors)
    apply_formats(model, formats)
    model.has_leading_logits = has_leading_logits(model.head.format)
    module, parameters = model.export_tvm(spec=model.spec())[:2]
    return module, [name for name, _ in parameters]


def config_hash(config: DecoderConfig) -> str:
    """Names a model configuration: a library fits the weights of this one only."""
    return hash_json(asdict(config))


def constant_function(name: str, value: str) -> relax.Function:
    """A function without arguments that gives `value`."""
    builder = relax.BlockBuilder()
    with builder.function(name, []):
        builder.emit_func_output(tvm.ir.StringImm(value))
    return builder.get()[name].with_attr("global_symbol", name)


def planned_bytes(module: tvm.IRModule) -> dict[str, int]:
    """Workspace of each function, in bytes."""
    return {name: sum(sizes) for name, sizes in planned_storages(module).items()}


def planned_storages(module: tvm.IRModule) -> dict[str, list[int]]:
    """The storages that memory planning gave each function, in bytes."""
    found: dict[str, list[int]] = {}
    alloc = tvm.ir.Op.get("relax.vm.alloc_storage")
    for variable, func in module.functions.items():
        if not isinstance(func, relax.Function):
            continue
        sizes: list[int] = []

        def visit(node: Any, sizes: list[int] = sizes) -> None:
            if isinstance(node, relax.Call) and node.op == alloc:
                size = node.args[0]
                if isinstance(size, relax.ShapeExpr) and hasattr(size.values[0], "value"):
                    sizes.append(int(size.values[0].value))

        relax.analysis.post_order_visit(func, visit)
        found[variable.name_hint] = sizes
    return found
