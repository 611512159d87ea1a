"""A library under the contract of MLC's model libraries, as WebLLM drives it.

embed, prefill, decode        the model (`relax_models/chat_decoder.py`)
create_tir_paged_kv_cache     its state (`native/web/kv_state.cc`)
softmax_with_temperature, argsort_probs, sample_with_top_p, apply_…_inplace   (`functions.py`)
_metadata                     JSON: parameters in call order, limits, memory
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from ...artifact.dtypes import numpy_dtype
from ...artifact.tensor_format import TensorFormat
from ...quant_schemes.layers import apply_formats
from ...relax_models.chat_decoder import CREATE_STATE, ChatDecoder, create_state_function
from ...relax_models.config import DecoderConfig
from ...relax_models.paged_attention import PAGE_SIZE
from ...schedules.gpu.limits import GpuLimits
from ...schedules.passes.lower_operators import LoweredModel, Parameter
from ...schedules.pipeline import run_pipeline, with_upper_bounds
from ..library import BuiltLibrary, compile_planned, config_hash, planned_bytes
from ..target import CompileTarget
from .functions import logit_functions, with_sampling

logger = logging.getLogger(__name__)

PROMISED_BINDING_BYTES = 128 << 20
_BATCH = 1
"""Sequences of a step: WebLLM has one."""


@dataclass(frozen=True, slots=True)
class ChatLibraryBuilder:
    """Builds libraries of one target. `query_tile` is what its attention takes."""

    limits: GpuLimits
    prefill_chunk_size: int
    """Most tokens of a step."""
    query_tile: Callable[[DecoderConfig], int]

    def __call__(
        self,
        config: DecoderConfig,
        formats: Mapping[str, TensorFormat],
        target: CompileTarget,
        path: Path,
        *,
        scheme_dtype: str,
        context_window_size: int,
        dump_ir: Path | None = None,
    ) -> BuiltLibrary:
        """Write the library to `path`; see `targets.library.build_library`."""
        kv_dtype = target.kv_dtype(scheme_dtype)
        lowered = self._lower(config, formats, target, kv_dtype)
        bounds = {
            "num_tokens": self.prefill_chunk_size, "batch_size": _BATCH, "num_samples": _BATCH,
        }  # fmt: skip
        module = relax.transform.BundleModelParams()(lowered.module)
        module[CREATE_STATE] = create_state_function(config, kv_dtype, self.query_tile(config))
        module = with_sampling(module, config.vocab_size, self.limits)
        tvm_target = tvm.target.Target(target.spec)
        planned = run_pipeline(with_upper_bounds(module, bounds), tvm_target, dump_ir=dump_ir)
        memory = planned_bytes(planned)
        largest = _largest_binding(lowered)
        if largest > PROMISED_BINDING_BYTES and target.variants:
            logger.warning(
                "the largest weight has %d MB: devices that bind no more than the 128 MB that "
                "WebGPU promises, some phones among them, cannot run this model; choose one with "
                "a smaller vocabulary, or fewer bits for the embedding, such as q4f16_1",
                largest >> 20,
            )
        metadata = {
            **_contract(config, lowered, context_window_size, memory),
            "prefill_chunk_size": self.prefill_chunk_size,
            "config_hash": config_hash(config),
            "kv_dtype": kv_dtype,
            "page_size": PAGE_SIZE,
            "page_shape": [
                config.num_hidden_layers, -1, 2 * config.num_key_value_heads,
                PAGE_SIZE * config.head_dim,
            ],
            "max_num_sequence": _BATCH,
            "schedules": lowered.schedules,
            "device_requirements": {
                "required_features": ["shader-f16"] if self.limits.has_float16 else [],
                "max_storage_buffer_binding_size": largest,
            },
            **target.constants,
        }  # fmt: skip
        for name, func in logit_functions(config.vocab_size, self.limits).items():
            planned[name] = func
        compile_planned(planned, metadata, target, path)
        return BuiltLibrary(metadata, memory)

    def _lower(
        self,
        config: DecoderConfig,
        formats: Mapping[str, TensorFormat],
        target: CompileTarget,
        kv_dtype: str,
    ) -> LoweredModel:
        model = ChatDecoder(config, kv_dtype=kv_dtype)
        apply_formats(model, formats)
        module, parameters = model.export_tvm(spec=model.spec())[:2]
        return target.lower(module, [name for name, _ in parameters])


def _contract(
    config: DecoderConfig, lowered: LoweredModel, context_window_size: int, memory: dict[str, int]
) -> dict[str, Any]:
    """What MLC's clients read of `_metadata`."""
    return {
        "model_type": config.model_type,
        "kv_state_kind": "kv_cache",
        "context_window_size": context_window_size,
        "sliding_window_size": -1,
        "attention_sink_size": -1,
        "max_batch_size": _BATCH,
        "tensor_parallel_shards": 1,
        "pipeline_parallel_stages": 1,
        "params": [_parameter(parameter) for parameter in lowered.parameters],
        "memory_usage": memory,
        "kv_cache": {
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        },
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "dtype": parameter.dtype,
        "preprocs": [],
    }


def _largest_binding(lowered: LoweredModel) -> int:
    """Bytes of the largest weight: what a device must be able to bind."""
    return max(
        math.prod(parameter.shape) * numpy_dtype(parameter.dtype).itemsize
        for parameter in lowered.parameters
    )
