"""What a build keeps, adds, leaves behind when it is stopped, and takes of memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast import MLCEngine
from everycast import compile as compile_model
from everycast.artifact.manifest import read_manifest
from safetensors.numpy import save_file

REQUEST: dict[str, Any] = {
    "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip


def weight_files(folder: Path) -> dict[str, int]:
    """Name → time of the last change, of everything but libraries and manifest."""
    return {
        path.name: path.stat().st_mtime_ns
        for path in folder.iterdir()
        if path.is_file() and path.name != "everycast.json"
    }


def test_a_library_is_added_to_converted_weights(
    tiny: Path, tmp_path: Path, run: Callable[..., Any], built_f32: Path
) -> None:
    """`convert` and then `compile`, twice for two targets: the weights are written once."""
    output = tmp_path / "dist"
    converted = run("convert", tiny, "-q", "q0f32", "-o", output, "--json")
    folder = Path(json.loads(converted.out)["path"])
    before = weight_files(folder)
    assert not list(folder.glob("lib/*")) and not read_manifest(folder).libraries
    run("chat", folder, "--prompt", "a", "--json").error("no library", "--target cpu")

    stages: list[str] = []
    compiled = compile_model(  # in a child, as users do
        tiny, "cpu:x86-64-v3", "q0f32", output, progress=lambda event: stages.append(event.stage)
    )
    assert compiled == folder and weight_files(folder) == before
    assert "compile" in stages and "weights" not in stages
    with MLCEngine(folder, device="cpu:x86-64-v3") as engine:
        ids = engine.completions.create(**REQUEST).choices[0].token_ids
    with MLCEngine(built_f32) as engine:
        assert engine.completions.create(**REQUEST).choices[0].token_ids == ids


def test_another_target_beside_the_first(
    artifact: Path, built: Any, tiny: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    output = tmp_path / "dist"
    output.mkdir()
    artifact = artifact.rename(output / built.folder.name)
    before = weight_files(artifact)
    result = run("compile", tiny, "--target", "cpu:x86-64-v3", "-o", output, "--json")
    assert Path(json.loads(result.out)["path"]) == artifact
    assert weight_files(artifact) == before
    assert sorted(read_manifest(artifact).libraries) == ["cpu", "cpu:x86-64-v3"]
    assert sorted(p.name for p in artifact.glob("lib/*")) == ["cpu-x86-64-v3.so", "cpu.so"]
    assert not list(artifact.glob(".building*"))
    chat = ("chat", artifact, "--prompt", "the 模型", "--max-tokens", "8", "--temperature", "0")
    for target in ("cpu", "cpu:x86-64-v3"):
        answer = json.loads(run(*chat, "--device", target, "--json").out)
        assert len(answer["token_ids"]) <= 8 and answer["prompt_tokens"] > 0
    assert json.loads(run(*chat, "--device", "cpu", "--json").out)["text"] == built.answer["text"]


@pytest.fixture(scope="module")
def large(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """204 MB of float16 weights, 8 MB the largest tensor."""
    folder = tmp_path_factory.mktemp("large") / "large"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    layers, hidden, wide, vocab = 6, 1024, 4096, config["vocab_size"]
    settings = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": wide,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        bits = rng.integers(0, 1 << 16, shape, np.uint16) & 0xA7FF  # below 0.03
        return bits.view(np.float16)

    tensors = {
        "model.embed_tokens.weight": random(vocab, hidden),
        "lm_head.weight": random(vocab, hidden),
        "model.norm.weight": np.ones(hidden, np.float16),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name in "qkvo":
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = random(hidden, hidden)
        for name, shape in (
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(hidden, np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


PEAK = """
import resource, sys
from pathlib import Path
from everycast.targets.build import BuildRequest, compile_model
for model in sys.argv[2:]:
    compile_model(BuildRequest(model, None, "q4f16_1", Path(sys.argv[1])), lambda *_: None)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_is_that_of_the_largest_tensor(large: Path, tiny: Path, tmp_path: Path) -> None:
    """Beyond what the compiler itself takes, which a tiny model shows first."""
    num_bytes = (large / "model.safetensors").stat().st_size
    assert num_bytes > 200_000_000
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), str(tiny), str(large)],
        capture_output=True, encoding="utf-8", check=True,
    )  # fmt: skip
    base, peak = map(int, done.stdout.split())
    assert peak - base < 0.6 * num_bytes, (base, peak)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_stopped_leaves_no_artifact(
    large: Path, tmp_path: Path, command: Any, sent: signal.Signals
) -> None:
    """Whatever stops it, nothing has the artifact's name; after Ctrl-C there is nothing at all."""
    output = tmp_path / "dist"
    process = subprocess.Popen(
        [*command, "convert", str(large), "-q", "q4af16_e8", "-o", str(output), "--json"],
        stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True, env=dict(os.environ),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(output.glob(".*.tmp/params_shard_0.bin")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, sent)  # as a terminal does
    err = process.communicate(timeout=60)[1]
    assert "Traceback" not in err and err.count("\n") <= 1
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert list(output.iterdir()) == []
    assert not list(output.glob("[!.]*"))
