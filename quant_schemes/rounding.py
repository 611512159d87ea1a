"""How the quantized values, the scale and the minimum of a group of weights are chosen.

A rule takes groups, [num_groups, group_size] float32, finite and at most `MAX_WEIGHT`, and gives a
`Rounded`. The arithmetic runs on the transpose, [group_size, num_groups]: long inner loops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..artifact.dtypes import largest_finite, numpy_dtype
from ..artifact.tensor_format import TensorFormat

Rounding = Literal["mlc", "minmax", "searched"]
Floats = npt.NDArray[np.float32]

MAX_WEIGHT = 1e30
"""Sums over a group stay finite in float32 below this; no honest weight comes near."""

# How many steps more than the levels have the range is cut into (fewer: the ends are clipped).
# Wider or finer grids gained less than 1 % of the error on normal and Laplace weights.
_AFFINE_GRID = tuple(i * 0.3 for i in range(-6, 3))
_SYMMETRIC_GRID = tuple(i * 0.2 for i in range(-8, 5))

_DROPPED_BITS = {"float32": 0, "float16": 13, "bfloat16": 16}
"""Significant bits that a type has fewer than float32."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """q: [num_groups, group_size] uint8; scale, minimum: [num_groups] of the format's dtype."""

    q: npt.NDArray[np.uint8]
    scale: np.ndarray
    minimum: np.ndarray | None = None


def round_groups(groups: Floats, fmt: TensorFormat, rounding: Rounding) -> Rounded:
    """Quantize groups by the rule named `rounding`; ValueError if it cannot make the format."""
    rule = _RULES.get((rounding, fmt.is_affine))
    if rule is None:
        kind = "affine" if fmt.is_affine else "symmetric"
        raise ValueError(f"rounding '{rounding}' does not make {kind} formats")
    return rule(groups, fmt)


def _round_mlc(groups: Floats, fmt: TensorFormat) -> Rounded:
    """MLC-LLM's group quantization (mlc_llm/quantization/group_quantization.py):

        scale = max|w| / max_int        q = clip(round(w / scale + max_int), 0, 2 * max_int)

    with max_int = 2**(bits - 1) - 1, each operation rounded to the format's dtype and halves to
    even, as in the function that TVM compiles from it. A group of zeros gets q = max_int.
    """
    max_int = _num_levels(fmt) // 2
    if fmt.zero_point != max_int:
        raise ValueError(f"rounding 'mlc' needs zero point {max_int}, not {fmt.zero_point}")
    dtype = numpy_dtype(fmt.dtype)
    w = groups.T.astype(dtype).astype(np.float32)
    scale = (np.abs(w).max(axis=0) / np.float32(max_int)).astype(dtype)
    x = _round_significand(w / _nonzero(scale), fmt)
    x = _round_significand(x + np.float32(max_int), fmt)
    return Rounded(_to_values(x, 2 * max_int), scale)


def _round_min_max(groups: Floats, fmt: TensorFormat) -> Rounded:
    """Affine: the smallest weight is level 0, the largest the last one."""
    w = np.ascontiguousarray(groups.T)
    low = w.min(axis=0)
    return _round_affine(w, (w.max(axis=0) - low) / np.float32(_num_levels(fmt)), low, fmt)


def _round_searched_affine(groups: Floats, fmt: TensorFormat) -> Rounded:
    """Affine, with the smallest weighted squared error over a grid of ranges.

    A candidate lays the levels over a range a little narrower or wider than [min, max], rounds,
    and takes the scale and minimum that suit those q best (weighted least squares). Large weights
    count more, as in llama.cpp's `make_qkx2_quants`; unlike there, the minimum has either sign.
    """
    num_levels = _num_levels(fmt)
    w = np.ascontiguousarray(groups.T)
    low = w.min(axis=0)
    span = w.max(axis=0) - low
    weights = _importance(w)
    # Unit ranges: sums neither overflow nor cancel, however small the group's spread.
    x = (w - low) / _nonzero(span)
    wx = weights * x
    sum_w, sum_wx = weights.sum(axis=0), wx.sum(axis=0)
    best_scale, best_min = np.full_like(span, 1 / num_levels), np.zeros_like(span)
    best_error = np.full_like(span, np.inf)
    for extra in _AFFINE_GRID:
        # Centred: half of what is cut or added is at each end.
        q = x * np.float32(num_levels + extra)
        q -= np.float32(extra / 2)
        _round_clip(q, 0, num_levels)
        wq = weights * q
        sum_wq, sum_wqq, sum_wqx = wq.sum(axis=0), (wq * q).sum(axis=0), (wx * q).sum(axis=0)
        determinant = sum_w * sum_wqq - sum_wq * sum_wq
        scale = (sum_w * sum_wqx - sum_wx * sum_wq) / _nonzero(determinant)
        minimum = (sum_wx - scale * sum_wq) / sum_w
        q *= scale
        q += minimum
        q -= x
        q *= q
        q *= weights
        error = q.sum(axis=0)
        better = (error < best_error) & (determinant > 0)
        np.copyto(best_error, error, where=better)
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_min, minimum, where=better)
    return _round_affine(w, best_scale * span, best_min * span + low, fmt)


def _round_searched_symmetric(groups: Floats, fmt: TensorFormat) -> Rounded:
    """Symmetric, with the smallest weighted squared error over a grid of scales of both signs.

    The levels need not lie even about the zero point (4 bits, zero point 7: -7 to 8), so a scale
    of the other sign is another candidate. Large weights count more, as in the affine search.
    """
    zero_point = fmt.zero_point or 0
    lowest, highest = -zero_point, _num_levels(fmt) - zero_point
    w = np.ascontiguousarray(groups.T)
    largest = np.abs(w).max(axis=0)
    weights = _importance(w)
    x = w / _nonzero(largest)
    wx = weights * x
    best_scale, best_gain = np.zeros_like(largest), np.zeros_like(largest)
    reach = max(-lowest, highest)
    for steps in (sign * (reach + extra) for sign in (1, -1) for extra in _SYMMETRIC_GRID):
        q = x * np.float32(steps)
        _round_clip(q, lowest, highest)
        sum_wqx = (wx * q).sum(axis=0)
        q *= q
        q *= weights
        scale = sum_wqx / _nonzero(q.sum(axis=0))
        # By so much this scale lowers the squared error from that of all zeros.
        gain = scale * sum_wqx
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, scale, where=better)
    scale = _stored(best_scale * largest, fmt)
    w /= _nonzero(scale)
    w += np.float32(zero_point)
    return Rounded(_to_values(w, _num_levels(fmt)), scale)


_RULES: dict[tuple[str, bool], Callable[[Floats, TensorFormat], Rounded]] = {
    ("mlc", False): _round_mlc,
    ("minmax", True): _round_min_max,
    ("searched", True): _round_searched_affine,
    ("searched", False): _round_searched_symmetric,
}


def _round_affine(w: Floats, scale: Floats, minimum: Floats, fmt: TensorFormat) -> Rounded:
    """w: [group_size, num_groups] to the nearest levels of the *stored* scale and minimum."""
    stored_scale, stored_min = _stored(scale, fmt), _stored(minimum, fmt)
    q = (w - stored_min.astype(np.float32)) / _nonzero(stored_scale)
    return Rounded(_to_values(q, _num_levels(fmt)), stored_scale, stored_min)


def _num_levels(fmt: TensorFormat) -> int:
    """The largest q."""
    if fmt.bits is None:
        raise ValueError(f"a {fmt.dtype} weight is not quantized")
    return (1 << fmt.bits) - 1


def _importance(w: Floats) -> Floats:
    """[group_size, num_groups]: |w| plus the root mean square of w's group, relative to its
    largest weight; 1 in a group of zeros."""
    size = np.abs(w)
    largest = size.max(axis=0)
    size /= _nonzero(largest)
    size += np.sqrt(np.mean(size * size, axis=0))
    size[:, largest == 0] = 1
    return size


def _nonzero(divisor: np.ndarray) -> Floats:
    """float32, with 1 for 0: what is divided is 0 there as well, or not used."""
    return np.where(divisor == 0, np.float32(1), divisor.astype(np.float32))


def _stored(values: Floats, fmt: TensorFormat) -> np.ndarray:
    """Rounded to the format's dtype, never to infinity."""
    limit = np.float32(largest_finite(fmt.dtype))
    return values.clip(-limit, limit).astype(numpy_dtype(fmt.dtype))


def _round_significand(x: Floats, fmt: TensorFormat) -> Floats:
    """x with as many significant bits as the format's dtype has, halves to even, but with
    float32's exponents: four times faster than a cast there and back."""
    dropped = _DROPPED_BITS[fmt.dtype]
    if dropped == 0:
        return x
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(dropped)) & np.uint32(1)
    bits += odd + np.uint32((1 << (dropped - 1)) - 1)
    bits &= np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return x


def _round_clip(x: Floats, lowest: int, highest: int) -> None:
    np.rint(x, out=x)
    np.clip(x, np.float32(lowest), np.float32(highest), out=x)


def _to_values(x: Floats, highest: int) -> npt.NDArray[np.uint8]:
    """[group_size, num_groups] float32 → [num_groups, group_size] uint8, rounded and clipped."""
    _round_clip(x, 0, highest)
    return np.ascontiguousarray(x.astype(np.uint8).T)
