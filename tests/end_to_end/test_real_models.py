"""The three real models: logits and perplexity against a float32 forward pass in NumPy."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from everycast.artifact.cache import cache_dir
from everycast.artifact.errors import CheckpointError
from everycast.benchmarks.shuffled_gguf import write_shuffled
from everycast.engine.mlc_engine import MLCEngine
from everycast.engine.tokenizer import Tokenizer
from everycast.evaluation import measure_perplexity, read_text
from everycast.relax_models import registry
from everycast.relax_models.checkpoint.gguf import GGUFCheckpoint
from everycast.relax_models.checkpoint.named_models import fetch_named

pytestmark = pytest.mark.slow

PERPLEXITIES = {"smollm2-135m": 28.493, "gemma3-270m": 22.338, "qwen2.5-coder-0.5b": 42.230}
"""Of the first 2,000 tokens of Botchan, 1,999 scored, by a float32 forward pass over weights that
PyPI `gguf` dequantized. Gemma's begin token is the first of them; the others have none."""
HALF_PRECISION = {"smollm2-135m": 1e-3, "gemma3-270m": 1e-3, "qwen2.5-coder-0.5b": 5e-3}
"""Tolerances of logits with float16 pages. Qwen2 adds large biases to its keys, which leaves fewer
bits for what differs between tokens."""
NUM_TOKENS = 2000
TEXT = (
    "The harbour was quiet that morning. Two fishermen sat on the wall and mended their nets, and "
    "neither of them spoke. When the bell of the church rang nine, the younger one stood up."
)
BOTCHAN_SDIST = "sentencepiece==0.2.3"
BOTCHAN_SHA256 = "464bd5300c24fce16fcc4555d4231a57632caae4d0090ad6aa92854a3b227ba7"


@pytest.fixture(scope="session")
def botchan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The novel, out of a source distribution that has it among its tests; kept in the cache."""
    path = cache_dir() / "texts" / "botchan.txt"
    if not path.is_file():
        folder = tmp_path_factory.mktemp("botchan")
        command = [sys.executable, "-P", "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--no-binary", "sentencepiece", "--dest", str(folder), BOTCHAN_SDIST]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode:
            pytest.skip(f"{BOTCHAN_SDIST} cannot be downloaded: {done.stderr.strip()[-200:]}")
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            member = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/test/botchan.txt")
            assert member is not None
            content = member.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == BOTCHAN_SHA256
    return read_text(path)


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    gguf: Path


@pytest.fixture(scope="module", params=PERPLEXITIES)
def model(request: pytest.FixtureRequest) -> Model:
    name = request.param
    if name == "smollm2-135m":
        return Model(name, request.getfixturevalue("default_gguf"))
    try:
        return Model(name, fetch_named(name, cache_dir()))
    except CheckpointError as error:
        pytest.skip(f"{name} cannot be had: {error}")


def reference_logits(reference: ModuleType, gguf: Path, ids: list[int]) -> np.ndarray:
    checkpoint = GGUFCheckpoint(gguf)
    config = registry.load_config(checkpoint)
    weights = reference.float_weights(registry.weight_map(config, checkpoint), checkpoint)
    logits: np.ndarray = reference.reference_logits(config, weights, ids)
    return logits


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def test_perplexity(model: Model, botchan: str, tmp_path: Path, build: Callable[..., Path]) -> None:
    folder = build(model.gguf, output=tmp_path, activations="int16")
    config = {"context_window_size": NUM_TOKENS}
    with MLCEngine(folder, mode="interactive", engine_config=config) as engine:
        result = measure_perplexity(engine, botchan, NUM_TOKENS)
    assert result.num_scored_tokens == NUM_TOKENS - 1
    assert result.perplexity == pytest.approx(PERPLEXITIES[model.name], rel=1e-3)


@pytest.mark.parametrize("quantization", ["q0f32", None])
def test_logits(
    model: Model, quantization: str | None, tmp_path: Path, reference: ModuleType,
    build: Callable[..., Path], compiled: Callable[[Path], Any],
) -> None:  # fmt: skip
    """Without loss (None), keys and values are kept in float16: nearly all of the error."""
    folder = build(model.gguf, quantization=quantization, output=tmp_path, activations="float32")
    ids = Tokenizer.from_folder(folder).encode(TEXT)
    expected = reference_logits(reference, model.gguf, ids)
    error = relative_error(compiled(folder).logits(ids), expected)
    shutil.rmtree(folder)  # gigabytes, of which pytest keeps three sessions
    print(f"{model.name} {quantization}: largest error {error:.1e} of the largest logit")
    assert error < (1e-4 if quantization == "q0f32" else HALF_PRECISION[model.name])


def test_a_shuffled_copy_is_the_same_model(
    model: Model, tmp_path: Path, reference: ModuleType
) -> None:
    """What benchmarks/quality.py quantizes."""
    shuffled = tmp_path / "shuffled.gguf"
    write_shuffled(model.gguf, shuffled)
    ids = list(range(100, 120))
    logits = reference_logits(reference, shuffled, ids)
    shuffled.unlink()
    assert relative_error(logits, reference_logits(reference, model.gguf, ids)) < 1e-4
