import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from everycast.artifact import tensor_cache as module
from everycast.artifact.errors import ArtifactError
from everycast.artifact.tensor_cache import TensorCacheReader, TensorCacheWriter
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = ["float32", "float16", "bfloat16", "uint32", "int8", "bool", "int64", "float8_e4m3fn"]


def array_of(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return values.astype(module.numpy_dtype(dtype))


def write(folder: Path, tensors: dict[str, np.ndarray], **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with TensorCacheWriter(folder, {"who": "test"}, **options) as writer:
        for name, array in tensors.items():
            writer.add(name, array)
    return folder


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return {f"layers.{i}.{dtype}": array_of(dtype, (i + 1, 7), i) for i, dtype in enumerate(DTYPES)}


@pytest.fixture
def cache(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    return write(tmp_path / "cache", tensors, shard_bytes=256)


def edit(cache: Path, change: Any) -> None:
    path = cache / "tensor-cache.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_what_is_written_is_read(cache: Path, tensors: dict[str, np.ndarray]) -> None:
    reader = TensorCacheReader(cache)
    assert reader.names == tuple(tensors) == tuple(reader)
    for name, array in tensors.items():
        read = reader.read(name)
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)
        assert read.ctypes.data % 64 == 0
        assert not read.flags.writeable
        info = reader.info(name)
        assert (info.shape, info.num_bytes) == (array.shape, array.nbytes)
    reader.verify()
    assert reader.metadata == {
        "who": "test",
        "ParamSize": len(tensors),
        "ParamBytes": sum(a.nbytes for a in tensors.values()),
    }


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 6), max_size=3), st.booleans()),
        max_size=8,
    ),
    st.integers(1, 500),
)
def test_any_shapes_and_shard_sizes(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[tuple[str, list[int], bool]],
    shard_bytes: int,
) -> None:
    """Scalars, empty tensors, and arrays that do not lie in C order included."""
    tensors = {
        f"t{i}": array_of(dtype, tuple(shape), i).T if turned else array_of(dtype, tuple(shape), i)
        for i, (dtype, shape, turned) in enumerate(entries)
    }
    cache = write(tmp_path_factory.mktemp("cache"), tensors, shard_bytes=shard_bytes)
    reader = TensorCacheReader(cache)
    reader.verify()
    for name, array in tensors.items():
        read = reader.read(name)
        assert (read.shape, read.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(read, array)
    for shard in reader.shards.values():
        inside = [reader.info(name) for name in reader if reader.info(name).shard == shard.file]
        assert shard.num_bytes <= shard_bytes or len(inside) == 1


def test_reading_copies_nothing(cache: Path) -> None:
    reader = TensorCacheReader(cache)
    name = reader.names[0]
    assert np.shares_memory(reader.read(name), reader.read(name))


def test_big_endian_arrays_are_stored_little_endian(tmp_path: Path) -> None:
    array = np.arange(5, dtype=">u4")
    read = TensorCacheReader(write(tmp_path, {"w": array})).read("w")
    assert read.dtype == np.uint32
    np.testing.assert_array_equal(read, array)


def test_writer_refuses(tmp_path: Path) -> None:
    with TensorCacheWriter(tmp_path) as writer:
        writer.add("w", np.zeros(3, np.float32))
        with pytest.raises(ValueError, match="tensor w was already written"):
            writer.add("w", np.zeros(3, np.float32))
        with pytest.raises(ValueError, match="element type 'complex64' cannot be stored"):
            writer.add("c", np.zeros(3, np.complex64))


def test_an_exception_leaves_no_cache(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TensorCacheWriter(tmp_path) as writer:
        writer.add("w", np.zeros(3, np.float32))
        raise RuntimeError
    with pytest.raises(ArtifactError, match=r"holds no weights: there is no tensor-cache\.json"):
        TensorCacheReader(tmp_path)


def test_verify_reports_progress(cache: Path) -> None:
    calls: list[tuple[int, int]] = []
    reader = TensorCacheReader(cache)
    reader.verify(lambda done, total: calls.append((done, total)))
    total = sum(shard.num_bytes for shard in reader.shards.values())
    assert calls[-1] == (total, total)


def test_a_flipped_bit_names_the_shard(cache: Path) -> None:
    shard = cache / "params_shard_1.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"params_shard_1\.bin is corrupted"):
        TensorCacheReader(cache).verify()


def test_a_truncated_or_missing_shard_is_named(cache: Path) -> None:
    shard = cache / "params_shard_1.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(
        ArtifactError, match=rf"params_shard_1\.bin has {len(data) - 1} bytes instead of"
    ):
        TensorCacheReader(cache)
    shard.unlink()
    with pytest.raises(ArtifactError, match=r"params_shard_1\.bin is missing"):
        TensorCacheReader(cache)


def test_an_unknown_tensor(cache: Path) -> None:
    assert "nope" not in TensorCacheReader(cache)
    with pytest.raises(ArtifactError, match="holds no tensor nope"):
        TensorCacheReader(cache).read("nope")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"metadata": 1, "records": []}', "\xff"])
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "tensor-cache.json").write_text(text, encoding="latin-1")
    with pytest.raises(ArtifactError, match=r"tensor-cache\.json"):
        TensorCacheReader(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nbytes", 12),
        ("byteOffset", 10**9),
        ("byteOffset", -64),
        ("shape", [-1, -7]),
        ("shape", None),
        ("dtype", "float7"),
        ("name", "layers.1.float16"),
        ("format", "zip"),
    ],
)
def test_records_that_make_no_sense(cache: Path, field: str, value: Any) -> None:
    edit(cache, lambda document: document["records"][0]["records"][0].update({field: value}))
    with pytest.raises(ArtifactError, match=r"tensor-cache\.json is damaged"):
        TensorCacheReader(cache)


@pytest.mark.parametrize("path", ["../secret.bin", "/etc/hostname", "a/b.bin"])
def test_shards_stay_in_the_folder(cache: Path, path: str) -> None:
    edit(cache, lambda document: document["records"][0].update(dataPath=path))
    with pytest.raises(ArtifactError, match="outside the folder"):
        TensorCacheReader(cache)


def test_hashes(tmp_path: Path) -> None:
    """The layout hash knows shapes and dtypes, the weights hash every byte."""
    base = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint32)}
    variants = {
        "base": base,
        "same": base,
        "order": dict(reversed(base.items())),
        "value": {**base, "b": np.ones(4, np.uint32)},
        "shape": {**base, "a": np.zeros((3, 2), np.float32)},
        "dtype": {**base, "b": np.zeros(4, np.int32)},
        "name": {"a": base["a"], "c": base["b"]},
    }
    readers = {n: TensorCacheReader(write(tmp_path / n, v)) for n, v in variants.items()}
    same_weights = {
        n for n, r in readers.items() if r.weights_hash() == readers["base"].weights_hash()
    }
    same_layout = {
        n for n, r in readers.items() if r.layout_hash() == readers["base"].layout_hash()
    }
    assert same_weights == {"base", "same"}
    assert same_layout == {"base", "same", "order", "value"}


def test_bfloat16_upper_halves_and_unaligned_tensors(tmp_path: Path) -> None:
    """As TVM's default encoding writes them: read as float32, and moved to an aligned place."""
    exact = np.array([1.5, -2.0, 3.25], np.float32)
    odd = np.arange(4, dtype=np.float16)
    halves = exact.astype(ml_dtypes.bfloat16).tobytes()
    (tmp_path / "params_shard_0.bin").write_bytes(halves + odd.tobytes())

    def tensor(name: str, array: np.ndarray, offset: int, size: int) -> dict[str, Any]:
        return {
            "name": name,
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "format": "f32-to-bf16",
            "nbytes": size,
            "byteOffset": offset,
        }

    shard = {
        "dataPath": "params_shard_0.bin",
        "format": "raw-shard",
        "nbytes": 14,
        "md5sum": "",
        "records": [tensor("exact", exact, 0, 6), tensor("odd", odd, 6, 8)],
    }
    document = {"metadata": {}, "records": [shard]}
    (tmp_path / "tensor-cache.json").write_text(json.dumps(document))
    reader = TensorCacheReader(tmp_path)
    for name, array in (("exact", exact), ("odd", odd)):
        read = reader.read(name)
        assert read.dtype == array.dtype
        assert read.ctypes.data % 64 == 0
        np.testing.assert_array_equal(read, array)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    # TVM leaves the files it reads to the garbage collector.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
def test_tvm_reads_ours(cache: Path, tensors: dict[str, np.ndarray]) -> None:
    import tvm
    from tvm.contrib import tvmjs

    loaded, metadata = tvmjs.load_tensor_cache(str(cache), tvm.cpu())
    assert metadata["who"] == "test"
    assert set(loaded) == set(tensors)
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype.name
        assert loaded[name].numpy().tobytes() == array.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["raw", "f32-to-bf16"])
def test_we_read_tvms(tmp_path: Path, tensors: dict[str, np.ndarray], encoding: str) -> None:
    from tvm.contrib import tvmjs

    # TVM pads nothing: most of these do not lie on a multiple of 64 bytes.
    tvmjs.dump_tensor_cache(
        tensors, str(tmp_path), encode_format=encoding, meta_data={"who": "tvm"}, shard_cap_mb=1
    )
    reader = TensorCacheReader(tmp_path)
    reader.verify()
    assert reader.metadata == {"who": "tvm"}
    for name, array in tensors.items():
        np.testing.assert_array_equal(reader.read(name), array)
        assert reader.read(name).ctypes.data % 64 == 0
