"""Random weights in a given shape: a GGUF that imports, compiles and runs."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from everycast.benchmarks.bench_model import compile_for, describe
from everycast.benchmarks.random_gguf import borrowed_tokenizer, write_random
from everycast.benchmarks.shapes import SHAPES, Shape, find_shape
from everycast.benchmarks.workers import BenchError
from gguf.quants import dequantize

TINY = Shape("llama", 2, 64, 96, 4, 2, 16, 300, 1e4, True)
TINY_QWEN = Shape("qwen3", 1, 64, 96, 4, 2, 32, 300, 1e6, False, True)


def byte_tokens() -> list[str]:
    """The alphabet of byte-level BPE."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|endoftext|>", *byte_tokens()],
    "tokenizer.ggml.token_type": [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * 256],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
}
TOKENIZER["tokenizer.ggml.tokens"].append("ab")
TOKENIZER["tokenizer.ggml.token_type"].append(gguf.TokenType.NORMAL)


@pytest.mark.parametrize("shape", [TINY, TINY_QWEN], ids=["llama", "qwen3"])
def test_what_is_in_the_file(shape: Shape, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    seen: list[tuple[int, int]] = []
    write_random(shape, "tiny", TOKENIZER, path, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and [p.name for p in tmp_path.iterdir()] == ["random.gguf"]
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"
    assert ("output.weight" in tensors) == (not shape.is_tied)
    assert ("blk.0.attn_q_norm.weight" in tensors) == shape.has_head_norms
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type.name == "Q4_0" and list(down.shape) == [96, 64]
    values = dequantize(down.data, down.tensor_type)
    assert values.std() == pytest.approx(96**-0.5, rel=0.1) and abs(values.mean()) < 0.02
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == shape.vocab_size
    model = describe("tiny", path)
    assert model.num_head_parameters == 300 * 64
    assert 4.5 < model.bits_per_weight < 8.5
    borrowed = borrowed_tokenizer(path)
    assert borrowed["tokenizer.ggml.merges"] == ["a b"]
    assert borrowed["tokenizer.ggml.add_bos_token"] is False


def test_it_compiles_and_runs(tmp_path: Path) -> None:
    from everycast.benchmarks.worker_everycast import EngineWorks, engine_config
    from everycast.benchmarks.works import parse_works
    from everycast.engine.loader import open_artifact

    path = tmp_path / "random.gguf"
    write_random(TINY, "tiny", TOKENIZER, path, lambda done, total: None)
    artifact = compile_for(describe("tiny", path), "auto", "cpu", tmp_path, None)
    works = parse_works(["decode", "prefill_128", "batch_4", "decode_64"])
    opened = open_artifact(artifact, "cpu", engine_config=engine_config(works))
    loop, tokenizer, _ = opened.load()
    loop.start()
    try:
        run = EngineWorks(loop, tokenizer.size).run
        tokens = {work.name: run(work.name, 0)[0] for work in works}
        assert min(run(work.name, 1)[1] for work in works) > 0
    finally:
        loop.shutdown()
    assert tokens == {"decode": 128, "prefill_128": 128, "batch_4": 256, "decode_64": 32}


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random(TINY, "tiny", TOKENIZER, tmp_path / "random.gguf", stop)
    too_small = Shape("llama", 1, 64, 96, 4, 2, 16, 100, 1e4, True)
    with pytest.raises(BenchError, match="258 tokens are more than the shape's 100"):
        write_random(too_small, "tiny", TOKENIZER, tmp_path / "random.gguf", stop)
    assert list(tmp_path.iterdir()) == []


def test_unknown_shapes_name_the_nearest() -> None:
    with pytest.raises(BenchError, match=r"did you mean llama-3\.2-1b"):
        find_shape("llama-3.2-1")
    for shape in SHAPES.values():
        assert shape.hidden_size % 32 == shape.intermediate_size % 32 == 0
        assert np.prod([shape.num_heads, shape.head_dim]) % 32 == 0
