"""The same bits as another type: lane by lane, or 32-bit words and their parts."""

from typing import TYPE_CHECKING, Any

from .glsl_types import convert, glsl_name
from .writer import join_lanes

if TYPE_CHECKING:
    from .expressions import Expressions, Pieces


def reinterpret(code: "Expressions", e: Any, arguments: list[Any]) -> "Pieces":
    """The bits of a value, read as another type."""
    source, target = code.dtype(arguments[0]), code.dtype(e)
    pieces = code.value(arguments[0])
    if source.bits * source.lanes != target.bits * target.lanes:
        code.writer.fail(f"it reads {source} as {target}")
    if source.lanes == target.lanes:
        return [
            _same_width_bits(piece, source.scalar, target.scalar, width)
            for width, piece in zip(source.widths, pieces, strict=True)
        ]
    # One 32-bit word or several, each to or from its parts.
    if source.lanes < target.lanes and source.bits == 32 and target.bits in (8, 16):
        words = code.writer.lanes(source, pieces)
        bits = _same_width_bits
        per_word = 32 // target.bits
        parts = f"{'u8' if target.bits == 8 else 'u16'}vec{per_word}"
        unsigned = "uint8" if target.bits == 8 else "uint16"
        lanes: list[str] = []
        for word in words:
            name = code.writer.fresh()
            unpack = "unpack8" if target.bits == 8 else "unpack16"
            code.writer.emit(
                f"{parts} {name} = {unpack}({bits(word, source.scalar, 'uint32', 1)});"
            )
            lanes += [bits(f"{name}.{c}", unsigned, target.scalar, 1) for c in "xyzw"[:per_word]]
        return join_lanes(target, lanes)
    if source.lanes > target.lanes and target.bits == 32 and source.bits in (8, 16):
        per_word = 32 // source.bits
        unsigned = "uint8" if source.bits == 8 else "uint16"
        bits_of_lanes = [
            _same_width_bits(lane, source.scalar, unsigned, 1)
            for lane in code.writer.lanes(source, pieces)
        ]
        glsl = glsl_name(unsigned, per_word)
        words = [
            f"pack32({glsl}({', '.join(bits_of_lanes[i : i + per_word])}))"
            for i in range(0, len(bits_of_lanes), per_word)
        ]
        return join_lanes(target, [_same_width_bits(w, "uint32", target.scalar, 1) for w in words])
    code.writer.fail(f"it reads {source} as {target}")


_BIT_FUNCTIONS = {
    ("float32", "int32"): "floatBitsToInt",
    ("float32", "uint32"): "floatBitsToUint",
    ("int32", "float32"): "intBitsToFloat",
    ("uint32", "float32"): "uintBitsToFloat",
    ("float16", "int16"): "float16BitsToInt16",
    ("float16", "uint16"): "float16BitsToUint16",
    ("int16", "float16"): "int16BitsToFloat16",
    ("uint16", "float16"): "uint16BitsToFloat16",
    ("float64", "int64"): "doubleBitsToInt64",
    ("float64", "uint64"): "doubleBitsToUint64",
    ("int64", "float64"): "int64BitsToDouble",
    ("uint64", "float64"): "uint64BitsToDouble",
}


def _same_width_bits(text: str, source: str, target: str, width: int) -> str:
    function = _BIT_FUNCTIONS.get((source, target))
    return f"{function}({text})" if function else convert(text, source, target, width)
