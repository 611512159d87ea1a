"""`MLCEngine`: the engine's public face, in OpenAI's form.

    with MLCEngine("smollm2-135m") as engine:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        for chunk in engine.chat.completions.create(messages=messages, stream=True):
            print(chunk.choices[0].delta.content, end="")

A stream that is left early or closed aborts its request and frees its pages.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from .answers import ChatAnswer, CompletionAnswer
from .loop import EngineLoop
from .metrics import EngineMetrics
from .model_description import ModelDescription
from .responses import ChatCompletion, ChatCompletionChunk, Completion
from .sampling_params import SamplingParams
from .streams import Stream, wait_for_answer
from .text_engine import TextEngine
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .engine_config import EngineConfig, Mode


class Engine:
    """What `MLCEngine` and `AsyncMLCEngine` have in common."""

    def __init__(
        self,
        model: str | Path,
        device: str = "auto",
        model_lib: str | Path | None = None,
        mode: "Mode" = "local",
        engine_config: "EngineConfig | Mapping[str, Any] | None" = None,
    ) -> None:
        """Load a model.

        model: a built artifact, or anything one can be built from (a name, a folder, a GGUF).
        device: the target to run on; "auto" takes the best there is. model_lib: a library other
        than the artifact's own. mode: local (a few requests), interactive (one at a time) or
        server (many). engine_config: sizes, under MLC's names.

        Raises EverycastError, saying what to do, if the model cannot be loaded.
        """
        from .loader import load_engine_parts

        self._set_up(*load_engine_parts(model, device, model_lib, mode, engine_config))

    @classmethod
    def from_parts(
        cls, loop: EngineLoop, tokenizer: Tokenizer, description: ModelDescription
    ) -> Self:
        """An engine over a loop that is not started yet, such as one over a scripted model."""
        engine = cls.__new__(cls)
        engine._set_up(loop, tokenizer, description)
        return engine

    def _set_up(
        self, loop: EngineLoop, tokenizer: Tokenizer, description: ModelDescription
    ) -> None:
        self._engine = TextEngine(loop, tokenizer, description)

    @property
    def model_name(self) -> str:
        return self._engine.description.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that mean this model."""
        return (self.model_name, *self._engine.description.other_names)

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What a request that names nothing is sampled with: the makers' advice, where the
        checkpoint has any."""
        return self._engine.description.defaults

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def abort(self, request_id: str) -> None:
        """End a request, by the `id` of its response or chunks; its choices end with "abort"."""
        self._engine.abort(request_id)

    def metrics(self) -> EngineMetrics:
        """Counters and the state of queues and pages now."""
        return self._engine.metrics()

    def terminate(self) -> None:
        """Abort what runs, end the background thread and free the memory; again is no harm."""
        self._engine.terminate()


class MLCEngine(Engine):
    """Runs a model; calls wait for their answers."""

    def _set_up(
        self, loop: EngineLoop, tokenizer: Tokenizer, description: ModelDescription
    ) -> None:
        super()._set_up(loop, tokenizer, description)
        self.chat = Chat(self._engine)
        self.completions = Completions(self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.terminate()


class Chat:
    def __init__(self, engine: TextEngine) -> None:
        self.completions = ChatCompletions(engine)


class ChatCompletions:
    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine

    @overload
    def create(self, *, stream: Literal[True], **request: Any) -> Stream[ChatCompletionChunk]: ...
    @overload
    def create(self, *, stream: Literal[False] | None = None, **request: Any) -> ChatCompletion: ...
    @overload
    def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> ChatCompletion | Stream[ChatCompletionChunk]: ...
    def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """The model's answer to `messages`, whole or as a stream of chunks.

        request: the fields of OpenAI's chat completions, and the extensions of
        `ChatCompletionRequest`. Raises RequestError, naming the field, for a request that is not
        valid or does not fit the context, before anything runs.
        """
        prepared = self._engine.prepare_chat({**request, "stream": stream})
        answer = ChatAnswer(prepared, self._engine.tokenizer)
        if stream:
            return Stream(self._engine, prepared, answer)
        return wait_for_answer(self._engine, prepared, answer)


class Completions:
    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine

    @overload
    def create(self, *, stream: Literal[True], **request: Any) -> Stream[Completion]: ...
    @overload
    def create(self, *, stream: Literal[False] | None = None, **request: Any) -> Completion: ...
    @overload
    def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> Completion | Stream[Completion]: ...
    def create(
        self, *, stream: bool | None = None, **request: Any
    ) -> Completion | Stream[Completion]:
        """The continuation of `prompt` (text, token ids, or a list of either).

        As `ChatCompletions.create`, with the fields of `CompletionRequest`.
        """
        prepared = self._engine.prepare_completion({**request, "stream": stream})
        answer = CompletionAnswer(prepared, self._engine.tokenizer)
        if stream:
            return Stream(self._engine, prepared, answer)
        return wait_for_answer(self._engine, prepared, answer)
