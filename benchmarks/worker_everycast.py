"""Worker: an artifact in everycast's engine loop.

    TVM_NUM_THREADS=N python -m everycast.benchmarks.worker_everycast ARTIFACT DEVICE WORKS

Requests go in and tokens come out as in `MLCEngine`: scheduler, paged KV, sampler (greedy) and a
thread of its own; only the text is left out. WORKS (names by commas) say how much KV memory is
needed.
"""

import itertools
import math
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..engine.loader import OpenArtifact, open_artifact
from ..engine.loop import EngineLoop
from ..engine.sampling_params import SamplingParams
from ..engine.sequence import Request
from ..engine.token_sink import RequestOutput
from .worker_loop import answer_works
from .works import Work, parse_work, random_prompt

LEAST_CONTEXT = 1024
SKEW = 16
"""Tokens that a stream of a batch decodes more than are timed. Streams start some steps apart, as
requests come in; the last one is timed, and the others must still run when it has its tokens."""


class _Times:
    """`TokenSink` that notes when each token came."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.error: Exception | None = None
        self.is_done = threading.Event()

    def on_token(self, choice_index: int, token_id: int) -> bool:
        self.seconds.append(time.perf_counter())
        return False

    def on_output(self, output: RequestOutput) -> None:
        if output.is_finished:
            self.error = output.error
            self.is_done.set()


class EngineWorks:
    """Runs works on a started loop."""

    def __init__(self, loop: EngineLoop, vocab_size: int) -> None:
        self._loop = loop
        self._vocab_size = vocab_size
        self._ids = itertools.count()

    def run(self, name: str, seed: int) -> tuple[int, float]:
        """(tokens, seconds) of the work.

        With several streams: from the first token of the stream that got it last until that stream
        has `timed_tokens` more. All streams decode one token a step all that time.
        """
        work = parse_work(name)
        skew = SKEW if work.streams > 1 else 0
        params = SamplingParams(
            temperature=0.0, max_tokens=1 + work.timed_tokens + skew, ignore_eos=True
        )
        prompts = [
            tuple(random_prompt(work, self._vocab_size, seed * work.streams + stream))
            for stream in range(work.streams)
        ]
        start = time.perf_counter()
        streams = []
        for prompt in prompts:
            streams.append(_Times())
            self._loop.submit(Request(f"{name}-{next(self._ids)}", prompt, params), streams[-1])
        for stream in streams:
            stream.is_done.wait()
            if stream.error is not None:
                raise stream.error
        last = max(streams, key=lambda stream: stream.seconds[0])
        if not work.timed_tokens:
            return work.prompt_tokens, last.seconds[0] - start
        end = last.seconds[work.timed_tokens]
        if min(stream.seconds[-1] for stream in streams) < end and work.streams > 1:
            raise RuntimeError(f"the streams started more than {skew} steps apart")
        return work.streams * work.timed_tokens, end - last.seconds[0]


def engine_config(works: Sequence[Work]) -> dict[str, Any]:
    """Room for the largest of the works, with as much again for what the prefix cache keeps."""
    context = max(LEAST_CONTEXT, *(work.context for work in works))
    tokens = [work.streams * (work.context + SKEW + 16) for work in works]
    return {
        "context_window_size": context,
        "max_num_sequence": max(work.streams for work in works),
        "max_total_seq_length": 2 * max(context, *tokens),
    }


def bytes_per_token(artifact: OpenArtifact) -> int:
    """Packed weights that a decoding step reads: all but an embedding that is not the head too."""
    parameters = artifact.library.metadata["parameters"]
    has_head = any("lm_head" in parameter["name"] for parameter in parameters)
    return sum(
        math.prod(parameter["shape"]) * np.dtype(numpy_dtype(parameter["dtype"])).itemsize
        for parameter in parameters
        if not (has_head and "embed_tokens" in parameter["name"])
    )


def main() -> None:
    folder, device, names = sys.argv[1:]
    works = [parse_work(name) for name in names.split(",")]
    artifact = open_artifact(Path(folder), device, engine_config=engine_config(works))
    loop, tokenizer, _ = artifact.load()
    loop.start()
    ready = {
        "bits_per_weight": artifact.manifest.weights.bits_per_weight,
        "bytes_per_token": bytes_per_token(artifact),
        "unread_bytes": artifact.library.metadata.get("leading_logits", {}).get(
            "unread_weight_bytes", 0
        ),
        "kv_bytes_per_token": artifact.info.page_bytes / artifact.info.page_size,
        "activations": artifact.library.metadata.get("activations", "float32"),
    }
    answer_works(ready, EngineWorks(loop, tokenizer.size).run)


if __name__ == "__main__":
    main()
