"""Which draws a step makes, and what they mean: sampling as vLLM and OpenAI define it.

The order is: padded ids left out, end tokens forbidden before `min_tokens`, logit_bias, penalties
(repetition, frequency, presence), then for greedy requests the arg max, else temperature, min_p,
top_k, top_p and one draw. Log probabilities are those of the raw logits, before all of this, over
the tokenizer's ids.

Here is no work in proportion to the vocabulary: the runner has the logits (`ModelRunner.sample`).
"""

import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .model_runner import LogitBias, ModelRunner, Penalties, SampleInput, TokenParts
from .sampling_params import SamplingParams
from .seen_tokens import SeenTokens

MIN_LOGPROB = -9999.0
"""Reported instead of minus infinity, which JSON cannot hold (OpenAI does the same)."""
_UINT64 = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_SMALLEST_INVERSE = 1e-30
"""An infinite temperature: larger would turn a forbidden token's logit into no number."""
_ARG_MAX = (0.0, -math.inf, 0.0, 1.0, 0.0)
"""A row of `SampleInput.settings`; the arg max takes no number."""
_NO_DRAWS = np.empty(0, np.int32)


class TokenLogprob(NamedTuple):
    """Natural log of a token's probability, and of the most likely ones at the same place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


class SampledToken(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None
    """Present when the request asked for logprobs."""


class SequenceSampler:
    """What the draws of one sequence depend on: its parameters and its tokens so far.

    A draw depends on the seed, the choice's index and the place in the output alone: neither on
    the batch nor on a preemption.
    """

    __slots__ = (
        "_asks_arg_max", "_bias", "_early_bias", "_filters", "_key", "num_sampled", "params",
        "penalties", "seen",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        num_ids: int,
        eos_token_ids: Sequence[int] = (),
        choice_index: int = 0,
    ) -> None:
        """num_ids: number of real token ids; logits from there on are padding."""
        self.params = params
        self.num_sampled = 0
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._key = _mix(_mix(seed & _UINT64) + choice_index)
        self._filters = None if params.is_greedy else _filters(params)
        end_ids = {i for i in (*eos_token_ids, *params.stop_token_ids) if 0 <= i < num_ids}
        forbidden = dict.fromkeys(end_ids, -math.inf) if params.min_tokens else {}
        self._early_bias = _bias({**params.logit_bias, **forbidden})
        self._bias = _bias(params.logit_bias)
        has_counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        is_repetition = params.repetition_penalty != 1.0
        self.seen: SeenTokens | None = None
        """Tokens of prompt and output; only kept when a penalty needs them."""
        if is_repetition or has_counts:
            prompt = [i for i in prompt_ids if i < num_ids] if is_repetition else []
            self.seen = SeenTokens(prompt)
        self._asks_arg_max = params.is_greedy and self.seen is None and not params.logprobs
        self.penalties = (
            params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        )  # fmt: skip

    def bias(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(ids [n] int32, what is added to their logits [n] float32), for the next token; None if
        there is nothing to add."""
        return self._early_bias if self.num_sampled < self.params.min_tokens else self._bias

    @property
    def takes_arg_max(self) -> bool:
        """Whether the next token is the arg max of the logits as the model gives them, and nothing
        else of them is asked for."""
        return self._asks_arg_max and self.bias() is None

    def settings(self) -> tuple[float, ...]:
        """The next draw's row of `SampleInput.settings`."""
        if self._filters is None:
            return _ARG_MAX
        return (*self._filters, uniform_at(self._key, self.num_sampled))

    def accept(self, token_id: int) -> None:
        """Remember the token that was drawn."""
        self.num_sampled += 1
        if self.seen is not None:
            self.seen.add_output(token_id)


def sample_tokens(
    runner: ModelRunner, draws: Sequence[tuple[int, SequenceSampler]], *, num_ids: int
) -> list[SampledToken | None]:
    """The next token of each sampler from its row of the step's logits, which its sampler has
    accepted; None where the logits are not numbers.

    Samplers that share a row must be choices of one request that have sampled alike (nothing yet).
    """
    if not draws:
        return []
    inputs = _sample_input(draws, num_ids)
    output = runner.sample(inputs)
    places = {draw: i for i, draw in enumerate(inputs.logprob_draws.tolist())}
    tokens: list[SampledToken | None] = []
    for draw, ((_, sampler), token_id) in enumerate(
        zip(draws, output.token_ids.tolist(), strict=True)
    ):
        if token_id < 0:
            tokens.append(None)
            continue
        sampler.accept(token_id)
        logprob = None
        if output.logprobs is not None and draw in places:
            num_top = sampler.params.top_logprobs
            logprob = _logprob(output.logprobs, places[draw], token_id, num_top)
        tokens.append(SampledToken(token_id, logprob))
    return tokens


@functools.cache
def _arg_max_settings(num_draws: int) -> np.ndarray:
    """Nobody writes to `SampleInput.settings`, so steps may share them."""
    return np.array([_ARG_MAX] * num_draws)


def _sample_input(draws: Sequence[tuple[int, SequenceSampler]], num_ids: int) -> SampleInput:
    rows = _int32([row for row, _ in draws])
    if all([sampler.takes_arg_max for _, sampler in draws]):
        return SampleInput(num_ids, rows, _arg_max_settings(len(draws)), None, None, _NO_DRAWS, 0)
    by_row = dict(draws)
    logprob_draws = [i for i, (_, s) in enumerate(draws) if s.params.logprobs]
    return SampleInput(
        num_ids=num_ids,
        rows=rows,
        settings=np.array([sampler.settings() for _, sampler in draws], np.float64),
        bias=_joined_bias(by_row),
        penalties=_joined_penalties(by_row),
        logprob_draws=_int32(logprob_draws),
        num_top=max((draws[i][1].params.top_logprobs for i in logprob_draws), default=0),
    )


def token_logprobs(
    runner: ModelRunner,
    rows: Sequence[int],
    token_ids: Sequence[int],
    *,
    num_ids: int,
    num_top: int,
) -> list[TokenLogprob]:
    """Log probability of token_ids[i] under row rows[i] of the step's raw logits, with the
    `num_top` most likely ids."""
    parts = runner.logprobs(_int32(rows), _int32(token_ids), num_ids=num_ids, num_top=num_top)
    return [_logprob(parts, i, token_id, num_top) for i, token_id in enumerate(token_ids)]


def uniform_at(key: int, counter: int) -> float:
    """Number `counter` of the stream `key`, in [0, 1) with 53 bits.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): a mix of
    key + counter · (2^64 / golden ratio), which needs no state.
    """
    return (_mix(key + counter * _WEYL) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """A bijection of 64-bit numbers in which every input bit changes half of the output bits."""
    value = (value + _WEYL) & _UINT64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64
    return value ^ (value >> 31)


def _filters(params: SamplingParams) -> tuple[float, float, float, float]:
    """All of a draw's settings but the uniform number, where it is not the arg max."""
    inverse = max(math.log2(math.e) / params.temperature, _SMALLEST_INVERSE)
    offset = -math.inf
    if params.min_p > 0:
        # Within float32's range, where it is added to a logit.
        offset = max(params.temperature * math.log(params.min_p), -1e38)
    return inverse, offset, float(max(params.top_k, 0)), params.top_p


def _bias(values: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray] | None:
    if not values:
        return None
    return _int32(list(values)), np.array(list(values.values()), np.float32)


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _joined_bias(samplers: dict[int, SequenceSampler]) -> LogitBias | None:
    """The biases of all rows, None if there are none."""
    parts = [(row, *bias) for row, s in samplers.items() if (bias := s.bias()) is not None]
    if not parts:
        return None
    rows, ids, values = zip(*parts, strict=True)
    lengths = [len(part) for part in ids]
    return LogitBias(np.repeat(_int32(rows), lengths), np.concatenate(ids), np.concatenate(values))


def _joined_penalties(samplers: dict[int, SequenceSampler]) -> Penalties | None:
    """The penalties of all rows, None if there are none."""
    parts = [
        (row, s.penalties, s.seen.ids, s.seen.counts)
        for row, s in samplers.items()
        if s.seen is not None and s.seen.ids.size
    ]
    if not parts:
        return None
    rows, values, ids, counts = zip(*parts, strict=True)
    index = np.repeat(_int32(range(len(parts))), [len(part) for part in ids])
    return Penalties(
        _int32(rows), np.array(values, np.float32), index,
        np.concatenate(ids), np.concatenate(counts),
    )  # fmt: skip


def _logprob(tokens: TokenParts, place: int, token_id: int, num_top: int) -> TokenLogprob:
    highest, total, logit = tokens.parts[place].tolist()
    log_sum = highest + math.log(total)
    top = zip(
        tokens.top_ids[place, :num_top].tolist(),
        tokens.top_logits[place, :num_top].tolist(),
        strict=True,
    )
    return TokenLogprob(
        token_id=token_id,
        logprob=_finite(logit - log_sum),
        top=tuple((i, _finite(value - log_sum)) for i, value in top if i >= 0),
    )


def _finite(logprob: float) -> float:
    # NaN compares false and becomes the minimum too.
    return min(logprob, 0.0) if logprob > MIN_LOGPROB else MIN_LOGPROB
