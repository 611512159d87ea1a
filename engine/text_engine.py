"""Requests in OpenAI's form to requests of the loop: what both public engines share."""

import itertools
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ..artifact.errors import RequestError
from .answers import Prepared, Prompt
from .chat_template import ChatTemplate
from .loop import EngineLoop
from .metrics import EngineMetrics
from .model_description import ModelDescription
from .protocol import ChatCompletionRequest, CompletionRequest
from .sequence import Request
from .text_sink import RequestUpdate, TextSink
from .tokenizer import Tokenizer

AnyPrepared = Prepared[ChatCompletionRequest] | Prepared[CompletionRequest]


@dataclass(frozen=True, slots=True)
class RunningRequest:
    request_id: str
    loop_ids: tuple[str, ...]
    """The loop's name of each prompt; never used twice."""


class TextEngine:
    """Owns the loop: starts it, and shuts it down when this object goes or the process ends.

    All methods may be called from any thread.
    """

    def __init__(
        self, loop: EngineLoop, tokenizer: Tokenizer, description: ModelDescription
    ) -> None:
        """loop: not started yet."""
        self.tokenizer = tokenizer
        self.description = description
        self._loop = loop
        self._template = ChatTemplate(
            tokenizer.config.chat_templates, tokenizer.config.special_tokens
        )
        self._running: dict[str, RunningRequest] = {}
        self._lock = Lock()
        self._numbers = itertools.count()
        loop.start()
        self._shutdown = weakref.finalize(self, loop.shutdown)

    def prepare_chat(self, values: Mapping[str, Any]) -> Prepared[ChatCompletionRequest]:
        """Check a chat request and make its prompt. Raises RequestError."""
        request = ChatCompletionRequest.parse(values)
        text = self._template.render(
            request.template_messages(), documents=request.documents, **request.template_kwargs()
        )
        # The template writes the begin token itself where the model wants one.
        ids = self.tokenizer.encode(text, add_bos=False)
        return Prepared(
            request,
            request.request_id or f"chatcmpl-{secrets.token_hex(12)}",
            int(time.time()),
            self.description.name,
            request.sampling_params(self.description.defaults),
            (Prompt(text, tuple(ids)),),
        )

    def prepare_completion(self, values: Mapping[str, Any]) -> Prepared[CompletionRequest]:
        """Check a text completion request and make its prompts. Raises RequestError."""
        request = CompletionRequest.parse(values)
        return Prepared(
            request,
            request.request_id or f"cmpl-{secrets.token_hex(12)}",
            int(time.time()),
            self.description.name,
            request.sampling_params(self.description.defaults),
            tuple(self._prompt(request, prompt) for prompt in request.prompts()),
        )

    def start(self, prepared: AnyPrepared, emit: Callable[[RequestUpdate], None]) -> RunningRequest:
        """Put every prompt in line. `emit` is called in the loop's thread. Call `finish` with what
        this gives.

        Raises RequestError, or EverycastError after `terminate`; then nothing of it runs.
        """
        running = RunningRequest(
            prepared.request_id,
            tuple(f"{prepared.request_id}/{next(self._numbers)}" for _ in prepared.prompts),
        )
        with self._lock:
            if running.request_id in self._running:
                raise RequestError(
                    f"a request with id {running.request_id!r} is already running",
                    param="request_id",
                )
            self._running[running.request_id] = running
        try:
            for i, (loop_id, prompt) in enumerate(
                zip(running.loop_ids, prepared.prompts, strict=True)
            ):
                sink = TextSink(
                    self.tokenizer,
                    prepared.params,
                    emit,
                    prompt_ids=prompt.ids,
                    prompt_index=i,
                    skip_special=prepared.request.skip_special_tokens,
                )
                self._loop.submit(Request(loop_id, prompt.ids, prepared.params), sink)
        except BaseException as error:
            self.finish(running, is_complete=False)
            if isinstance(error, RequestError) and error.param == "prompt":
                raise RequestError(str(error), param=prepared.request.prompt_field) from None
            raise
        return running

    def finish(self, running: RunningRequest, *, is_complete: bool) -> None:
        """Forget a request; abort what still runs unless it is complete. Again is no harm."""
        with self._lock:
            if self._running.get(running.request_id) is running:
                del self._running[running.request_id]
        if not is_complete:
            self._abort(running)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; one that is not known is no error."""
        with self._lock:
            running = self._running.get(request_id)
        if running is not None:
            self._abort(running)

    def _abort(self, running: RunningRequest) -> None:
        for loop_id in running.loop_ids:
            self._loop.abort(loop_id)

    def metrics(self) -> EngineMetrics:
        return self._loop.metrics()

    def terminate(self) -> None:
        """Abort everything and give the memory back; again is no harm."""
        self._shutdown()

    def _prompt(self, request: CompletionRequest, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            add_bos = None if request.add_special_tokens else False
            return Prompt(prompt, tuple(self.tokenizer.encode(prompt, add_bos=add_bos)))
        text = ""
        if request.echo:
            text = self.tokenizer.decode(prompt, skip_special=request.skip_special_tokens)
        return Prompt(text, tuple(prompt))
