"""Tokens of the loop to pieces of text: detokenizes, finds stop texts, holds back what is unsure.

Runs in the loop's thread, so that a stop text ends a choice before another token is computed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .detokenizer import Detokenizer
from .sampler import SampledToken, TokenLogprob
from .sampling_params import SamplingParams
from .sequence import FinishReason
from .stop_checker import StopChecker
from .token_sink import ChoiceOutput, RequestOutput, Usage
from .tokenizer import Tokenizer


class PlacedToken(NamedTuple):
    token: SampledToken
    text_offset: int
    """Characters of the choice's text that were complete before this token."""


class ChoiceUpdate(NamedTuple):
    """The next piece of one choice: some text, or its end, or both."""

    choice_index: int
    text: str
    tokens: tuple[PlacedToken, ...]
    """Tokens since the last update; their text may be longer, held back for a stop text."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop text or the token id that ended it."""


class RequestUpdate(NamedTuple):
    prompt_index: int
    choices: tuple[ChoiceUpdate, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    """All of them, with the first update."""
    usage: Usage
    is_finished: bool
    error: Exception | None = None


class TextSink:
    """The `TokenSink` of one prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        emit: Callable[[RequestUpdate], None],
        *,
        prompt_ids: Sequence[int],
        prompt_index: int = 0,
        skip_special: bool = True,
    ) -> None:
        """emit: called in the loop's thread with every update; must not wait."""
        at_start = all(token_id in tokenizer.special_ids for token_id in prompt_ids)
        self._emit = emit
        self._prompt_index = prompt_index
        self._prompt_logprobs: list[TokenLogprob] = []
        self._choices = [
            _ChoiceText(
                Detokenizer(tokenizer, at_start=at_start, skip_special=skip_special),
                StopChecker(params.stop),
                params.min_tokens,
            )
            for _ in range(params.n)
        ]

    def on_token(self, choice_index: int, token_id: int) -> bool:
        return self._choices[choice_index].push(token_id)

    def on_output(self, output: RequestOutput) -> None:
        self._prompt_logprobs += output.prompt_logprobs
        updates = [self._choices[choice.choice_index].take(choice) for choice in output.choices]
        choices = tuple([update for update in updates if update is not None])
        if not (choices or output.is_finished):
            return
        self._emit(
            RequestUpdate(
                self._prompt_index,
                choices,
                tuple(self._prompt_logprobs),
                output.usage,
                output.is_finished,
                output.error,
            )
        )
        self._prompt_logprobs = []


class _ChoiceText:
    def __init__(self, detokenizer: Detokenizer, checker: StopChecker, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._checker = checker
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_characters = 0
        self._offsets: list[int] = []
        """Of tokens that were pushed but not taken."""
        self._text = ""
        self._tokens: list[PlacedToken] = []
        self._stop: str | None = None

    def push(self, token_id: int) -> bool:
        """Take a token's text; True if it completed a stop text."""
        text = self._detokenizer.push(token_id)
        self._offsets.append(self._num_characters)
        self._num_characters += len(text)
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            self._text += text
            return False
        result = self._checker.push(text)
        self._text += result.text
        self._stop = result.stop
        return result.stop is not None

    def take(self, output: ChoiceOutput) -> ChoiceUpdate | None:
        """What can be shown now; None while there is neither text nor an end."""
        for i, token in enumerate(output.tokens):
            # A token that ends the choice by its id was not pushed: it has no text.
            offset = self._offsets[i] if i < len(self._offsets) else self._num_characters
            self._tokens.append(PlacedToken(token, offset))
        self._offsets.clear()
        if output.finish_reason is not None and self._stop is None:
            self._text += self._checker.finish()
        if not self._text and output.finish_reason is None:
            return None
        update = ChoiceUpdate(
            output.choice_index,
            self._text,
            tuple(self._tokens),
            output.finish_reason,
            stop_reason=self._stop if self._stop is not None else output.stop_token_id,
        )
        self._text = ""
        self._tokens = []
        return update


def merge_updates(updates: Sequence[RequestUpdate]) -> list[ChoiceUpdate]:
    """The whole choices of one prompt, in order, from all of its updates."""
    pieces: dict[int, list[ChoiceUpdate]] = {}
    for update in updates:
        for choice in update.choices:
            pieces.setdefault(choice.choice_index, []).append(choice)
    return [
        ChoiceUpdate(
            choice_index,
            "".join(piece.text for piece in parts),
            tuple(token for piece in parts for token in piece.tokens),
            parts[-1].finish_reason,
            parts[-1].stop_reason,
        )
        for choice_index, parts in sorted(pieces.items())
    ]
