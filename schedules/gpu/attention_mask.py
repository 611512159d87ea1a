"""Which keys a token attends to: all up to its own, or in a tree of guesses its ancestors'."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script import tirx as T

from .kernel import bind, settled

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive tokens of a sequence."""

    sequence: Any
    first_token: Any
    num_tokens: Any


class Mask(Protocol):
    """Keys are counted in the order in which they lie in the sequence's pages."""

    def keys(self, tile: Tile) -> tuple[Any, Any]:
        """The first and the last key that a token of the tile may see."""
        ...

    def seen_by(self, token: Any, tile: Tile) -> Callable[[Any], Any]:
        """Key → whether the token sees it; for keys from 0 to the end of the last's page."""
        ...


@dataclass(frozen=True, slots=True)
class CausalMask:
    """A token at position p sees the keys up to p, with a window the last so many of them.

    positions [num_tokens] int32, ascending in each sequence: token p's key is key p.
    """

    positions: Any
    window: int | None

    def keys(self, tile: Tile) -> tuple[Any, Any]:
        first: Any = T.int32(0)
        if self.window is not None:
            first = T.max(self.positions[tile.first_token] - (self.window - 1), 0)
        return first, bind(self.positions[tile.first_token + tile.num_tokens - 1])

    def seen_by(self, token: Any, tile: Tile) -> Callable[[Any], Any]:
        position = bind(self.positions[token])

        def is_seen(key: Any) -> Any:
            if self.window is None:
                return key <= position
            return T.And(key <= position, position - key < self.window)

        return is_seen


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The new tokens of a sequence are a tree: a token sees what was there before them, and of them
    its ancestors and itself; with a window, those of these at its last positions.

    positions [num_tokens] int32: a token's depth in its tree, from the first new position on;
    trees [num_sequences, 3] int32, of each sequence: the number of keys before its tree, its first
      token and how many tokens it has. Where the new tokens are no tree but follow each other: any
      number above their positions, any token, 0;
    ancestors [num_tokens, num_words] int32: bit i % 32, from the lowest, of word i // 32 says that
      the token sees token i of its tree, whose key is the i-th new one.
    """

    positions: Any
    window: int | None
    trees: Any
    ancestors: Any
    num_words: Any

    def keys(self, tile: Tile) -> tuple[Any, Any]:
        context, _, count = self._tree(tile)
        first: Any = T.int32(0)
        if self.window is not None:
            # No position of a tree is below its context.
            least = T.min(context, self.positions[tile.first_token])
            first = settled(T.max(least - (self.window - 1), 0))
        last_position = bind(self.positions[tile.first_token + tile.num_tokens - 1])
        return first, settled(T.Select(count > 0, context + count - 1, last_position))

    def seen_by(self, token: Any, tile: Tile) -> Callable[[Any], Any]:
        context, first_token, count = self._tree(tile)
        position = bind(self.positions[token])

        def is_seen(key: Any) -> Any:
            place = settled(T.max(key - context, 0))
            word = T.min(T.shift_right(place, T.int32(5)), self.num_words - 1)
            bits = bind(self.ancestors[token, settled(word)])
            bit = T.shift_right(bits, T.bitwise_and(place, T.int32(_WORD_BITS - 1)))
            is_ancestor = T.And(place < count, T.bitwise_and(bit, T.int32(1)) != 0)
            is_new = key >= context
            seen = T.Select(is_new, is_ancestor, key <= position)
            if self.window is None:
                return seen
            other = settled(T.min(place, T.max(count - 1, 0)))
            key_position = settled(T.Select(is_new, self.positions[first_token + other], key))
            return T.And(seen, position - key_position < self.window)

        return is_seen

    def _tree(self, tile: Tile) -> tuple[Any, Any, Any]:
        context, first_token, count = (bind(self.trees[tile.sequence, i]) for i in range(3))
        return context, first_token, count
