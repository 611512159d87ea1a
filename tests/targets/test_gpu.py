"""Libraries for GPUs: what is in them, and what is said where one cannot be made."""

import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.machine_code import PREFIX, from_text
from everycast.artifact.manifest import read_manifest
from everycast.targets import build, cuda, device_linkers, nvcc, rocm
from everycast.targets.build import BuildRequest, compile_model
from everycast.targets.target import find_target

HEADERS = Path(__file__).parent / "headers"
FAT_BINARY = 0xBA55ED50
"""First word of what `nvcc -fatbin` writes."""


def compiled(checkpoint: Path, target: str, output: Path) -> tuple[bytes, Any]:
    """(the library, its stamp); skips where a tool is missing."""
    try:
        folder = compile_model(
            BuildRequest(str(checkpoint), target, "q4f16_1", output), lambda *_: None
        )
    except CompileError as error:
        if "run: " not in str(error):
            raise
        pytest.skip(str(error))
    stamp = read_manifest(folder).libraries[target]
    return (folder / stamp.file).read_bytes(), stamp


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dist")


def test_cuda_libraries_hold_machine_code(tiny_checkpoint: Path, dist: Path) -> None:
    library, stamp = compiled(tiny_checkpoint, "cuda:sm_90", dist)
    assert stamp.file == "lib/cuda-sm_90.so" and stamp.target_spec["arch"] == "sm_90"
    text = re.search(re.escape(PREFIX).encode() + b"[A-Za-z0-9+/]+=*", library)
    assert text is not None
    code = from_text(text[0].decode())
    assert struct.unpack_from("<I", code)[0] == FAT_BINARY
    assert b"__global__" not in library and b"attention_4_2_16_kernel" in code


def test_rocm_libraries_hold_code_objects(
    tiny_checkpoint: Path, dist: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arch in rocm.ARCHITECTURES:
        library, stamp = compiled(tiny_checkpoint, f"rocm:{arch}", dist)
        assert stamp.target_spec["mcpu"] == arch
        assert arch.encode() in library and b"amdhsa.kernels" in library
    assert "AMD codegen" not in capfd.readouterr().err


def check_source(source: bytes, suffix: str, *options: str) -> None:
    """Let clang, which comes with ziglang, read kernels with the headers beside this file."""
    pytest.importorskip("ziglang", reason="clang, to check kernels with, comes with ziglang")
    command = [sys.executable, "-m", "ziglang", "clang", "-fsyntax-only", f"-I{HEADERS}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"kernels.{suffix}")
        file.write_bytes(source)
        run = subprocess.run([*command, *options, str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[:2000]


def sources(library: bytes, start: bytes, end: bytes) -> list[bytes]:
    """The texts in a library from `start` to the last `end` before what is no text."""
    pattern = re.escape(start) + rb"[\t\n\x20-\x7e]*" + re.escape(end)
    return re.findall(pattern, library)


def test_metal_libraries_are_for_macos(tiny_checkpoint: Path, dist: Path) -> None:
    library, stamp = compiled(tiny_checkpoint, "metal", dist)
    assert (stamp.file, stamp.platform) == ("lib/metal.dylib", "macos-arm64")
    magic, cpu_type, _, file_type = struct.unpack_from("<IIII", library)
    assert (magic, cpu_type, file_type) == (0xFEEDFACF, 0x0100000C, 6)  # 64 bits, arm64, dylib
    kernels = sources(library, b"#include <metal_stdlib>", b"\n}\n")
    assert any(b"kernel void attention_4_2_16_kernel" in source for source in kernels)
    for source in kernels:
        check_source(source, "cc", "-std=c++17", "-nostdinc", "-nostdinc++", "-Wno-everything")


def test_opencl_libraries_hold_source(tiny_checkpoint: Path, dist: Path) -> None:
    library, _ = compiled(tiny_checkpoint, "opencl", dist)
    (source,) = sources(library, b"// Function: ", b"\n}\n")
    assert b"__kernel void attention_4_2_16_kernel" in source
    # Their own header comes first, in place of clang's, which has the same name.
    target = ("-target", "spir64-unknown-unknown", "-cl-std=CL2.0", "-w")
    check_source(source, "cl", *target, "-Xclang", "-fdeclare-opencl-builtins")


def test_one_artifact_holds_all_libraries(tiny_checkpoint: Path, dist: Path) -> None:
    compiled(tiny_checkpoint, "opencl", dist)
    _, stamp = compiled(tiny_checkpoint, "vulkan", dist)
    (folder,) = dist.iterdir()
    manifest = read_manifest(folder)
    assert {"opencl", "vulkan"} <= set(manifest.libraries)
    shards = list(folder.glob("params_shard_*.bin"))
    assert len(shards) == 1 and not (folder / ".packed").exists()
    assert stamp.schedules["default"] == 0 and stamp.schedules["hand"] > 0


def test_all_targets_whose_tools_are_there(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(build, "TARGETS", {"opencl": "", "cpu": "", "metal": ""})
    monkeypatch.setattr(device_linkers, "host_platform", lambda: "linux-x86_64")
    monkeypatch.setattr(device_linkers.importlib.util, "find_spec", lambda name: None)
    request = BuildRequest(str(tiny_checkpoint), "all", "q4f16_1", tmp_path)
    with caplog.at_level("WARNING"):
        folder = compile_model(request, lambda *_: None)
    assert set(read_manifest(folder).libraries) == {"opencl", "cpu"}
    assert "left out: target metal needs a linker for macOS" in caplog.text
    monkeypatch.setattr(build, "TARGETS", {"metal": ""})
    with pytest.raises(CompileError, match="no target can be compiled for here"):
        compile_model(request, lambda *_: None)


def test_what_the_engine_is_told() -> None:
    target = find_target("opencl")
    limits = {"threads_per_block": 256, "shared_bytes_per_block": 32768}
    assert target.constants == {"device": "opencl", "device_limits": limits}
    config: Any = SimpleNamespace(
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=100
    )
    assert target.model_constants(config)["query_tile"] == 10
    assert set(target.sampling_functions(100)) == set(find_target("cpu").sampling_functions(100))
    json.dumps(target.spec)  # the manifest keeps it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rocm:gfx1", "unknown architecture 'gfx1' for target rocm; supported: gfx90a, gfx942"),
        ("opencl:x", "target opencl has one library for all devices; leave ':x' out"),
        ("metal:x", "target metal has one library for all devices"),
    ],
)
def test_an_unknown_architecture_is_one_line(text: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        find_target(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_compute_capability_is_one_line() -> None:
    try:
        nvcc.find_nvcc()
    except CompileError as error:
        pytest.skip(str(error))
    with pytest.raises(CompileError, match=r"unknown architecture 'sm_1' .* knows .*sm_90"):
        find_target("cuda:sm_1")


def test_activations_are_for_the_cpu() -> None:
    for name in ("vulkan", "cuda", "rocm", "metal", "opencl"):
        with pytest.raises(CompileError, match=f"activations 'int8' are for target cpu; {name}"):
            find_target(name, activations="int8")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("rocm", "target rocm needs ld.lld, .*pip install ziglang"),
        ("metal", "target metal needs a linker for macOS, .*pip install ziglang"),
        ("cuda", "target cuda needs nvcc, .*pip install nvidia-cuda-nvcc"),
    ],
)
def test_a_missing_tool_is_one_line(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_linkers, "host_platform", lambda: "linux-x86_64")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=message):
        find_target(target)


def test_what_a_code_generator_says_reaches_the_user(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def architectures(self) -> tuple[str, ...]:
            return ("sm_90",)

        def compile(self, source: str, architectures: tuple[str, ...]) -> bytes:
            raise CompileError("nvcc failed (exit code 1): no")

    monkeypatch.setattr(cuda, "find_nvcc", Broken)
    request = BuildRequest(str(tiny_checkpoint), "cuda", "q4f16_1", tmp_path)
    with pytest.raises(CompileError, match=r"^nvcc failed \(exit code 1\): no$"):
        compile_model(request, lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_nvcc_failures_name_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=2, stderr="kernels.cu(1): error: no\nmore", stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        CompileError, match=r"^nvcc failed \(exit code 2\): kernels.cu\(1\): error: no$"
    ):
        nvcc.Nvcc("nvcc").compile("", ("sm_90",))
