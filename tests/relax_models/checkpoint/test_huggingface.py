"""The Hugging Face reader against files written, and read, by PyPI `safetensors`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint.huggingface import HuggingFaceCheckpoint
from everycast.relax_models.checkpoint.safetensors_header import read_header
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPE = (5, 7)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
AWKWARD = 'Željko 張 庭 模型 a\'b "c"'


def weight(seed: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(dtype)


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


def save_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty model folder with a config, under a name full of odd characters."""
    path = tmp_path / AWKWARD
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "name": "模型"}')
    return path


@pytest.fixture
def sharded(folder: Path) -> Path:
    """Tensors a and b, one a shard, with an index."""
    for part, name in ((1, "a.weight"), (2, "b.weight")):
        save(folder / f"model-0000{part}-of-00002.safetensors", {name: weight(part)})
    save_index(
        folder,
        {
            "a.weight": "model-00001-of-00002.safetensors",
            "b.weight": "model-00002-of-00002.safetensors",
        },
    )
    return folder


def one_line_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceCheckpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_one_file_of_every_dtype_equals_the_reference_reader(folder: Path) -> None:
    written = {
        "f32.weight": weight(1),
        "f16.weight": weight(2, np.float16),
        "bf16.weight": weight(3, ml_dtypes.bfloat16),
        "norm.weight": weight(4)[0],
        "odd.weight": weight(5, np.float16)[:1, :1],
        "scalar": np.array(2.5, np.float32),
        "nothing": np.zeros((0, 4), np.float32),
    }
    save(folder / "model.safetensors", written)
    checkpoint = HuggingFaceCheckpoint(folder)
    assert checkpoint.kind == "huggingface"
    assert checkpoint.config == {"model_type": "llama", "name": "模型"}
    assert set(checkpoint.tensors) == set(written)
    reference = safetensors.deserialize((folder / "model.safetensors").read_bytes())
    for name, entry in reference:
        info, array = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.dtype, list(info.shape)) == (entry["dtype"], entry["shape"])
        assert info.num_bytes == len(entry["data"])
        assert array.tobytes() == bytes(entry["data"])
        assert array.flags.aligned
        np.testing.assert_array_equal(array, written[name], strict=True)
    loaded = safetensors.numpy.load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(checkpoint.read("f16.weight"), loaded["f16.weight"], strict=True)


def test_data_that_is_not_aligned_is_read_aligned(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length
    data = np.float32([1.5, -2.0]).tobytes()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    array = HuggingFaceCheckpoint(folder).read("a")
    assert array.flags.aligned
    assert array.tolist() == [1.5, -2.0]


def test_shards_with_an_index(sharded: Path) -> None:
    checkpoint = HuggingFaceCheckpoint(sharded)
    assert list(checkpoint.tensors) == ["a.weight", "b.weight"]
    np.testing.assert_array_equal(checkpoint.read("b.weight"), weight(2))


def test_index_is_respected_when_a_stray_file_lies_beside_it(sharded: Path) -> None:
    save(sharded / "model.safetensors", {"a.weight": weight(9, np.float16)})
    checkpoint = HuggingFaceCheckpoint(sharded)
    assert checkpoint.tensors["a.weight"].dtype == "F32"
    np.testing.assert_array_equal(checkpoint.read("a.weight"), weight(1))


def test_without_index_all_shards_are_read(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    checkpoint = HuggingFaceCheckpoint(sharded)
    assert list(checkpoint.tensors) == ["a.weight", "b.weight"]
    np.testing.assert_array_equal(checkpoint.read("b.weight"), weight(2))


def test_shard_missing_from_index_or_from_numbering(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "names 2 shards, missing: model-00002-of-00002.safetensors" in one_line_error(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    assert "missing shards: model-00002-of-00002.safetensors" in one_line_error(sharded)


@pytest.mark.parametrize("indexed", [True, False])
def test_tensor_in_two_shards(sharded: Path, indexed: bool) -> None:
    second = sharded / "model-00002-of-00002.safetensors"
    save(second, {"a.weight": weight(1), "b.weight": weight(2)})
    if not indexed:
        (sharded / "model.safetensors.index.json").unlink()
    message = one_line_error(sharded)
    assert "'a.weight' is both in model-00001-of-00002.safetensors and in model-00002" in message


def test_index_of_another_model(sharded: Path) -> None:
    save_index(sharded, {"c.weight": "model-00001-of-00002.safetensors"})
    assert "they are not there: 'c.weight'" in one_line_error(sharded)
    save_index(sharded, {"a.weight": "../model.safetensors"})
    assert "names the shard '../model.safetensors', which is no file name" in one_line_error(
        sharded
    )
    (sharded / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in one_line_error(sharded)


def test_truncated_and_damaged_shards(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    for content, message in (
        (data[:-1], f"is truncated: it has {len(data) - 1} bytes, its header promises {len(data)}"),
        (data + b"x", f"is damaged: it has {len(data) + 1} bytes"),
        (data[:20], "is truncated: it has 20 bytes, its header alone takes"),
        (data[:5], "is not a safetensors file"),
        (b"", "is empty"),
        (b"<html>not found</html>", "is not a safetensors file"),
        (LFS_POINTER, "this is a git-lfs pointer"),
    ):
        shard.write_bytes(content)
        found = one_line_error(sharded)
        assert message in found
        assert shard.name in found


F32 = {"dtype": "F32", "shape": [1]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "its header is not a JSON object"),
        ({"t": 1}, "header entry 't' is not complete"),
        ({"t": {**F32, "data_offsets": [0]}}, "header entry 't' is not complete"),
        ({"t": {**F32, "dtype": "Q9", "data_offsets": [0, 4]}}, "unknown dtype 'Q9'"),
        ({"t": {**F32, "shape": [-1], "data_offsets": [0, 4]}}, "has shape '[-1]'"),
        ({"t": {**F32, "shape": [1.0], "data_offsets": [0, 4]}}, "has shape '[1.0]'"),
        ({"t": {**F32, "data_offsets": [0, 3]}}, "F32 '[1]', does not take 3 bytes"),
        ({"t": {**F32, "data_offsets": [4, 8]}}, "overlap or leave a gap"),
        (
            {"t": {**F32, "data_offsets": [0, 4]}, "u": {**F32, "data_offsets": [0, 4]}},
            "overlap or leave a gap",
        ),
    ],
)
def test_damaged_headers(folder: Path, header: Any, message: str) -> None:
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    assert message in one_line_error(folder)


def test_config_missing_or_wrong(folder: Path) -> None:
    save(folder / "model.safetensors", {"a.weight": weight(1)})
    config = folder / "config.json"
    config.write_text("{")
    assert "config.json is not valid JSON" in one_line_error(folder)
    config.write_text("[]")
    assert "config.json holds a JSON list, not an object" in one_line_error(folder)
    config.write_bytes(LFS_POINTER)
    assert "config.json: this is a git-lfs pointer" in one_line_error(folder)
    config.unlink()
    assert "config.json is missing" in one_line_error(folder)
    assert "is not a folder" in one_line_error(folder / "nope")


def test_pickles_are_refused_with_advice(folder: Path) -> None:
    assert "holds no *.safetensors file" in one_line_error(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    message = one_line_error(folder)
    assert "only pickled weights (pytorch_model.bin)" in message
    assert "safe_serialization=True" in message


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "AWQ"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "FP8"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
    ],
)
def test_quantized_checkpoints_are_named(folder: Path, config: dict[str, Any], name: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert one_line_error(folder).startswith(f"{name} checkpoint detected: ")


def test_quantized_checkpoints_that_do_not_say_so(folder: Path) -> None:
    marker = folder / "quantize_config.json"
    marker.write_text("{}")
    assert one_line_error(folder).startswith("GPTQ checkpoint detected: ")
    marker.rename(folder / "quant_config.json")
    assert one_line_error(folder).startswith("AWQ checkpoint detected: ")
    (folder / "quant_config.json").unlink()
    packed = {"l.qweight": np.zeros((2, 2), np.int32)}
    save(folder / "model.safetensors", packed)
    assert one_line_error(folder).startswith("GPTQ or AWQ checkpoint detected: ")
    save(folder / "model.safetensors", {**packed, "l.g_idx": np.zeros(2, np.int32)})
    assert one_line_error(folder).startswith("GPTQ checkpoint detected: ")


def test_buffers_of_other_dtypes_are_refused_only_when_read(folder: Path) -> None:
    save(folder / "model.safetensors", {"ids": np.arange(3), "a.weight": weight(1)})
    checkpoint = HuggingFaceCheckpoint(folder)
    assert checkpoint.tensors["ids"].dtype == "I64"
    with pytest.raises(CheckpointError, match=r"'ids' has dtype I64, .* supported: F32, F16, BF16"):
        checkpoint.read("ids")
    with pytest.raises(CheckpointError, match="has no tensor 'nope'"):
        checkpoint.read("nope")
    save(folder / "model.safetensors", {"a.weight": np.arange(3)})
    assert "tensor 'a.weight' has dtype I64, which is not supported" in one_line_error(folder)


def test_a_file_cut_after_opening_is_an_error_on_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    save(path, {"a.weight": weight(1)})
    checkpoint = HuggingFaceCheckpoint(folder)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="can no longer be read up to byte"):
        checkpoint.read("a.weight")


def test_source_hash_follows_files_and_not_place(sharded: Path, tmp_path: Path) -> None:
    before = HuggingFaceCheckpoint(sharded).source_hash()
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    assert HuggingFaceCheckpoint(copy).source_hash() == before
    (copy / "tokenizer.json").write_text("{}")
    changed = HuggingFaceCheckpoint(copy).source_hash()
    assert changed != before
    os.utime(copy / "tokenizer.json", ns=(0, 5))
    assert HuggingFaceCheckpoint(copy).source_hash() != changed


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Truncate anywhere, then overwrite bytes of the header: never any other exception."""
    content = bytearray(
        safetensors.numpy.save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)})
    )
    header_end = 8 + int.from_bytes(content[:8], "little")
    content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    edits = st.lists(st.tuples(st.integers(0, header_end), st.integers(0, 255)), max_size=6)
    for position, value in data.draw(edits):
        if position < len(content):
            content[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    for name, info in header.tensors.items():
        assert header.offsets_bytes[name] + info.num_bytes <= len(content)
