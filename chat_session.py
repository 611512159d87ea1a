"""`everycast chat`: one answer, or a conversation in the terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .artifact.errors import RequestError

if TYPE_CHECKING:
    from .engine.mlc_engine import MLCEngine

HELP = """\
/help   this list          /reset  forget the conversation
/stats  what was measured  /exit   leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


@dataclass(slots=True)
class Answer:
    """One answer and what was measured. Times are seconds; None where there is nothing to time."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    ttft_s: float | None = None
    decode_tokens_per_s: float | None = None
    finish_reason: str | None = None

    def record(self) -> dict[str, Any]:
        """The fields of `chat --json`."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": self.ttft_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }

    def summary(self) -> str:
        parts = [f"{len(self.token_ids)} tokens"]
        if self.decode_tokens_per_s is not None:
            parts.append(f"{self.decode_tokens_per_s:.1f} tokens/s")
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.2f} s")
        if self.finish_reason in ("length", "interrupted"):
            parts.append({"length": "stopped by the token limit"}.get(self.finish_reason, "stopped"))
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Session:
    """An engine and the settings of every answer in a conversation.

    `options` are fields of the request (`max_tokens`, `temperature`, …). Without a chat template
    the messages' texts are joined and continued as plain text.
    """

    engine: "MLCEngine"
    system: str | None
    options: dict[str, Any]

    def answer(
        self, turns: list[dict[str, str]], show: Callable[[str], None] = lambda text: None
    ) -> Answer:
        """The model's answer to `turns`; `show` gets each piece of text as it comes.

        Ctrl-C aborts the request and gives what there is. Raises RequestError, as when the
        conversation no longer fits the context.
        """
        answer = Answer()
        started = time.perf_counter()
        first = last = None
        num_first = 0
        stream = self._stream(turns)
        try:
            for text, token_ids, prompt_tokens, finish_reason in stream:
                now = time.perf_counter()
                answer.prompt_tokens = prompt_tokens or answer.prompt_tokens
                answer.finish_reason = finish_reason or answer.finish_reason
                if token_ids:
                    last = now
                    answer.token_ids += token_ids
                    if first is None:
                        first, num_first = now, len(token_ids)
                        answer.ttft_s = first - started
                if text:
                    answer.text += text
                    show(text)
        except KeyboardInterrupt:
            answer.finish_reason = "interrupted"
        finally:
            stream.close()
        if first is not None and last is not None and last > first:
            answer.decode_tokens_per_s = (len(answer.token_ids) - num_first) / (last - first)
        return answer

    def _stream(
        self, turns: list[dict[str, str]]
    ) -> "Iterator[tuple[str, list[int], int, str | None]]":
        raise NotImplementedError
