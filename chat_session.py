"""`everycast chat`: one answer, or a conversation in the terminal."""

import re
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import console
from .artifact.errors import RequestError
from .engine.sampling_params import SamplingParams

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
            parts.append({"length": "cut by the token limit"}.get(self.finish_reason, "stopped"))
        return ", ".join(parts)


Piece = tuple[str, list[int], int, str | None]
"""(text, token ids, prompt tokens or 0 if not known yet, finish reason)"""


_ADVICE = {"temperature": 0.6, "top_p": 0.9}
"""For models whose makers advise nothing: livelier than the likeliest words, and still to the point
in small models. The browser page has the same."""


class Session:
    """An engine and the settings of every answer in a conversation."""

    def __init__(self, engine: "MLCEngine", system: str | None, options: dict[str, Any]) -> None:
        """options: fields of the request, such as `max_tokens` and `temperature`; those that are
        None are the makers' advice, or ours."""
        self.engine = engine
        self.is_chat = "default" in engine.tokenizer.config.chat_templates
        """Without a chat template the texts are joined, and continued as plain text."""
        self._system = system
        is_advised = engine.sampling_defaults != SamplingParams()
        given = {name: value for name, value in options.items() if value is not None}
        self._options = given if is_advised or "temperature" in given else {**_ADVICE, **given}

    def answer(
        self, turns: list[dict[str, str]], show: Callable[[str], None] = lambda text: None
    ) -> Answer:
        """The model's answer to `turns`; `show` gets each piece of text as it comes.

        Ctrl-C aborts the request and gives what there is. Raises RequestError, as when the
        conversation no longer fits the context.
        """
        answer = Answer()
        num_first = 0
        started = last = time.perf_counter()
        try:
            with closing(self._pieces(turns)) as pieces:
                for text, token_ids, prompt_tokens, finish_reason in pieces:
                    answer.prompt_tokens = prompt_tokens or answer.prompt_tokens
                    answer.finish_reason = finish_reason or answer.finish_reason
                    if token_ids:
                        last = time.perf_counter()
                        answer.token_ids += token_ids
                        if answer.ttft_s is None:
                            answer.ttft_s = last - started
                            num_first = len(token_ids)
                    if text:
                        answer.text += text
                        show(text)
        except KeyboardInterrupt:
            answer.finish_reason = "interrupted"
        decoded = len(answer.token_ids) - num_first
        if answer.ttft_s is not None and decoded:
            answer.decode_tokens_per_s = decoded / (last - started - answer.ttft_s)
        return answer

    def _pieces(self, turns: list[dict[str, str]]) -> Generator[Piece, None, None]:
        if self._system is not None:
            turns = [{"role": "system", "content": self._system}, *turns]
        options = {
            **self._options,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        stream: Any
        if self.is_chat:
            stream = self.engine.chat.completions.create(messages=turns, **options)
        else:
            prompt = "\n".join(turn["content"] for turn in turns)
            stream = self.engine.completions.create(prompt=prompt, **options)
        with stream:
            for chunk in stream:
                if not chunk.choices:  # the last one, which holds the usage
                    yield "", [], chunk.usage.prompt_tokens, None
                for choice in chunk.choices:
                    text = choice.delta.content if self.is_chat else choice.text
                    yield text or "", choice.token_ids or [], 0, choice.finish_reason


def print_answer(session: Session, turns: list[dict[str, str]], *, quiet: bool = False) -> Answer:
    """Show an answer as it comes on stdout, then what was measured on stderr."""
    clean = console.plain if sys.stdout.isatty() else str

    shown = False

    def show(text: str) -> None:
        nonlocal shown
        shown = True
        sys.stdout.write(clean(text))
        sys.stdout.flush()

    def end() -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    try:
        answer = session.answer(turns, show)
    except Exception:
        if shown:  # the error has a line of its own
            end()
        raise
    end()
    if not quiet:
        console.note(answer.summary())
    return answer


def converse(session: Session) -> None:
    """Read, answer, again, until `/exit` or the end of the input."""
    _set_up_editing()
    console.note("/help shows the commands, Ctrl-D leaves")
    turns: list[dict[str, str]] = []
    last: Answer | None = None
    while (text := _read_message()) is not None:
        match text.strip():
            case "":
                pass
            case "/exit" | "/quit":
                return
            case "/help":
                console.note(HELP)
            case "/reset":
                turns.clear()
                console.note("forgotten")
            case "/stats":
                console.note(_stats(session, last))
            case command if re.fullmatch(r"/[a-z]+", command):
                console.note(f"{command} is no command; /help shows them")
            case _:
                last = _take_turn(session, turns, text) or last


def _take_turn(session: Session, turns: list[dict[str, str]], text: str) -> Answer | None:
    turns.append({"role": "user", "content": text})
    try:
        answer = print_answer(session, turns)
    except RequestError as error:
        turns.pop()
        console.error(f"{error} (/reset forgets the conversation)")
        return None
    turns.append({"role": "assistant", "content": answer.text})
    return answer


def _read_message() -> str | None:
    """One message, which may span lines; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else ">>> ")
        except EOFError:
            print(file=sys.stderr)
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            console.note("Ctrl-D or /exit leaves")
            lines.clear()
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _set_up_editing() -> None:
    try:
        import readline
    except ImportError:
        return  # Windows: the console edits lines itself
    readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message


def _stats(session: Session, last: Answer | None) -> str:
    metrics = session.engine.metrics()
    pages = f"{metrics.num_available_pages} of {metrics.num_pages} KV pages free"
    return f"{last.summary()}; {pages}" if last else pages
