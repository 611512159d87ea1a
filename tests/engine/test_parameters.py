import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.artifact.dtypes import numpy_dtype
from everycast.artifact.errors import ArtifactError, CapacityError
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.engine import parameters
from everycast.engine.parameters import load_parameters, read_parameters
from everycast.engine.runtime import Library, as_array
from everycast.schedules.cpu.packing import LAYOUT_VERSION
from hypothesis import given
from hypothesis import strategies as st

CURRENT = f"_v{LAYOUT_VERSION}_"
"""Part of every packing function's name."""


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy without packed weights, to change."""
    folder = tmp_path / "artifact"
    return shutil.copytree(tiny_artifact, folder, ignore=shutil.ignore_patterns(".packed"))


@pytest.fixture
def library(tiny_artifact: Path) -> Library:
    (file,) = (tiny_artifact / "lib").iterdir()
    return Library(file)


def load(folder: Path, library: Library, **options: Any) -> list[np.ndarray]:
    """The parameters one by one; this library takes them as one buffer."""
    (tensor,) = load_parameters(folder, library, TensorCacheReader(folder), **options)
    memory = as_array(tensor)
    return [
        memory[p.offset : p.offset + p.num_bytes].view(numpy_dtype(p.dtype)).reshape(p.shape)
        for p in read_parameters(library.metadata)[0]
    ]


def test_a_library_may_take_a_tensor_for_each_parameter(artifact: Path, library: Library) -> None:
    expected = load(artifact, library)
    other = Other(library, parameters_in_one_buffer=False)
    tensors = load_parameters(artifact, other, TensorCacheReader(artifact))  # type: ignore[arg-type]
    for tensor, array in zip(tensors, expected, strict=True):
        np.testing.assert_array_equal(as_array(tensor), array)


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from(["float32", "uint8"])), min_size=1))
def test_parameters_lie_one_after_another(entries: list[tuple[int, str]]) -> None:
    metadata = {
        "parameters": [
            {"name": str(i), "shape": [2, n], "dtype": dtype, "sources": ["a"], "pack": None}
            for i, (n, dtype) in enumerate(entries)
        ]
    }
    read, num_bytes = read_parameters(metadata)
    end = 0
    for parameter, (n, dtype) in zip(read, entries, strict=True):
        assert parameter.num_bytes == 2 * n * np.dtype(dtype).itemsize
        assert end <= parameter.offset < end + 64 and parameter.offset % 64 == 0
        end = parameter.offset + parameter.num_bytes
    assert end <= num_bytes < end + 64


def test_packed_once_then_read(artifact: Path, library: Library) -> None:
    seen: list[tuple[int, int]] = []
    first = load(artifact, library, progress=lambda *done: seen.append(done))
    (file,) = (artifact / ".packed").iterdir()
    listed, num_bytes = read_parameters(library.metadata)
    assert seen[-1][1] == num_bytes < file.stat().st_size
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(first) == len(listed) == len(seen)
    written = file.stat().st_mtime_ns
    seen.clear()
    second = load(artifact, library, progress=lambda *done: seen.append(done))
    assert not seen and file.stat().st_mtime_ns == written
    for parameter, a, b in zip(listed, first, second, strict=True):
        assert a.shape == parameter.shape and a.dtype.name == parameter.dtype
        assert b.ctypes.data % 64 == 0
        np.testing.assert_array_equal(a, b)


def test_a_parameter_without_packing_is_its_tensor(artifact: Path, library: Library) -> None:
    weights = TensorCacheReader(artifact)
    plain = [p.pack is None for p in read_parameters(library.metadata)[0]]
    assert any(plain) and not all(plain)
    for parameter, array in zip(
        read_parameters(library.metadata)[0], load(artifact, library), strict=True
    ):
        if parameter.pack is None:
            np.testing.assert_array_equal(array, weights.read(parameter.name))


def test_the_packed_file_is_of_these_weights_and_this_layout(
    artifact: Path, library: Library
) -> None:
    load(artifact, library)
    (before,) = (artifact / ".packed").iterdir()
    packers = {p["pack"] for p in library.metadata["parameters"]} - {None}
    assert packers and all(CURRENT in name for name in packers)
    other = Other(library)
    load(artifact, other)
    (after,) = (artifact / ".packed").iterdir()
    assert after != before  # and the stale one is gone


class Other:
    """The same library with another version of the packed layout."""

    def __init__(self, library: Library, **changes: Any) -> None:
        text = json.dumps({**library.metadata, **changes}).replace(CURRENT, "_v999_")
        assert "_v999_" in text
        self.library, self.metadata = library, json.loads(text)

    def function(self, name: str) -> Any:
        return self.library.function(name.replace("_v999_", CURRENT))


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-100],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "without a digest": lambda data: data[:-32],
    "a bit in front": lambda data: flip(data, 0),
    "a bit in the middle": lambda data: flip(data, len(data) // 2),
    "a bit of the digest": lambda data: flip(data, len(data) - 1),
    "a page of zeros": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "pages changed over": lambda data: data[4096:8192] + data[:4096] + data[8192:],
    "no data at all": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_packed_file_is_made_again(
    artifact: Path, library: Library, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load(artifact, library)
    (file,) = (artifact / ".packed").iterdir()
    content = file.read_bytes()
    file.write_bytes(DAMAGE[damage](content))
    for a, b in zip(load(artifact, library), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert file.read_bytes() == content
    (record,) = caplog.records
    assert record.getMessage() == f"{file} is not what was written; its weights are packed again"


def test_the_packed_file_of_other_weights_is_not_taken(artifact: Path, library: Library) -> None:
    expected = load(artifact, library)
    (file,) = (artifact / ".packed").iterdir()
    content = file.read_bytes()
    load(artifact, Other(library))  # type: ignore[arg-type]
    (other,) = (artifact / ".packed").iterdir()
    other.rename(file)
    assert file.stat().st_size == len(content)
    for a, b in zip(load(artifact, library), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert file.read_bytes() == content


def test_a_packed_file_that_cannot_be_read_is_made_again(
    artifact: Path,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = load(artifact, library)
    read, calls = parameters.read_packed_file, iter([OSError(5, "Input/output error")])

    def fails_once(*arguments: Any) -> Any:
        for error in calls:
            raise error
        return read(*arguments)

    monkeypatch.setattr(parameters, "read_packed_file", fails_once)
    for a, b in zip(load(artifact, library), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert "cannot be read (Input/output error)" in caplog.text


def test_a_damaged_packed_file_and_a_corrupted_shard_give_nothing(
    artifact: Path, library: Library
) -> None:
    load(artifact, library)
    (file,) = (artifact / ".packed").iterdir()
    for path in (file, artifact / "params_shard_0.bin"):
        path.write_bytes(flip(path.read_bytes(), 1000))
    with pytest.raises(ArtifactError, match=r"params_shard_0\.bin"):
        load(artifact, library)


def test_a_disk_that_does_not_keep_what_is_written(
    artifact: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "read_packed_file", lambda *_: None)
    with pytest.raises(ArtifactError, match="is not what was just written; check the disk"):
        load(artifact, library)


def test_a_corrupted_shard_is_found_before_packing(artifact: Path, library: Library) -> None:
    shard = artifact / "params_shard_0.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"params_shard_0\.bin"):
        load(artifact, library)
    assert not (artifact / ".packed").exists()


def changed(library: Library, name: str, **values: Any) -> Any:
    """The library, but what it says of one parameter is changed."""
    metadata = json.loads(json.dumps(library.metadata))
    for entry in metadata["parameters"]:
        if entry["name"] == name:
            entry.update(values)
    other = Other(library)
    other.metadata = metadata
    return other


def test_missing_tensors_are_all_named(artifact: Path, library: Library) -> None:
    metadata = json.loads(json.dumps(library.metadata))
    for entry in metadata["parameters"]:
        entry["sources"] = [f"other.{name}" for name in entry["sources"]]
    other = Other(library)
    other.metadata = metadata
    count = sum(len(entry["sources"]) for entry in metadata["parameters"])
    with pytest.raises(ArtifactError, match=rf"lacks {count} tensors .*: other\..*, …; build"):
        load(artifact, other)  # type: ignore[arg-type]


def test_tensors_of_another_form_are_named(artifact: Path, library: Library) -> None:
    norm = "model.norm.weight"
    with pytest.raises(ArtifactError, match=rf"{norm} as float32 \(64,\), but its library takes"):
        load(artifact, changed(library, norm, shape=[65]))
    packed = next(p for p in library.metadata["parameters"] if p["pack"])
    swapped = changed(library, packed["name"], sources=packed["sources"][::-1])
    with pytest.raises(ArtifactError, match=r"do not fit the library: .*; compile") as info:
        load(artifact, swapped)
    assert "\n" not in str(info.value)
    assert list((artifact / ".packed").iterdir()) == []


def test_a_full_disk_leaves_nothing(
    artifact: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> np.ndarray:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parameters, "_packed", full)
    with pytest.raises(CapacityError, match="no room to write"):
        load(artifact, library)
    assert list((artifact / ".packed").iterdir()) == []


def test_an_artifact_that_cannot_be_written_to_is_packed_in_the_cache(
    artifact: Path, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(parameters.os, "access", lambda path, mode: False)
    expected = load(artifact, library)
    assert not (artifact / ".packed").exists()
    (in_cache,) = (tmp_path / "cache" / "packed").iterdir()
    # One that came with the artifact is taken, unless it is damaged.
    beside = artifact / ".packed" / in_cache.name
    beside.parent.mkdir()
    in_cache.rename(beside)
    load(artifact, library)
    assert not in_cache.exists()
    beside.write_bytes(flip(beside.read_bytes(), 99))
    for a, b in zip(load(artifact, library), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert in_cache.exists()
