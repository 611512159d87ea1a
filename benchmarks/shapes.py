"""Sizes of real models, for models of random weights: a large one can be timed without its weights,
since no engine's speed depends on what the numbers are."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from .workers import BenchError


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes; `architecture` as GGUF spells it."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    is_tied: bool
    has_head_norms: bool = False
    """RMSNorms over each head of query and key."""


SHAPES: Mapping[str, Shape] = {
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128_256, 5e5, True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14_336, 32, 8, 128, 128_256, 5e5, False),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, 1e6, True, True),
}


def find_shape(name: str) -> Shape:
    """Raises BenchError, naming the nearest, for one that is not in the table."""
    if name in SHAPES:
        return SHAPES[name]
    near = difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise BenchError(f"there is no shape {name!r}; {hint}known: {', '.join(SHAPES)}")
