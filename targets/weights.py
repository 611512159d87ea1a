"""From a checkpoint's tensors to the artifact's: which format each gets, and its parts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..artifact.errors import CheckpointError
from ..artifact.tensor_format import TensorFormat
from ..quant_schemes.gguf_blocks import format_for, import_blocks
from ..quant_schemes.group import cast_float, dequantize, quantize
from ..quant_schemes.rounding import Rounding
from ..quant_schemes.scheme import Role, find_scheme, formats_for
from ..relax_models.checkpoint.source import FLOAT_DTYPES, Checkpoint
from ..relax_models.config import DecoderConfig
from ..relax_models.name_map import EMBEDDING, HEAD, parameter_shapes
from ..relax_models.rope import inverse_frequencies
from ..relax_models.weights import WeightSource

LOSSLESS = "gguf"
"""Quantization name of a GGUF whose blocks are kept as they are."""

_FLOAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What the weights of one build become. `formats` is by parameter name, matrices only."""

    quantization: str
    formats: Mapping[str, TensorFormat]
    dtype: str
    """Dtype of the scheme: float32 keeps everything in float32."""


def plan_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    sources: Mapping[str, WeightSource],
    quantization: str | None,
    default: str,
) -> WeightPlan:
    """Formats of all matrices. Without a quantization a GGUF keeps its blocks and a float
    checkpoint gets the scheme `default`. Raises CheckpointError or CompileError."""
    shapes = {name: s for name, s in parameter_shapes(config).items() if len(s) == 2}
    if quantization in (None, LOSSLESS) and checkpoint.kind == "gguf":
        formats = {name: _stored_format(checkpoint, sources[name].name) for name in shapes}
        return WeightPlan(LOSSLESS, formats, "float16")
    if quantization == LOSSLESS:
        raise CheckpointError(
            f"{checkpoint.path.name} is no GGUF: quantization '{LOSSLESS}' keeps a GGUF's blocks; "
            "choose a scheme such as q4f16_1, or leave --quantization out"
        )
    scheme = find_scheme(quantization or default)
    roles: list[tuple[str, Role]] = [(name, _role(name)) for name in shapes]
    return WeightPlan(scheme.name, formats_for(scheme, roles), scheme.dtype)


def _role(name: str) -> Role:
    return "embedding" if name == EMBEDDING else "head" if name == HEAD else "linear"


def _stored_format(checkpoint: Checkpoint, tensor: str) -> TensorFormat:
    dtype = checkpoint.tensors[tensor].dtype
    if dtype in _FLOAT_NAMES:
        return TensorFormat(_FLOAT_NAMES[dtype])  # type: ignore[arg-type]
    return format_for(dtype)


def rope_parameters(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Inverse frequencies of the model's rotary embeddings, kept beside its weights."""
    return {
        f"rope.{i}.inv_freq": inverse_frequencies(rope).astype(np.float32)
        for i, rope in enumerate(config.ropes)
    }


def stored_tensors(
    checkpoint: Checkpoint, sources: Mapping[str, WeightSource], plan: WeightPlan
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(parameter name, its tensors by full name), one parameter at a time.

    Raises CheckpointError, naming the tensor, for a damaged one or values that do not fit.
    """
    for parameter, source in sources.items():
        info = checkpoint.tensors[source.name]
        array = checkpoint.read(source.name)
        if source.rows is not None:
            array = array[source.rows]
        prefix = parameter.rpartition(".")[0]
        fmt = plan.formats.get(parameter)
        if fmt is None:
            yield parameter, {parameter: _vector(array, info.dtype, source)}
            continue
        if info.dtype in FLOAT_DTYPES:
            rounding = "mlc" if plan.quantization == LOSSLESS else _rounding(plan)
            parts = quantize(array, fmt, rounding, name=source.name)
        else:
            block_format, parts = import_blocks(array, info.dtype, name=source.name)
            if plan.quantization != LOSSLESS:
                n, k = array.shape[0], info.shape[1]
                weight = dequantize(parts, block_format, n, k)
                parts = quantize(weight, fmt, _rounding(plan), name=source.name)
        yield parameter, {f"{prefix}.{part}": value for part, value in parts.items()}


def _rounding(plan: WeightPlan) -> Rounding:
    return find_scheme(plan.quantization).rounding


def _vector(array: np.ndarray, dtype: str, source: WeightSource) -> np.ndarray:
    if dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"tensor {source.name} is stored as {dtype}; norms and biases must be floats"
        )
    vector = cast_float(array.astype(np.float32), "float32", name=source.name)
    return vector + np.float32(source.add) if source.add else vector
