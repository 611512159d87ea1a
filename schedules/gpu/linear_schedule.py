"""The parameters of the linear kernels, which `everycast tune` searches by measurement.

They shape the kernels by `GpuLimits`: a linear layer has one for each bucket of rows of x, so that
what is found for one changes nothing of the others.

Other lanes and words change the order in which products are summed: a tuned kernel gives other bits
than the default one, as near to the exact sum. Whatever does not (tiles of float32) gives the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .limits import GemmTile, GpuLimits, MatrixTile

Bucket = Literal["one", "few", "many"]
"""A single row (decoding), up to `GpuLimits.gemv_rows`, and more (prefill)."""

_FIELDS = {
    "shares_memory", "gemv_threads", "gemv_lanes", "gemv_columns", "gemv_tokens", "gemv_passes",
    "gemv_words", "gemv_stages", "gemv_blocks", "register_threads", "register_columns",
    "register_rows", "matrix_blocks",
}  # fmt: skip
"""Parameters that are fields of `GpuLimits`."""
_GEMM_TILE = {
    "tile_rows": "rows", "tile_columns": "columns", "tile_depth": "depth",
    "thread_rows": "thread_rows", "thread_columns": "thread_columns",
}  # fmt: skip
"""Parameters that are fields of the largest of `GpuLimits.gemm_tiles`."""
_MATRIX_TILE = {
    "matrix_rows": "rows", "matrix_columns": "columns", "matrix_depth": "depth",
    "warp_rows": "warp_rows", "warp_columns": "warp_columns",
}  # fmt: skip
"""The same of `GpuLimits.matrix_tiles`."""
_MAY_BE_ZERO = {"shares_memory", "gemv_stages"}


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """What shapes the kernels of a linear layer, by the number of rows."""

    one: GpuLimits
    few: GpuLimits
    """Also says how many rows are few."""
    many: GpuLimits

    def with_parameters(self, bucket: str, parameters: Mapping[str, Any]) -> "LinearSchedule":
        """The same with other values for a bucket; ValueError as in `with_parameters`."""
        if bucket not in ("one", "few", "many"):
            raise ValueError(f"a linear schedule has no bucket '{bucket}'")
        return replace(self, **{bucket: with_parameters(getattr(self, bucket), parameters)})


def default_schedule(limits: GpuLimits) -> LinearSchedule:
    """What the target's record says, whatever the number of rows."""
    return LinearSchedule(limits, limits, limits)


def parameters_of(limits: GpuLimits, names: Sequence[str]) -> dict[str, int]:
    """The values of these parameters."""
    values = {}
    for name in names:
        if name in _GEMM_TILE:
            values[name] = getattr(limits.gemm_tiles[-1], _GEMM_TILE[name])
        elif name in _MATRIX_TILE:
            values[name] = getattr(limits.matrix_tiles[-1], _MATRIX_TILE[name])
        else:
            values[name] = int(getattr(limits, name))
    return values


def check_parameters(bucket: str, parameters: Mapping[str, Any]) -> None:
    """ValueError for a bucket, names or values that no kernel has, whatever the target."""
    if bucket not in ("one", "few", "many"):
        raise ValueError(f"a linear schedule has no bucket '{bucket}'")
    unknown = parameters.keys() - _FIELDS - _GEMM_TILE.keys() - _MATRIX_TILE.keys()
    if unknown:
        raise ValueError(f"a linear schedule has no {', '.join(sorted(unknown))}")
    for name, value in parameters.items():
        least = 0 if name in _MAY_BE_ZERO else 1
        if type(value) is not int or not least <= value < 1 << 16:
            raise ValueError(f"{name} of a linear schedule cannot be {value!r}")


def with_parameters(limits: GpuLimits, parameters: Mapping[str, Any]) -> GpuLimits:
    """The limits with other values; ValueError for unknown ones, and for values that the limits
    themselves, or their tiles, do not allow.

    Of the smaller tiles those stay that have fewer rows than the largest.
    """
    check_parameters("one", parameters)
    changes: dict[str, Any] = {name: parameters[name] for name in parameters if name in _FIELDS}
    if "shares_memory" in changes:
        changes["shares_memory"] = bool(changes["shares_memory"])
    if gemm := _named(parameters, _GEMM_TILE):
        last: GemmTile = replace(limits.gemm_tiles[-1], **gemm)
        smaller = [tile for tile in limits.gemm_tiles[:-1] if tile.rows < last.rows]
        changes["gemm_tiles"] = (*smaller, last)
    if matrix := _named(parameters, _MATRIX_TILE):
        if not limits.matrix_tiles:
            raise ValueError("the target has no matrix tiles")
        largest: MatrixTile = replace(limits.matrix_tiles[-1], **matrix)
        others = [tile for tile in limits.matrix_tiles[:-1] if tile.rows < largest.rows]
        changes["matrix_tiles"] = (*others, largest)
    return replace(limits, **changes)


def _named(parameters: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {field: parameters[name] for name, field in names.items() if name in parameters}
