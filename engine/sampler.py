"""Logits to token ids, as vLLM and OpenAI define it, in NumPy.

The order is: padded ids cut off, end tokens forbidden before `min_tokens`, logit_bias, penalties
(repetition, frequency, presence), then for greedy requests the arg max, else temperature, min_p,
top_k, top_p and one draw. Log probabilities are those of the raw logits, before all of this, over
the tokenizer's ids.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..artifact.errors import EverycastError
from .sampling_params import SamplingParams
from .token_filter import draw, keep_min_p, keep_top_k, keep_top_p

MIN_LOGPROB = -9999.0
"""Reported instead of minus infinity, which JSON cannot hold (OpenAI does the same)."""
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log of a token's probability, and of the most likely ones at the same place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None
    """Present when the request asked for logprobs."""


class SequenceSampler:
    """Chooses the tokens of one sequence and remembers what its penalties must know.

    The draw depends on the seed, the choice's index and the place in the output alone: neither on
    the batch nor on a preemption.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        tokenizer_size: int,
        eos_token_ids: Sequence[int] = (),
        choice_index: int = 0,
    ) -> None:
        self.params = params
        self.num_ids = min(vocab_size, tokenizer_size)
        self.num_sampled = 0
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._key = np.array([seed & _UINT64, choice_index], dtype=np.uint64)
        end_ids = {i for i in (*eos_token_ids, *params.stop_token_ids) if 0 <= i < self.num_ids}
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._repeats = params.repetition_penalty != 1.0
        self._counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        # Boolean and count per token id; only made when a penalty needs them.
        self._is_seen = np.zeros(self.num_ids if self._repeats else 0, dtype=np.bool_)
        self._output_counts = np.zeros(self.num_ids if self._counts else 0, dtype=np.float32)
        if self._repeats:
            prompt = np.asarray(prompt_ids, dtype=np.int64)
            self._is_seen[prompt[prompt < self.num_ids]] = True

    def sample(self, logits: np.ndarray) -> SampledToken:
        """The next token.

        logits: [vocab_size] float32, not modified. Raises EverycastError if they are not numbers.
        """
        raw = logits[: self.num_ids]
        row = self._adjust(raw) if self._changes_logits() else raw
        token_id = int(row.argmax())
        if not np.isfinite(row[token_id]):
            raise EverycastError("the model gave logits that are not numbers (NaN or infinity)")
        if not self.params.is_greedy:
            token_id = self._draw(row, row[token_id])
        return self._accept(token_id, raw)

    def _accept(self, token_id: int, raw: np.ndarray) -> SampledToken:
        self.num_sampled += 1
        if self._repeats:
            self._is_seen[token_id] = True
        if self._counts:
            self._output_counts[token_id] += 1
        if not self.params.logprobs:
            return SampledToken(token_id)
        (logprob,) = token_logprobs(raw[None], [token_id], num_top=self.params.top_logprobs)
        return SampledToken(token_id, logprob)

    def _changes_logits(self) -> bool:
        return (
            self._repeats
            or self._counts
            or self._bias_ids.size > 0
            or self.num_sampled < self.params.min_tokens
        )

    def _adjust(self, raw: np.ndarray) -> np.ndarray:
        row = raw.copy()
        if self.num_sampled < self.params.min_tokens:
            row[self._end_ids] = -np.inf
        row[self._bias_ids] += self._bias
        if self._repeats:
            seen = row[self._is_seen]
            penalty = np.float32(self.params.repetition_penalty)
            row[self._is_seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            row -= np.float32(self.params.frequency_penalty) * self._output_counts
            row -= np.float32(self.params.presence_penalty) * (self._output_counts > 0)
        return row

    def _draw(self, row: np.ndarray, highest: np.float32) -> int:
        """One id, by inverting the cumulative distribution of the ids that are kept."""
        params = self.params
        # Relative to the highest logit, so that the largest weight is 1 and none overflows.
        weights = np.exp((row - highest) / np.float32(params.temperature))
        ids: np.ndarray | None = None
        if params.min_p > 0.0:
            ids = keep_min_p(weights, params.min_p)
        if params.top_k > 0:
            ids = keep_top_k(weights, params.top_k, ids)
        if params.top_p < 1.0:
            ids = keep_top_p(weights, params.top_p, ids)
        kept = weights if ids is None else weights[ids]
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=self.num_sampled))
        place = draw(kept, generator.random())
        return place if ids is None else int(ids[place])


def token_logprobs(
    logits: np.ndarray,
    token_ids: Sequence[int],
    *,
    num_top: int,
    tokenizer_size: int | None = None,
) -> list[TokenLogprob]:
    """Log probability of `token_ids[i]` under row i, with the `num_top` most likely ids.

    logits: [len(token_ids), vocab_size] float32, raw; ids from `tokenizer_size` on are padding.
    """
    rows = logits[:, :tokenizer_size]
    highest = rows.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(rows - highest).sum(axis=1, dtype=np.float64)) + highest[:, 0]
    results = []
    for row, total, token_id in zip(rows, log_sum, token_ids, strict=True):
        best: list[int] = []
        if num_top > 0:
            ids = keep_top_k(row, num_top)
            best = ids[np.lexsort((ids, -row[ids]))].tolist()
        results.append(
            TokenLogprob(
                token_id=token_id,
                logprob=_finite(float(row[token_id]) - total),
                top=tuple((i, _finite(float(row[i]) - total)) for i in best),
            )
        )
    return results


def _finite(logprob: float) -> float:
    # NaN compares false and becomes the minimum too.
    return min(float(logprob), 0.0) if logprob > MIN_LOGPROB else MIN_LOGPROB
