"""The table of peers, and environments that cannot be had."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.benchmarks import peer_environments
from everycast.benchmarks.engines import install
from everycast.benchmarks.peer_environments import PeerError, peer_package, peer_python
from everycast.benchmarks.peers import PEERS, Package, Peer, find_peer
from everycast.benchmarks.workers import BenchError

PACKAGE = Package("p", ("p==1",), "some seconds", {"FLAGS": "-O3"})


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_the_table_names_files_that_are_there(peer: Peer) -> None:
    assert peer.script.is_file() and "native" in peer.packages
    assert peer.prepare_script is None or peer.prepare_script.is_file()
    assert not peer.servers or peer.server_script.is_file()
    assert find_peer(peer.name) is peer
    for package in (*peer.packages.values(), *peer.servers.values()):
        assert all("==" in requirement for requirement in package.requirements)


def test_an_unknown_peer() -> None:
    with pytest.raises(BenchError, match=r"no peer 'llama\.cp'; did you mean llama\.cpp\?"):
        find_peer("llama.cp")


def test_what_a_peer_does_not_have() -> None:
    with pytest.raises(PeerError, match="openvino has no build for avx2 alone"):
        peer_package(find_peer("openvino"), "avx2")
    with pytest.raises(PeerError, match="openvino has no server: its rows are left out"):
        peer_package(find_peer("openvino"), "native", server=True)
    assert peer_package(find_peer("llama.cpp"), "avx2", server=True).name == "llama.cpp-server-avx2"


class Pip:
    """Stands in for subprocess.run."""

    def __init__(self, code: int = 0, stderr: str = "") -> None:
        self.code, self.stderr = code, stderr
        self.commands: list[list[str]] = []
        self.environment: dict[str, str] = {}

    def __call__(self, command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        self.commands.append(command)
        self.environment = env
        Path(command[-1]).mkdir() if "venv" in command else None
        code = self.code if "pip" in command else 0
        return SimpleNamespace(returncode=code, stderr=self.stderr)


def use(pip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_environments.subprocess, "run", pip)


def test_a_peer_is_installed_once_and_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip()
    use(pip, monkeypatch)
    notes: list[str] = []
    python = peer_python(PACKAGE, {}, tmp_path / "peers", notes.append)
    assert python == tmp_path / "peers" / "p" / "bin" / "python"
    assert notes == [f"installing p==1 into {tmp_path / 'peers' / 'p'} (some seconds)"]
    assert pip.commands[1][0] == str(python) and pip.commands[1][-1] == "p==1"
    assert pip.environment["FLAGS"] == "-O3"
    assert peer_python(PACKAGE, {}, tmp_path / "peers", notes.append) == python
    assert len(pip.commands) == 2 and len(notes) == 1
    newer = Package("p", ("p==2",), "some seconds")
    peer_python(newer, {}, tmp_path / "peers", notes.append)
    assert len(pip.commands) == 4


def test_the_users_own_environment(tmp_path: Path) -> None:
    chosen = {"p": Path(sys.executable)}
    assert peer_python(PACKAGE, chosen, tmp_path, pytest.fail) == Path(sys.executable)


def test_a_peer_that_cannot_be_installed_is_one_line_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Pip(1, "WARNING: x\nERROR: No matching distribution found for p==1\n"), monkeypatch)
    notes: list[str] = []
    with pytest.raises(PeerError) as caught:
        peer_python(PACKAGE, {}, tmp_path, notes.append)
    assert "\n" not in str(caught.value)
    for part in ("p cannot be installed", "No matching distribution", "--peer-python p=PYTHON"):
        assert part in str(caught.value)
    use(Pip(), monkeypatch)
    peer_python(PACKAGE, {}, tmp_path, notes.append)

    def slow(*arguments: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("pip", 3600)

    use(slow, monkeypatch)
    with pytest.raises(PeerError, match="timed out"):
        peer_python(Package("q", ("q==1",), ""), {}, tmp_path, notes.append)


def test_peers_that_cannot_be_had_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    peers = [find_peer(name) for name in ("llama.cpp", "openvino", "onnxruntime-genai")]
    chosen = {
        peer.packages["native"].name: Path(sys.executable) for peer in peers if peer.name != "x"
    }
    use(Pip(), monkeypatch)
    gguf = tmp_path / "m.gguf"
    options = {"gguf": gguf, "folder": tmp_path, "note": notes.append}
    found = install(peers, "native", chosen, **options)  # type: ignore[arg-type]
    assert [one.peer.name for one in found] == ["llama.cpp", "openvino", "onnxruntime-genai"]
    assert notes == ["preparing m.gguf for onnxruntime-genai"]
    monkeypatch.undo()
    found = install(peers, "native", chosen, **options)  # type: ignore[arg-type]
    assert [one.peer.name for one in found] == ["llama.cpp", "openvino"]  # no onnx to make it
    assert "onnxruntime-genai cannot use m.gguf: " in notes[-1]
    assert install(peers[1:2], "native", chosen, server=True, **options) == []  # type: ignore[arg-type]
    assert "openvino has no server" in notes[-1]
