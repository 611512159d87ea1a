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
    page_tensors: int = 1
    """In how many tensors the KV pages lie; they divide the layers."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: `num_sequences` sequences, each with one or more new tokens, in order.

    input_ids:      [num_tokens] int32
    positions:      [num_tokens] int32, position of each token in its sequence
    query_offsets:  [num_sequences + 1] int32, sequence i owns tokens offsets[i]:offsets[i + 1]
    block_tables:   [num_sequences, max_num_blocks] int32, page numbers, padded with 0
    logit_rows:     [num_rows] int32, the tokens whose logits are wanted (may be empty)
    arg_max_ids:    not 0: nothing is asked of these but the arg max of each row, over so many ids
    """

    input_ids: np.ndarray
    positions: np.ndarray
    query_offsets: np.ndarray
    block_tables: np.ndarray
    logit_rows: np.ndarray
    arg_max_ids: int = 0


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to single logits. No (row, token) is given twice.

    rows, token_ids: [n] int32; values: [n] float32, -inf forbids the token
    """

    rows: np.ndarray
    token_ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties, and the tokens these are for. No (row, token) is given twice.

    rows:       [num_rows] int32
    values:     [num_rows, 3] float32, (presence, frequency, repetition) of each row
    row_index:  [n] int32, an index into `rows`
    token_ids:  [n] int32, a token of prompt or output
    counts:     [n] int32, how often it is in the output
    """

    rows: np.ndarray
    values: np.ndarray
    row_index: np.ndarray
    token_ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True)
class SampleInput:
    """What to draw from the logits of a step, whose rows are counted as in `logit_rows`.

    num_ids:       ids from here on are padding
    rows:          [num_draws] int32, a row may be drawn from several times
    settings:      [num_draws, 5] float64, of each draw
                     inverse_temperature: log2(e) / temperature, and 0 takes the arg max
                     min_p_offset: temperature · ln(min_p), -inf keeps all
                     top_k: 0 keeps all
                     top_p: 1 keeps all
                     uniform: in [0, 1), where the cumulative probability is inverted
    bias, penalties: how the rows are changed first
    logprob_draws: [num_logprobs] int32, the draws whose log probability is wanted
    num_top:       most likely tokens wanted with them
    """

    num_ids: int
    rows: np.ndarray
    settings: np.ndarray
    bias: LogitBias | None
    penalties: Penalties | None
    logprob_draws: np.ndarray
    num_top: int


@dataclass(frozen=True, slots=True)
class TokenParts:
    """Log probabilities in parts: that of a token with logit x is `x - highest - ln(sum)`.

    parts:      [n, 3] float64: highest logit, Σ exp(logit - highest), logit of the token; all NaN
                if the logits are not numbers
    top_ids:    [n, num_top] int32, most likely first, the lowest id of equals; -1 where there are
                not so many
    top_logits: [n, num_top] float32
    """

    parts: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """token_ids: [num_draws] int32, -1 where the logits are not numbers (NaN or infinity).
    logprobs: of `logprob_draws`, under the logits as the model gave them."""

    token_ids: np.ndarray
    logprobs: TokenParts | None


class ModelRunner(Protocol):
    info: ModelInfo
    num_pages: int

    def execute(self, step: StepInput) -> np.ndarray | None:
        """Append the new tokens' keys and values to their pages, attend, and compute the logits,
        [num_rows, vocab_size] float32, which stay with the runner until the next call. What is
        returned shows them where they are in the host's memory; the engine does not read it. With
        `arg_max_ids`, only the highest logit of a row need be exact, and the others lower."""
        ...

    def sample(self, draws: SampleInput) -> SampleOutput:
        """Tokens from the logits of the last step. Changes these: draw once from a step."""
        ...

    def logprobs(
        self, rows: np.ndarray, token_ids: np.ndarray, *, num_ids: int, num_top: int
    ) -> TokenParts:
        """Log probability of token_ids[i] under row rows[i] of the last step's logits, both [n]
        int32; before `sample`, or of rows that it does not change."""
        ...

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole KV pages, for copy-on-write forks. No target is a source or given twice."""
        ...

    def close(self) -> None: ...
