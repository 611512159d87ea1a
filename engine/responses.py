"""Answers as OpenAI writes them, whole and in streamed chunks."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from .sequence import FinishReason


class _Model(BaseModel):
    # Built when first used: most programs use a few of these, and imports shall be quick.
    model_config = ConfigDict(frozen=True, defer_build=True)


class _Response(_Model):
    """`null` is written, except for our own extensions and the usage, which are left out then."""

    extensions: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _leave_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for name in self.extensions:
            if values.get(name) is None:
                values.pop(name, None)
        return values


class PromptTokensDetails(_Model):
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved."""


class Usage(_Model):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Model):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Model):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(_Model):
    """Four lists of equal length, an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of a prompt, which nothing predicts."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Where each token's text begins in the choice's text, in characters."""


class PromptTokenLogprob(_Model):
    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[int, PromptTokenLogprob] | None]
"""For each prompt token: token id → log probability, the token itself and the most likely ones."""


class _Choice(_Response):
    extensions = ("token_ids", "prompt_token_ids", "prompt_logprobs", "stop_reason")

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop text or stop token that ended the choice."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class AssistantMessage(_Model):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatDelta(_Response):
    extensions = ("role", "content")

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class _Answer(_Response):
    extensions = ("usage",)

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    usage: Usage | None = None


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Completion(_Answer):
    """A text completion; streamed chunks have the same form."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
