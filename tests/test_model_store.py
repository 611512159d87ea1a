import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from everycast import model_store
from everycast.artifact.errors import ArtifactError, CheckpointError, RequestError
from everycast.artifact.host import Versions
from everycast.artifact.manifest import Manifest, ModelStamp, WeightsStamp, write_manifest
from hypothesis import given
from hypothesis import strategies as st


class Builder:
    """Stands in for the compiler: writes an artifact folder, or fails."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def __call__(self, model: str, *, output: Path, **options: Any) -> Path:
        self.calls.append({"model": model, **options})
        if self.error is not None:
            (output / "half").mkdir(parents=True)
            raise self.error
        return make_artifact(output / "built", quantization=options["quantization"])


def make_artifact(folder: Path, quantization: str | None = None) -> Path:
    folder.mkdir(parents=True)
    manifest = Manifest(
        Versions("1", "2", "3"),
        ModelStamp("m", "llama", "LlamaForCausalLM", "m.gguf", "a", "b", 1000),
        WeightsStamp(quantization or "gguf", 8.5, 1000, "c", "d"),
    )
    write_manifest(folder, manifest)
    (folder / "params_shard_0.bin").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "Željko 張 庭" / "cache a'b"
    monkeypatch.setenv("EVERYCAST_CACHE", str(folder))
    return folder


@pytest.fixture
def build() -> Iterator[Builder]:
    yield Builder()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "模型 a'b.gguf"
    file.write_bytes(b"GGUF")
    return file


def test_an_artifact_folder_is_used_as_it_is(cache: Path, tmp_path: Path, build: Builder) -> None:
    folder = make_artifact(tmp_path / "dist" / "m-q4f16_1", quantization="q4f16_1")
    assert model_store.ensure_artifact(str(folder), build=build) == folder
    assert model_store.ensure_artifact(str(folder), quantization="q4f16_1", build=build) == folder
    with pytest.raises(RequestError, match="quantized as q4f16_1, not q0f32"):
        model_store.ensure_artifact(str(folder), quantization="q0f32", build=build)
    with pytest.raises(RequestError, match="activations included"):
        model_store.ensure_artifact(str(folder), activations="int8", build=build)
    assert not build.calls


def test_a_source_is_built_once(cache: Path, gguf: Path, build: Builder) -> None:
    first = model_store.ensure_artifact(str(gguf), build=build)
    assert first.is_relative_to(cache)
    assert model_store.ensure_artifact(str(gguf), build=build) == first
    assert len(build.calls) == 1


def test_every_part_of_the_request_has_its_own_slot(
    cache: Path, gguf: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {
        model_store.ensure_artifact(str(gguf), build=build),
        model_store.ensure_artifact(str(gguf), "cpu:x86-64-v3", build=build),
        model_store.ensure_artifact(str(gguf), quantization="q4f16_1", build=build),
        model_store.ensure_artifact(str(gguf), activations="int8", build=build),
        model_store.ensure_artifact("smollm2-135m", build=build),
        model_store.ensure_artifact("HF://org/smollm2-135m", build=build),
    }
    monkeypatch.setattr(model_store, "__version__", "99")
    paths.add(model_store.ensure_artifact(str(gguf), build=build))
    assert len(paths) == len(build.calls) == 7


def test_a_changed_source_is_built_again(cache: Path, gguf: Path, build: Builder) -> None:
    before = model_store.ensure_artifact(str(gguf), build=build)
    os.utime(gguf, ns=(1, 1))
    assert model_store.ensure_artifact(str(gguf), build=build) != before


@pytest.mark.parametrize("opened", [1, 2])
def test_every_shard_of_a_split_gguf_counts(
    cache: Path, tmp_path: Path, build: Builder, opened: int
) -> None:
    shards = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for shard in (*shards, tmp_path / "other-00001-of-00002.gguf"):
        shard.write_bytes(b"GGUF")
    model = str(shards[opened - 1])
    before = model_store.ensure_artifact(model, build=build)
    (tmp_path / "other-00001-of-00002.gguf").write_bytes(b"changed")
    assert model_store.ensure_artifact(model, build=build) == before
    shards[1].write_bytes(b"GGUF, but longer")
    assert model_store.ensure_artifact(model, build=build) != before


def test_a_failed_build_leaves_nothing_that_counts(cache: Path, gguf: Path, build: Builder) -> None:
    build.error = CheckpointError("NaN in blk.0")
    with pytest.raises(CheckpointError, match="NaN"):
        model_store.ensure_artifact(str(gguf), build=build)
    assert model_store.stored_models() == []
    build.error = None
    path = model_store.ensure_artifact(str(gguf), build=build)
    assert not (path.parent / "half").exists()


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"model": 1}', "\x00"])
def test_a_damaged_record_means_a_new_build(
    cache: Path, gguf: Path, build: Builder, record: str
) -> None:
    path = model_store.ensure_artifact(str(gguf), build=build)
    (path.parent / "slot.json").write_text(record)
    assert model_store.ensure_artifact(str(gguf), build=build) == path
    assert len(build.calls) == 2


@pytest.mark.parametrize("model", ["./missing", "/no/such/model.gguf", "missing.gguf"])
def test_a_missing_path_is_named(cache: Path, build: Builder, model: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        model_store.ensure_artifact(model, build=build)
    assert not build.calls


def test_stored_models_are_listed_with_their_size(
    cache: Path, gguf: Path, tmp_path: Path, build: Builder
) -> None:
    built = model_store.ensure_artifact(str(gguf), quantization="q4f16_1", build=build)
    mine = make_artifact(tmp_path / "dist" / "mine")
    in_cache, outside = model_store.stored_models(tmp_path / "dist", tmp_path / "absent")
    assert (in_cache.path, outside.path) == (built, mine)
    assert in_cache.slot is not None and in_cache.slot.quantization == "q4f16_1"
    assert outside.slot is None
    assert outside.num_bytes == 1000 + (mine / "everycast.json").stat().st_size


def test_remove_by_name_source_or_path(
    cache: Path, gguf: Path, tmp_path: Path, build: Builder
) -> None:
    for quantization in (None, "q4f16_1"):
        model_store.ensure_artifact(str(gguf), quantization=quantization, build=build)
    assert len(model_store.removable(str(gguf))) == 2
    assert len(model_store.removable("built")) == 2
    for folder in model_store.removable(str(gguf)):
        assert model_store.remove(folder) > 1000
    assert model_store.stored_models() == []
    assert gguf.exists()
    mine = make_artifact(tmp_path / "dist" / "mine")
    assert model_store.removable(str(mine)) == [mine]


def test_only_built_models_are_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "photos"
    plain.mkdir()
    with pytest.raises(ArtifactError, match="no built model"):
        model_store.removable(str(plain))
    with pytest.raises(ArtifactError, match="not a built model"):
        model_store.remove(plain)
    (cache / "artifacts").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="not a built model"):
        model_store.remove(cache / "artifacts" / "..")
    artifact = make_artifact(tmp_path / "dist" / "m")
    link = tmp_path / "link"
    link.symlink_to(artifact)
    with pytest.raises(ArtifactError, match="link"):
        model_store.remove(link)
    monkeypatch.chdir(artifact)
    with pytest.raises(ArtifactError, match="current"):
        model_store.remove(artifact)
    assert artifact.exists() and cache.exists()


@given(st.text(min_size=1, max_size=80))
def test_any_model_name_makes_one_plain_folder_name(name: str) -> None:
    slot = model_store._slot_name(name.replace("\x00", "0"), "cpu", None, "auto")
    assert Path(slot).name == slot and slot not in (".", "..") and slot.isascii()


def test_a_model_runs_on_one_target() -> None:
    with pytest.raises(RequestError, match="target 'all' is for everycast compile"):
        model_store.ensure_artifact("m", "all")
