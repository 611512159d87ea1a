"""Worker: an artifact in everycast's engine loop.

    TVM_NUM_THREADS=N python -m everycast.benchmarks.worker_everycast ARTIFACT

Requests go in and tokens come out as in `MLCEngine`: scheduler, paged KV, sampler (greedy) and a
thread of its own; only the text is left out.
"""

import itertools
import json
import math
import sys
import threading
import time
from pathlib import Path

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..engine.loader import OpenArtifact, open_artifact
from ..engine.loop import EngineLoop
from ..engine.sampling_params import SamplingParams
from ..engine.sequence import Request
from ..engine.token_sink import RequestOutput
from .works import DECODE_TOKENS, WORKS, random_prompt


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


def run(loop: EngineLoop, work: str, vocab_size: int, seed: int) -> float:
    """Seconds that the work's tokens took."""
    max_tokens = 1 + DECODE_TOKENS if work == "decode" else 1
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompt = tuple(random_prompt(work, vocab_size, seed))
    times = _Times()
    start = time.perf_counter()
    loop.submit(Request(f"{work}-{seed}", prompt, params), times)
    times.is_done.wait()
    if times.error is not None:
        raise times.error
    return times.seconds[-1] - (times.seconds[0] if work == "decode" else start)


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
    artifact = open_artifact(Path(sys.argv[1]))
    loop, tokenizer, _ = artifact.load()
    loop.start()
    vocab_size = tokenizer.size
    seeds = itertools.count()
    for work in WORKS:
        run(loop, work, vocab_size, next(seeds))
    ready = {
        "bits_per_weight": artifact.manifest.weights.bits_per_weight,
        "bytes_per_token": bytes_per_token(artifact),
        "activations": artifact.library.metadata["activations"],
    }
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        seconds = run(loop, line.strip(), vocab_size, next(seeds))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
