"""The default model on a Vulkan device against the CPU with float activations: logits and text."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from everycast.engine.device_runner import DeviceRunner
from everycast.engine.loader import open_artifact
from everycast.engine.mlc_engine import MLCEngine
from everycast.engine.model_runner import ModelRunner, StepInput
from everycast.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

TEXT = (
    "The harbour was quiet that morning. Two fishermen sat on the wall and mended their nets, and "
    "neither of them spoke. When the bell of the church rang nine, the younger one stood up."
)
CONFIG = {"context_window_size": 256, "max_num_sequence": 4}


def logits_of(runner: ModelRunner, ids: list[int]) -> np.ndarray:
    """[n] ids → [n, vocab_size]: two chunks of a prefill, then five steps of one token."""
    ends = [13, len(ids) - 5, *range(len(ids) - 4, len(ids) + 1)]
    page_size = runner.info.page_size
    table = np.arange(-(-len(ids) // page_size), dtype=np.int32)[None]
    parts = []
    for start, end in zip([0, *ends], ends, strict=False):
        rows = np.arange(end - start, dtype=np.int32)
        offsets = np.array([0, end - start], np.int32)
        step = StepInput(np.array(ids[start:end], np.int32), rows + start, offsets, table, rows)
        logits = runner.execute(step)
        logits = runner.logits() if isinstance(runner, DeviceRunner) else logits
        assert logits is not None
        parts.append(logits.copy())
    return np.concatenate(parts)


@pytest.mark.parametrize(("quantization", "tolerance"), [("q0f32", 1e-3), (None, 2e-2)])
def test_logits_and_text(
    vulkan: None, default_gguf: Path, quantization: str | None, tolerance: float, tmp_path: Path,
    build: Callable[..., Path],
) -> None:  # fmt: skip
    """Without loss (None), keys and values are kept in float16."""
    for target, activations in (("cpu", "float32"), ("vulkan", "auto")):
        folder = build(default_gguf, target, quantization, tmp_path, activations=activations)
    ids = Tokenizer.from_folder(folder).encode(TEXT)
    logits, texts = [], []
    for device in ("cpu", "vulkan"):
        runner = open_artifact(folder, device, engine_config=CONFIG).runner()
        logits.append(logits_of(runner, ids))
        runner.close()
        with MLCEngine(folder, device=device, engine_config=CONFIG) as engine:
            answer = engine.completions.create(prompt=TEXT, max_tokens=24, temperature=0)
        texts.append(answer.choices[0].text)
    shutil.rmtree(folder)  # gigabytes, of which pytest keeps three sessions
    error = float(np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max())
    print(f"{quantization}: largest difference {error:.1e} of the largest logit")
    assert error < tolerance
    if quantization == "q0f32":
        assert texts[0] == texts[1]
