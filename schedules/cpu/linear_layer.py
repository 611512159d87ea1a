"""A weight of a linear kernel under construction: its arguments, and its products with x."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from . import dot_bf16, dot_int8
from .byte_dots import BYTE_DOTS, ByteDot
from .control import either, for_tiles
from .dot_float import dot_float
from .dot_many import dot_many, for_chunks
from .int8_activations import Int8Activations
from .isa import CpuIsa
from .kernel import Kernel
from .linear_schedule import LinearSchedule
from .packing import PackedWeight
from .tile_prefetch import tile_ahead
from .vectors import LANES, constant, local_array, ramp
from .weight_groups import UnpackedBlock

_MAX_UNPACKED_BYTES = 320 * 1024
"""They are on the stack: threads have at least 512 kB."""


class Layer:
    """A weight's arguments in a kernel under construction."""

    def __init__(
        self,
        func: Kernel,
        weight: PackedWeight,
        has_bias: bool,
        suffix: str,
        isa: CpuIsa,
        schedule: LinearSchedule,
    ) -> None:
        self.weight, self.isa, self.schedule = weight, isa, schedule
        self.packed = func.buffer(f"packed{suffix}", (weight.num_bytes,), "uint8")
        self.bias = func.buffer(f"bias{suffix}", (weight.n,), "float32") if has_bias else None

    def dot(self, block: Any, x: Any, first: Any, tokens: int, batch: tuple[Any, Any]) -> list[Any]:
        """Emit x Wᵀ of a block of 16 rows and the `tokens` tokens from `first` on, of a batch
        [start, stop): a vector of rows per token."""
        if isinstance(x, Int8Activations):
            ahead = tile_ahead(self.schedule, first, tokens, *batch, is_pair=False)
            blocks = [(self.packed, block)]
            return dot_int8.dot_int8(self.weight, blocks, x, first, tokens, self.unit, ahead)[0]
        num_bytes = self.schedule.prefetch_bytes(tokens)
        if isinstance(x, dot_bf16.Bf16Activations):
            return dot_bf16.dot_bf16(self.weight, self.packed, block, x, first, tokens, num_bytes)
        chains = self.isa.chains
        return dot_float(self.weight, self.packed, block, x, first, tokens, chains, num_bytes)

    def dot_pair(
        self,
        block: Any,
        other: "Layer",
        other_block: Any,
        x: Any,
        first: Any,
        tokens: int,
        batch: tuple[Any, Any],
    ) -> list[list[Any]]:
        """The same of two blocks, one of another layer perhaps: a vector of rows per token of each.

        Weights of one form and int8 are worked on at once.
        """
        if self.weight != other.weight or not isinstance(x, Int8Activations):
            return [
                self.dot(block, x, first, tokens, batch),
                other.dot(other_block, x, first, tokens, batch),
            ]
        blocks = [(self.packed, block), (other.packed, other_block)]
        ahead = tile_ahead(self.schedule, first, tokens, *batch, is_pair=True)
        return dot_int8.dot_int8(self.weight, blocks, x, first, tokens, self.unit, ahead)

    def unpack(self, block: Any) -> UnpackedBlock:
        """The block unpacked, for `dot_int8.dot_unpacked`."""
        unpacked = UnpackedBlock(self.weight, self.unit)
        unpacked.load(self.packed, block)
        return unpacked

    @property
    def can_unpack(self) -> bool:
        is_integer = dot_int8.supports(self.weight) and self.isa.byte_dot is not None
        return is_integer and not dot_int8.is_of_words(self.weight, self.unit)

    @property
    def unit(self) -> ByteDot:
        return BYTE_DOTS[self.isa.byte_dot or ""]

    def bias_vector(self, block: Any) -> Any:
        """The bound bias of a block of 16 rows; None without one."""
        if self.bias is None:
            return None
        bias, n = self.bias, self.weight.n
        if n % LANES == 0:
            return B.Bind(bias[ramp(block * LANES)])
        vector = local_array(LANES)
        B.buffer_store(vector, constant(0.0), [ramp(0)])
        with B.serial(T.min(T.int64(LANES), n - block * LANES)) as lane:
            B.buffer_store(vector, bias[block * LANES + lane], [lane])
        return B.Bind(vector[ramp(0)])


def many_tokens(layers: Sequence[Layer], x: Any) -> int:
    """Tokens from which on `dot_many` takes blocks of these layers together; 0: never."""
    first = layers[0]
    is_fit = isinstance(x, Int8Activations) and dot_int8.supports(first.weight)
    is_fit = is_fit and first.unit.lanes == LANES and first.unit.widen is None
    are_alike = all(layer.weight == first.weight for layer in layers)
    return first.schedule.many_tokens if is_fit and are_alike else 0


def dot_blocks_many(
    blocks: Sequence[tuple[Layer, Any]],
    x: Any,
    first: Any,
    count: Any,
    store: Callable[[Any, list[Any]], None],
) -> None:
    """`dot_many` of blocks of layers with weights of one form."""
    layer, _ = blocks[0]
    numbers = [(each.packed, number) for each, number in blocks]
    distance = layer.schedule.prefetch_many
    dot_many(layer.weight, numbers, x, first, count, layer.unit, distance, store)


@contextmanager
def unless_many(
    least: int, start: Any, stop: Any, emit: Callable[[Any, Any], None]
) -> Iterator[None]:
    """`emit(first, count)` for chunks of [start, stop) that `dot_many` takes, where there are at
    least so many tokens (0: never); else what is emitted in this context."""
    if not least:
        yield
        return
    with either(stop - start >= least) as (many, few):
        with many:
            for_chunks(start, stop, emit)
        with few:
            yield


@contextmanager
def unless_unpacked(
    layers: Sequence[Layer],
    block: Any,
    x: Any,
    start: Any,
    stop: Any,
    emit: Callable[[Any, int, list[UnpackedBlock]], None],
) -> Iterator[None]:
    """`emit(first, size, the layers' blocks)` for all tiles of [start, stop), where there are
    enough for unpacking the blocks beforehand; else what is emitted in this context."""
    schedule = layers[0].schedule
    num_bytes = sum(UnpackedBlock.num_bytes(layer.weight) for layer in layers)
    if (
        not schedule.unpack_tokens
        or schedule.least_paired
        or num_bytes > _MAX_UNPACKED_BYTES
        or not isinstance(x, Int8Activations)
        or not all(layer.can_unpack for layer in layers)
    ):
        yield
        return
    with either(stop - start >= schedule.unpack_tokens) as (many, few):
        with many:
            unpacked = [layer.unpack(block) for layer in layers]
            for_tiles(start, stop, schedule.tiles, lambda first, size: emit(first, size, unpacked))
        with few:
            yield
