"""GGUFs of every block type, imported without loss, against the dequantized model in NumPy."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.engine.mlc_engine import MLCEngine
from everycast.relax_models import registry
from everycast.relax_models.checkpoint.gguf import GGUFCheckpoint

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 256, 512, 1, 4, 2, 64, 256
SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
TYPES = ("Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q8_0")
"""By matrix, in the order of `matrices`: every type, side by side with others."""


def matrices(vocab_size: int) -> dict[str, tuple[int, int]]:
    """GGUF name → [out, in]."""
    shapes = {"token_embd": (vocab_size, HIDDEN)}
    for i in range(LAYERS):
        block = {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return {**shapes, "output": (vocab_size, HIDDEN)}


def quantized(type_name: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Random blocks of about the values that a trained matrix has: [rows, bytes per row] uint8."""
    kind = gguf.GGMLQuantizationType[type_name]
    deviation = 1.2 / shape[1] ** 0.5
    if type_name in SIMPLE:
        weight = rng.standard_normal(shape, np.float32) * np.float32(deviation)
        raw: np.ndarray = gguf.quants.quantize(weight, kind)
        return raw
    # The package cannot quantize to these; but any bytes are a block, if its scales are sane.
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block_size, num_bytes), np.uint8)
    scale, minimum = {
        "Q4_K": (deviation / 170, deviation / 23),
        "Q5_K": (deviation / 340, deviation / 22),
        "Q6_K": (deviation / 1370, 0.0),
    }[type_name]
    places = ((208, scale),) if type_name == "Q6_K" else ((0, scale), (2, minimum))
    for offset, value in places:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(path: Path, tiny: Path, **options: Any) -> None:
    """A llama as llama.cpp's converter writes it, with the tokenizer of the tiny checkpoint, and
    Llama 3.1's frequency factors as a tensor. `options` of the writer split it."""
    tokenizer = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    config = json.loads((tiny / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * len(tokens[3:]))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(config["chat_template"])
    rng = np.random.default_rng(0)
    for (name, shape), type_name in zip(matrices(len(tokens)).items(), TYPES, strict=True):
        raw = quantized(type_name, shape, rng)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[type_name])
    norms = [f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", 1 + 0.2 * rng.standard_normal(HIDDEN, np.float32))
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True, slots=True)
class Files:
    whole: Path
    last_part: Path
    """The last part of the same model split in several files."""


@pytest.fixture(scope="module")
def files(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "llama.gguf", tiny)
    write_gguf(folder / "parts.gguf", tiny, split_max_tensors=6)
    return Files(folder / "llama.gguf", sorted(folder.glob("parts-*.gguf"))[-1])


@pytest.fixture(scope="module")
def imported(files: Files, build: Callable[..., Path]) -> Path:
    """Compiled with nothing said."""
    return build(files.whole, output=files.whole.parent / "dist")


IDS = np.random.default_rng(5).integers(3, 300, 50)


@pytest.fixture(scope="module")
def expected(files: Files, reference: ModuleType) -> np.ndarray:
    checkpoint = GGUFCheckpoint(files.whole)
    config = registry.load_config(checkpoint)
    weights = reference.float_weights(registry.weight_map(config, checkpoint), checkpoint)
    logits: np.ndarray = reference.reference_logits(config, weights, IDS)
    return logits


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def test_all_types_are_there() -> None:
    assert set(TYPES) == {*SIMPLE, *K_QUANTS}


def test_logits_with_the_default_activations(
    files: Files, imported: Path, expected: np.ndarray, compiled: Callable[[Path], Any],
    build: Callable[..., Path],
) -> None:  # fmt: skip
    assert imported.name == "llama-gguf"
    assert expected.shape[1] % 64 != 0  # case 37: a vocabulary of 300
    error = relative_error(compiled(imported).logits(IDS), expected)
    assert error < 3e-2  # int8 in the MLP
    exact = build(files.whole, output=imported.parent, activations="int16")
    assert relative_error(compiled(exact).logits(IDS), expected) < min(3e-3, error)


def test_logits_with_float_activations(
    imported: Path, files: Files, expected: np.ndarray, compiled: Callable[[Path], Any],
    build: Callable[..., Path],
) -> None:  # fmt: skip
    """The weights are kept and the library alone is built again."""
    shard = imported / "params_shard_0.bin"
    written = shard.stat().st_mtime_ns
    again = build(files.whole, output=imported.parent, activations="float32")
    assert again == imported and shard.stat().st_mtime_ns == written
    model = compiled(again)  # in the place of a library that this process has loaded
    assert model.activations == "float32"
    assert relative_error(model.logits(IDS), expected) < 1e-3


def test_the_tokenizer_and_the_template_come_along(imported: Path) -> None:
    with MLCEngine(imported) as engine:
        answer = engine.chat.completions.create(
            messages=[{"role": "user", "content": "the fox"}], max_tokens=4,
            return_token_ids=True, temperature=0,
        )  # fmt: skip
        ids = answer.choices[0].prompt_token_ids
        text = engine.tokenizer.decode(ids or [], skip_special=False)
    assert text == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"


def test_rope_factors_divide_the_frequencies(imported: Path) -> None:
    """Case 37: `rope_freqs.weight` is used, not passed over."""
    plain = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    stored = TensorCacheReader(imported).read("rope.0.inv_freq")
    np.testing.assert_allclose(stored, plain / np.linspace(1, 8, HEAD_DIM // 2), rtol=1e-6)


def test_a_split_model_has_the_weights_of_the_whole(
    imported: Path, files: Files, build: Callable[..., Path]
) -> None:
    """Case 37: whichever part is named."""
    assert len(list(files.whole.parent.glob("parts-*.gguf"))) == 3
    folder = build(files.last_part, target=None, output=files.whole.parent / "split")
    whole, split = TensorCacheReader(imported), TensorCacheReader(folder)
    assert split.weights_hash() == whole.weights_hash()
    names = ("tokenizer.json", "mlc-chat-config.json")
    for name in names:
        assert (folder / name).read_bytes() == (imported / name).read_bytes()
