"""Worker: what onnx_from_gguf.py made of a GGUF, in ONNX Runtime GenAI.

    python worker_onnxruntime.py FILE.gguf --threads N

Streams of a batch run in one generator, all of the same length.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
from onnx_from_gguf import RECORD, folder_of  # beside this file: it runs as a script
from worker_loop import answer_works
from works import parse_work, random_prompt

VOCABULARY = 30_000
"""Prompts take token ids below this, which every model here has."""


class OnnxRuntime:
    def __init__(self, folder: Path, threads: int) -> None:
        config = genai.Config(str(folder))
        config.clear_providers()
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = genai.Model(config)

    def run(self, name: str, seed: int) -> tuple[int, float]:
        """(tokens, seconds) of the work."""
        work = parse_work(name)
        prompts = np.array(
            [
                random_prompt(work, VOCABULARY, seed * work.streams + stream)
                for stream in range(work.streams)
            ],
            np.int32,
        )
        params = genai.GeneratorParams(self._model)
        # Greater than needed, so that no end token ends a stream before its time.
        length = work.context + 1
        params.set_search_options(
            max_length=length, min_length=length, do_sample=False, batch_size=work.streams
        )
        generator = genai.Generator(self._model, params)
        start = time.perf_counter()
        generator.append_tokens(prompts)
        generator.generate_next_token()
        if not work.timed_tokens:
            return work.prompt_tokens, time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(work.timed_tokens):
            generator.generate_next_token()
        return work.streams * work.timed_tokens, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    folder = folder_of(options.model)
    peer = OnnxRuntime(folder, options.threads)
    ready = {
        "version": f"onnxruntime-genai {genai.__version__}",
        "bits_per_weight": json.loads((folder / RECORD).read_text())["bits_per_weight"],
    }
    answer_works(ready, peer.run)


if __name__ == "__main__":
    main()
