"""What a user types, and which checkpoint opens."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint import resolve
from everycast.relax_models.checkpoint.resolve import is_named, open_checkpoint
from hypothesis import example, given
from hypothesis import strategies as st

FOLDERS = ("plain", "Željko 張 庭/模型 a'b", 'with "quotes" and spaces')
WEIGHT = np.ones((2, 32), np.float32)


def write_gguf(path: Path, *, split: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=1 if split else 0)
    for i in range(2):
        writer.add_tensor(f"t{i}", WEIGHT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_huggingface(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    safetensors.numpy.save_file({"t": WEIGHT}, folder / "model.safetensors")
    return folder


def one_line_error(spec: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_and_files(tmp_path: Path, name: str) -> None:
    folder = write_huggingface(tmp_path / name / "hf")
    assert open_checkpoint(str(folder)).kind == "huggingface"
    path = write_gguf(tmp_path / name / "g" / "m.gguf")
    for spec in (path, path.parent):
        checkpoint = open_checkpoint(str(spec))
        assert (checkpoint.kind, checkpoint.path) == ("gguf", path)
        np.testing.assert_array_equal(checkpoint.read("t1"), WEIGHT)
    other_name = path.rename(path.with_name("blob"))
    assert open_checkpoint(str(other_name)).kind == "gguf"


def test_a_split_gguf_is_one_model_and_two_are_too_many(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", split=True)
    assert list(open_checkpoint(str(tmp_path)).tensors) == ["t0", "t1"]
    write_gguf(tmp_path / "n.gguf")
    assert "holds 2 GGUF models: m-00001-of-00002.gguf, n.gguf; give one" in one_line_error(
        str(tmp_path)
    )
    assert open_checkpoint(str(tmp_path / "m-00002-of-00002.gguf")).kind == "gguf"


def test_safetensors_win_over_a_gguf_beside_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    write_huggingface(tmp_path)
    assert open_checkpoint(str(tmp_path)).kind == "huggingface"


def test_config_beside_a_gguf_alone_is_a_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(str(tmp_path)).kind == "gguf"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint("~/m.gguf").kind == "gguf"


def test_names_go_to_the_cache_and_paths_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    calls: list[tuple[str, Path]] = []

    def fetch_named(name: str, cache: Path, progress: object) -> Path:
        calls.append((name, cache))
        return path

    monkeypatch.setattr(resolve, "fetch_named", fetch_named)
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "default"))
    monkeypatch.chdir(tmp_path)
    write_huggingface(tmp_path / "smollm2-135m")
    assert is_named("smollm2-135m") and not is_named("./smollm2-135m")
    assert open_checkpoint("smollm2-135m").path == path
    assert open_checkpoint("smollm2-135m", cache=tmp_path).path == path
    assert calls == [("smollm2-135m", tmp_path / "default"), ("smollm2-135m", tmp_path)]
    assert open_checkpoint("./smollm2-135m").kind == "huggingface"


@pytest.mark.parametrize(
    ("spec", "repo", "revision"),
    [
        ("HF://org/name", "org/name", None),
        ("hf://org/name/", "org/name", None),
        ("HF://org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_hub_specs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    repo: str,
    revision: str | None,
) -> None:
    folder = write_huggingface(tmp_path / "snapshot")

    def fetch_hub(name: str, *, revision: str | None = None) -> Path:
        asked.append((name, revision))
        return folder

    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(resolve, "fetch_hub", fetch_hub)
    assert open_checkpoint(spec).path == folder
    assert asked == [(repo, revision)]


def test_unknown_specs_are_one_line_with_the_nearest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nearest = one_line_error("smollm-135M")
    assert nearest.startswith("no model 'smollm-135M': did you mean smollm2-135m? known names: ")
    assert "HF://HuggingFaceTB/SmolLM2-135M;" in one_line_error("HuggingFaceTB/SmolLM2-135M")
    assert "known names: smollm2-135m, gemma3-270m" in one_line_error("")
    assert one_line_error("./nothing").startswith("there is no file or folder './nothing'; give")
    assert one_line_error("x.gguf").startswith("there is no file or folder 'x.gguf'")
    assert "no model 'two\\nlines'" in one_line_error("two\nlines")
    assert "no model" in one_line_error("nul\0byte")
    assert "no model" in one_line_error("x" * 5000)


def test_other_files_and_empty_folders(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "hf")
    shard = str(folder / "model.safetensors")
    assert f"is one file of a model; give its folder, {folder}" in one_line_error(shard)
    text = tmp_path / "notes.txt"
    text.write_text("x")
    assert "notes.txt is not a model; give a Hugging Face folder" in one_line_error(str(text))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json is missing" in one_line_error(str(empty))


@given(st.text(max_size=30).filter(lambda spec: not spec.upper().startswith("HF://")))
@example("~no-such-user/model")
def test_no_spec_raises_anything_else(spec: str) -> None:
    try:
        open_checkpoint(spec)
    except CheckpointError as error:
        assert "\n" not in str(error)
