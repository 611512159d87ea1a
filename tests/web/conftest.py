"""Models in a browser: Chromium, and tiny models compiled for it and for the processor.

These tests run where `EVERYCAST_TEST_WEB` is set, as `make test-web` does: they need Emscripten,
Node.js, Chromium, and `npm ci` in `web`.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.benchmarks.browser import WEB, Browser
from everycast.engine.loader import open_artifact
from everycast.engine.model_runner import StepInput
from everycast.engine.paged_runner import PagedRunner
from everycast.engine.parameters import load_parameters
from everycast.targets.build import BuildRequest, compile_model
from everycast.targets.webgpu import target as webgpu

LIBRARY = "lib/webgpu-cpu-adapter.wasm"
"""The one for SwiftShader, which is the adapter here."""
GPU_LIBRARY, F16_LIBRARY = "lib/webgpu.wasm", "lib/webgpu-f16.wasm"
SUBGROUP_LIBRARY = "lib/webgpu-f16-subgroups.wasm"
CONTEXT = 1280
_CHUNK = 512
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "q4f16_1", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "q0f32", {}),
    "qwen2": ("qwen2", "q8f16_1", {"vocab_size": 331}),
    "qwen3-yarn": ("qwen3", "q0f32", {"rope_parameters": _YARN}),
    "gemma3": ("gemma3_text", "q0f32", {}),
    "llama-3.2": ("llama", "q4f16_1", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
}
"""Name → (model type, scheme, settings)."""
MAX_WEIGHT_BYTES = {"qwen2": 8 << 10}
"""In place of 128 MB: embedding and head come in three parts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("EVERYCAST_TEST_WEB"):
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="browser tests: run `make test-web`"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


class Greedy:
    """The CPU target's tokens."""

    def __init__(self, folder: Path) -> None:
        opened = open_artifact(folder, "cpu")
        parameters = load_parameters(folder, opened.library, TensorCacheReader(folder))
        num_pages = CONTEXT // opened.info.page_size
        self._runner = PagedRunner(opened.library, parameters, opened.info, num_pages)
        self._block_table = np.arange(num_pages, dtype=np.int32)[None]

    def __call__(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """The most likely `num_tokens` tokens after the prompt."""
        logits = self.logits(prompt_ids)
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            logits = self._step(tokens[-1:], len(prompt_ids) + len(tokens) - 1)
            tokens.append(int(logits.argmax()))
        return tokens

    def logits(self, prompt_ids: list[int]) -> np.ndarray:
        """[vocab_size] float32, after the prompt."""
        for start in range(0, len(prompt_ids), _CHUNK):
            logits = self._step(prompt_ids[start : start + _CHUNK], start)
        return logits

    def _step(self, ids: list[int], start: int) -> np.ndarray:
        count = len(ids)
        step = StepInput(
            np.array(ids, np.int32),
            np.arange(start, start + count, dtype=np.int32),
            np.array([0, count], np.int32),
            self._block_table,
            np.array([count - 1], np.int32),
        )
        return self._runner.execute(step)[0]


@pytest.fixture(scope="session")
def greedy() -> type[Greedy]:
    return Greedy


@pytest.fixture(scope="session")
def web() -> SimpleNamespace:
    """Where things are."""
    return SimpleNamespace(
        folder=WEB,
        context=CONTEXT,
        library=LIBRARY,
        gpu_library=GPU_LIBRARY,
        f16_library=F16_LIBRARY,
        subgroup_library=SUBGROUP_LIBRARY,
    )


@pytest.fixture(scope="session", params=MODELS)
def model(
    request: pytest.FixtureRequest,
    make_tiny: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A tiny model compiled for browsers and for the CPU."""
    model_type, scheme, settings = MODELS[request.param]
    parent = tmp_path_factory.mktemp(request.param)
    folder = make_tiny(model_type, parent / request.param, max_position_embeddings=2048, **settings)
    # The exact kind of activations: browsers compute in float32.
    exact = "int16" if scheme != "q0f32" else "auto"
    variants = dict(webgpu._VARIANTS)
    if request.param in MAX_WEIGHT_BYTES:
        most = MAX_WEIGHT_BYTES[request.param]
        variants = {name: replace(v, max_weight_bytes=most) for name, v in variants.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(webgpu, "_VARIANTS", variants)
        for target, activations in (("webgpu", "auto"), ("cpu", exact)):
            built = compile_model(
                BuildRequest(str(folder), target, scheme, parent / "dist", activations=activations),
                lambda *_: None,
            )
    return built
