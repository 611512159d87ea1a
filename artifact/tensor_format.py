"""How one weight matrix is stored: the vocabulary that importers, schemes and kernels share."""

from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """Storage of a weight of shape [N, K] (N output rows, K inputs).

    Float: `bits` is None and `dtype` is the dtype of the values.
    Quantized: `bits`-wide unsigned integers q in groups of `group_size` along K, with a scale of
    dtype `dtype` per group:

        symmetric (`zero_point` is a number):  w = (q - zero_point) * scale
        affine    (`zero_point` is None):      w = q * scale + min

    The low bits of q are packed little end first along K into uint32 words: 10 values a word for
    3 bits, 8 for 4, 4 for 8. 5 and 6 bits are 4-bit words plus a plane `q_high` of 1 or 2 bits a
    value, 32 or 16 values a word. K is padded with zeros to a multiple of `group_size`.
    """

    dtype: Literal["float32", "float16", "bfloat16"]
    bits: Literal[3, 4, 5, 6, 8] | None = None
    group_size: int = 32
    zero_point: int | None = None
    layout: Literal["NK", "KN"] = "NK"

    @property
    def is_affine(self) -> bool:
        return self.bits is not None and self.zero_point is None

    @property
    def values_per_word(self) -> int:
        """Values in one uint32 of `q_weight`."""
        return {3: 10, 4: 8, 5: 8, 6: 8, 8: 4}[self.bits or 8]

    def padded_k(self, k: int) -> int:
        return _ceil_div(k, self.group_size) * self.group_size

    def parts(self, n: int, k: int) -> dict[str, tuple[Shape, str]]:
        """Tensors that store a [n, k] weight: name suffix → (shape, dtype)."""
        if self.bits is None:
            return {"weight": ((n, k), self.dtype)}
        padded = self.padded_k(k)
        columns = {"q_weight": (padded // self.values_per_word, "uint32")}
        if self.bits in (5, 6):
            columns["q_high"] = (padded // (32 // (self.bits - 4)), "uint32")
        columns["q_scale"] = (padded // self.group_size, self.dtype)
        if self.is_affine:
            columns["q_min"] = (padded // self.group_size, self.dtype)
        return {
            part: ((c, n) if self.layout == "KN" else (n, c), dtype)
            for part, (c, dtype) in columns.items()
        }
