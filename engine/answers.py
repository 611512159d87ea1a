"""Updates of running requests to OpenAI's response objects, streamed or whole."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from . import responses
from .detokenizer import Detokenizer
from .protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from .sampler import TokenLogprob
from .sampling_params import SamplingParams
from .text_sink import ChoiceUpdate, PlacedToken, RequestUpdate, merge_updates
from .tokenizer import Tokenizer

RequestT = TypeVar("RequestT", bound=GenerationRequest)
WholeT = TypeVar("WholeT")
ChunkT = TypeVar("ChunkT")


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared(Generic[RequestT]):
    """A checked request, ready for the loop."""

    request: RequestT
    request_id: str
    created: int
    """Unix time, seconds."""
    model: str
    params: SamplingParams
    prompts: tuple[Prompt, ...]


class Answer(ABC, Generic[RequestT, WholeT, ChunkT]):
    """Builds the response to one request. Feed it every update, once."""

    def __init__(self, prepared: Prepared[RequestT], tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._request = prepared.request
        self._tokenizer = tokenizer
        self._header: dict[str, Any] = {
            "id": prepared.request_id,
            "created": prepared.created,
            "model": prepared.model,
        }
        self._last_updates: dict[int, RequestUpdate] = {}
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        self._begun: set[int] = set()
        """Indices of choices whose first chunk was built."""

    def chunks(self, update: RequestUpdate) -> list[ChunkT]:
        """The chunks that this update gives, one for each choice that has something new."""
        self._note(update)
        result = []
        for choice in update.choices:
            index = self._index(update.prompt_index, choice)
            is_first = index not in self._begun
            self._begun.add(index)
            result.append(self._chunk(update.prompt_index, choice, is_first=is_first))
        return result

    @abstractmethod
    def usage_chunk(self) -> ChunkT:
        """The chunk without choices that follows the last one, with the usage."""

    @abstractmethod
    def whole(self, updates: Sequence[RequestUpdate]) -> WholeT:
        """The response from all updates of all prompts."""

    @abstractmethod
    def _chunk(self, prompt_index: int, choice: ChoiceUpdate, *, is_first: bool) -> ChunkT: ...

    def _merged(self, updates: Sequence[RequestUpdate]) -> list[tuple[int, ChoiceUpdate]]:
        """(prompt index, whole choice), in order."""
        for update in updates:
            self._note(update)
        return [
            (i, choice)
            for i in range(len(self._prepared.prompts))
            for choice in merge_updates([u for u in updates if u.prompt_index == i])
        ]

    def _note(self, update: RequestUpdate) -> None:
        self._last_updates[update.prompt_index] = update
        if update.prompt_logprobs:
            self._prompt_logprobs[update.prompt_index] = update.prompt_logprobs

    def _usage(self) -> responses.Usage:
        usages = [update.usage for update in self._last_updates.values()]
        num_prompt_tokens = sum(len(prompt.ids) for prompt in self._prepared.prompts)
        num_output_tokens = sum(usage.num_output_tokens for usage in usages)
        return responses.Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=responses.PromptTokensDetails(
                cached_tokens=sum(usage.num_cached_tokens for usage in usages)
            ),
        )

    def _index(self, prompt_index: int, choice: ChoiceUpdate) -> int:
        return prompt_index * self._prepared.params.n + choice.choice_index

    def _common(self, prompt_index: int, choice: ChoiceUpdate, *, is_first: bool) -> dict[str, Any]:
        """What choices of every kind have."""
        values: dict[str, Any] = {
            "index": self._index(prompt_index, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        prompt_ids = self._prepared.prompts[prompt_index].ids
        if self._request.return_token_ids:
            values["token_ids"] = [placed.token.token_id for placed in choice.tokens]
            if is_first:
                values["prompt_token_ids"] = list(prompt_ids)
        if is_first and self._request.prompt_logprobs is not None:
            values["prompt_logprobs"] = [
                None,
                *map(self._prompt_entry, self._prompt_logprobs.get(prompt_index, ())),
            ]
        return values

    def _prompt_entry(self, logprob: TokenLogprob) -> dict[int, responses.PromptTokenLogprob]:
        return {
            token_id: responses.PromptTokenLogprob(
                logprob=value, decoded_token=self._token_text(token_id)
            )
            for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob))
        }

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.id_to_bytes(token_id).decode("utf-8", "replace")


class ChatAnswer(
    Answer[ChatCompletionRequest, responses.ChatCompletion, responses.ChatCompletionChunk]
):
    def usage_chunk(self) -> responses.ChatCompletionChunk:
        return responses.ChatCompletionChunk(**self._header, choices=[], usage=self._usage())

    def whole(self, updates: Sequence[RequestUpdate]) -> responses.ChatCompletion:
        choices = [
            responses.ChatChoice(
                **self._common(prompt_index, choice, is_first=True),
                message=responses.AssistantMessage(content=choice.text),
                logprobs=self._logprobs(choice),
            )
            for prompt_index, choice in self._merged(updates)
        ]
        return responses.ChatCompletion(**self._header, choices=choices, usage=self._usage())

    def _chunk(
        self, prompt_index: int, choice: ChoiceUpdate, *, is_first: bool
    ) -> responses.ChatCompletionChunk:
        delta = responses.ChatDelta(
            role="assistant" if is_first else None,
            content=choice.text if choice.text or is_first else None,
        )
        built = responses.ChatChunkChoice(
            **self._common(prompt_index, choice, is_first=is_first),
            delta=delta,
            logprobs=self._logprobs(choice),
        )
        return responses.ChatCompletionChunk(**self._header, choices=[built])

    def _logprobs(self, choice: ChoiceUpdate) -> responses.ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        entries = []
        for placed in choice.tokens:
            logprob = placed.token.logprob
            assert logprob is not None
            entries.append(
                responses.ChatTokenLogprob(
                    **self._token_entry(logprob.token_id, logprob.logprob),
                    top_logprobs=[
                        responses.TopLogprob(**self._token_entry(*entry)) for entry in logprob.top
                    ],
                )
            )
        return responses.ChatLogprobs(content=entries)

    def _token_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.id_to_bytes(token_id)),
        }


class CompletionAnswer(Answer[CompletionRequest, responses.Completion, responses.Completion]):
    def usage_chunk(self) -> responses.Completion:
        return responses.Completion(**self._header, choices=[], usage=self._usage())

    def whole(self, updates: Sequence[RequestUpdate]) -> responses.Completion:
        choices = [
            self._choice(prompt_index, choice, is_first=True)
            for prompt_index, choice in self._merged(updates)
        ]
        return responses.Completion(**self._header, choices=choices, usage=self._usage())

    def _chunk(
        self, prompt_index: int, choice: ChoiceUpdate, *, is_first: bool
    ) -> responses.Completion:
        built = self._choice(prompt_index, choice, is_first=is_first)
        return responses.Completion(**self._header, choices=[built])

    def _choice(
        self, prompt_index: int, choice: ChoiceUpdate, *, is_first: bool
    ) -> responses.CompletionChoice:
        prompt = self._prepared.prompts[prompt_index]
        echoed = prompt.text if self._request.echo and is_first else ""
        return responses.CompletionChoice(
            **self._common(prompt_index, choice, is_first=is_first),
            text=echoed + choice.text,
            logprobs=self._logprobs(prompt_index, choice, is_first=is_first),
        )

    def _logprobs(
        self, prompt_index: int, choice: ChoiceUpdate, *, is_first: bool
    ) -> responses.CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        entries: list[tuple[int, TokenLogprob | None, int]] = []
        """(token id, its log probability, its place in the text)"""
        start = 0
        if self._request.echo:
            prompt = self._prepared.prompts[prompt_index]
            start = len(prompt.text)
            if is_first:
                entries += self._prompt_entries(prompt_index, prompt)
        entries += (_placed_entry(placed, start) for placed in choice.tokens)
        return responses.CompletionLogprobs(
            tokens=[self._legacy_text(token_id) for token_id, _, _ in entries],
            token_logprobs=[None if p is None else p.logprob for _, p, _ in entries],
            top_logprobs=(
                [None if p is None else self._top(p) for _, p, _ in entries]
                if self._request.logprobs > 0
                else None
            ),
            text_offset=[offset for _, _, offset in entries],
        )

    def _prompt_entries(
        self, prompt_index: int, prompt: Prompt
    ) -> list[tuple[int, TokenLogprob | None, int]]:
        # The first token of a prompt is predicted by nothing.
        logprobs = [None, *self._prompt_logprobs.get(prompt_index, ())]
        detokenizer = Detokenizer(
            self._tokenizer, at_start=True, skip_special=self._request.skip_special_tokens
        )
        entries: list[tuple[int, TokenLogprob | None, int]] = []
        offset = 0
        for token_id, logprob in zip(prompt.ids, logprobs, strict=True):
            entries.append((token_id, logprob, offset))
            offset += len(detokenizer.push(token_id))
        return entries

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        # The token itself is always there, so there may be one more than was asked for.
        entries = (*logprob.top, (logprob.token_id, logprob.logprob))
        return {self._legacy_text(token_id): value for token_id, value in entries}

    def _legacy_text(self, token_id: int) -> str:
        """A token as OpenAI's text completions name it: half characters stay distinguishable."""
        data = self._tokenizer.id_to_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _placed_entry(placed: PlacedToken, start: int) -> tuple[int, TokenLogprob | None, int]:
    return placed.token.token_id, placed.token.logprob, start + placed.text_offset
