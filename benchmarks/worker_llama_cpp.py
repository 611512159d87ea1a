"""Worker: a GGUF in llama.cpp or ik_llama.cpp, through the low-level interface of its Python wheel.

    python worker_llama_cpp.py MODULE FILE.gguf --threads N [--copy] [--repack]

MODULE is `llama_cpp.llama_cpp` or `ik_llama_cpp._ctypes_api`. Calls what llama.cpp's own
llama-bench and llama-batched-bench call, so nothing but llama_decode and the read of the logits is
timed: no sampling and no text. `--copy` reads the weights into memory instead of mapping the file,
which the huge pages of GLIBC_TUNABLES=glibc.malloc.hugetlb=1 need; `--repack` is ik_llama.cpp's
repacking of weights while they load.
"""

import argparse
import importlib
import os
import sys
import time
from typing import Any

from worker_loop import answer_works  # beside this file: it runs as a script
from works import Work, parse_work, random_prompt

UBATCH = 512
LEAST_CONTEXT = 1024


class Context:
    """A llama_context with room for a work's streams."""

    def __init__(self, lib: Any, model: Any, threads: int, work: Work) -> None:
        self._lib = lib
        size = max(LEAST_CONTEXT, work.streams * -(-work.context // 16) * 16)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, size, UBATCH
        params.n_seq_max = work.streams
        params.n_threads = params.n_threads_batch = threads
        # What one of the two libraries does not have is an attribute that nobody reads.
        params.no_perf = True
        params.kv_unified = False
        # ik_llama.cpp's flash attention stops the process when several sequences meet in a batch.
        params.flash_attn = work.streams == 1
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"no context of {size} tokens and {work.streams} sequences")
        self._batch = lib.llama_batch_init(size, 0, 1)
        self._kept: list[int] | None = None
        """Prompt of the only stream whose keys and values are there."""

    def prefill(self, prompts: list[list[int]]) -> None:
        """The prompts of all streams in one batch, logits of the last token of each."""
        if len(prompts) == 1 and self._keep(prompts[0]):
            return
        self._clear()
        self._decode(
            [
                (token, position, stream, position == len(prompt) - 1)
                for stream, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
        )
        self._kept = prompts[0] if len(prompts) == 1 else None

    def step(self, tokens: list[int], position: int) -> None:
        """One token more of each stream."""
        self._decode([(token, position, stream, True) for stream, token in enumerate(tokens)])

    def _keep(self, prompt: list[int]) -> bool:
        """Cut back to `prompt`, if that is what is there and the library can do it."""
        lib = self._lib
        if prompt != self._kept or not hasattr(lib, "llama_memory_seq_rm"):
            return False
        memory = lib.llama_get_memory(self._context)
        return bool(lib.llama_memory_seq_rm(memory, 0, len(prompt), -1))

    def _clear(self) -> None:
        if hasattr(self._lib, "llama_memory_clear"):
            self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        else:
            self._lib.llama_kv_cache_clear(self._context)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: token, position, stream, wants logits."""
        batch = self._batch
        last = 0
        for i, (token, position, stream, wants_logits) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
            batch.logits[i] = wants_logits
            last = i if wants_logits else last
        batch.n_tokens = len(rows)
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._lib.llama_get_logits_ith(self._context, last)


class LlamaCpp:
    """A model, with a context for each size of work."""

    def __init__(self, lib: Any, options: argparse.Namespace) -> None:
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.use_mmap = not options.copy
        if options.repack:
            params.repack_tensors = True
        self._lib, self._threads = lib, options.threads
        self._model = lib.llama_model_load_from_file(options.model.encode(), params)
        if not self._model:
            sys.exit(f"it cannot load {options.model}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, int], Context] = {}

    def run(self, name: str, seed: int) -> tuple[int, float]:
        """(tokens, seconds) of the work."""
        work = parse_work(name)
        prompts = [
            random_prompt(work, self._vocab_size, seed * work.streams + stream)
            for stream in range(work.streams)
        ]
        context = self._context(work)
        start = time.perf_counter()
        context.prefill(prompts)
        if not work.timed_tokens:
            return work.prompt_tokens, time.perf_counter() - start
        start = time.perf_counter()
        for i in range(work.timed_tokens):
            tokens = [prompt[i % len(prompt)] for prompt in prompts]
            context.step(tokens, work.prompt_tokens + i)
        return work.streams * work.timed_tokens, time.perf_counter() - start

    def _context(self, work: Work) -> Context:
        # A short context for short works: attention may look at all that is reserved.
        key = (work.streams, max(LEAST_CONTEXT, work.context))
        if key not in self._contexts:
            self._contexts[key] = Context(self._lib, self._model, self._threads, work)
        return self._contexts[key]


def _silence(lib: Any) -> None:
    """llama.cpp tells standard error all about the model, and ik_llama.cpp standard output too,
    which is the worker's line to its caller."""
    if hasattr(lib, "llama_log_set"):
        callback = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(callback, None)
        lib.everycast_log_callback = callback  # the library does not keep it alive
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(answers, "w", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--copy", action="store_true")
    parser.add_argument("--repack", action="store_true")
    options = parser.parse_args()
    lib = importlib.import_module(options.module)
    package = importlib.import_module(options.module.partition(".")[0])
    _silence(lib)
    peer = LlamaCpp(lib, options)
    info = getattr(lib, "llama_print_system_info", None)
    ready = {
        "version": f"{package.__name__} {package.__version__}",
        "system_info": info().decode() if info else "",
    }
    answer_works(ready, peer.run)


if __name__ == "__main__":
    main()
