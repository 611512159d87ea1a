"""A whole model on a Vulkan device, through the engine, against transformers."""

from pathlib import Path

import numpy as np
import pytest
from everycast.engine.device_runner import DeviceRunner
from everycast.engine.loader import open_artifact
from everycast.engine.mlc_engine import MLCEngine
from everycast.engine.model_runner import StepInput
from everycast.engine.tvm_runtime import tvm_ffi
from everycast.targets.build import BuildRequest, compile_model

LENGTH = 45


@pytest.fixture(scope="module")
def artifact(memory, make_tiny, tmp_path_factory) -> Path:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny")
    request = BuildRequest(str(folder), "vulkan", "q0f32", folder.parent / "dist")
    return compile_model(request, lambda *_: None)


@pytest.fixture(scope="module")
def runner(artifact: Path) -> DeviceRunner:
    opened = open_artifact(artifact, "vulkan")
    return opened.runner()


def run(runner: DeviceRunner, ids: np.ndarray, start: int = 0, first_page: int = 0) -> np.ndarray:
    count = len(ids)
    table = np.arange(first_page, first_page + 6, dtype=np.int32)[None]
    positions = np.arange(start, start + count, dtype=np.int32)
    rows = np.arange(count, dtype=np.int32)
    offsets = np.array([0, count], np.int32)
    step = StepInput(ids.astype(np.int32), positions, offsets, table, rows)
    return runner.execute(step).copy()


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(abs(got - expected).max() / abs(expected).max())


def test_a_model_on_the_device(artifact: Path, runner: DeviceRunner) -> None:
    """Prefill, token by token, and after pages were copied; two submissions a token at most."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    source = artifact.parent.parent / "tiny"
    reference = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        expected = reference(torch.tensor(ids[None])).logits[0].numpy()
    for length in (1, 7, 16, LENGTH):
        assert relative_error(run(runner, ids[:length]), expected[:length]) < 1e-3
    counters = tvm_ffi.get_global_func("everycast.vulkan.counters")
    before = int(counters(0)["submissions"])
    rows = [run(runner, ids[i : i + 1], i, first_page=8)[0] for i in range(20)]
    assert relative_error(np.stack(rows), expected[:20]) < 1e-3
    assert int(counters(0)["submissions"]) - before <= 2 * 20
    runner.copy_pages([0, 1, 2], [20, 21, 22])
    assert relative_error(run(runner, ids[40:], 40, first_page=20), expected[40:]) < 1e-3


def test_the_engine_runs_on_the_device(artifact: Path) -> None:
    """The same greedy text whichever way the work is cut; sampling is the library's own."""
    engine = MLCEngine(artifact, device="vulkan")
    try:
        answers = [
            engine.completions.create(prompt="Hello there", max_tokens=8, temperature=0, seed=1)
            for _ in range(2)
        ]
    finally:
        engine.terminate()
    texts = [answer.choices[0].text for answer in answers]
    assert texts[0] == texts[1] and answers[0].usage.completion_tokens > 0
