"""Engines whose model says what a test wants, token by token."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from everycast import AsyncMLCEngine, MLCEngine
from everycast.engine.engine_config import EngineConfig
from everycast.engine.loop import EngineLoop
from everycast.engine.model_description import ModelDescription
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scripted_model import Script, ScriptedModel, hash_script
from everycast.engine.tokenizer import Tokenizer

TEXT = "😀漢字🎉🚀 naïve"
MESSAGES = [{"role": "user", "content": "hi"}]
CONTEXT = 128
PAGES = 256


def bytes_as_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte, so that every character is cut in pieces."""
    table = {tokenizer.id_to_bytes(i): i for i in reversed(range(tokenizer.size))}
    return [table[bytes([byte])] for byte in text.encode()]


def after_prompt(output: Sequence[int], *, prompt_end: int, eos: int) -> Script:
    """`output` after the last `prompt_end` token of the history, then the end token."""

    def script(history: tuple[int, ...]) -> int:
        if prompt_end not in history:
            return eos
        num_done = history[::-1].index(prompt_end)
        return output[num_done] if num_done < len(output) else eos

    return script


def make_loop(
    tokenizer: Tokenizer, script: Script, *, noise: float = 0.0, step_time_s: float = 0.0
) -> EngineLoop:
    runner = ScriptedModel(
        script,
        # Padded, as real models are.
        vocab_size=tokenizer.size + 12,
        num_pages=PAGES,
        context_window_size=CONTEXT,
        noise=noise,
        step_time_s=step_time_s,
    )
    limits = EngineConfig(mode="server", prefix_cache_mode="disable").resolve(runner.info, PAGES)
    eos = tokenizer.eos_token_id
    return EngineLoop(
        runner, limits, tokenizer_size=tokenizer.size, eos_token_ids=() if eos is None else (eos,)
    )


class Parts:
    """Makes engines over scripted models, and ends them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        assert tokenizer.eos_token_id is not None
        self.eos = tokenizer.eos_token_id
        # Every chat prompt and every prompt of these tests ends with it.
        (self.newline,) = tokenizer.encode("\n")
        self.endings: list[Callable[[], None]] = []

    def saying(self, output: str | Sequence[int], **options: Any) -> MLCEngine:
        return self._end(MLCEngine.from_parts(*self.parts(output, **options)))

    def rambling(self, **options: Any) -> MLCEngine:
        """An engine whose text has no end and no pattern."""
        loop = make_loop(self.tokenizer, hash_script(self.tokenizer.size), **options)
        return self._end(MLCEngine.from_parts(loop, self.tokenizer, ModelDescription("scripted")))

    def parts(
        self, output: str | Sequence[int], **options: Any
    ) -> tuple[EngineLoop, Tokenizer, ModelDescription]:
        ids = bytes_as_tokens(self.tokenizer, output) if isinstance(output, str) else output
        script = after_prompt(ids, prompt_end=self.newline, eos=self.eos)
        loop = make_loop(self.tokenizer, script, **options)
        return loop, self.tokenizer, ModelDescription("scripted", SamplingParams(temperature=0))

    def _end(self, engine: MLCEngine) -> MLCEngine:
        self.endings.append(engine.terminate)
        return engine


def wait_until_idle(engine: MLCEngine | AsyncMLCEngine) -> None:
    """Returns when no sequence is there and all pages are free; fails after two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        metrics = engine.metrics()
        is_empty = metrics.num_running_sequences == metrics.num_waiting_sequences == 0
        if is_empty and metrics.num_available_pages == metrics.num_pages:
            return
        time.sleep(0.005)
    pytest.fail(f"pages or sequences are left: {engine.metrics()}")
