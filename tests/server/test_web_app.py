"""The page over HTTP: headers, ranges, caching, and nothing but the files of the site."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact.web_index import WebModel, web_model
from everycast.artifact.web_site import HEADERS, Site
from everycast.server.web_app import create_web_app
from starlette.testclient import TestClient

FOR_EVER = "public, max-age=31536000, immutable"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "sw.js").write_text("// worker")
    (folder / "assets" / "index-1a2b.js").write_text("// code")
    return folder


@pytest.fixture
def model(write_web_artifact: Callable[..., Path], tmp_path: Path) -> WebModel:
    return web_model(write_web_artifact(tmp_path / "tiny"))


@pytest.fixture
def client(page: Path, model: WebModel) -> Iterator[TestClient]:
    with TestClient(create_web_app(Site(page, (model,)))) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "kind", "caching"),
    [
        ("/", "text/html; charset=utf-8", "no-cache"),
        ("/sw.js", "text/javascript; charset=utf-8", "no-cache"),
        ("/models.json", "application/json", "no-cache"),
        ("/assets/index-1a2b.js", "text/javascript; charset=utf-8", FOR_EVER),
    ],
)
def test_every_file_has_its_type_caching_and_the_common_headers(
    client: TestClient, path: str, kind: str, caching: str
) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == kind
    assert response.headers["cache-control"] == caching
    for name, value in HEADERS.items():
        assert response.headers[name] == value


def test_models_are_served_under_their_hashes(client: TestClient, model: WebModel) -> None:
    record = client.get("/models.json").json()["models"][0]
    assert record == json.loads(json.dumps(model.record()))
    for file in model.all_files:
        response = client.get(f"/{model.base}{file.path}")
        assert response.content == file.source.read_bytes()
        assert response.headers["etag"] == f'"{file.sha256}"'
        assert "immutable" in response.headers["cache-control"]
    library = client.head(f"/{model.base}lib/webgpu.wasm")
    assert library.headers["content-type"] == "application/wasm"
    assert library.content == b""


def test_a_download_goes_on_where_it_broke(client: TestClient, model: WebModel) -> None:
    file = model.files[-1]
    url = f"/{model.base}{file.path}"
    rest = client.get(url, headers={"Range": "bytes=1000-", "If-Range": f'"{file.sha256}"'})
    assert rest.status_code == 206
    assert rest.headers["content-range"] == f"bytes 1000-{file.num_bytes - 1}/{file.num_bytes}"
    assert rest.content == file.source.read_bytes()[1000:]
    whole = client.get(url, headers={"Range": "bytes=1000-", "If-Range": '"older"'})
    assert (whole.status_code, len(whole.content)) == (200, file.num_bytes)
    beyond = client.get(url, headers={"Range": f"bytes={file.num_bytes}-"})
    assert beyond.status_code == 416


@pytest.mark.parametrize("path", ["/", "/models.json", "/assets/index-1a2b.js"])
def test_a_known_version_is_not_sent_again(client: TestClient, path: str) -> None:
    tag = client.get(path).headers["etag"]
    again = client.get(path, headers={"If-None-Match": f'"other", {tag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == tag


@pytest.mark.parametrize(
    "path", ["/missing", "/../tiny/everycast.json", "/%2e%2e/tiny/everycast.json", "/v1/models"]
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert {name: response.headers[name] for name in HEADERS} == HEADERS


def test_files_that_the_page_does_not_need_stay_private(
    client: TestClient, model: WebModel
) -> None:
    for name in ("everycast.json", "tokenizer_config.json", "lib/cpu.so"):
        assert client.get(f"/{model.base}{name}").status_code == 404


def test_a_file_that_vanished_is_not_found(client: TestClient, model: WebModel) -> None:
    model.files[0].source.unlink()
    assert client.get(f"/{model.base}{model.files[0].path}").status_code == 404


def test_a_host_with_an_engine_answers_both(
    page: Path, model: WebModel, serve: Callable[..., Any]
) -> None:
    running = serve(lambda history: 2)
    with TestClient(create_web_app(Site(page, (model,)), running.engine)) as client:
        assert client.get("/").text == "<!doctype html>"
        assert client.get("/models.json").json()["has_server"] is True
        assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"
        answer = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}
        )
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
