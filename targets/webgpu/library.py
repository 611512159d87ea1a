"""A library under the contract of MLC's model libraries, as WebLLM drives it.

embed, prefill, decode        the model (`relax_models/chat_decoder.py`)
create_tir_paged_kv_cache     its state (`native/web/kv_state.cc`)
softmax_with_temperature, argsort_probs, sample_with_top_p, apply_…_inplace   (`functions.py`)
_metadata                     JSON: parameters in call order, limits, memory
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from ...artifact.dtypes import numpy_dtype
from ...artifact.errors import CompileError
from ...artifact.tensor_format import TensorFormat
from ...quant_schemes.layers import apply_formats
from ...relax_models.chat_decoder import CREATE_STATE, ChatDecoder, create_state_function
from ...relax_models.config import DecoderConfig
from ...relax_models.decoder import page_shape
from ...relax_models.paged_attention import PAGE_SIZE
from ...schedules.gpu.limits import GpuLimits
from ...schedules.passes.lower_operators import LoweredModel, Parameter
from ...schedules.pipeline import run_pipeline, with_upper_bounds
from ..library import BuiltLibrary, compile_planned, config_hash, planned_storages
from ..target import CompileTarget
from .functions import logit_functions, with_sampling

logger = logging.getLogger(__name__)

PROMISED_BINDING_BYTES = 128 << 20
"""Of a buffer, what WebGPU promises that kernels are given. No buffer of ours is larger."""
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
        storages = planned_storages(planned)
        memory = {name: sum(sizes) for name, sizes in storages.items()}
        largest = max(
            *(parameter.num_bytes for parameter in lowered.parameters),
            *(size for sizes in storages.values() for size in sizes),
        )
        if largest > PROMISED_BINDING_BYTES:
            raise CompileError(
                f"a step of {self.prefill_chunk_size} tokens needs a buffer of {largest >> 20} MB, "
                f"browsers promise {PROMISED_BINDING_BYTES >> 20} MB: the model is too wide"
            )
        context_window_size = self._context(config, kv_dtype, context_window_size, target)
        metadata = {
            **_contract(config, lowered, context_window_size, memory),
            "prefill_chunk_size": self.prefill_chunk_size,
            "config_hash": config_hash(config),
            "kv_dtype": kv_dtype,
            "page_size": PAGE_SIZE,
            "page_tensors": config.num_hidden_layers,
            "page_shape": page_shape(config, -1, config.num_hidden_layers),
            "max_num_sequence": _BATCH,
            "schedules": lowered.schedules,
            "device_requirements": {
                "required_features": _required_features(self.limits),
                "min_subgroup_size": self.limits.subgroup,
                "max_storage_buffer_binding_size": largest,
                "max_context_window_size": context_window_size,
            },
            **target.constants,
        }  # fmt: skip
        for name, func in logit_functions(config.vocab_size, self.limits).items():
            planned[name] = func
        compile_planned(planned, metadata, target, path)
        return BuiltLibrary(metadata, memory, lowered.row_parts)

    def _context(
        self, config: DecoderConfig, kv_dtype: str, wanted: int, target: CompileTarget
    ) -> int:
        """As many tokens as are wanted, and as a layer's keys and values fit in one buffer."""
        token_bytes = 2 * config.num_key_value_heads * config.head_dim
        token_bytes *= numpy_dtype(kv_dtype).itemsize
        most = PROMISED_BINDING_BYTES // (token_bytes * PAGE_SIZE) * PAGE_SIZE
        if most < wanted and target.variants:
            logger.warning(
                "in browsers a conversation has at most %d of the model's %d tokens: a layer's "
                "keys and values must fit in the %d MB that WebGPU promises of a buffer",
                most, wanted, PROMISED_BINDING_BYTES >> 20,
            )  # fmt: skip
        return min(wanted, most)

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


def _required_features(limits: GpuLimits) -> list[str]:
    """WebGPU's names of what a device must have."""
    needed = {"shader-f16": limits.has_float16, "subgroups": limits.subgroup is not None}
    return [name for name, is_needed in needed.items() if is_needed]


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
