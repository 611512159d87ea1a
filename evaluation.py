"""How well a model predicts a text."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .artifact.errors import RequestError

if TYPE_CHECKING:
    from .engine.mlc_engine import MLCEngine


@dataclass(frozen=True, slots=True)
class Perplexity:
    perplexity: float
    num_scored_tokens: int
    """One less than the tokens of the window: nothing predicts the first."""
    seconds: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


def read_text(path: Path) -> str:
    """The file's text; a byte order mark is dropped and every line end becomes a newline, so that
    a figure does not depend on the machine that wrote the file.

    Raises RequestError if it is not UTF-8 or cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def measure_perplexity(
    engine: "MLCEngine", text: str, num_tokens: int, *, bos: bool | None = None
) -> Perplexity:
    """Perplexity over the first `num_tokens` tokens of `text` (the begin token counts), in one
    window. `bos`: put the tokenizer's begin token first; None is what the tokenizer does.

    Raises RequestError if the text has fewer than two tokens or the window does not fit.
    """
    ids = engine.tokenizer.encode(text, add_bos=bos)[:num_tokens]
    if len(ids) < 2:
        raise RequestError(f"the text has {len(ids)} tokens; at least 2 are needed")
    started = time.perf_counter()
    answer = engine.completions.create(prompt=ids, max_tokens=0, echo=True, logprobs=0)
    seconds = time.perf_counter() - started
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None, "logprobs were asked for"
    scored = [value for value in logprobs.token_logprobs if value is not None]
    return Perplexity(math.exp(-math.fsum(scored) / len(scored)), len(scored), seconds)
