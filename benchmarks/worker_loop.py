"""The worker's side of the protocol of `workers.py`. Standard library only."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping

COLD = ("memory", "start")
"""Works that are for a process which has done nothing yet."""


def answer_works(ready: Mapping[str, object], run: Callable[[str, int], tuple[int, float]]) -> None:
    """Say `ready`, then do each work that standard input names, until it ends.

    `run(work, seed)` gives (tokens, seconds). A work is done once untimed before it is first
    timed. What it raises is the answer, and the worker goes on.
    """
    print(json.dumps(ready), flush=True)
    seeds = itertools.count()
    warm = set(COLD)
    for line in sys.stdin:
        work = line.strip()
        try:
            if work not in warm:
                run(work, next(seeds))
                warm.add(work)
            tokens, seconds = run(work, next(seeds))
            answer: dict[str, object] = {"tokens": tokens, "seconds": seconds}
        except Exception as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(answer), flush=True)
