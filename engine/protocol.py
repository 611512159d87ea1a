"""Requests as OpenAI writes them, checked, with the extensions of vLLM and MLC by their names.

A field that is null is as good as absent. Fields that would change nothing here are accepted;
fields that ask for what is not supported are refused by name; so are unknown ones.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..artifact.errors import RequestError
from .sampling_params import MAX_TOP_LOGPROBS, SamplingParams

_NO_EFFECT = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
"""OpenAI's fields about accounts, storage and tools that do not change the text."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "suffix": ("",),
    "best_of": (1,),
}
"""Fields that are not supported → the values that ask for nothing."""

_TYPE_NAMES = ("str", "int", "float")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, defer_build=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What chat and text completions have in common. None leaves it to the model's defaults."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str | int, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    """False shows special tokens as text."""
    return_token_ids: bool = False
    """Give the ids of prompt and output with each choice."""
    request_id: str | None = Field(default=None, min_length=1)
    """Name under which the request can be aborted; made up if absent."""

    kind: ClassVar[str]
    prompt_field: ClassVar[str]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """The checked request. Raises RequestError, naming the field and what it may be."""
        given = {name: value for name, value in values.items() if value is not None}
        for name in _NO_EFFECT & given.keys():
            del given[name]
        for name in _NEUTRAL.keys() & given.keys():
            value = given.pop(name)
            if value not in _NEUTRAL[name]:
                raise RequestError(f"{name} is not supported", param=name)
        for name in given:
            if name not in cls.model_fields:
                raise _unknown_field(name, cls)
        try:
            return cls(**given)
        except ValidationError as error:
            raise _first_problem(error) from None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """How to sample; ranges are not checked yet. Raises RequestError for a logit_bias whose
        keys are no numbers."""
        chosen = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
            if (value := getattr(self, name)) is not None
        }
        return replace(
            defaults,
            **chosen,
            n=self.n,
            seed=self.seed,
            logit_bias=_integer_keys(self.logit_bias),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            prompt_logprobs=self.prompt_logprobs,
        )


class ChatMessage(BaseModel):
    """One message; other fields (`tool_calls`, `name`, ...) are the template's affair."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, defer_build=True)

    role: str
    content: str | list[dict[str, Any]] | None = None

    def to_template(self, place: int) -> dict[str, Any]:
        """What the chat template sees. Raises RequestError for content that is not text, and where
        there is none: only a message of tool calls may go without."""
        message = self.model_dump()
        if self.content is None and not message.get("tool_calls"):
            raise RequestError(f"messages[{place}].content is missing", param="messages")
        if isinstance(self.content, list):
            message["content"] = "\n".join(_text_parts(self.content, place))
        return message


class ChatCompletionRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = 0
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    """For templates that read it."""
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""

    kind = "chat"
    prompt_field = "messages"

    @field_validator("messages", mode="before")
    @classmethod
    def _accept_answers(cls, messages: object) -> object:
        """Messages may be response objects, ours or the OpenAI client's."""
        if not isinstance(messages, list | tuple):
            return messages
        return [
            message.model_dump() if isinstance(message, BaseModel) else message
            for message in messages
        ]

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as the chat template sees them."""
        return [message.to_template(i) for i, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template besides the messages."""
        reserved = {"messages", "tools", "documents"} & self.chat_template_kwargs.keys()
        if reserved:
            raise RequestError(
                f"chat_template_kwargs must not hold {min(reserved)}", param="chat_template_kwargs"
            )
        kwargs = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        params = super().sampling_params(defaults)
        limit = self.max_completion_tokens
        if limit is not None and limit < 0:
            raise RequestError(
                f"max_completion_tokens must be at least 0, got {limit}",
                param="max_completion_tokens",
            )
        return replace(
            params,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            max_tokens=self.max_tokens if limit is None else limit,
        )


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    """Texts or token ids; one choice and more for each prompt."""
    logprobs: int | None = None
    """Report log probabilities, with so many alternatives."""
    echo: bool = False
    """Put the prompt in front of the text."""
    add_special_tokens: bool = True
    """Let the tokenizer put its begin token in front of a text."""

    kind = "text"
    prompt_field = "prompt"

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises RequestError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if ids := [item for item in self.prompt if isinstance(item, int)]:
            return [ids]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        if not prompts:
            raise RequestError("prompt is an empty list", param="prompt")
        return prompts

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        params = super().sampling_params(defaults)
        if self.logprobs is not None:
            if not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
                raise RequestError(
                    f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {self.logprobs}",
                    param="logprobs",
                )
            params = replace(params, logprobs=True, top_logprobs=self.logprobs)
            if self.echo and self.prompt_logprobs is None:
                params = replace(params, prompt_logprobs=self.logprobs)
        return params


def _text_parts(parts: list[dict[str, Any]], place: int) -> Iterator[str]:
    for part in parts:
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages[{place}].content holds a part of type 'text' without a text",
                param="messages",
            )
        if part.get("type") != "text":
            raise RequestError(
                f"messages[{place}].content holds a part of type {part.get('type')!r}; "
                "this model reads only text",
                param="messages",
            )
        yield part["text"]


def _integer_keys(bias: Mapping[str | int, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias") from None


def _unknown_field(name: str, request: type[GenerationRequest]) -> RequestError:
    near = difflib.get_close_matches(name, request.model_fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RequestError(f"unknown field {name!r} for {request.kind} completions{hint}", param=name)


def _first_problem(error: ValidationError) -> RequestError:
    problems = error.errors(include_url=False, include_context=False)
    problem = problems[0]
    field = str(problem["loc"][0])
    # A union reports every member it tried, and puts the member's type into the place.
    place = field + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in problem["loc"][1:]
        if isinstance(part, int) or (part.isidentifier() and part not in _TYPE_NAMES)
    )
    if problem["type"] == "missing":
        return RequestError(f"{place} is missing", param=field)
    reasons = dict.fromkeys(p["msg"] for p in problems if p["loc"][0] == problem["loc"][0])
    text = " or ".join(reason[:1].lower() + reason[1:] for reason in reasons)
    seen = repr(problem["input"])
    return RequestError(f"{place}: {text}, got {seen[:80]}", param=field)
