"""Checkpoints that cannot be built: one line that names the fault, and nothing written."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Damage = Callable[[Path], None]
WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def set_config(**settings: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return damage


def change(name: str, value: float, dtype: Any = np.float32) -> Damage:
    """Put one value into a tensor, and store it as `dtype`."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[name] = tensors[name].astype(dtype)
        tensors[name].flat[7] = value
        save_file(tensors, folder / WEIGHTS)

    return damage


def lose(name: str) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors[name]
        save_file(tensors, folder / WEIGHTS)

    return damage


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def lose_a_shard(folder: Path) -> None:
    names = list(load_file(folder / WEIGHTS))
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: shards[name == HEAD] for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lfs_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text(LFS_POINTER)


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "missing shard": (lose_a_shard, ("missing", "model-00002-of-00002.safetensors")),
    "truncated shard": (truncate, (WEIGHTS, "truncated")),
    "git-lfs pointer": (lfs_pointer, ("this is a git-lfs pointer", WEIGHTS)),
    "GPTQ": (
        set_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        ("GPTQ checkpoint detected",),
    ),
    "AWQ": (
        set_config(quantization_config={"quant_method": "awq", "bits": 4}),
        ("AWQ checkpoint detected",),
    ),
    "unknown architecture": (
        set_config(model_type="llamma"), ("'llamma' is not supported", "nearest", "'llama'"),
    ),
    "unknown rope type": (
        set_config(rope_parameters={"rope_type": "spiral", "factor": 2.0}),
        ("spiral", "config.json", "supported"),
    ),
    "NaN": (change(DOWN, np.nan), (DOWN, "NaN")),
    "NaN in a norm": (change(NORM, np.nan), (NORM, "NaN")),
    "infinite": (change(DOWN, np.inf), (DOWN,)),
    "no tokenizer": (no_tokenizer, ("tokenizer",)),
    "untied head missing": (lose(HEAD), (f"missing {HEAD}", "does not tie")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_damaged_checkpoints(run: Callable[..., Any], source: Path, case: str) -> None:
    """Cases 33 to 36 among them."""
    damage, parts = CASES[case]
    damage(source)
    output = source.parent / "dist"
    # Without a library: weights are read only after everything else was found to be fine.
    run("convert", source, "-o", output, "--json").error(*parts)
    assert not output.exists() or not list(output.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_too_large_for_float16(run: Callable[..., Any], source: Path, dtype: str) -> None:
    """Case 35: flagged, not turned into infinity; float32 keeps them."""
    change(DOWN, 1e5, np.dtype(getattr(ml_dtypes, dtype, dtype)))(source)
    output = source.parent / "dist"
    run("convert", source, "-q", "q0f16", "-o", output, "--json").error(DOWN, "65504")
    assert not list(output.iterdir())
    assert run("convert", source, "-q", "q0f32", "-o", output, "--json").code == 0


def test_the_child_of_a_build_says_the_same(
    run_child: Callable[..., Any], source: Path, session_cache: Path
) -> None:
    """What is raised in the compiler's process is the one line of the command."""
    set_config(quantization_config={"quant_method": "gptq"})(source)
    run_child("chat", source, "--prompt", "a", "--json").error("GPTQ checkpoint detected")
    assert not list(session_cache.glob("artifacts/source-*/*"))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("-q", "q4f16_9"), ("unknown quantization 'q4f16_9'", "q4f16_1")),
        (("--target", "cdua"), ("unknown target 'cdua'", "cuda")),
        (("--target", "npu"), ("unknown target 'npu'", "cpu")),
        (("--target", "rocm:gfx0000"), ("gfx0000", "gfx942")),
        (("--target", "vulkan:big"), ("big", "vulkan")),
        (("--target", "cpu:znver44"), ("unknown CPU 'znver44'", "znver4")),
        (("--activations", "int7"), ("'int7'", "int8")),
        (("--context-window-size", "257"), ("257", "256")),
    ],
)
def test_unknown_choices(
    run: Callable[..., Any], tiny: Path, tmp_path: Path, options: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:  # fmt: skip
    run("compile", tiny, *options, "-o", tmp_path / "dist", "--json").error(*parts)
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("model", ["no/such/folder", "./model.gguf", "smolm2-135m"])
def test_a_model_that_is_not_there(run: Callable[..., Any], tmp_path: Path, model: str) -> None:
    run("compile", model, "-o", tmp_path / "dist", "--json").error(model)


def test_not_enough_disk_is_known_before_the_work(
    run: Callable[..., Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    output = tmp_path / "dist"
    run("compile", tiny, "-o", output, "--json").error("MB on disk", "10 MB free", "-o")
    assert not output.exists()


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """The system refuses to let any file grow larger, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_on_the_way(
    run: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "dist"
    with limited_file_size(100_000):
        result = run("convert", tiny, "-q", "q0f32", "-o", output, "--json")
    result.error("no room to write", "params_shard")
    assert list(output.iterdir()) == []
