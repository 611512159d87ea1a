"""Reading and writing arrays: which elements, and in vectors of how many lanes."""

from typing import TYPE_CHECKING, Any

from tvm import tirx

from .glsl_types import DType, convert
from .writer import join_lanes

if TYPE_CHECKING:
    from .expressions import Expressions, Pieces


def places(code: "Expressions", buffer: Any, indices: Any, lanes: int) -> tuple[list[str], bool]:
    """What is read or written at `indices`: for each piece of the value, or, if the flag is not
    set, for each of its lanes."""
    array = code.arrays.get(buffer)
    if array is None:
        code.writer.fail(f"buffer {buffer.name} is neither an argument nor allocated")
    if len(indices) != 1:
        code.writer.fail(f"buffer {buffer.name} has {len(indices)} dimensions left")
    element = DType.parse(str(buffer.dtype))
    if element is None:
        code.writer.fail(f"buffer {buffer.name} has elements of type {buffer.dtype}")
    scalar = "uint8" if element.is_bool and array.place == "buffer" else element.scalar
    if scalar != array.scalar and array.place != "buffer":
        code.writer.fail(f"{buffer.name} sees {array.place} memory of {array.scalar} as {scalar}")
    index = indices[0]
    widths = DType(scalar, lanes).widths
    if lanes == 1:
        array.views.add((scalar, 1))
        return [array.element(scalar, 1, code.index(index))], True
    base = _start(code, buffer, element, index)
    if base is None:
        array.views.add((scalar, 1))
        texts = [convert(text, code.dtype(index).scalar, "int32", 1) for text in code.lanes(index)]
        return [array.element(scalar, 1, text) for text in texts], False
    # Arrays of three-lane vectors have gaps, so there are none.
    is_vector = set(widths) in ({2}, {4}) and _is_multiple(code, base, widths[0])
    width = widths[0] if is_vector else 1
    array.views.add((scalar, width))
    if array.place != "buffer":
        width = array.width
    start = code.writer.temporary("int32", 1, _quotient(code, base, width))
    texts = [f"{start} + {i}" if i else start for i in range(lanes // width)]
    return [array.element(scalar, width, text) for text in texts], width == widths[0]


def load(code: "Expressions", e: Any) -> "Pieces":
    """The pieces of what is read from a buffer."""
    dtype = code.dtype(e)
    elements, is_whole = places(code, e.source, e.indices, dtype.lanes)
    array = code.arrays[e.source]
    array.is_loaded = True
    if dtype.is_bool and array.place == "buffer":
        elements = [
            f"({text} != uint8_t(0))" if width == 1 else f"notEqual({text}, u8vec{width}(0))"
            for width, text in zip(
                dtype.widths if is_whole else [1] * dtype.lanes, elements, strict=True
            )
        ]
    return elements if is_whole else join_lanes(dtype, elements)


def _start(code: "Expressions", buffer: Any, element: DType, index: Any) -> Any:
    """The first scalar of an access to consecutive ones; None if they are not that."""
    if element.lanes > 1:
        if code.dtype(index).lanes > 1:
            code.writer.fail(f"buffer {buffer.name} of vectors is seen through a vector")
        return index * element.lanes
    is_row = type(index).__name__ == "Ramp" and code.analyzer.can_prove_equal(index.stride, 1)
    return index.base if is_row else None


def _is_multiple(code: "Expressions", e: Any, divisor: int) -> bool:
    known = code.analyzer.modular_set(e)
    return int(known.coeff) % divisor == 0 and int(known.base) % divisor == 0


def _quotient(code: "Expressions", e: Any, divisor: int) -> str:
    """The index e / divisor, which leaves no rest."""
    if divisor == 1:
        return code.index(e)
    quotient = code.analyzer.simplify(tirx.floordiv(e, divisor))
    if type(quotient).__name__ == "IntImm" or _is_linear(quotient):
        return code.index(quotient)
    return f"({code.index(e)} >> {divisor.bit_length() - 1})"


def _is_linear(e: Any) -> bool:
    """Whether an index is made of sums and products only, all of which stay exact."""
    kind = type(e).__name__
    if kind in ("Add", "Sub", "Mul"):
        return _is_linear(e.a) and _is_linear(e.b)
    return kind in ("Var", "IntImm") or (kind == "Cast" and _is_linear(e.value))
