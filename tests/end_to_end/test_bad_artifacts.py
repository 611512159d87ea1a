"""Artifacts that are damaged or do not fit: refused by name before anything of them runs."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everycast import MLCEngine
from everycast.artifact.errors import CapacityError
from everycast.engine import loader

Damage = Callable[[Path], None]


def edit_library(**changes: Any) -> Damage:
    """Change fields of the library's stamp."""

    def damage(folder: Path) -> None:
        path = folder / "everycast.json"
        manifest = json.loads(path.read_text())
        stamp = manifest["libraries"]["cpu"]
        for name, value in changes.items():
            stamp[name] = {**stamp[name], **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(manifest))

    return damage


def overwrite(name: str, content: bytes, at: int | None = None) -> Damage:
    """Replace a file's content, or the bytes `at` a place of it."""

    def damage(folder: Path) -> None:
        path = folder / name
        if at is None:
            path.write_bytes(content)
            return
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


def cut(name: str, num_bytes: int) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return damage


def delete(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def library_that_is_none(folder: Path) -> None:
    """Stamped with its own hash, but nothing that loads."""
    (folder / "lib/cpu.so").write_bytes(b"no ELF file")
    edit_library(sha256=hashlib.sha256(b"no ELF file").hexdigest())(folder)


def other_weights(folder: Path) -> None:
    """A tensor cache that says other hashes than those of the manifest."""
    path = folder / "tensor-cache.json"
    records = json.loads(path.read_text())
    records["records"][0]["md5sum"] = "0" * 32
    path.write_text(json.dumps(records))


SHARD, LIBRARY, MANIFEST = "params_shard_0.bin", "lib/cpu.so", "everycast.json"
CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "another everycast": (
        edit_library(versions={"everycast": "0.0.1"}), ("everycast 0.0.1", "compile it again"),
    ),
    "another TVM": (edit_library(versions={"tvm": "0.1"}), ("TVM 0.1", "compile it again")),
    "another platform": (edit_library(platform="macos-aarch64"), ("macos-aarch64",)),
    "a CPU feature": (edit_library(cpu_features=["sve9"]), ("CPU features", "sve9")),
    "another configuration": (edit_library(config_hash="0"), ("config hash",)),
    "another layout": (edit_library(layout_hash="0"), ("layout hash",)),
    "a flipped bit in a shard": (
        overwrite(SHARD, b"\x5a\xa5\x5a", at=5000), (SHARD, "corrupted", "MD5"),
    ),
    "a truncated shard": (cut(SHARD, 100), (SHARD,)),
    "a missing shard": (delete(SHARD), (SHARD,)),
    "weights of another build": (other_weights, ("weights hash",)),
    "a flipped bit in the library": (
        overwrite(LIBRARY, b"\x5a\xa5\x5a", at=5000), ("lib/cpu.so is corrupted",),
    ),
    "a truncated library": (cut(LIBRARY, 100), ("lib/cpu.so is corrupted",)),
    "a missing library": (delete(LIBRARY), ("lib/cpu.so is missing",)),
    "a library that is none": (library_that_is_none, ("cpu.so", "does not load")),
    "a manifest cut short": (cut(MANIFEST, 10), ("everycast.json",)),
    "a manifest of nonsense": (overwrite(MANIFEST, b"[]"), ("everycast.json",)),
    "no chat config": (delete("mlc-chat-config.json"), ("mlc-chat-config.json",)),
    "no tokenizer": (delete("tokenizer.json"), ("tokenizer.json",)),
    "no tensor cache": (delete("tensor-cache.json"), ("tensor-cache.json",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_damaged_artifacts(run: Callable[..., Any], artifact: Path, case: str) -> None:
    damage, parts = CASES[case]
    damage(artifact)
    run("chat", artifact, "--prompt", "a", "--max-tokens", "1", "--json").error(*parts)


def test_an_artifact_is_not_of_every_target_and_quantization(
    run: Callable[..., Any], artifact: Path
) -> None:
    chat = ("chat", artifact, "--prompt", "a", "--json")
    run(*chat, "--device", "rocm").error("cannot run on rocm")
    run(*chat, "--device", "cpu:x86-64-v3").error("cpu:x86-64-v3", "built: cpu")
    run(*chat, "-q", "q4f16_1").error("q4af16_e8", "not q4f16_1")


def test_not_enough_memory(
    run: Callable[..., Any], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name it is refused with both numbers; not asked for, it is reduced."""
    serve = ("serve", artifact, "--port", "0", "--quiet")
    run(*serve, "--max-total-seq-length", 10**12).error("10000", "tokens", "max_total_seq_length")
    run(*serve, "--context-window-size", "257").error("257", "256")
    monkeypatch.setattr(loader, "available_memory", lambda: 100_000_000)
    run(*serve).error("100 MB", "available")
    with pytest.raises(CapacityError, match="100 MB"):
        MLCEngine(artifact)


def test_a_context_nobody_asked_for_is_reduced_aloud(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = loader.open_artifact(artifact).plan
    fixed = plan.weight_bytes + plan.workspace_bytes + (256 << 20)
    monkeypatch.setattr(loader, "available_memory", lambda: fixed + 3 * plan.page_bytes)
    with MLCEngine(artifact) as engine:
        answer = engine.completions.create(prompt=[5, 6, 7], temperature=0, ignore_eos=True)
    assert answer.usage is not None and answer.usage.total_tokens == 48
    assert "512 to 48 tokens" in caplog.text and "256 to 48 tokens" in caplog.text
