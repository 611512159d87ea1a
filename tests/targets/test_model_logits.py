"""Compiled models against transformers: every model type, every way of cutting the work."""

from pathlib import Path

import numpy as np
import pytest
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.engine.loader import open_artifact
from everycast.engine.model_runner import StepInput
from everycast.engine.paged_runner import PagedRunner
from everycast.engine.parameters import load_parameters
from everycast.targets.build import BuildRequest, compile_model
from everycast.targets.cpu import ONE_REGION

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama-odd": (
        "llama",
        {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 6, "head_dim": 12,
         "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "gemma3": ("gemma3_text", {}),
}  # fmt: skip
BFLOAT16 = {
    # Two terms of bfloat16 where the machine has the dot products; keys and values are float16.
    "int16": ("1", 3e-3),
    # One term; called operator by operator.
    "mixed": ("0", 3e-2),
}
"""Activations: (`ONE_REGION`, largest error)."""
LENGTH = 45
NUM_PAGES = 40


class Compiled:
    """A compiled tiny model with pages of its own, driven as the engine does."""

    def __init__(self, folder: Path) -> None:
        opened = open_artifact(folder)
        self.library = opened.library
        parameters = load_parameters(folder, self.library, TensorCacheReader(folder))
        self.runner = PagedRunner(self.library, parameters, opened.info, NUM_PAGES)

    def run(self, chunks, arg_max_ids=0):
        """chunks: (first page, tokens before, token ids) of each sequence; logits of all."""
        ids = np.concatenate([c[2] for c in chunks]).astype(np.int32)
        positions = np.concatenate([np.arange(c[1], c[1] + len(c[2])) for c in chunks])
        offsets = np.cumsum([0, *(len(c[2]) for c in chunks)]).astype(np.int32)
        tables = np.stack([np.arange(c[0], c[0] + 6) for c in chunks]).astype(np.int32)
        rows = np.arange(len(ids), dtype=np.int32)
        step = StepInput(ids, positions.astype(np.int32), offsets, tables, rows, arg_max_ids)
        return self.runner.execute(step).copy()


def relative_error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.fixture(scope="module", params=MODELS)
def model(request, make_tiny, tmp_path_factory):
    """(compiled q0f32 model, token ids, transformers' logits [LENGTH, vocab])."""
    model_type, overrides = MODELS[request.param]
    folder = make_tiny(model_type, tmp_path_factory.mktemp(request.param), **overrides)
    built = compile_model(
        BuildRequest(str(folder), "cpu", "q0f32", folder.parent / "dist"), lambda *_: None
    )
    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    return Compiled(built), ids, logits_of_transformers(folder, ids)


def logits_of_transformers(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        return reference(torch.tensor(ids[None])).logits[0].numpy()


def test_prefill_gives_the_logits_of_transformers(model):
    compiled, ids, expected = model
    for length in (1, 2, 7, 16, 17, 33, LENGTH):
        logits = compiled.run([(0, 0, ids[:length])])
        assert relative_error(logits, expected[:length]) < 1e-3


def test_chunks_give_what_one_prefill_gives(model):
    compiled, ids, expected = model
    parts = [compiled.run([(6, start, ids[start : start + 9])]) for start in range(0, LENGTH, 9)]
    assert relative_error(np.concatenate(parts), expected) < 1e-3


def test_token_by_token_gives_what_prefill_gives(model):
    compiled, ids, expected = model
    rows = [compiled.run([(12, i, ids[i : i + 1])])[0] for i in range(LENGTH)]
    assert relative_error(np.stack(rows), expected) < 1e-3


def test_a_mixed_batch_gives_what_each_sequence_gives_alone(model):
    compiled, ids, expected = model
    compiled.run([(0, 0, ids[:20])])
    compiled.run([(6, 0, ids[:31])])
    logits = compiled.run(
        [(0, 20, ids[20:21]), (12, 0, ids[:33]), (6, 31, ids[31:40]), (18, 0, ids[:1])]
    )
    wanted = np.concatenate([expected[20:21], expected[:33], expected[31:40], expected[:1]])
    assert relative_error(logits, wanted) < 1e-3


def test_copied_pages_hold_the_same_history(model):
    compiled, ids, expected = model
    compiled.run([(0, 0, ids[:40])])
    compiled.runner.copy_pages([0, 1, 2], [30, 31, 32])
    logits = compiled.run([(30, 40, ids[40:])])
    assert relative_error(logits, expected[40:]) < 1e-3


@pytest.mark.parametrize("activations", BFLOAT16)
def test_weights_of_bfloat16(activations, make_tiny, tmp_path, monkeypatch):
    """Of odd sizes, embedding and head the same matrix."""
    one_region, limit = BFLOAT16[activations]
    monkeypatch.setenv(ONE_REGION, one_region)
    model_type, overrides = MODELS["llama-odd"]
    folder = make_tiny(model_type, tmp_path / "tiny", dtype="bfloat16", **overrides)
    request = BuildRequest(str(folder), "cpu", "q0bf16", tmp_path / "dist", activations=activations)
    compiled = Compiled(compile_model(request, lambda *_: None))
    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    expected = logits_of_transformers(folder, ids)
    assert relative_error(compiled.run([(0, 0, ids)]), expected) < limit
    rows = [compiled.run([(12, i, ids[i : i + 1])])[0] for i in range(LENGTH)]
    assert relative_error(np.stack(rows), expected) < limit


@pytest.mark.parametrize(
    ("name", "activations", "region"),
    [("llama", "mixed", "1"), ("llama-odd", "mixed", "1"), ("gemma3", "int8", "0")],
)
def test_leading_logits(name, activations, region, make_tiny, tmp_path, monkeypatch):
    """Heads of 8 bits: the same arg max, with the same bits, of any number of rows."""
    monkeypatch.setenv(ONE_REGION, region)
    model_type, overrides = MODELS[name]
    folder = make_tiny(model_type, tmp_path / "tiny", **overrides)
    request = BuildRequest(
        str(folder), "cpu", "q8f16_1", tmp_path / "dist", activations=activations
    )
    compiled = Compiled(compile_model(request, lambda *_: None))
    metadata = compiled.library.metadata
    assert metadata["leading_logits"]["unread_weight_bytes"] > 0
    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    num_ids = metadata["vocab_size"] - 5
    for length in (1, 2, 9, LENGTH):
        full = compiled.run([(0, 0, ids[:length])])[:, :num_ids]
        leading = compiled.run([(0, 0, ids[:length])], arg_max_ids=num_ids)[:, :num_ids]
        np.testing.assert_array_equal(leading.argmax(axis=1), full.argmax(axis=1))
        np.testing.assert_array_equal(leading.max(axis=1), full.max(axis=1))


@pytest.mark.parametrize(
    ("quantization", "activations"),
    [("q4f16_1", "mixed"), ("q8f16_1", "int16"), ("q8f16_1", "float32"), ("q0f32", "auto")],
)
def test_who_has_no_leading_logits(quantization, activations, make_tiny, tmp_path):
    """Heads of other bits, and activations that are asked to be exact."""
    folder = make_tiny("llama", tmp_path / "tiny")
    request = BuildRequest(
        str(folder), "cpu", quantization, tmp_path / "dist", activations=activations
    )
    metadata = Compiled(compile_model(request, lambda *_: None)).library.metadata
    assert "leading_logits" not in metadata
