"""The value of one weight, as a TE expression over the parts of its format."""

from collections.abc import Sequence

from tvm import te, tirx

from ..artifact.tensor_format import TensorFormat


def _field(
    words: te.Tensor, fmt: TensorFormat, row: tirx.Expr, k: tirx.Expr, bits: int, per: int
) -> tirx.Expr:
    """`bits`-wide field number k of `row`: `per` fields a uint32 word, little end first."""
    word = words[k // per, row] if fmt.layout == "KN" else words[row, k // per]
    shift = (k % per).astype("uint32") * tirx.const(bits, "uint32")
    return (word >> shift) & tirx.const((1 << bits) - 1, "uint32")


def element(fmt: TensorFormat, parts: Sequence[te.Tensor], n: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
    """Weight [n, k] as float32; see `TensorFormat` for the formulas."""
    if fmt.bits is None:
        return parts[0][n, k].astype("float32")
    tensors = dict(zip(fmt.parts(1, 1), parts, strict=True))
    low_bits = 4 if fmt.bits in (5, 6) else fmt.bits
    q = _field(tensors["q_weight"], fmt, n, k, low_bits, fmt.values_per_word)
    if "q_high" in tensors:
        high_bits = fmt.bits - 4
        high = _field(tensors["q_high"], fmt, n, k, high_bits, 32 // high_bits)
        q = q | (high << tirx.const(4, "uint32"))

    def of_group(tensor: te.Tensor) -> tirx.Expr:
        group = k // fmt.group_size
        value = tensor[group, n] if fmt.layout == "KN" else tensor[n, group]
        return value.astype("float32")

    scale = of_group(tensors["q_scale"])
    if fmt.zero_point is None:
        return q.astype("float32") * scale + of_group(tensors["q_min"])
    return (q.astype("int32") - fmt.zero_point).astype("float32") * scale
