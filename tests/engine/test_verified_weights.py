"""Weights are hashed once, and again when they were touched."""

import os
import shutil
from pathlib import Path

import pytest
from everycast.artifact.errors import ArtifactError
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.engine.verified_weights import verify_once


@pytest.fixture
def folder(tiny_artifact: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "artifact"
    return shutil.copytree(tiny_artifact, copy, ignore=shutil.ignore_patterns(".packed"))


def count_hashes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the weights were hashed in one load."""
    counts = []
    with monkeypatch.context() as patch:
        verify = TensorCacheReader.verify
        patch.setattr(TensorCacheReader, "verify", lambda self: counts.append(verify(self)))
        verify_once(TensorCacheReader(folder))
    return len(counts)


def test_once_and_again_after_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [count_hashes(folder, monkeypatch) for _ in range(3)] == [1, 0, 0]
    shard = next(folder.glob("params_shard_*.bin"))
    os.utime(shard, ns=(1, 1))
    assert [count_hashes(folder, monkeypatch) for _ in range(2)] == [1, 0]
    copy = shutil.copytree(folder, folder.with_name("copy"))  # other files, the same times
    assert count_hashes(copy, monkeypatch) == 1
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    for _ in range(2):
        with pytest.raises(ArtifactError, match="is corrupted: its MD5 is not that of"):
            verify_once(TensorCacheReader(folder))


def test_a_missing_shard(folder: Path) -> None:
    weights = TensorCacheReader(folder)
    verify_once(weights)
    for shard in folder.glob("params_shard_*.bin"):
        shard.unlink()
    with pytest.raises(Exception, match="params_shard_0"):
        verify_once(weights)


def test_where_the_artifact_cannot_be_written_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert [count_hashes(folder, monkeypatch) for _ in range(2)] == [1, 0]
    assert not (folder / ".packed").exists()
