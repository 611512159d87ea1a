"""The packed weights beside an artifact: made once, found again, never stale."""

import os
from pathlib import Path

import pytest
from everycast import MLCEngine
from everycast.engine import parameters
from everycast.engine.loader import open_artifact
from everycast.engine.parameters import load_parameters

REQUEST = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def num_packed_bytes(folder: Path) -> int:
    """Load the parameters; bytes that were packed for it."""
    done = 0

    def progress(now: int, total: int) -> None:
        nonlocal done
        done = now

    opened = open_artifact(folder)
    load_parameters(folder, opened.library, opened.weights, progress)
    return done


def text(folder: Path) -> str:
    with MLCEngine(folder) as engine:
        return engine.completions.create(**REQUEST).choices[0].text


def test_weights_are_packed_once(artifact: Path) -> None:
    assert num_packed_bytes(artifact) > 0
    (packed,) = (artifact / ".packed").iterdir()
    written = packed.stat().st_mtime_ns
    assert num_packed_bytes(artifact) == 0
    assert packed.stat().st_mtime_ns == written
    # A second loading reads the shards no more.
    expected = text(artifact)
    for shard in artifact.glob("params_shard_*.bin"):
        shard.write_bytes(bytes(shard.stat().st_size))
    assert text(artifact) == expected


def test_what_is_cut_short_or_stale_is_made_again(artifact: Path) -> None:
    expected = text(artifact)
    (packed,) = (artifact / ".packed").iterdir()
    content = packed.read_bytes()
    packed.write_bytes(content[:-64])
    stale = packed.with_name("0123456789abcdef.bin")
    stale.write_bytes(b"of another library")
    assert text(artifact) == expected
    assert packed.read_bytes() == content
    assert list((artifact / ".packed").iterdir()) == [packed]


def test_an_artifact_that_cannot_be_written_to(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed weights go to the user's cache. The system would let root write anywhere, so
    what it says is replaced."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("EVERYCAST_CACHE", str(cache))
    artifact.chmod(0o555)
    monkeypatch.setattr(parameters.os, "access", lambda path, mode: not (mode & os.W_OK))
    assert num_packed_bytes(artifact) > 0
    assert num_packed_bytes(artifact) == 0
    assert not (artifact / ".packed").exists()
    assert len(list((cache / "packed").iterdir())) == 1
    artifact.chmod(0o755)
