"""What is measured of an engine, the same for every one.

Standard library only: the peers' workers run in Python environments of their own.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "prefill", "batch", "serve", "memory", "start"]

MAX_STREAMS = 64
"""Most sequences of a batch or clients of a server."""
LONGEST = 131_072
"""Most tokens of a prompt that a work may name."""
SHORT_PROMPT = 16
LONG_DECODE_TOKENS = 32
BATCH_TOKENS = SERVE_PROMPT = SERVE_TOKENS = 64
RATE_REQUESTS = 24
"""Requests of one rate; also the most that can be under way."""
GROUPS = {
    # The longest one leaves room for the answer in a window of 8192.
    "contexts": tuple(f"decode_{n}" for n in (128, 512, 1024, 2048, 4096, 8064)),
    "batches": tuple(f"batch_{n}" for n in (1, 2, 4, 8, 16, 32, 64)),
    "serve_rates": tuple(f"serve_rate_{n}" for n in (1, 2, 4, 8)),
}
"""Several works by one name."""
EXAMPLES = (
    "decode, decode_busy, decode_4096, prefill_128, batch_8, serve_16, serve_rate_4, memory, start "
    f"(any number in place of these), or the groups {', '.join(GROUPS)}"
)


@dataclass(frozen=True)
class Work:
    """One thing to time. `streams` sequences get a prompt each; then each decodes `timed_tokens`.

    timed_tokens 0: the time of the prompt itself counts, up to its first token. `serve`: streams
    are clients of a server, or with a `rate` the requests that arrive at so many a second.
    `is_beside_others`: every CPU has another program to run meanwhile.
    """

    name: str
    kind: Kind
    streams: int = 1
    prompt_tokens: int = SHORT_PROMPT
    timed_tokens: int = 0
    rate: int | None = None
    is_beside_others: bool = False

    @property
    def context(self) -> int:
        """Tokens of one sequence at the end."""
        return self.prompt_tokens + self.timed_tokens + 1


_FIXED = {
    "decode": Work("decode", "decode", timed_tokens=128),
    "decode_busy": Work("decode_busy", "decode", timed_tokens=128, is_beside_others=True),
    "memory": Work("memory", "memory", prompt_tokens=128, timed_tokens=64),
    "start": Work("start", "start"),
}


def parse_work(name: str) -> Work:
    """The work of that name. Raises ValueError, one line, for another."""
    if name in _FIXED:
        return _FIXED[name]
    match = re.fullmatch(r"(decode|prefill|batch|serve|serve_rate)_([1-9]\d{0,8})", name)
    if match is None:
        raise ValueError(f"there is no work {name!r}; choose of {EXAMPLES}")
    kind, number = match[1], int(match[2])
    most = LONGEST if kind in ("decode", "prefill") else MAX_STREAMS
    if number > most:
        raise ValueError(f"work {name!r}: {number} is more than {most}, the most of {kind}_N")
    if kind == "decode":
        return Work(name, "decode", 1, number, LONG_DECODE_TOKENS)
    if kind == "prefill":
        return Work(name, "prefill", 1, number)
    if kind == "batch":
        return Work(name, "batch", number, SHORT_PROMPT, BATCH_TOKENS)
    if kind == "serve_rate":
        return Work(name, "serve", RATE_REQUESTS, SERVE_PROMPT, SERVE_TOKENS, number)
    return Work(name, "serve", number, SERVE_PROMPT, SERVE_TOKENS)


def parse_works(names: Iterable[str]) -> tuple[Work, ...]:
    """The works of those names, groups taken apart, each once. Raises ValueError."""
    single = [one for name in names for one in GROUPS.get(name, (name,))]
    return tuple(parse_work(name) for name in dict.fromkeys(single))


def random_prompt(work: Work, vocab_size: int, seed: int) -> list[int]:
    """Token ids of a prompt: other ones for every seed, so that no cache knows them.

    But a long context that is not timed is the same in every round: an engine may keep it.
    """
    if work.kind == "decode" and work.prompt_tokens > SHORT_PROMPT:
        seed = 0
    generator = random.Random(f"{work.name} {seed}")
    return [generator.randrange(vocab_size) for _ in range(work.prompt_tokens)]
