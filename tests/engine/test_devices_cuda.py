"""CUDA as far as it goes without a GPU: TVM's runtime for it, over a driver that computes nothing.

The libraries hold what the fake driver takes for machine code, so no CUDA compiler is needed.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everycast.engine.device_runtimes import has_runtime
from everycast.targets import cuda
from everycast.targets.build import BuildRequest, compile_model

HERE = Path(__file__).parent
FAT_BINARY = struct.pack("<I", 0xBA55ED50) + bytes(60)
VERSIONS = {"libcuda.so.1": "", "libcudart.so.13": "libcudart.so.13 { global: *; };"}


class FakeNvcc:
    def architectures(self) -> tuple[str, ...]:
        return ("sm_75", "sm_80", "sm_86", "sm_90", "sm_120")

    def compile(self, source: str, architectures: tuple[str, ...]) -> bytes:
        assert "__global__" in source
        return FAT_BINARY


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake libraries."""
    if not has_runtime("cuda"):
        pytest.skip("this wheel of TVM has no CUDA runtime")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("cuda")
    for name, versions in VERSIONS.items():
        (folder / f"{name}.map").write_text(versions or "{ global: *; };")
        link = f"-Wl,-soname,{name},--version-script={folder / name}.map"
        options = ["-shared", "-fPIC", "-w", link, "-o", str(folder / name)]
        subprocess.run([compiler, *options, str(HERE / "fake_cuda.c")], check=True)
    return folder


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for the CPU, for CUDA's usual architectures, and for sm_86 alone."""
    output = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "find_cuda_compiler", FakeNvcc)
        for target in ("cpu", "cuda", "cuda:sm_86"):
            request = BuildRequest(str(tiny_checkpoint), target, "q4f16_1", output)
            folder = compile_model(request, lambda *_: None)
    return folder


@pytest.fixture(scope="module")
def outcomes(driver: Path) -> Callable[..., list[dict[str, Any]]]:
    """Of cases (environment, device), one after another in one process."""

    def outcomes(model: Path, *cases: tuple[dict[str, str], str]) -> list[dict[str, Any]]:
        text = json.dumps(
            [{"environment": e, "device": device, "model": str(model)} for e, device in cases]
        )
        run = subprocess.run(
            [sys.executable, "-P", str(HERE / "fake_cuda_cases.py"), text],
            env=os.environ | {"LD_LIBRARY_PATH": str(driver)}, capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return [json.loads(line) for line in run.stdout.splitlines()]

    return outcomes


def test_a_model_is_loaded_and_stepped(outcomes: Any, artifact: Path) -> None:
    """What tokens come is not said: kernels do nothing."""
    listed, auto, named, second = outcomes(
        artifact,
        ({}, "list"),
        ({}, "auto"),
        ({"FAKE_CUDA_ARCH": "86"}, "cuda"),
        ({"FAKE_CUDA_DEVICES": "2"}, "cuda:1"),
    )
    assert listed == {"devices": [["cuda:0 (Fake GPU 0)", "CUDA 13.0", ["sm_90", "warps of 32"]]]}
    assert auto.get("choice") == "device: cuda:0 (Fake GPU 0), the best that is here", auto
    assert auto["tokens"] == 8 and auto["taken"] > 0
    assert auto["architectures"] == ["sm_80", "sm_86", "sm_90", "sm_120"]
    assert named["architectures"] == ["sm_86"], "the library of its architecture"
    assert (second["choice"], second["tokens"]) == ("device: cuda:1 (Fake GPU 1)", 8)


FAILURES = {
    "no device": ({"FAKE_CUDA_COUNT": "100"}, "cuda", ("NVIDIA's driver finds no device here",)),
    "hidden": (
        {"FAKE_CUDA_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "7"}, "cuda",
        ("finds no device here (CUDA_VISIBLE_DEVICES is '7')",),
    ),
    "old driver": ({"FAKE_CUDA_COUNT": "35"}, "cuda", ("CUDA 13.0", "install driver 580 or later")),
    "another error": ({"FAKE_CUDA_COUNT": "999"}, "cuda", ("'unknown error' (error 999)",)),
    "too high a number": ({}, "cuda:3", ("no device cuda:3", "this machine has cuda:0")),
    "another architecture": (
        {"FAKE_CUDA_ARCH": "72"}, "cuda",
        ("is sm_72", "kernels need sm_80 or later", "--device cpu"),
    ),
    "little memory": ({"FAKE_CUDA_BYTES": "1000000"}, "cuda", ("needs", "1 MB", "available")),
    "too large a tensor": ({}, "fill", ("has no room for 2147 MB", "free some, take a sm")),
}  # fmt: skip


def test_each_failure_is_one_line(outcomes: Any, artifact: Path) -> None:
    results = outcomes(artifact, *((env, device) for env, device, _ in FAILURES.values()))
    for (name, (_, _, parts)), outcome in zip(FAILURES.items(), results, strict=True):
        assert "\n" not in outcome["error"], name
        for part in parts:
            assert part in outcome["error"], name


def test_auto_goes_on_to_the_cpu_and_says_why(
    outcomes: Any, artifact: Path, tmp_path: Path
) -> None:
    little = {"FAKE_CUDA_BYTES": "1000000"}
    (small,) = outcomes(artifact, (little, "auto"))
    assert small["choice"].startswith("device: cpu; not cuda:0 (Fake GPU 0): the model needs ")
    assert small["tokens"] == 8
    copy = tmp_path / artifact.name
    shutil.copytree(artifact, copy)
    manifest = json.loads((copy / "everycast.json").read_text())
    manifest["libraries"] = {"cpu": manifest["libraries"]["cpu"]}
    (copy / "everycast.json").write_text(json.dumps(manifest))
    (without,) = outcomes(copy, ({}, "auto"))
    assert "device: cpu; not cuda:0 (Fake GPU 0): the artifact has no library" in without["choice"]
    assert f"--target cuda -o {tmp_path} -q q4f16_1" in without["choice"]


def test_without_a_driver(artifact: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU of NVIDIA's")
    command = [sys.executable, "-P", "-m", "everycast.cli", "chat", str(artifact), "--prompt", "a"]
    run = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("error: cannot run on cuda: ")
    if has_runtime("cuda"):
        assert "this machine has no NVIDIA driver (libcuda.so.1); install it" in run.stderr
