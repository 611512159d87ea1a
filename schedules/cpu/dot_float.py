"""Weights of any format times float32 activations: widened in registers, then multiply-add.

Lanes are rows. A weight vector is widened to float32 once a tile and multiplied by one broadcast
activation for each token.

The products of a token and a row go into one sum, or two for quantized weights where registers
suffice (`CpuIsa.chains`): the same ones in the same order for every number of tokens, so that a
token's result does not depend on the batch it is in, to the last bit.
"""

from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .control import clear
from .packing import PackedWeight
from .vectors import LANES, local_array, opaque, ramp, splat
from .weight_vectors import load_float, load_min, load_pair, load_scale, prefetch

_UNROLL = 2
"""A pair of bfloat16."""


def dot_float(
    weight: PackedWeight,
    packed: Any,
    block: Any,
    x: Any,
    first: Any,
    tokens: int,
    chains: int,
    prefetch_bytes: int,
) -> list[Any]:
    """Emit x Wᵀ of 16 rows and `tokens` tokens from `first` on: a vector of rows per token.

    `chains` must be the same for every tile of a kernel. Float weights have one: more make tiles
    of 4 tokens a quarter slower, and memory is what a single token waits for. Weights are
    prefetched `prefetch_bytes` ahead.
    """
    chains = chains if weight.is_quantized else 1
    tile = _Tile(weight, packed, x, opaque(first), tokens, chains, prefetch_bytes)
    base = opaque(block * weight.block_bytes)
    if weight.is_quantized:
        tile.emit_groups(base)
    else:
        tile.emit_values(base)
    return tile.sums()


class _Tile:
    """The sums of a tile: `chains` vectors a token."""

    def __init__(
        self,
        weight: PackedWeight,
        packed: Any,
        x: Any,
        first: Any,
        tokens: int,
        chains: int,
        prefetch_bytes: int,
    ) -> None:
        self.weight, self.packed, self.x = weight, packed, x
        self.first, self.tokens, self.chains = first, tokens, chains
        self.prefetch_bytes = prefetch_bytes
        self.acc = local_array(tokens * chains * LANES)
        clear(self.acc, tokens * chains)

    def sums(self) -> list[Any]:
        def total(token: int) -> Any:
            first, *others = (self.acc[self._at(token, chain)] for chain in range(self.chains))
            return sum(others, start=first)

        return [total(i) for i in range(self.tokens)]

    def _at(self, token: int, chain: int) -> Any:
        return ramp((chain % self.chains * self.tokens + token) * LANES)

    def _multiply_add(self, vector: Any, k: Any, chain: int) -> None:
        """Add the products of one k: `vector` holds 16 rows of it."""
        vector = B.Bind(vector)
        for i in range(self.tokens):
            at = self._at(i, chain)
            product = vector * splat(self.x[self.first + i, k])
            B.buffer_store(self.acc, self.acc[at] + product, [at])

    def emit_values(self, base: Any) -> None:
        """A float weight: one vector for each k."""
        weight = self.weight
        step_bytes = _UNROLL * weight.vector_bytes

        def emit(step: Any, count: int) -> None:
            at = base + step * step_bytes
            if weight.is_bfloat16:
                vectors = load_pair(self.packed, at)[:count]
            else:
                starts = (at + j * weight.vector_bytes for j in range(count))
                vectors = tuple(load_float(self.packed, s, weight.format.dtype) for s in starts)
            for j, vector in enumerate(vectors):
                self._multiply_add(vector, step * _UNROLL + j, chain=0)

        whole, rest = divmod(weight.k, _UNROLL)
        with B.serial(T.int64(whole)) as i:
            prefetch(self.packed, base + i * step_bytes, step_bytes, self.prefetch_bytes)
            emit(i, _UNROLL)
        if rest:
            emit(T.int64(whole), rest)

    def emit_groups(self, base: Any) -> None:
        """A quantized weight: pairs of whole groups, then what is left, up to K.

        The groups of a pair go into different chains, so that a full tile needs the registers of
        one chain at a time.
        """
        weight = self.weight
        whole_pairs, rest = divmod(weight.k, 2 * weight.group)
        with B.serial(T.int64(whole_pairs)) as pair:
            start = B.Bind(base + pair * weight.pair_bytes)
            prefetch(self.packed, start, weight.pair_bytes, self.prefetch_bytes)
            for half in (0, 1):
                self._emit_group(start, half, (pair * 2 + half) * weight.group, weight.group)
        start = base + whole_pairs * weight.pair_bytes
        for half in (0, 1):
            count = min(max(0, rest - half * weight.group), weight.group)
            if count:
                k = T.int64((whole_pairs * 2 + half) * weight.group)
                self._emit_group(start, half, k, count)

    def _emit_group(self, start: Any, half: int, first_k: Any, count: int) -> None:
        """The first `count` values of group `half` of the pair at byte `start`."""
        weight = self.weight
        scale = load_scale(weight, self.packed, start, half)
        minimum = load_min(weight, self.packed, start, half, scale)
        q_start = start + weight.q_offset + half * weight.q_bytes

        def emit(j: Any, limit: int) -> None:
            words = B.Bind(T.reinterpret("uint32x16", self.packed[ramp(q_start + j * 64, 64)]))
            for k, shift in _fields(weight):
                if k < limit:
                    value = scale * _unsigned_field(words, shift, weight.is_nibbles) + minimum
                    self._multiply_add(value, first_k + 4 * j + k, half)

        if count == weight.group:
            with B.serial(T.int64(weight.words)) as j:
                emit(j, weight.group)
        else:
            for j in range(weight.words):
                emit(j, count - 4 * j)


def _fields(weight: PackedWeight) -> list[tuple[int, int]]:
    """(k relative to 4 j, first bit) of the values in word j of a group."""
    fields = [(byte, 8 * byte) for byte in range(4)]
    if weight.is_nibbles:
        fields += [(weight.group // 2 + byte, 8 * byte + 4) for byte in range(4)]
    return fields


def _unsigned_field(words: Any, shift: int, is_nibbles: bool) -> Any:
    field = T.shift_right(words, splat(T.uint32(shift))) if shift else words
    if shift + (4 if is_nibbles else 8) < 32:
        field = T.bitwise_and(field, splat(T.uint32(15 if is_nibbles else 255)))
    # Signed, because a conversion from unsigned is many instructions before AVX-512.
    return T.Cast("float32x16", T.reinterpret("int32x16", field))
