"""Fetching from a hub: the real client against a small hub on the loopback interface."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import safetensors.numpy
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint.hub import fetch_hub
from everycast.relax_models.checkpoint.huggingface import HuggingFaceCheckpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "f" * 40
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": safetensors.numpy.save({"a.weight": WEIGHT}),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "tokenizer.model": b"spm",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"copy",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"onnx",
}
WANTED = {
    "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "tokenizer.model",
}  # fmt: skip


class Hub(ThreadingHTTPServer):
    """`org/tiny` (branch main, tag v1), `org/gated`, and `org/broken`, which always fails."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        match path.strip("/").split("/"):
            case ["api", "models", "org", "broken", *_]:
                self.reply(418, X_Error_Message="teapot")
            case ["api", "models", "org", "tiny" | "gated" as name, "revision", revision]:
                commits = {"main": COMMIT, COMMIT: COMMIT, "v1": OTHER_COMMIT}
                if revision not in commits:
                    self.reply(404, X_Error_Code="RevisionNotFound")
                    return
                siblings = [{"rfilename": file} for file in FILES]
                model = {"id": f"org/{name}", "sha": commits[revision], "siblings": siblings}
                self.reply_json(model)
            case ["api", "models", "org", "tiny" | "gated", "tree", _]:
                self.reply_json(
                    [
                        {"type": "file", "path": file, "size": len(data), "oid": etag(data)}
                        for file, data in FILES.items()
                    ]
                )
            case ["org", "gated", "resolve", *_]:
                self.reply(403, X_Error_Code="GatedRepo")
            case ["org", "tiny", "resolve", commit, *file]:
                data = FILES["/".join(file)]
                self.reply(200, data, ETag=f'"{etag(data)}"', X_Repo_Commit=commit)
            case _:
                self.reply(404, X_Error_Code="RepoNotFound")


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, with this process's client pointed at it and at an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return hub


def one_line_error(repo: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        fetch_hub(repo, revision=revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fetch_takes_weights_and_tokenizer_only(client: Hub) -> None:
    folder = fetch_hub("org/tiny")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == WANTED
    checkpoint = HuggingFaceCheckpoint(folder)
    np.testing.assert_array_equal(checkpoint.read("a.weight"), WEIGHT)
    client.requests.clear()
    assert fetch_hub("org/tiny") == folder
    assert not [request for request in client.requests if request.startswith("GET /org/")]


def test_revision_by_tag_and_by_commit(client: Hub) -> None:
    assert fetch_hub("org/tiny", revision="v1").name == OTHER_COMMIT
    assert fetch_hub("org/tiny", revision=COMMIT).name == COMMIT


def test_without_a_connection_the_cached_snapshot_is_used(
    client: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = fetch_hub("org/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch_hub("org/tiny") == folder


def test_errors_are_one_line(client: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"HF://org/none was not found at {client.url}" in one_line_error("org/none")
    assert "not its revision 'v9'" in one_line_error("org/tiny", "v9")
    gated = one_line_error("org/gated")
    assert f"HF://org/gated is gated: accept its terms at {client.url}/org/gated" in gated
    assert "is not a name on the hub" in one_line_error("a/b/c")
    assert "answered with status 418" in one_line_error("org/broken")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached; check" in one_line_error("org/tiny")


def test_environment_of_the_client_is_honoured(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT and an HF_HOME with odd characters, as a user sets them: in a new process."""
    home = tmp_path / "Željko 張 庭/模型 a'b"
    home.mkdir(parents=True)
    program = (
        "from everycast.relax_models.checkpoint.hub import fetch_hub; print(fetch_hub('org/tiny'))"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONUTF8": "1"}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        environment.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    folder = Path(result.stdout.strip())
    assert folder.is_relative_to(home)
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
