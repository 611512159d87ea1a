import errno
import hashlib
import os
from pathlib import Path

import pytest
from everycast.artifact.errors import ArtifactError, CapacityError
from everycast.artifact.files import atomic_folder, atomic_write, disk_errors
from everycast.artifact.hashing import hash_bytes, hash_file, hash_json

AWKWARD = "Željko 張 庭 模型 a'b" * 4


def test_atomic_write_replaces(tmp_path: Path) -> None:
    path = tmp_path / AWKWARD
    atomic_write(path, b"one")
    atomic_write(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == [AWKWARD]


def test_atomic_write_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match=r"no room to write .*file: \d+ MB free there"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot write .*: No such file or directory"):
        atomic_write(tmp_path / "nowhere" / "file", b"")


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), disk_errors(tmp_path):
        raise ValueError("mine")


def test_atomic_folder_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "dist" / AWKWARD
    with atomic_folder(path) as folder:
        (folder / "lib").mkdir()
        (folder / "lib" / "cpu.so").write_bytes(b"code")
        assert not path.exists()
    assert (path / "lib" / "cpu.so").read_bytes() == b"code"
    assert list(path.parent.iterdir()) == [path]


def test_atomic_folder_replaces_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for content in ("old", "new"):
        with atomic_folder(path) as folder:
            (folder / content).touch()
            assert content == "old" or (path / "old").exists()
    assert [entry.name for entry in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_folder_leaves_the_old_one_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with atomic_folder(path) as folder:
        (folder / "old").touch()
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as folder:
        (folder / "new").touch()
        raise KeyboardInterrupt
    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_folder_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename into place fails after the old folder has stepped aside."""
    path = tmp_path / "model"
    with atomic_folder(path) as folder:
        (folder / "old").touch()
    rename = Path.rename

    def fails_once(self: Path, target: Path) -> Path:
        if Path(target) == path and (self / "new").exists():
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_once)
    with (
        pytest.raises(ArtifactError, match="Input/output error"),
        atomic_folder(path) as folder,
    ):
        (folder / "new").touch()
    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_hashes(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    path = tmp_path / "data"
    path.write_bytes(data)
    pieces: list[int] = []
    assert hash_file(path, progress=pieces.append) == hash_bytes(data)
    assert sum(pieces) == len(data) and len(pieces) > 1
    assert hash_file(path, "md5") == hashlib.md5(data, usedforsecurity=False).hexdigest()
    assert hash_json({"a": 1, "b": [2]}) == hash_json({"b": [2], "a": 1})
    assert hash_json({"a": 1}) != hash_json({"a": 2})
