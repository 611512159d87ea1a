"""One model in the many forms that Hugging Face folders take: the same weights come out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.quant_schemes.scheme import SCHEMES
from safetensors.numpy import load_file, save_file

WEIGHTS = "model.safetensors"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Build = Callable[..., Path]


@pytest.fixture(scope="module")
def weights_hash(build: Build) -> Callable[[Path, str], str]:
    """Hash of all weights of a folder, converted."""

    def weights_hash(source: Path, scheme: str) -> str:
        folder = build(
            source, target=None, quantization=scheme, output=source.parent / "dist-of-sources"
        )
        return TensorCacheReader(folder).weights_hash()

    return weights_hash


def shard(folder: Path, num_shards: int, *, index: bool) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::num_shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if index:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_shards(source: Path, tiny: Path, weights_hash: Callable[..., str], index: bool) -> None:
    """Case 34: with an index a stray file of another dtype is passed over."""
    shard(source, 3, index=index)
    if index:
        half = {n: a.astype(np.float16) for n, a in load_file(tiny / WEIGHTS).items()}
        save_file(half, source / WEIGHTS)
    assert weights_hash(source, "q4f16_1") == weights_hash(tiny, "q4f16_1")


def test_fused_projections(source: Path, tiny: Path, weights_hash: Callable[..., str]) -> None:
    """Phi-3's names, q, k and v in one tensor."""
    tensors = load_file(source / WEIGHTS)
    for fused, parts in FUSED.items():
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            stacked = np.concatenate([tensors.pop(n) for n in names])
            tensors[name.replace(f".{parts[0]}.", f".{fused}.")] = stacked
    save_file(tensors, source / WEIGHTS)
    assert sum("qkv_proj" in name for name in tensors) == 2
    assert weights_hash(source, "q4af16_e8") == weights_hash(tiny, "q4af16_e8")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["q0f32", "q0f16", "q4f16_1", "q8f16_1", "q4af16_e8"])
def test_half_precision_sources(
    source: Path, tiny: Path, weights_hash: Callable[..., str], dtype: str, scheme: str
) -> None:
    """Case 35: what is stored is what a float32 file with the rounded values gives."""
    import ml_dtypes

    half = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tensors = {n: a.astype(half) for n, a in load_file(tiny / WEIGHTS).items()}
    save_file(tensors, source / WEIGHTS)
    wide = source.parent / "wide"
    shutil.copytree(source, wide)
    save_file({n: a.astype(np.float32) for n, a in tensors.items()}, wide / WEIGHTS)
    assert scheme in SCHEMES
    assert weights_hash(source, scheme) == weights_hash(wide, scheme)


@pytest.mark.parametrize("has_copy", [True, False])
def test_tied_heads(source: Path, build: Build, tmp_path: Path, has_copy: bool) -> None:
    """Case 33: with or without a copy of the embedding as `lm_head.weight`."""
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(source / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if not has_copy:
        del tensors["lm_head.weight"]
    save_file(tensors, source / WEIGHTS)
    folder = build(source, target=None, quantization="q0f32", output=tmp_path / "dist")
    cache = TensorCacheReader(folder)
    assert "lm_head.weight" not in cache
    np.testing.assert_array_equal(
        cache.read("model.embed_tokens.weight"), tensors["model.embed_tokens.weight"]
    )
