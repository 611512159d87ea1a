"""How one request wants its tokens chosen and when it ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..artifact.errors import RequestError

MAX_CHOICES = 128
"""Most choices of one request (OpenAI's limit for `n`)."""
MAX_TOP_LOGPROBS = 20
"""Most alternatives a token can be reported with (OpenAI's limit for `top_logprobs`)."""
GREEDY_TEMPERATURE = 1e-5
"""Below it the most likely token is taken: dividing by such a temperature would overflow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and meanings are OpenAI's and vLLM's; counts are tokens."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches it; 0 keeps the best one."""
    top_k: int = 0
    """Keep so many tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Drop tokens less likely than this part of the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that is in the output."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for every time it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id → number added to its logit."""
    seed: int | None = None
    """The draw of a token depends on this and on its place alone; None is a fresh seed."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output besides the model's own; their text is not part of it."""
    min_tokens: int = 0
    """Tokens before which neither a stop token nor a stop text ends the output."""
    max_tokens: int | None = None
    """Most tokens of the output; None runs to the end of the context."""
    ignore_eos: bool = False
    """The model's own end tokens do not end the output."""
    logprobs: bool = False
    """Report the log probability of every output token."""
    top_logprobs: int = 0
    """Report so many of the most likely tokens as well, at every place."""
    prompt_logprobs: int | None = None
    """Report the prompt's log probabilities with so many alternatives; None does not."""
    n: int = 1
    """Number of choices."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def validate(self, vocab_size: int, tokenizer_size: int) -> None:
        """Raise RequestError, naming the field, for a value outside its range.

        vocab_size: width of the model's logits, which may be padded beyond the tokenizer's ids.
        """
        _check_range("temperature", self.temperature, 0.0, math.inf)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"repetition_penalty must be a number above 0, got {self.repetition_penalty}",
                param="repetition_penalty",
            )
        if self.top_k < -1:
            raise RequestError(
                f"top_k must be at least 1, or 0 or -1 to keep all tokens, got {self.top_k}",
                param="top_k",
            )
        num_ids = min(vocab_size, tokenizer_size)
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, num_ids)
            _check_range("logit_bias", bias, -100.0, 100.0)
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id, num_ids)
        if "" in self.stop:
            raise RequestError("stop must not hold an empty text", param="stop")
        _check_count("n", self.n, 1, MAX_CHOICES)
        _check_count("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        _check_count("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_TOP_LOGPROBS)
        _check_count("min_tokens", self.min_tokens, 0, None)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs", param="top_logprobs")
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 0, None)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                    param="min_tokens",
                )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if math.isfinite(value) and low <= value <= high:
        return
    allowed = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
    raise RequestError(f"{name} must be {allowed}, got {value}", param=name)


def _check_count(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {allowed}, got {value}", param=name)


def _check_token_id(name: str, token_id: int, num_ids: int) -> None:
    if not 0 <= token_id < num_ids:
        raise RequestError(
            f"{name} names token id {token_id}; this model's ids run from 0 to {num_ids - 1}",
            param=name,
        )
