"""Worker: a GGUF in OpenVINO GenAI.

    python worker_openvino.py FILE.gguf --threads N

One stream runs in LLMPipeline, as its own samples do; several in ContinuousBatchingPipeline. Times
are those of the library's own counters between tokens where it has them: `generate` can only be
called for a prompt and an answer together.
"""

import argparse
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker_loop import answer_works  # beside this file: it runs as a script
from works import Work, parse_work, random_prompt

CACHE_GB = 1
VOCABULARY = 30_000
"""Prompts take token ids below this, which every model here has."""


class _Stamps(genai.StreamerBase):  # type: ignore[misc]
    """Notes when each token came."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def write(self, token: Any) -> Any:
        count = len(token) if isinstance(token, list) else 1
        self.seconds += [time.perf_counter()] * count
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class OpenVINO:
    """A pipeline for one stream and, when it is first needed, one for several."""

    def __init__(self, model: str, threads: int) -> None:
        self._model = model
        self._settings = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        self._single: Any = None
        self._batched: Any = None

    def run(self, name: str, seed: int) -> tuple[int, float]:
        """(tokens, seconds) of the work."""
        work = parse_work(name)
        prompts = [
            np.array([random_prompt(work, VOCABULARY, seed * work.streams + stream)], np.int64)
            for stream in range(work.streams)
        ]
        return (
            self._run_batch(work, prompts) if work.streams > 1 else self._run_one(work, prompts[0])
        )

    def _run_one(self, work: Work, prompt: np.ndarray) -> tuple[int, float]:
        if self._single is None:
            self._single = genai.LLMPipeline(
                self._model, "CPU", ATTENTION_BACKEND="SDPA", enable_save_ov_model=False,
                **self._settings,
            )  # fmt: skip
        stamps = _Stamps()
        inputs = genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt)))
        start = time.perf_counter()
        self._single.generate(inputs, _greedy(1 + work.timed_tokens), stamps)
        if not work.timed_tokens:
            return work.prompt_tokens, time.perf_counter() - start
        return work.timed_tokens, stamps.seconds[-1] - stamps.seconds[0]

    def _run_batch(self, work: Work, prompts: list[np.ndarray]) -> tuple[int, float]:
        """Steps are driven from here, so that only those are timed in which all decode."""
        if self._batched is None:
            config = genai.SchedulerConfig()
            config.cache_size, config.max_num_seqs = CACHE_GB, 64
            config.max_num_batched_tokens, config.enable_prefix_caching = 2048, False
            self._batched = genai.ContinuousBatchingPipeline(
                self._model, config, "CPU", self._settings
            )
        pipeline = self._batched
        greedy = _greedy(1 + work.timed_tokens)
        handles = [
            pipeline.add_request(i, ov.Tensor(prompt), greedy) for i, prompt in enumerate(prompts)
        ]
        pipeline.step()  # all prompts at once, and the first token of each
        start = time.perf_counter()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        seconds = time.perf_counter() - start
        del handles
        return work.streams * work.timed_tokens, seconds


def _greedy(max_tokens: int) -> Any:
    return genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    peer = OpenVINO(options.model, options.threads)
    answer_works({"version": f"openvino-genai {genai.get_version()}"}, peer.run)


if __name__ == "__main__":
    main()
