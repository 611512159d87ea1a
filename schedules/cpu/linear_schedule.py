"""The parameters of the linear kernels, which `everycast tune` searches by measurement.

None of them changes the order in which the products of a row and a token are summed: a tuned
kernel gives the same bits as any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .isa import CpuIsa

Bucket = Literal["one", "few", "many"]
"""Tiles of a single token (decoding), the largest ones (prefill), and what is between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSchedule:
    """How the linear kernels of a call work. ValueError for values that no kernel can have."""

    tile_tokens: int
    """Tokens of the largest tile; the others are the powers of two below it."""
    pair_tokens: int = 0
    """Tokens of tiles that go through two blocks of 16 rows at once, in batches of at least two of
    the largest tiles; 0: there are none. For integer activations."""
    many_tokens: int = 0
    """Tokens from which on weights stay in registers and tokens pass by (see `dot_many`), instead;
    0: never. For integer activations."""
    unpack_tokens: int = 0
    """Tokens from which on a block of rows is unpacked once for all of their tiles; 0: never. For
    integer activations, where there are no tiles of two blocks."""
    chunk_bytes: int = 512 * 1024
    """Activations that stay in the cache while the weights pass by."""
    prefetch_one: int = 0
    """How many bytes ahead weights are prefetched, in tiles of a single token; 0: not at all."""
    prefetch_few: int = 8192
    """The same in tiles of fewer tokens than the largest."""
    prefetch_tile: int = 8192
    """The same where a largest tile is all of the batch; for integer activations."""
    prefetch_many: int = 8192
    """The same in larger batches: for integer activations the next block of rows, which the tiles
    of the one before ask for in turns."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("tile_tokens", "chunk_bytes") else 0
            if type(value) is not int or not least <= value < 1 << 31:
                raise ValueError(f"{field.name} of a linear schedule cannot be {value!r}")

    @property
    def tiles(self) -> tuple[int, ...]:
        """Sizes of tiles, largest first."""
        powers = (1 << i for i in reversed(range(self.tile_tokens.bit_length())))
        return (self.tile_tokens, *(size for size in powers if size < self.tile_tokens))

    @property
    def least_paired(self) -> int:
        """Tokens from which on it is worth to go through two blocks at once: fewer wait for memory.
        0: there is none."""
        return self.many_tokens or (2 * self.tile_tokens if self.pair_tokens else 0)

    def prefetch_bytes(self, tokens: int) -> int:
        """For a tile of this many tokens and one block."""
        if tokens == 1:
            return self.prefetch_one
        return self.prefetch_many if tokens == self.tile_tokens else self.prefetch_few

    def with_parameters(self, parameters: Mapping[str, Any]) -> "LinearSchedule":
        """The same with other values of some fields; ValueError for unknown ones or values."""
        unknown = parameters.keys() - {field.name for field in fields(self)}
        if unknown:
            raise ValueError(f"a linear schedule has no {', '.join(sorted(unknown))}")
        return replace(self, **parameters)


_LARGEST_PREFETCH = 256 * 1024
"""For all blocks of a tile. Of an L2 cache of 1 MB, beside as much of what is worked on and the
activations."""


def default_schedule(
    isa: CpuIsa,
    terms: int,
    *,
    is_quantized: bool,
    has_pairs: bool = False,
    has_many: bool = False,
    block_bytes: int = 0,
) -> LinearSchedule:
    """What serves most machines; `terms` as in `CpuIsa.largest_tile`; `has_pairs`: for weights that
    tiles of two blocks are worth it for; `has_many`: that `dot_many` takes; `block_bytes` of a
    block of 16 rows of them.

    Blocks of quantized weights stay in the cache for many tokens: their first tile alone waits for
    memory, unless the tiles of the block before ask for all of it (16 tokens are up to a sixth
    faster, 32 up to a twentieth). In full tiles of floats, prefetches between the multiply-adds
    cost a third of the speed. Terms of bfloat16 lose a twentieth with short rows, and gain half or
    more with long ones.
    """
    pair_tokens = isa.pair_tile if has_pairs and terms else 0
    many_tokens = isa.many_tokens if has_many and terms else 0
    ahead = 8192 if is_quantized or terms else 0
    if is_quantized and terms:
        two = bool(pair_tokens or many_tokens)
        ahead = min(max(ahead, block_bytes), _LARGEST_PREFETCH // (2 if two else 1))
    return LinearSchedule(
        tile_tokens=isa.largest_tile(terms),
        pair_tokens=pair_tokens,
        many_tokens=many_tokens,
        unpack_tokens=isa.unpack_tokens if has_pairs and terms else 0,
        prefetch_many=ahead,
    )
