"""One forward pass over a ragged batch of tokens: the seam between the engine and a model."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of a model. Counts are tokens unless named otherwise."""

    vocab_size: int
    """Width of the logits; may be padded beyond the tokenizer's vocabulary."""
    context_window_size: int
    page_size: int
    page_bytes: int
    """Bytes of one KV page over all layers."""
    prefill_chunk_size: int
    """Most tokens in one step (a limit compiled into the library)."""
    max_num_sequence: int
    """Most sequences in one step (a limit compiled into the library)."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: `num_sequences` sequences, each with one or more new tokens, in order.

    input_ids:      [num_tokens] int32
    positions:      [num_tokens] int32, position of each token in its sequence
    query_offsets:  [num_sequences + 1] int32, sequence i owns tokens offsets[i]:offsets[i + 1]
    block_tables:   [num_sequences, max_num_blocks] int32, page numbers, padded with 0
    logit_rows:     [num_rows] int32, the tokens whose logits are wanted (may be empty)
    """

    input_ids: np.ndarray
    positions: np.ndarray
    query_offsets: np.ndarray
    block_tables: np.ndarray
    logit_rows: np.ndarray


class ModelRunner(Protocol):
    info: ModelInfo
    num_pages: int

    def execute(self, step: StepInput) -> np.ndarray:
        """Append the new tokens' keys and values to their pages, attend, and give the logits,
        [num_rows, vocab_size] float32 (valid until the next call; the caller may modify it)."""
        ...

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole KV pages, for copy-on-write forks. No target is a source or given twice."""
        ...

    def close(self) -> None: ...
