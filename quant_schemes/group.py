"""Weights to their stored parts and back: the NumPy reference for every format."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ..artifact.dtypes import largest_finite, numpy_dtype
from ..artifact.errors import CheckpointError
from ..artifact.tensor_format import TensorFormat
from .bits import check_parts, from_layout, pack_values, to_layout, unpack_values
from .rounding import MAX_WEIGHT, Rounding, round_groups

_BLOCK_WEIGHTS = 1 << 17
"""Weights that one thread works on at a time: about 5 MB with all intermediate arrays."""


def cast_float(array: np.ndarray, dtype: str, *, name: str) -> np.ndarray:
    """A float tensor of any shape as `dtype`. CheckpointError, naming the tensor, if it holds NaN,
    infinity or a value that `dtype` cannot hold."""
    _check_range(array, dtype, largest_finite(dtype), name)
    return array.astype(numpy_dtype(dtype), copy=False)


def quantize(
    weight: np.ndarray, fmt: TensorFormat, rounding: Rounding, *, name: str
) -> dict[str, np.ndarray]:
    """The parts of `fmt.parts(n, k)` for a weight [n, k] of any float dtype.

    Memory beyond the result is a few megabytes a thread. CheckpointError, naming the tensor, for
    NaN, infinity, or a weight larger than the scale's dtype holds (65504 for float16);
    ValueError if `rounding` cannot make `fmt`.
    """
    n, k = weight.shape
    if fmt.bits is None:
        return {"weight": cast_float(weight, fmt.dtype, name=name)}
    limit = min(largest_finite(fmt.dtype), MAX_WEIGHT)
    expected = fmt.parts(n, k).items()
    out = {part: np.empty(shape, numpy_dtype(dtype)) for part, (shape, dtype) in expected}

    def quantize_rows(rows: slice) -> None:
        block = weight[rows].astype(np.float32, copy=False)
        _check_range(block, fmt.dtype, limit, name)
        for part, array in _quantize_block(block, fmt, rounding).items():
            out[part][(slice(None), rows) if fmt.layout == "KN" else rows] = array

    rows_per_block = max(1, _BLOCK_WEIGHTS // max(1, k))
    blocks = [slice(row, row + rows_per_block) for row in range(0, n, rows_per_block)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(quantize_rows, blocks):
            pass
    return out


def dequantize(
    parts: Mapping[str, np.ndarray], fmt: TensorFormat, n: int, k: int
) -> npt.NDArray[np.float32]:
    """The weight that the parts stand for: [n, k] float32, computed in float32.

    Symmetric: (q - zero_point) * scale. Affine: q * scale + min, one rounding where the product
    is exact, as it is for float16 scales and for GGUF's K blocks. ValueError if a part is missing
    or of another shape or dtype than `fmt.parts(n, k)`.
    """
    check_parts(parts, fmt.parts(n, k))
    if fmt.bits is None:
        return parts["weight"].astype(np.float32, copy=False)
    weight = unpack_values(parts, fmt, n, k).astype(np.float32)
    if fmt.zero_point is not None:
        weight -= np.float32(fmt.zero_point)
    weight *= _per_value(parts["q_scale"], fmt, k)
    if fmt.is_affine:
        weight += _per_value(parts["q_min"], fmt, k)
    return weight


def _quantize_block(
    block: npt.NDArray[np.float32], fmt: TensorFormat, rounding: Rounding
) -> dict[str, np.ndarray]:
    n, k = block.shape
    # Repeating the last weight leaves the range of the last group as it is.
    padded = np.pad(block, ((0, 0), (0, fmt.padded_k(k) - k)), mode="edge")
    rounded = round_groups(padded.reshape(-1, fmt.group_size), fmt, rounding)
    parts = pack_values(rounded.q.reshape(n, -1)[:, :k], fmt)
    parts["q_scale"] = to_layout(rounded.scale.reshape(n, -1), fmt)
    if rounded.minimum is not None:
        parts["q_min"] = to_layout(rounded.minimum.reshape(n, -1), fmt)
    return parts


def _per_value(stored: np.ndarray, fmt: TensorFormat, k: int) -> npt.NDArray[np.float32]:
    """A number per group, spread over the group's columns: [n, k] float32."""
    per_group = from_layout(stored, fmt).astype(np.float32)
    return np.repeat(per_group, fmt.group_size, axis=1)[:, :k]


def _check_range(array: np.ndarray, dtype: str, limit: float, name: str) -> None:
    if array.size == 0:
        return
    with np.errstate(invalid="ignore"):  # NaN wins both; min and max allocate nothing
        extremes = (float(array.min()), float(array.max()))
    if not np.isfinite(extremes).all():
        raise CheckpointError(
            f"tensor {name} holds NaN or infinity; the checkpoint is damaged, fetch it again"
        )
    largest = max(extremes, key=abs)
    if abs(largest) > limit:
        raise CheckpointError(
            f"tensor {name} holds {largest:g}, but {dtype} stores at most {limit:g}; "
            f"choose a scheme that stores float32 (such as q4f32_1 or q0f32) or mend the checkpoint"
        )
