"""What is searched for each bucket of rows, for a layer and a target."""

from collections.abc import Mapping

from ...tuning.search import Parameters, Space, candidates_of
from ..limits import GpuLimits
from ..linear_operator import LinearOperator
from ..linear_schedule import parameters_of, with_parameters
from ..matrix_gemm import can_use_matrices
from ..wide_gemv import has_wide_reads

_Values = Mapping[str, tuple[int, ...]]

_REGISTERS: _Values = {"register_threads": (8, 16, 32, 64), "register_columns": (2, 4, 8, 16)}
_GEMV: _Values = {
    "gemv_threads": (32, 64, 128, 256),
    "gemv_lanes": (8, 16, 32, 64),
    "gemv_columns": (1, 2, 4, 8),
}
_FEW: _Values = {"gemv_tokens": (1, 2, 4, 8), "gemv_passes": (1, 2, 4)}
_GEMM: _Values = {
    "tile_rows": (16, 32, 64, 128),
    "tile_columns": (32, 64, 128),
    "tile_depth": (16, 32, 64),
    "thread_rows": (2, 4, 8),
    "thread_columns": (2, 4, 8),
}
_MATRICES: _Values = {
    "matrix_rows": (32, 64, 128, 256),
    "matrix_columns": (32, 64, 128, 256),
    "matrix_depth": (32, 64),
    "warp_rows": (16, 32, 64),
    "warp_columns": (16, 32, 64),
    "matrix_blocks": (32, 64, 96, 128, 192),
}
_MOST_REGISTERS = 128
"""Sums that a thread keeps; more would not stay in registers."""
BUCKETS = ("one", "few", "many")
ROWS: Mapping[str, tuple[int, ...]] = {"one": (1,), "few": (2, 4, 8), "many": (256,)}
"""Rows of the batches that a bucket is timed with, one after the other."""
_MOST_OUTPUTS, _LEAST_MANY = 1 << 22, 64


def rows_of(operator: LinearOperator, bucket: str) -> tuple[int, ...]:
    """As in `ROWS`; but a layer with as many columns as a head has never gets that many rows."""
    most = max(_MOST_OUTPUTS // operator.n // _LEAST_MANY * _LEAST_MANY, _LEAST_MANY)
    return tuple(min(rows, most) for rows in ROWS[bucket])


def space_of(operator: LinearOperator, bucket: str, limits: GpuLimits) -> Space:
    """The parameters that matter to a bucket on a target with these limits, and their values in
    order, the target's own among them."""
    space: dict[str, tuple[int, ...]]
    if bucket == "many" and can_use_matrices(operator, limits):
        space = dict(_MATRICES)
    elif bucket == "many":
        space = {"shares_memory": (0, 1), **_GEMM, **_REGISTERS, "register_rows": (4, 8, 16)}
    else:
        space = {"shares_memory": (0, 1), **_GEMV, **_REGISTERS}
        if has_wide_reads(operator.weights[0], _with_words(limits, 4)):
            space["gemv_words"] = (1, 2, 4)
        if limits.gemv_stages:
            space["gemv_stages"] = (2, 3, 4)
        if bucket == "few":
            space |= _FEW
    default = parameters_of(limits, list(space))
    return {name: tuple(sorted({*values, default[name]})) for name, values in space.items()}


def candidates(operator: LinearOperator, bucket: str, limits: GpuLimits) -> list[Parameters]:
    """The combinations that the limits allow, each another kernel; the default is the first.

    Where a thread keeps to itself, what others do together is not looked at, and the other way
    round: such parameters keep their default values.
    """
    space = space_of(operator, bucket, limits)
    default = parameters_of(limits, list(space))
    found = {tuple(default.values()): default}
    for shares in space.get("shares_memory", (1,)):
        free = {name: values for name, values in space.items() if _matters(name, bucket, shares)}
        for candidate in candidates_of(free):
            whole = default | candidate
            if "shares_memory" in space:
                whole["shares_memory"] = shares
            if tuple(whole.values()) not in found and is_legal(operator, bucket, limits, whole):
                found[tuple(whole.values())] = whole
    return list(found.values())


def is_legal(
    operator: LinearOperator, bucket: str, limits: GpuLimits, parameters: Parameters
) -> bool:
    """Whether the limits allow a kernel with these parameters."""
    try:
        new = with_parameters(limits, parameters)
    except ValueError:
        return False
    count = len(operator.weights)
    if not new.shares_memory:
        rows = {"one": 1, "few": new.gemv_tokens, "many": new.register_rows}[bucket]
        columns = max((new.register_columns // (2 if rows == 1 else 1)) // count, 1)
        return rows * columns * count <= _MOST_REGISTERS
    if bucket == "many":
        tile = new.gemm_tiles[-1]
        has_enough = tile.num_threads >= 32 and tile.depth >= operator.weights[0].step
        if can_use_matrices(operator, new):
            return True
        return has_enough and tile.thread_rows * tile.thread_columns <= _MOST_REGISTERS
    tokens = new.gemv_tokens if bucket == "few" else 1
    sums = max(new.gemv_columns // count, 1) * count * tokens
    if new.gemv_lanes > new.gemv_threads or sums > _MOST_REGISTERS:
        return False
    return 4 * sums * new.gemv_threads <= new.shared_bytes


def _matters(name: str, bucket: str, shares: int) -> bool:
    if name == "shares_memory":
        return False
    if name in ("gemv_tokens", "gemv_passes"):
        return True
    return name.startswith("register_") != bool(shares)


def _with_words(limits: GpuLimits, words: int) -> GpuLimits:
    return with_parameters(limits, {"gemv_words": words})
