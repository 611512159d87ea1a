"""What comes out of the loop for one request, and who receives it.

Some of these are made for every token, so they are named tuples: made three times as quickly as
frozen dataclasses.
"""

from typing import NamedTuple, Protocol

from .sampler import SampledToken, TokenLogprob
from .sequence import FinishReason


class Usage(NamedTuple):
    """Tokens a request has used so far, all choices together."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Counts every token sampled, the stop token too."""
    num_cached_tokens: int
    """Prompt tokens that came from the prefix cache."""


class ChoiceOutput(NamedTuple):
    """What one step gave to one choice."""

    choice_index: int
    tokens: tuple[SampledToken, ...]
    """New tokens in order; a stop token is the last of them."""
    finish_reason: FinishReason | None = None
    """None while the choice goes on. stop: a stop token or the sink's `on_token` ended it;
    length: max_tokens or the context did; abort: the caller did; error: see the output."""
    stop_token_id: int | None = None
    """The end or stop token that ended it; its text is no part of the output."""


class RequestOutput(NamedTuple):
    """What one step gave to one request."""

    request_id: str
    choices: tuple[ChoiceOutput, ...]
    """Only choices that have something new."""
    prompt_logprobs: tuple[TokenLogprob, ...]
    """The next prompt tokens' log probabilities; the first prompt token has none, so over all
    outputs there are `num_prompt_tokens - 1`, and they come before the first output token."""
    usage: Usage
    is_finished: bool
    """Nothing follows: every choice has its finish reason."""
    error: Exception | None = None
    """Why the request failed; then every choice left ends with "error"."""


class TokenSink(Protocol):
    """Where one request's tokens go. Both methods are called in the loop's thread, so they must
    be quick and must not wait; one that raises fails its own request and no other."""

    def on_token(self, choice_index: int, token_id: int) -> bool:
        """Called for each new token of a choice, in order, before the step's `on_output`; True
        ends the choice with this token and finish reason "stop", so that no further token is
        computed.

        Not called for end and stop tokens, which end the choice by themselves. The last token
        that max_tokens allows is passed too: True turns its "length" into "stop". The loop obeys
        at once: a stop text that must not count before `min_tokens` is the sink's to ignore.
        """
        ...

    def on_output(self, output: RequestOutput) -> None:
        """Called at most once a step when there is something new, the last time with
        `is_finished`. Pages of what ended are free by then."""
        ...
