"""Which weights a tile of tokens asks for while it multiplies by others.

A core waits for some 64 lines of memory at a time, and requests beyond that hold up its own loads.
A block of rows that several tiles go through is therefore asked for by all of the tiles before it,
in turns, at the pace at which it will be worked on; the only tile of a small batch asks for what it
needs itself a little later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .linear_schedule import LinearSchedule
from .vectors import opaque

_TURNS = (2, 4, 8)
"""So many tiles share a block, if there are as many. With more, some would find no step of a short
row to be theirs."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A tile asks for all that lies `distance` bytes behind what it reads, in the steps of its loop
    along K that are its turn."""

    distance: Any
    """An int or a bound int64; the int 0: it asks for nothing."""
    turn: Any = None
    """Bound int64; None: it is its turn in every step."""
    mask: Any = None
    """Bits of a step's number that say whose turn it is, bound int64."""

    @property
    def is_nothing(self) -> bool:
        return isinstance(self.distance, int) and self.distance == 0

    @contextmanager
    def in_turn(self, step: Any) -> Iterator[None]:
        """What is emitted in this context happens in steps that are its turn."""
        if self.turn is None:
            yield
            return
        with B.If(T.bitwise_and(step, self.mask) == self.turn), B.Then():
            yield


def tile_ahead(
    schedule: LinearSchedule, first: Any, tokens: int, start: Any, stop: Any, *, is_pair: bool
) -> Ahead:
    """What the tile of `tokens` tokens from `first` on asks for, of a batch that goes from `start`
    to `stop`; `is_pair`: it goes through two blocks at once."""
    if not is_pair and (tokens == 1 or tokens < schedule.tile_tokens):
        return Ahead(schedule.prefetch_bytes(tokens))
    distance: Any = T.int64(schedule.prefetch_many)
    if not is_pair:
        is_only_tile = stop - start <= tokens
        distance = T.if_then_else(is_only_tile, T.int64(schedule.prefetch_tile), distance)
    distance = opaque(distance)
    num_tiles = opaque((stop - start) // tokens)
    mask = sum(T.Cast("int64", num_tiles >= turns) * T.int64(turns // 2) for turns in _TURNS)
    # The turn of none: there is nothing to ask for.
    turn = T.if_then_else(distance > 0, (first - start) // tokens, T.int64(-1))
    return Ahead(distance, opaque(turn), opaque(mask))
