"""Division of integers, which GLSL leaves open for negative ones."""

from typing import TYPE_CHECKING, Any

from .glsl_types import DType, glsl_name
from .writer import join_lanes

if TYPE_CHECKING:
    from .expressions import Expressions, Pieces


def _operands(code: "Expressions", e: Any) -> list[tuple[str, str]]:
    """Lanes of both operands, as names."""
    return list(zip(code.lanes(e.a), code.lanes(e.b), strict=True))


def remainder(code: "Expressions", e: Any) -> "Pieces":
    """What a division that is cut towards zero leaves."""
    dtype = code.dtype(e)
    quotient = "trunc({0} / {1})" if dtype.is_float else "({0} / {1})"
    lanes = [f"({a} - {b} * {quotient.format(a, b)})" for a, b in _operands(code, e)]
    return join_lanes(dtype, _cut(dtype, lanes))


def floor_div(code: "Expressions", e: Any) -> "Pieces":
    """The quotient, rounded down."""
    dtype, names = code.dtype(e), _operands(code, e)
    if dtype.is_float:
        return join_lanes(dtype, [f"floor({a} / {b})" for a, b in names])
    lanes = [f"({a} / {b})" for a, b in names]
    if not _is_unsigned(code, e):
        lanes = [f"({a} / {b} - {_one_if_rounded_up(dtype.scalar, a, b)})" for a, b in names]
    return join_lanes(dtype, _cut(dtype, lanes))


def floor_mod(code: "Expressions", e: Any) -> "Pieces":
    """What a division that is rounded down leaves."""
    dtype, names = code.dtype(e), _operands(code, e)
    if dtype.is_float:
        return join_lanes(dtype, [f"({a} - {b} * floor({a} / {b}))" for a, b in names])
    lanes = [f"({a} - {b} * ({a} / {b}))" for a, b in names]
    if not _is_unsigned(code, e):
        lanes = [
            f"({a} - {b} * ({a} / {b} - {_one_if_rounded_up(dtype.scalar, a, b)}))"
            for a, b in names
        ]
    return join_lanes(dtype, _cut(dtype, lanes))


def _cut(dtype: DType, lanes: list[str]) -> list[str]:
    """Results that GLSL computed in 32 bits, in their small type again."""
    if not dtype.is_small_int:
        return lanes
    return [f"{glsl_name(dtype.scalar)}({lane})" for lane in lanes]


def _is_unsigned(code: "Expressions", e: Any) -> bool:
    """Whether both operands of a division are sure not to be negative."""
    dtype = code.dtype(e)
    if dtype.scalar.startswith("uint"):
        return True
    return dtype.lanes == 1 and all(
        int(code.analyzer.const_int_bound(x).min_value) >= 0 for x in (e.a, e.b)
    )


def _one_if_rounded_up(scalar: str, a: str, b: str) -> str:
    """1 where a / b, cut towards zero, is above its floor."""
    # The product is exact even where the quotient had to be cut.
    return f"{glsl_name(scalar)}(({a} / {b}) * {b} != {a} && ({a} < 0) != ({b} < 0))"
