"""How weights lie in memory for the CPU kernels.

One uint8 buffer for each weight [N, K], in blocks of 16 rows (lane = row); N is padded with zero
rows. Every instruction set reads the same layout: its dot products of 4 bytes (VNNI, dotprod) and
its 32-bit lanes (float kernels) both want four consecutive k of one row in one 32-bit word.

bfloat16:           [N / 16][K / 2][16] pairs of consecutive k, the even one first, as their dot
                    products want them; an odd K is padded with zeros.

Other floats:       [N / 16][K][16] values.

Quantized formats:  [N / 16][pairs of groups along K] of

    | scales 0 | scales 1 | mins 0 | mins 1 | q of group 0 | q of group 1 |

    scales   [16 rows] of the format's dtype, for each group
    mins     likewise; only in affine formats
    q        [words][16 rows] uint32. Up to 4 bits: word j of a group of G values holds

             bits  31..28   27..24  23..20   19..16  15..12   11..8   7..4     3..0
             k   4j+3+G/2    4j+3  4j+2+G/2   4j+2  4j+1+G/2   4j+1  4j+G/2     4j

             5 to 8 bits: one value a byte, k = 4j in the lowest.

Two planes:         8-bit symmetric formats may be split, so that a kernel can read half of the bits
                    alone (see `leading_logits`). One after another:

    | all blocks, as of a 4-bit format, with the upper 4 bits of each q |
    | [N / 16][pairs of groups] lower 4 bits of both groups, in the same order |
    | [N / 256][K / 32][16 blocks] float32: the largest scale² of a block's 16 rows in a group |

Pairs keep q at multiples of 64 bytes. Kernels read a pair from front to back, as it lies: read out
of order, memory delivers 8-bit weights at two thirds of the speed. Groups of 64, 128, … are stored
as groups of 32 with equal scales (3-bit ones as they are). K is padded with zero groups (q, scale
and min 0) to whole pairs.
"""

from dataclasses import dataclass

from ...artifact.tensor_format import TensorFormat
from .vectors import LANES

LAYOUT_VERSION = 2
"""To be raised whenever packed bytes of the same weight change: packed weights are kept on disk."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def can_have_planes(fmt: TensorFormat) -> bool:
    """Whether q of a format may be split into two planes."""
    is_symmetric = fmt.bits == 8 and not fmt.is_affine
    return is_symmetric and fmt.group_size % 32 == 0 and fmt.dtype != "bfloat16"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The packed form of a weight [n, k] of some format. ValueError for an unsupported group, or
    for two `planes` of a format that has none."""

    format: TensorFormat
    n: int
    k: int
    planes: bool = False
    """Whether q is split into two planes."""

    def __post_init__(self) -> None:
        if self.planes and not can_have_planes(self.format):
            raise ValueError(f"{self.layout_key}: two planes are for 8-bit symmetric formats")
        if self.is_quantized and self.format.group_size % 8:
            raise ValueError(
                f"group_size {self.format.group_size}: the CPU kernels need a multiple of 8"
            )

    @property
    def is_quantized(self) -> bool:
        return self.format.bits is not None

    @property
    def is_bfloat16(self) -> bool:
        return not self.is_quantized and self.format.dtype == "bfloat16"

    @property
    def is_nibbles(self) -> bool:
        """Two values a byte; else quantized values take a byte each."""
        return self.format.bits in (3, 4)

    @property
    def largest_q(self) -> int:
        """The largest quantized value of the format; 0 for floats."""
        return (1 << (self.format.bits or 0)) - 1

    @property
    def group(self) -> int:
        """Values along K that share a scale in the packed form."""
        size = self.format.group_size
        return 32 if size % 32 == 0 and self.format.bits != 3 else size

    @property
    def num_blocks(self) -> int:
        return -(-self.n // LANES)

    @property
    def num_pairs(self) -> int:
        """Pairs of groups along K."""
        return -(-self.k // (2 * self.group))

    @property
    def num_groups(self) -> int:
        """Groups along K, with those of padding."""
        return 2 * self.num_pairs

    @property
    def words(self) -> int:
        """32-bit words of q in a group of one row."""
        return self.group // (8 if self.is_nibbles else 4)

    @property
    def vector_bytes(self) -> int:
        """16 scales, mins or float weights."""
        return LANES * DTYPE_BYTES[self.format.dtype]

    @property
    def q_bytes(self) -> int:
        """q of one group of 16 rows."""
        return self.words * LANES * 4

    @property
    def q_offset(self) -> int:
        """Bytes from the start of a pair to q of its first group."""
        return (4 if self.format.is_affine else 2) * self.vector_bytes

    @property
    def pair_bytes(self) -> int:
        return self.q_offset + 2 * self.q_bytes

    @property
    def block_bytes(self) -> int:
        """Of 16 rows that lie together: not of two planes."""
        if not self.is_quantized:
            stored_k = self.k + self.k % 2 if self.is_bfloat16 else self.k
            return stored_k * self.vector_bytes
        return self.num_pairs * self.pair_bytes

    @property
    def num_bytes(self) -> int:
        if self.planes:
            return self.squares_offset + self.num_block_vectors * self.num_groups * LANES * 4
        return self.num_blocks * self.block_bytes

    # ---- two planes

    @property
    def upper(self) -> "PackedWeight":
        """The upper plane as a weight of 4 bits, at the start of the buffer. Its zero point is not
        that of its format: see `dot_int8`."""
        return PackedWeight(TensorFormat(self.format.dtype, 4, 32, 7), self.n, self.k)

    @property
    def lower_offset(self) -> int:
        """Bytes before the lower plane."""
        return self.upper.num_bytes

    @property
    def lower_pair_bytes(self) -> int:
        """Lower bits of a pair of groups of 16 rows."""
        return 2 * self.upper.q_bytes

    @property
    def lower_block_bytes(self) -> int:
        return self.num_pairs * self.lower_pair_bytes

    @property
    def squares_offset(self) -> int:
        """Bytes before the largest scale² of blocks and groups."""
        return self.lower_offset + self.num_blocks * self.lower_block_bytes

    @property
    def num_block_vectors(self) -> int:
        """Vectors of 16 blocks."""
        return -(-self.num_blocks // LANES)

    @property
    def layout_key(self) -> str:
        """What the packed bytes depend on besides the weight's values: its format, not its size."""
        f = self.format
        if f.bits is None:
            return f.dtype
        zero = "affine" if f.zero_point is None else f"zero{f.zero_point}"
        planes = "_planes" if self.planes else ""
        return f"q{f.bits}_group{f.group_size}_{zero}_{f.dtype}{planes}"

    @property
    def key(self) -> str:
        """A stable name of this packed form, for caches and metadata."""
        return f"v{LAYOUT_VERSION}_{self.layout_key}_{self.n}x{self.k}"
