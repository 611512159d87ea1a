"""Quantized weights times int8 activations of many tokens.

Tiles (see `dot_int8`) keep the sums of a few tokens in registers and read the weights of all
groups; here the weights of a group stay in registers, unpacked once, while all tokens of a chunk
pass by, each with its sums in the L1 cache. What a token brings along lies beside that of the next.

Where an instruction set can add more bytes in the same time than it can multiply, words of 4-bit
weights w and of x are multiplied in pairs (Winograd, A New Algorithm for Inner Product, 1968):

    (x1 + w2 + 128) · (x2 + w1) = x1·w1 + x2·w2  +  x1·x2 + 128·x2  +  w1·w2 + 128·w1

is one product of bytes for two, with w from -8 to 7 and x from -120 to 120. What it has too much is
the same for all rows, and comes with x (`activation.Starts`), or for all tokens, and is summed up
beforehand. All of it are exact integers: sums are the same as by single products, to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .activation import GROUP, KEPT_BITS
from .byte_dots import ByteDot
from .dot_int8 import block_groups, for_bits, upper_zero, zero_of_sums
from .int8_activations import Int8Activations
from .packing import PackedWeight
from .vectors import (
    LANES,
    ON_THE_STACK,
    constant,
    fma,
    local_array,
    opaque,
    ramp,
    splat,
    to_float,
)
from .weight_groups import StoredGroup
from .weight_vectors import prefetch_line

MAX_TOKENS = 64
"""Of a chunk: sums of two blocks take 8 kB of an L1 cache, and flags a word."""


def dot_many(
    weight: PackedWeight,
    blocks: Sequence[tuple[Any, Any]],
    x: Int8Activations,
    first: Any,
    count: Any,
    unit: ByteDot,
    distance: int,
    store: Callable[[Any, list[Any]], None],
) -> None:
    """Emit x Wᵀ of some blocks of 16 rows and `count` tokens (bound, at most `MAX_TOKENS`) from
    `first` on: `store(token, for each block a vector of rows)`, for every token.

    `blocks`: as in `dot_int8.dot_int8`; `unit`: one of 16 rows that widens nothing. `distance`: how
    many bytes behind what it reads it asks for; 0: nothing.
    """
    many = _Many(weight, blocks, x, first, count, unit)
    many.emit_high_terms(distance)
    if x.kept is not None:
        many.emit_low_terms()
    many.emit_store(store)


def dot_upper_many(
    weight: PackedWeight,
    blocks: Sequence[tuple[Any, Any]],
    x: Int8Activations,
    first: Any,
    count: Any,
    unit: ByteDot,
    distance: int,
    store: Callable[[Any, list[Any]], None],
) -> None:
    """As `dot_int8.dot_upper`, of many tokens."""
    many = _Many(weight.upper, blocks, x, first, count, unit)
    many.zero_point = upper_zero(weight)
    many.emit_high_terms(distance)

    def store_upper(token: Any, values: list[Any]) -> None:
        store(token, [B.Bind(value * constant(16.0)) for value in values])

    many.emit_store(store_upper)


def for_chunks(start: Any, stop: Any, emit: Callable[[Any, Any], None]) -> None:
    """`emit(first, count)` for chunks of [start, stop) of about one size."""
    count = B.Bind(stop - start)
    num_chunks = B.Bind((count + (MAX_TOKENS - 1)) // MAX_TOKENS)
    with B.serial(num_chunks) as i:
        first = B.Bind(i * count // num_chunks)
        emit(B.Bind(start + first), B.Bind((i + 1) * count // num_chunks - first))


class _Registers:
    """A group of a block in registers, as tokens are multiplied by it."""

    def __init__(self, group: StoredGroup, weight: PackedWeight, unit: ByteDot, pairs: int) -> None:
        self.q = {k: q for k, (q,) in group.words()}
        """By word of x, without those of pairs."""
        self.pairs: dict[tuple[int, int], tuple[Any, Any]] = {}
        """By words of x: what is added to each, uint8 and int8."""
        too_much: Any = splat(T.int32(0))
        for first in range(pairs):
            second = first + weight.words
            of_first = self.q.pop(second) + splat(T.uint8(128 - 8), 4 * LANES)
            of_second = self.q.pop(first) - splat(T.uint8(8), 4 * LANES)
            added = B.Bind(of_first), B.Bind(T.reinterpret("int8x64", of_second))
            too_much = unit.multiply_add(too_much, *added)
            self.pairs[first, second] = added
        self.start = B.Bind(splat(T.int32(0)) - too_much) if pairs else None
        self.scale = group.scale(0)
        self.minimum = group.minimum(0, self.scale) if weight.format.is_affine else None


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of a chunk: its number there, its row of x, and what its sums of a group begin with,
    a vector."""

    place: Any
    row: Any
    start: Any


class _Many:
    """The sums of a chunk, and how groups are added to them."""

    def __init__(
        self,
        weight: PackedWeight,
        blocks: Sequence[tuple[Any, Any]],
        x: Int8Activations,
        first: Any,
        count: Any,
        unit: ByteDot,
    ) -> None:
        self.weight, self.x, self.unit = weight, x, unit
        self.first, self.count, self.num_blocks = opaque(first), opaque(count), len(blocks)
        self.are_neighbours = len(blocks) > 1 and blocks[0][0].same_as(blocks[1][0])
        self.groups_at = block_groups(weight, blocks, unit)
        self.zero_point: int | Fraction = zero_of_sums(weight, unit)
        self.sums = local_array(MAX_TOKENS * self.num_blocks * LANES)
        with B.serial(self.count * self.num_blocks) as i:
            B.buffer_store(self.sums, constant(0.0), [ramp(i * LANES)])

    def place(self, i: Any, block: int) -> Any:
        """Where the sums of the chunk's token number i are."""
        return ramp((i * self.num_blocks + block) * LANES)

    def emit_high_terms(self, distance: int) -> None:
        with B.serial(T.int64(self.weight.num_groups)) as number:
            number = opaque(number)
            groups = self.groups_at(number)
            for group in groups:
                # What lies behind the end of a block is its neighbour, which is read already.
                group.prefetch(distance, self.num_blocks if self.are_neighbours else 1)
            blocks = self._registers(groups)

            def emit(*places: Any) -> None:
                tokens = [self._token(B.Bind(i), number, 0) for i in places]
                for token in tokens:
                    # The other threads' part of x may be in their caches still.
                    prefetch_line(T.address_of(self.x.groups[number + 1, token.row, 0]))
                self._emit_tokens(blocks, tokens, number, 0)

            with B.serial(self.count // 2) as i:
                emit(i * 2, i * 2 + 1)
            with B.If(self.count % 2 != 0), B.Then():
                emit(self.count - 1)

    def _token(self, place: Any, number: Any, term: int) -> _Token:
        """The chunk's token number `place` (bound), before a group and a term."""
        row = B.Bind(self.first + place)
        if self._num_pairs:
            start = self.x.paired_start(row, number, term)
        else:
            start = self.x.minus_zero(self.zero_point, self.weight.group, row, number, term)
        return _Token(place, row, B.Bind(splat(start)))

    def _registers(self, groups: Sequence[StoredGroup]) -> list[_Registers]:
        return [_Registers(group, self.weight, self.unit, self._num_pairs) for group in groups]

    def emit_low_terms(self) -> None:
        """Emit what low terms add: of each group for the tokens that keep it."""
        x, per_flag = self.x, GROUP // self.weight.group
        keepers = B.alloc_buffer((KEPT_BITS,), "int64", annotations=ON_THE_STACK)
        """For each group that a word of flags is about, the bits of the tokens that keep it."""
        any_keeps = B.alloc_buffer((1,), "int64", annotations=ON_THE_STACK)
        with B.serial(T.int64(KEPT_BITS)) as bit:
            B.buffer_store(keepers, T.int64(0), [bit])
        with B.serial(T.int64(x.kept.shape[1])) as word:
            B.buffer_store(any_keeps, T.int64(0), [0])
            with B.serial(self.count) as i:
                of_token = B.Bind(T.shift_left(T.int64(1), i))
                flags = B.Bind(x.kept[self.first + i, word])
                B.buffer_store(any_keeps, T.bitwise_or(any_keeps[0], flags), [0])

                def note(bit: Any) -> None:
                    B.buffer_store(keepers, T.bitwise_or(keepers[bit], of_token), [bit])

                for_bits(flags, note)

            def emit(bit: Any) -> None:
                tokens = opaque(keepers[bit])
                B.buffer_store(keepers, T.int64(0), [bit])
                for half in range(per_flag):
                    number = opaque((bit + word * KEPT_BITS) * per_flag + half)
                    self._emit_low_term(number, tokens)

            for_bits(any_keeps[0], emit)

    def _emit_low_term(self, number: Any, tokens: Any) -> None:
        """Emit what the low term of a group adds to the tokens with bits in `tokens`."""
        blocks = self._registers(self.groups_at(number))

        def emit(i: Any) -> None:
            self._emit_tokens(blocks, [self._token(i, number, 1)], number, 1)

        for_bits(tokens, emit)

    def emit_store(self, store: Callable[[Any, list[Any]], None]) -> None:
        with B.serial(self.count) as i:
            sums = [B.Bind(self.sums[self.place(i, b)]) for b in range(self.num_blocks)]
            store(B.Bind(self.first + i), sums)

    @property
    def _num_pairs(self) -> int:
        """Of words of a group, that products are made of."""
        return self.x.num_pairs if self.weight.is_nibbles else 0

    def _emit_tokens(
        self, blocks: Sequence[_Registers], tokens: Sequence[_Token], number: Any, term: int
    ) -> None:
        """Emit what a group and a term add to the sums of some tokens: word by word of all of them,
        so that no product waits for the one before it (a hundredth faster with two)."""
        x, size, unit = self.x, self.weight.group, self.unit

        def word(token: _Token, k: int) -> Any:
            value = splat(x.words(size, token.row, number, term, k))
            return B.Bind(T.reinterpret("int8x64", value))

        def add(dots: Any, q: Any, of_x: Any) -> Any:
            return B.Bind(unit.in_order(unit.multiply_add(dots, q, of_x)))

        dots = [
            [token.start if b.start is None else B.Bind(b.start + token.start) for b in blocks]
            for token in tokens
        ]
        for first, second in blocks[0].pairs:
            for token, of_token in zip(tokens, dots, strict=True):
                of_x = T.reinterpret("uint8x64", word(token, first)), word(token, second)
                for b, block in enumerate(blocks):
                    of_w = block.pairs[first, second]
                    sums = (B.Bind(one + other) for one, other in zip(of_x, of_w, strict=True))
                    of_token[b] = add(of_token[b], *sums)
        for k in blocks[0].q:
            for token, of_token in zip(tokens, dots, strict=True):
                value = word(token, k)
                for b, block in enumerate(blocks):
                    of_token[b] = add(of_token[b], block.q[k], value)
        for token, of_token in zip(tokens, dots, strict=True):
            scale = B.Bind(splat(x.scale(size, token.row, number, term)))
            for b, block in enumerate(blocks):
                value = self.sums[self.place(token.place, b)]
                if block.minimum is not None:
                    total = splat(x.sum(size, token.row, number, term))
                    value = fma(block.minimum, total, value, LANES)
                value = fma(to_float(of_token[b]), block.scale * scale, value, LANES)
                B.buffer_store(self.sums, value, [self.place(token.place, b)])
