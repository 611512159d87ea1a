import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint.resolve import open_checkpoint
from everycast.relax_models.checkpoint.tokenizer import TokenizerInfo
from everycast.relax_models.registry import load_config
from everycast.targets.chat_config import chat_config, sampling_advice


def folder(path: Path, **generation: Any) -> Any:
    """A Hugging Face checkpoint, as far as sampling goes."""
    (path / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return SimpleNamespace(kind="huggingface", path=path)


def test_advice_of_generation_config(tmp_path: Path) -> None:
    advice = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    checkpoint = folder(tmp_path, do_sample=True, eos_token_id=[1, 2], typical_p=0.5, **advice)
    assert sampling_advice(checkpoint) == advice
    assert sampling_advice(folder(tmp_path, top_p=None, temperature=1)) == {"temperature": 1}
    top_k = sampling_advice(folder(tmp_path, top_k=50.0))["top_k"]
    assert top_k == 50 and isinstance(top_k, int)


def test_without_sampling_only_the_penalty_counts(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path, do_sample=False, temperature=0.1, repetition_penalty=1.2)
    assert sampling_advice(checkpoint) == {"repetition_penalty": 1.2}


def test_no_advice(tmp_path: Path) -> None:
    assert sampling_advice(SimpleNamespace(kind="huggingface", path=tmp_path)) == {}
    file = tmp_path / "m.gguf"
    assert sampling_advice(SimpleNamespace(kind="gguf", path=file)) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")),
        ("temperature", "hot"), ("temperature", True), ("top_p", 1.5), ("top_p", [0.9]),
        ("top_k", 2.5), ("top_k", -2), ("top_k", float("inf")), ("repetition_penalty", 0),
    ],
)  # fmt: skip
def test_values_that_cannot_be_sampled_with_are_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        given = sampling_advice(folder(tmp_path, **{"min_new_tokens": 1, name: value}))
    assert given == {}
    assert len(caplog.records) == 1 and f"generation_config.json: {name}" in caplog.text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        sampling_advice(checkpoint)


def test_the_file_in_mlcs_names(tiny_checkpoint: Path) -> None:
    config = load_config(open_checkpoint(str(tiny_checkpoint)))
    tokenizer = TokenizerInfo(300, 0, (2, 1), None, False, True)
    values = chat_config(config, tokenizer, "q4f16_1", 128, {"top_p": 0.9})
    assert json.loads(json.dumps(values))["model_config"]["hidden_size"] == 64
    assert (values["vocab_size"], values["context_window_size"]) == (320, 128)
    assert (values["eos_token_id"], values["quantization"]) == ([2, 1], "q4f16_1")
    assert values["top_p"] == 0.9 and "temperature" not in values
