"""Worker: a GGUF in llama.cpp, through llama-cpp-python's low-level interface.

    python worker_llama_cpp.py FILE.gguf --threads N [--copy]

Calls what llama.cpp's own llama-bench calls, so nothing but llama_decode and the read of the logits
is timed: no sampling and no text. `--copy` reads the weights into memory instead of mapping the
file, which the huge pages of GLIBC_TUNABLES=glibc.malloc.hugetlb=1 need.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence

try:
    import llama_cpp as lib
except ImportError:
    sys.exit(f"{sys.executable} has no llama-cpp-python: see against_llama_cpp.py, --peer-python")
from works import DECODE_TOKENS, WORKS, random_prompt  # beside this file: it runs as a script

CONTEXT = 1024
UBATCH = 512


class LlamaCpp:
    """One model and one sequence."""

    def __init__(self, path: str, threads: int, use_mmap: bool) -> None:
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.use_mmap = use_mmap
        self.model = lib.llama_model_load_from_file(path.encode(), model_params)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, CONTEXT, UBATCH
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = lib.llama_init_from_model(self.model, params)
        self.batch = lib.llama_batch_init(CONTEXT, 0, 1)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def decode(self, tokens: Sequence[int], first_position: int) -> None:
        """Logits of the last of `tokens`."""
        batch = self.batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, first_position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        if lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        lib.llama_get_logits_ith(self.context, len(tokens) - 1)

    def run(self, work: str, seed: int) -> float:
        """Seconds that the work's tokens took."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        prompt = random_prompt(work, self.vocab_size, seed)
        start = time.perf_counter()
        self.decode(prompt, 0)
        if work == "decode":
            start = time.perf_counter()
            for i in range(DECODE_TOKENS):
                self.decode(prompt[i % len(prompt) :][:1], len(prompt) + i)
        return time.perf_counter() - start


@lib.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    """llama.cpp tells standard error all about the model."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--copy", action="store_true")
    options = parser.parse_args()
    lib.llama_log_set(_silent, None)
    peer = LlamaCpp(options.model, options.threads, use_mmap=not options.copy)
    seeds = itertools.count()
    for work in WORKS:
        peer.run(work, next(seeds))
    system = lib.llama_print_system_info().decode()
    print(json.dumps({"version": lib.__version__, "system_info": system}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": peer.run(line.strip(), next(seeds))}), flush=True)


if __name__ == "__main__":
    main()
