from pathlib import Path

import numpy as np
import pytest
from everycast.artifact.packed_layout import packed_offsets
from everycast.engine import packed_file
from everycast.engine.packed_file import PackedFileWriter, read_packed_file
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = "0123456789abcdef"


def write(path: Path, sizes: list[int], key: str = KEY) -> np.ndarray:
    """A file of random arrays, last to first; gives what must be read."""
    rng = np.random.default_rng(0)
    offsets, num_bytes = packed_offsets(sizes)
    expected = np.zeros(num_bytes, np.uint8)
    with PackedFileWriter(path, key, num_bytes) as file:
        for offset, size in reversed(list(zip(offsets, sizes, strict=True))):
            expected[offset : offset + size] = rng.integers(256, size=size)
            file.write(offset, expected[offset : offset + size].reshape(-1, 1))
    return expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=6), st.data())
def test_what_was_written_is_read_and_any_change_is_seen(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("packed") / "a.bin"
    expected = write(path, sizes)
    read = read_packed_file(path, KEY, len(expected))
    assert read is not None and read.ctypes.data % 64 == 0
    np.testing.assert_array_equal(read, expected)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, unique=True)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert read_packed_file(path, KEY, len(expected)) is None


def test_blocks_and_words_in_another_order_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    expected = write(path, [5 * 4096])
    content = path.read_bytes()
    for size in (8, 512, 4096):
        path.write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])
        assert read_packed_file(path, KEY, len(expected)) is None
    path.write_bytes(content)
    assert read_packed_file(path, KEY, len(expected)) is not None


def test_pieces_of_a_long_array_are_summed_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "_PIECE_BYTES", 1000)
    path = tmp_path / "a.bin"
    expected = write(path, [70, 12_345, 8192])
    np.testing.assert_array_equal(read_packed_file(path, KEY, len(expected)), expected)


def test_other_lengths_and_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    expected = write(path, [1000, 24])
    content = path.read_bytes()
    assert read_packed_file(path, KEY[::-1], len(expected)) is None
    assert read_packed_file(path, KEY, len(expected) - 64) is None
    for other in (b"", content[:-1], content[:-32], content[1:], content + b"\0"):
        path.write_bytes(other)
        assert read_packed_file(path, KEY, len(expected)) is None


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    expected = write(path, [100])
    with (
        pytest.raises(ZeroDivisionError),
        PackedFileWriter(path, KEY, len(expected)) as file,
    ):
        file.write(0, np.zeros(100))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(read_packed_file(path, KEY, len(expected)), expected)
