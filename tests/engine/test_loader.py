import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact.errors import ArtifactError, CapacityError, RequestError
from everycast.artifact.host import Host, this_host
from everycast.artifact.manifest import LibraryStamp, Manifest, read_manifest, write_manifest
from everycast.engine import loader
from everycast.engine.engine_config import EngineConfig
from everycast.engine.loader import open_artifact
from everycast.engine.parameters import read_parameters
from everycast.engine.threads import usable_cpus


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(tiny_artifact, tmp_path / "模型 a'b")


def edit_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_bytes())
    content.update(values)
    path.write_text(json.dumps(content), "utf-8")


def with_stamp(folder: Path, name: str = "cpu", **values: Any) -> None:
    """Change, or add, a library's stamp in the manifest."""
    manifest = read_manifest(folder)
    stamp = replace(manifest.libraries["cpu"], **values)
    write_manifest(folder, replace(manifest, libraries={**manifest.libraries, name: stamp}))


def test_an_artifact_is_opened_without_its_weights(artifact: Path) -> None:
    opened = open_artifact(artifact)
    stamp = read_manifest(artifact).libraries["cpu"]
    info = opened.info
    assert (info.vocab_size, info.context_window_size) == (320, 256)
    assert (info.prefill_chunk_size, info.max_num_sequence, info.page_size, info.page_bytes) == (
        stamp.limits.prefill_chunk_size,
        stamp.limits.max_num_sequence,
        stamp.limits.page_size,
        stamp.limits.page_bytes,
    )
    assert opened.plan.weight_bytes == read_parameters(opened.library.metadata)[1]
    assert not (artifact / ".packed").exists()


def test_the_plan_counts_scratch_memory_of_every_thread_that_draws(artifact: Path) -> None:
    opened = open_artifact(artifact, engine_config=EngineConfig(num_threads=1))
    stamp = read_manifest(artifact).libraries["cpu"]
    planes, width = opened.library.metadata["sampling_workspace"]
    functions = stamp.function_memory_bytes["forward"] + stamp.function_memory_bytes["logits"]
    assert opened.plan.workspace_bytes == functions + 4 * planes * width
    every = open_artifact(artifact).plan.workspace_bytes
    assert every == functions + usable_cpus() * 4 * planes * width


def test_loading_gives_a_loop_with_the_checkpoints_advice(artifact: Path) -> None:
    loop, tokenizer, description = open_artifact(artifact).load()
    assert tokenizer.size == 300
    assert description.name == artifact.name
    assert description.other_names == (read_manifest(artifact).model.name,)
    advice = description.defaults
    assert (advice.temperature, advice.top_p, advice.top_k) == (0.6, 0.9, 20)
    loop.shutdown()


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": "high"}, {"top_k": 2.5}, {"repetition_penalty": 0}]
)
def test_advice_that_makes_no_sense_is_named(artifact: Path, bad: dict[str, Any]) -> None:
    edit_json(artifact / "mlc-chat-config.json", **bad)
    with pytest.raises(ArtifactError, match=rf"mlc-chat-config\.json: .*{next(iter(bad))}"):
        open_artifact(artifact).load()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"eos_token_id": 2}', "\x00"])
def test_a_damaged_chat_config_is_named(artifact: Path, content: str) -> None:
    (artifact / "mlc-chat-config.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"mlc-chat-config\.json.*build the model again"):
        open_artifact(artifact)


def test_limits_that_differ_from_the_librarys_are_refused(artifact: Path) -> None:
    limits = read_manifest(artifact).libraries["cpu"].limits
    with_stamp(artifact, limits=replace(limits, page_bytes=limits.page_bytes * 2))
    with pytest.raises(ArtifactError, match=r"lib/cpu\.so of .* has other limits than everycast"):
        open_artifact(artifact)


def test_a_library_by_path(artifact: Path, tiny_artifact: Path) -> None:
    """Then the manifest need not know of any."""
    write_manifest(artifact, replace(read_manifest(artifact), libraries={}))
    with pytest.raises(ArtifactError, match=r"no library for target 'cpu' \(built: none\)"):
        open_artifact(artifact)
    library = tiny_artifact / "lib" / "cpu.so"
    assert open_artifact(artifact, model_lib=library).info.vocab_size == 320
    with pytest.raises(ArtifactError, match="does not load as a model library"):
        open_artifact(artifact, model_lib=artifact / "lib" / "none.so")
    manifest = read_manifest(artifact)
    write_manifest(
        artifact, replace(manifest, model=replace(manifest.model, config_hash="another"))
    )
    with pytest.raises(ArtifactError, match="was compiled for another model"):
        open_artifact(artifact, model_lib=library)


def test_devices(artifact: Path) -> None:
    assert open_artifact(artifact, "cpu").info.vocab_size == 320
    with pytest.raises(ArtifactError, match="cannot run on opencl: the apache-tvm that is inst"):
        open_artifact(artifact, "opencl")
    with pytest.raises(ArtifactError, match=r"device 'cdua' cannot be run on.*mean cuda\?"):
        open_artifact(artifact, "cdua")
    with pytest.raises(ArtifactError, match=r"no library for target 'cpu:znver4' \(built: cpu\)"):
        open_artifact(artifact, "cpu:znver4")


V3 = ("avx2", "fma")
AVX512 = (*V3, "avx512f")


@pytest.mark.parametrize(
    ("device", "features", "chosen"),
    [
        ("cpu", AVX512, "cpu:znver4"),
        ("cpu", V3, "cpu:x86-64-v3"),
        ("cpu:x86-64-v3", AVX512, "cpu:x86-64-v3"),
        ("vulkan", AVX512, "vulkan"),
    ],
)
def test_the_library_that_uses_most_of_the_machine(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, device: str, features: Any, chosen: str
) -> None:
    libraries = {"cuda": (), "vulkan": V3, "cpu:x86-64-v3": V3, "cpu:znver4": AVX512}
    manifest = stamps(libraries, read_manifest(artifact))
    host = Host(this_host().versions, "linux-x86_64", frozenset(features))
    monkeypatch.setattr(loader, "this_host", lambda: host)
    assert loader._library_stamp(manifest, device).file == chosen


def stamps(libraries: dict[str, tuple[str, ...]], manifest: Manifest) -> Manifest:
    """The manifest with libraries that are named as their file and need these features."""
    stamp: LibraryStamp = manifest.libraries["cpu"]
    return replace(
        manifest,
        libraries={
            name: replace(stamp, file=name, platform="linux-x86_64", cpu_features=features)
            for name, features in libraries.items()
        },
    )


def test_a_library_of_another_platform_is_refused_by_name(artifact: Path) -> None:
    with_stamp(artifact, "cpu:cortex-a76", platform="linux-riscv64")
    assert open_artifact(artifact).info.vocab_size == 320
    with pytest.raises(ArtifactError) as caught:
        open_artifact(artifact, "cpu:cortex-a76")
    message = str(caught.value)
    assert "'cpu:cortex-a76'" in message and "built for linux-riscv64, this machine is" in message
    assert message.endswith("compile one for this machine with --target cpu")


def test_weights_of_another_build_are_refused(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    weights = replace(manifest.weights, weights_hash="another")
    write_manifest(artifact, replace(manifest, weights=weights))
    with pytest.raises(ArtifactError, match="weights hash"):
        open_artifact(artifact)


def test_engine_config(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_artifact(artifact, engine_config={"max_num_sequence": 3}).config == EngineConfig(
        max_num_sequence=3
    )
    asked = EngineConfig(max_total_seq_length=64)
    opened = open_artifact(artifact, mode="server", engine_config=asked)
    assert (opened.config.mode, opened.plan.num_tokens) == ("server", 64)
    with pytest.raises(RequestError, match="max_num_sequences"):
        open_artifact(artifact, engine_config={"max_num_sequences": 3})
    with pytest.raises(CapacityError, match="257 is more than the model library was built for"):
        open_artifact(artifact, engine_config={"context_window_size": 257})
    fixed = opened.plan.weight_bytes + opened.plan.workspace_bytes + (256 << 20)
    monkeypatch.setattr(loader, "available_memory", lambda: fixed + 2 * opened.plan.page_bytes)
    with caplog.at_level(logging.WARNING):
        assert open_artifact(artifact).plan.num_tokens == 32
    assert "reduced from 512 to 32 tokens" in caplog.text


def test_more_threads_than_cpus_are_refused(artifact: Path) -> None:
    with pytest.raises(CapacityError, match=r"num_threads 10000 is more than the \d+ CPUs"):
        open_artifact(artifact, engine_config={"num_threads": 10_000})
