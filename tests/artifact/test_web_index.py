"""What the browser page is told about an artifact."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from everycast.artifact.errors import ArtifactError
from everycast.artifact.hashing import hash_file
from everycast.artifact.web_index import index_json, web_model
from everycast.artifact.web_site import CONTENT_SECURITY_POLICY, Site, headers_file

WriteArtifact = Callable[..., Path]
PAGE = Path(__file__).parents[2] / "web" / "index.html"


@pytest.fixture
def artifact(write_web_artifact: WriteArtifact, tmp_path: Path) -> Path:
    return write_web_artifact(tmp_path / "Tiny model (q4f32_1)")


def test_a_record_lists_what_webllm_reads_with_sizes_and_hashes(artifact: Path) -> None:
    model = web_model(artifact)
    assert [file.path for file in model.files] == [
        "mlc-chat-config.json",
        "tensor-cache.json",
        "tokenizer.json",
        "params_shard_0.bin",
        "params_shard_1.bin",
    ]
    for file in model.all_files:
        path = artifact / file.path
        assert (file.num_bytes, file.sha256) == (path.stat().st_size, hash_file(path))
    record = json.loads(index_json((model,)))["models"][0]
    assert record["id"] == "Tiny-model-q4f32_1"
    assert record["base"].startswith("models/Tiny-model-q4f32_1/")
    assert record["base"].endswith("/resolve/main/")
    assert record["largest_tensor_bytes"] == 8000
    assert record["context_window_size"] == 2048
    assert record["sampling"] == {"temperature": 0.7}, "1.0 changes nothing: it is no advice"


def test_libraries_for_browsers_come_with_what_they_need(artifact: Path) -> None:
    libraries = [library.record() for library in web_model(artifact).libraries]
    fields = ("path", "features", "min_subgroup_size", "is_for_cpu_adapters")
    assert [tuple(one[field] for field in fields) for one in libraries] == [
        ("lib/webgpu.wasm", [], None, False),
        ("lib/webgpu-f16.wasm", ["shader-f16"], None, False),
        ("lib/webgpu-f16-subgroups.wasm", ["shader-f16", "subgroups"], 32, False),
        ("lib/webgpu-cpu-adapter.wasm", [], None, True),
    ]
    assert {one["max_binding_bytes"] for one in libraries} == {8000}


def test_the_address_changes_with_any_file(artifact: Path) -> None:
    before = web_model(artifact).base
    assert web_model(artifact).base == before
    (artifact / "tokenizer.json").write_text('{"added": 1}')
    assert web_model(artifact).base != before


def test_an_artifact_for_other_targets_is_refused(
    write_web_artifact: WriteArtifact, tmp_path: Path
) -> None:
    folder = write_web_artifact(tmp_path / "model", targets=("cpu",))
    with pytest.raises(ArtifactError, match=r"no library for browsers; compile .* --target webgpu"):
        web_model(folder)


def test_damage_is_found_before_it_is_served(artifact: Path) -> None:
    (artifact / "lib" / "webgpu.wasm").write_bytes(b"other")
    with pytest.raises(ArtifactError, match=r"webgpu\.wasm is corrupted"):
        web_model(artifact)


def test_a_shard_of_other_bytes_is_found_before_it_is_served(artifact: Path) -> None:
    shard = artifact / "params_shard_1.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=r"params_shard_1\.bin is corrupted"):
        web_model(artifact)


@pytest.mark.parametrize("contents", ["", "[]", '{"context_window_size": 1}'])
def test_a_damaged_chat_config_is_named(artifact: Path, contents: str) -> None:
    (artifact / "mlc-chat-config.json").write_text(contents)
    with pytest.raises(ArtifactError, match=r"mlc-chat-config\.json.*build the artifact again"):
        web_model(artifact)


def test_a_tokenizer_that_browsers_cannot_read_is_refused(
    write_web_artifact: WriteArtifact, tmp_path: Path
) -> None:
    folder = write_web_artifact(tmp_path / "model", tokenizer_files=["merges.txt"])
    with pytest.raises(ArtifactError, match=r"no tokenizer that browsers can read"):
        web_model(folder)


def test_a_package_holds_page_models_and_headers(artifact: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    (page / "assets").mkdir(parents=True)
    (page / "index.html").write_text("page")
    (page / "assets" / "index-1.js").write_text("code")
    model = web_model(artifact)
    output = tmp_path / "site"
    Site(page, (model,)).write(output)
    assert (output / "index.html").read_text() == "page"
    assert json.loads((output / "models.json").read_bytes())["models"][0]["id"] == model.id
    for file in model.all_files:
        assert hash_file(output / model.base / file.path) == file.sha256
    assert (output / "_headers").read_text() == headers_file()
    assert "https" in (output / "README.md").read_text()


def test_the_headers_file_isolates_and_caches() -> None:
    text = headers_file()
    assert "/*\n  Content-Security-Policy: default-src 'none'" in text
    assert "  Cross-Origin-Embedder-Policy: require-corp\n" in text
    assert "/assets/*\n  Cache-Control: public, max-age=31536000, immutable\n" in text


def test_page_and_headers_have_one_policy() -> None:
    assert f'content="{CONTENT_SECURITY_POLICY}"' in PAGE.read_text()
    assert "unsafe-inline" not in CONTENT_SECURITY_POLICY
