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
UNREACHABLE = "http://127.0.0.1:9"
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


CLIENT = """
import json, sys
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint.hub import fetch_hub
answers = []
for repo, revision in json.loads(sys.argv[1]):
    try:
        answers.append(str(fetch_hub(repo, revision=revision)))
    except CheckpointError as error:
        answers.append(f"error: {error}")
print(json.dumps(answers))
"""


def fetch(url: str, home: Path, *models: tuple[str, str | None]) -> list[str]:
    """Folder or error for each (repo, revision), from one process with HF_ENDPOINT and HF_HOME.

    The client reads its environment when it is imported, hence a process of its own.
    """
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home)}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"):
        environment.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-P", "-c", CLIENT, json.dumps(models)],
        env=environment,
        capture_output=True,
        timeout=60,
        check=True,
    )
    answers: list[str] = json.loads(result.stdout)
    assert not any("\n" in answer for answer in answers)
    return answers


def files(folder: str) -> set[str]:
    root = Path(folder)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_fetch_takes_weights_and_tokenizer_only_and_only_once(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "Željko 張 庭/模型 a'b"
    home.mkdir(parents=True)
    main, again, tag, commit = fetch(
        hub.url, home, *(("org/tiny", revision) for revision in (None, None, "v1", COMMIT))
    )
    assert main == again == commit
    assert Path(main).is_relative_to(home)
    assert files(main) == files(tag) == WANTED
    assert (Path(main).name, Path(tag).name) == (COMMIT, OTHER_COMMIT)
    downloads = [request for request in hub.requests if request.startswith("GET /org/tiny/")]
    assert len(downloads) == len(set(downloads))
    checkpoint = HuggingFaceCheckpoint(Path(main))
    np.testing.assert_array_equal(checkpoint.read("a.weight"), WEIGHT)


def test_without_a_connection_the_cached_snapshot_is_used(hub: Hub, tmp_path: Path) -> None:
    [folder] = fetch(hub.url, tmp_path, ("org/tiny", None))
    cached, other = fetch(UNREACHABLE, tmp_path, ("org/tiny", None), ("org/other", None))
    assert cached == folder
    assert f"HF://org/other is not whole in the cache, and {UNREACHABLE} cannot be reached" in other


def test_errors_are_one_line(hub: Hub, tmp_path: Path) -> None:
    missing, revision, gated, malformed, broken = fetch(
        hub.url,
        tmp_path,
        *(("org/none", None), ("org/tiny", "v9"), ("org/gated", None), ("a/b/c", None)),
        ("org/broken", None),
    )
    assert f"error: HF://org/none was not found at {hub.url}; check the spelling" in missing
    assert "HF://org/tiny@v9: org/tiny exists, but not its revision 'v9'" in revision
    assert f"HF://org/gated is gated: accept its terms at {hub.url}/org/gated" in gated
    assert "error: 'a/b/c' is not a name on the hub; write HF://" in malformed
    assert f"{hub.url} answered with status 418" in broken
