"""The GGUF reader against files written, and read, by PyPI `gguf`."""

import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint.gguf import GGUFCheckpoint
from everycast.relax_models.checkpoint.gguf_header import BLOCK_TYPES, UNSUPPORTED_TYPES
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

N, K = 6, 512
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
AWKWARD = 'Željko 張 庭 模型 a\'b "c"'


def weight(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)


def blocks(type_name: str) -> np.ndarray:
    """uint8 [N, bytes per row] of a valid encoding (k-quants: any bytes are)."""
    if type_name in QUANTIZABLE:
        return gguf.quants.quantize(weight(), Type[type_name])
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Type[type_name]]
    row = K // block_size * block_bytes
    return np.random.default_rng(1).integers(0, 256, (N, row), dtype=np.uint8)


def write(path: Path, add: Callable[[gguf.GGUFWriter], None], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama", **options)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_everything(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("n.u8", 200)
    writer.add_int8("n.i8", -5)
    writer.add_uint16("n.u16", 60000)
    writer.add_int16("n.i16", -30000)
    writer.add_uint32("n.u32", 4_000_000_000)
    writer.add_int32("n.i32", -2_000_000_000)
    writer.add_uint64("n.u64", 1 << 63)
    writer.add_int64("n.i64", -(1 << 62))
    writer.add_float32("n.f32", 0.5)
    writer.add_float64("n.f64", 1e-300)
    writer.add_bool("n.bool", True)
    writer.add_string("s", "täg\n模型")
    writer.add_token_list(["a", "ß", "", "模"])
    writer.add_token_scores([0.0, -1.5, 2.25, 3.0])
    writer.add_array("flags", [True, False])
    writer.add_tensor("f32", weight(1))
    writer.add_tensor("f16", weight(2).astype(np.float16))
    bf16 = weight(3).astype(ml_dtypes.bfloat16)
    writer.add_tensor("bf16", bf16.view(np.uint8), raw_dtype=Type.BF16)
    writer.add_tensor("norm", weight(4)[0])
    writer.add_tensor("cube", weight(5).reshape(2, 3, K))
    for name in (*QUANTIZABLE, *K_QUANTS):
        writer.add_tensor(name.lower(), blocks(name), raw_dtype=Type[name])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / AWKWARD / "m.gguf", add_everything)


def test_metadata_and_tensors_equal_the_reference_reader(whole: Path) -> None:
    checkpoint = GGUFCheckpoint(whole)
    reader = gguf.GGUFReader(whole)
    expected = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert checkpoint.config == expected
    assert checkpoint.config["n.bool"] is True
    assert checkpoint.kind == "gguf"
    assert list(checkpoint.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = checkpoint.tensors[tensor.name]
        assert info.shape == tuple(int(d) for d in reversed(tensor.shape))
        assert (info.dtype, info.num_bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        data = checkpoint.read(tensor.name)
        assert data.tobytes() == tensor.data.tobytes()


def test_float_tensors_come_back_as_written(whole: Path) -> None:
    checkpoint = GGUFCheckpoint(whole)
    np.testing.assert_array_equal(checkpoint.read("f32"), weight(1), strict=True)
    np.testing.assert_array_equal(checkpoint.read("f16"), weight(2).astype(np.float16), strict=True)
    bf16 = checkpoint.read("bf16")
    assert bf16.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(bf16, weight(3).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(checkpoint.read("norm"), weight(4)[0], strict=True)
    np.testing.assert_array_equal(checkpoint.read("cube"), weight(5).reshape(2, 3, K), strict=True)


@pytest.mark.parametrize("type_name", QUANTIZABLE + K_QUANTS)
def test_blocks_come_back_raw_one_row_a_row(whole: Path, type_name: str) -> None:
    checkpoint = GGUFCheckpoint(whole)
    assert checkpoint.tensors[type_name.lower()].shape == (N, K)
    np.testing.assert_array_equal(
        checkpoint.read(type_name.lower()), blocks(type_name), strict=True
    )


def test_type_table_is_the_reference_packages() -> None:
    for number, (name, values, num_bytes) in BLOCK_TYPES.items():
        assert Type(number).name == name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (values, num_bytes)
    for number, name in UNSUPPORTED_TYPES.items():
        assert Type(number).name == name


def test_reading_maps_the_file_and_names_a_missing_tensor(whole: Path) -> None:
    checkpoint = GGUFCheckpoint(whole)
    data = checkpoint.read("q4_0")
    assert not data.flags.owndata and not data.flags.writeable
    with pytest.raises(CheckpointError, match=r"m\.gguf has no tensor 'nope'$"):
        checkpoint.read("nope")


def test_source_hash_follows_the_file(whole: Path) -> None:
    before = GGUFCheckpoint(whole).source_hash()
    assert GGUFCheckpoint(whole).source_hash() == before
    os.utime(whole, ns=(0, 12345))
    assert GGUFCheckpoint(whole).source_hash() != before


def test_a_large_vocabulary_opens_fast(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(262_144)]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_scores([0.5] * len(tokens))

    path = write(tmp_path / "vocab.gguf", add)
    start = time.process_time()
    checkpoint = GGUFCheckpoint(path)
    assert time.process_time() - start < 1.0
    assert checkpoint.config["tokenizer.ggml.tokens"] == tokens


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model split in three, metadata in the first part, tensors t0..t5 two a part."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_string("s", "first")
        for i in range(6):
            writer.add_tensor(f"t{i}", weight(i))

    write(tmp_path / "m.gguf", add, split_max_tensors=2)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in found] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole_split_model(parts: list[Path], opened: int) -> None:
    checkpoint = GGUFCheckpoint(parts[opened])
    assert checkpoint.path == parts[0]
    assert checkpoint.config["s"] == "first"
    assert list(checkpoint.tensors) == [f"t{i}" for i in range(6)]
    for i in range(6):
        np.testing.assert_array_equal(checkpoint.read(f"t{i}"), weight(i))


def one_line_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        GGUFCheckpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    assert "missing beside it: m-00002-of-00003.gguf" in one_line_error(parts[2])


def test_renamed_parts_are_refused(parts: list[Path]) -> None:
    alone = parts[1].rename(parts[1].with_name("other.gguf"))
    assert "says it is part '1' (from 0) of '3'" in one_line_error(alone)
    swapped = parts[2].rename(parts[1])
    parts[0].with_name(parts[2].name).write_bytes(swapped.read_bytes())
    assert "restore the original names" in one_line_error(parts[0])
    alone.rename(alone.with_name("m-00004-of-00003.gguf"))
    assert "part 4 of 3" in one_line_error(alone.with_name("m-00004-of-00003.gguf"))


def test_a_tensor_in_two_parts_and_a_wrong_total_are_refused(tmp_path: Path) -> None:
    for part in (1, 2):
        write(
            tmp_path / f"m-0000{part}-of-00002.gguf",
            lambda writer: writer.add_tensor("t", weight()),
        )
    assert "tensor 't' is in another part as well" in one_line_error(
        tmp_path / "m-00001-of-00002.gguf"
    )

    def first(writer: gguf.GGUFWriter) -> None:
        writer.add_int32("split.tensors.count", 3)
        writer.add_tensor("t", weight())

    write(tmp_path / "n-00001-of-00002.gguf", first)
    write(tmp_path / "n-00002-of-00002.gguf", lambda writer: writer.add_tensor("u", weight()))
    assert "hold 2 tensors, split.tensors.count says '3'" in one_line_error(
        tmp_path / "n-00001-of-00002.gguf"
    )


def test_an_unsupported_type_names_type_and_tensor(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        row = 2 * gguf.GGML_QUANT_SIZES[Type.IQ2_XS][1]
        for name in ("blk.0.w", "blk.1.w"):
            writer.add_tensor(name, np.zeros((N, row), np.uint8), raw_dtype=Type.IQ2_XS)

    message = one_line_error(write(tmp_path / "m.gguf", add))
    assert "tensor 'blk.0.w' (and 1 more tensors) has type IQ2_XS, which is not" in message
    assert "supported: F32, F16, Q4_0" in message


def test_a_truncated_file_says_where_it_ends(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: len(data) // 2])
    assert re.search(rf"is truncated: it has {len(data) // 2} bytes, tensor", one_line_error(cut))
    cut.write_bytes(data[:100])
    assert "is truncated or damaged: its header does not end" in one_line_error(cut)
    cut.write_bytes(b"")
    assert "is empty" in one_line_error(cut)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04" + b"\0" * 60, "is not a GGUF file: it starts with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF version 3 is not supported"),
        (b"GG", "is not a GGUF file"),
        (b"GGUF\3", "is truncated or damaged"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            "this is a git-lfs pointer",
        ),
    ],
)
def test_other_files_are_told_apart(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(start)
    assert message in one_line_error(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "is missing" in one_line_error(tmp_path / "m.gguf")
    assert "is not a file" in one_line_error(tmp_path)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(values: bytes = b"", num_values: int = 0, tensors: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, num_values) + values + tensors


ONE = string(b"k") + struct.pack("<IB", 0, 7)


def nested(depth: int) -> bytes:
    """Metadata `k`: arrays of one array, `depth` deep, the innermost empty."""
    return string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + b"\0" * 12


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(ONE + ONE, 2), "metadata 'k' is there twice"),
        (header(string(b"k") + struct.pack("<I", 13), 1), "'k' has value type 13"),
        (
            header(string(b"k") + struct.pack("<I", 8) + string(b"\xff"), 1),
            "'k' is not valid UTF-8",
        ),
        (header(string(b"\xff"), 1), "metadata number 0 is not valid UTF-8"),
        (header(string(b"k") + struct.pack("<IIQ", 9, 0, 1 << 60), 1), "is an array of 1152921504"),
        (header(nested(9), 1), "nests arrays more than 4 deep"),
        (
            header(string(b"general.alignment") + struct.pack("<II", 4, 12), 1),
            "general.alignment is '12'",
        ),
        (
            header(tensors=string(b"t") + struct.pack("<IQQIQ", 2, 31, 1, 2, 0), count=1),
            "tensor 't' of type Q4_0 has shape [1, 31]; its last dimension must be a ",
        ),
        (header(tensors=string(b"t") + struct.pack("<I", 5), count=1), "has 5 dimensions"),
        (
            header(tensors=string(b"t") + struct.pack("<IQIQ", 1, 1 << 62, 0, 0), count=1),
            "is truncated: it has",
        ),
        (
            header(tensors=string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 3), count=1) + b"\0" * 99,
            "tensor 't' is not aligned to 32 bytes",
        ),
        (
            header(tensors=(string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2, count=2),
            "tensor 't' is there twice",
        ),
        (header(tensors=string(b"\xff"), count=1), "name of tensor 0 is not valid UTF-8"),
        (header(num_values=1 << 63), "is truncated or damaged"),
        (header(count=1 << 63), "is truncated or damaged"),
    ],
)
def test_damaged_headers(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert message in one_line_error(path)


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(nested(2), 1))
    assert GGUFCheckpoint(path).config == {"k": [[[]]]}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_or_harmless(whole: Path, data: st.DataObject) -> None:
    """Truncate anywhere, then overwrite bytes of the header: never any other exception."""
    content = bytearray(whole.read_bytes())
    first_tensor = gguf_data_start(content)
    content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    edits = st.lists(st.tuples(st.integers(0, first_tensor), st.integers(0, 255)), max_size=8)
    for position, value in data.draw(edits):
        if position < len(content):
            content[position] = value
    path = whole.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        checkpoint = GGUFCheckpoint(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
        return
    for name, info in checkpoint.tensors.items():
        assert checkpoint.read(name).nbytes == info.num_bytes <= len(content)


def gguf_data_start(content: bytearray) -> int:
    """Where the header ends: the values of the first tensor written, 'f32'."""
    return bytes(content).index(weight(1).tobytes()[:64])


@pytest.mark.slow
def test_the_default_model(default_gguf: Path) -> None:
    start = time.process_time()
    checkpoint = GGUFCheckpoint(default_gguf)
    assert time.process_time() - start < 0.5
    assert checkpoint.config["general.architecture"] == "llama"
    assert len(checkpoint.config["tokenizer.ggml.tokens"]) == 49152
    assert len(checkpoint.tensors) == 272
    assert checkpoint.tensors["token_embd.weight"].shape == (49152, 576)
    assert checkpoint.read("blk.0.attn_q.weight").shape == (576, 576 // 32 * 20)
    assert all(np.isfinite(checkpoint.read("output_norm.weight")))
