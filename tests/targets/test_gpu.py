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
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.machine_code import PREFIX, from_text
from everycast.artifact.manifest import read_manifest
from everycast.targets import build, cuda, cuda_compiler, device_linkers, nvcc, nvrtc, opencl, rocm
from everycast.targets.build import BuildRequest, compile_model
from everycast.targets.inspection import cuda as cuda_code
from everycast.targets.inspection import metal as metal_code
from everycast.targets.inspection import opencl as opencl_code
from everycast.targets.inspection import rocm as rocm_code
from everycast.targets.inspection import vulkan as vulkan_code
from everycast.targets.inspection.library import read_library
from everycast.targets.inspection.report import Finding, ToolMissing
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


def inspected(inspector: ModuleType, library: bytes) -> Finding | None:
    """What the target's tool says of a library; None without the tool. Nothing may be wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "library")
        path.write_bytes(library)
        try:
            finding = inspector.inspect(read_library(path))
        except ToolMissing:
            return None
    assert finding.faults == () and "attention_4_2_16_kernel" in {k.name for k in finding.kernels}
    return finding


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
    if (finding := inspected(cuda_code, library)) is not None:
        assert finding.facts == ("machine code for sm_90", "PTX for sm_90")
        assert all(kernel.stack_bytes == 0 for kernel in finding.kernels)
        assert all(kernel.code_bytes and kernel.registers for kernel in finding.kernels)


def test_rocm_libraries_hold_code_objects(
    tiny_checkpoint: Path, dist: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arch in rocm.ARCHITECTURES:
        library, stamp = compiled(tiny_checkpoint, f"rocm:{arch}", dist)
        assert stamp.target_spec["mcpu"] == arch
        assert arch.encode() in library and b"amdhsa.kernels" in library
        if (finding := inspected(rocm_code, library)) is not None:
            assert {(k.arch, k.spills, k.stack_bytes) for k in finding.kernels} == {(arch, 0, 0)}
            assert f"waves of {rocm.ARCHITECTURES[arch]}" in finding.facts[0]
    said = capfd.readouterr().err
    assert "AMD codegen" not in said and "ROCm version" not in said


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
    assert (stamp.file, stamp.platform) == ("lib/metal.dylib", "macos-aarch64")
    finding = inspected(metal_code, library)
    assert finding is not None, "clang, to check kernels with, comes with ziglang"
    system, linked, signature = finding.facts
    assert system.startswith("arm64 library for macOS 13.0 or later")
    assert linked == "linked with /usr/lib/libSystem.B.dylib" and signature.endswith("ad hoc")
    assert b"@rpath/model.dylib" in library and str(dist).encode() not in library


def test_opencl_libraries_hold_source(tiny_checkpoint: Path, dist: Path) -> None:
    library, _ = compiled(tiny_checkpoint, "opencl", dist)
    (source,) = sources(library, b"// Function: ", b"\n}\n")
    assert b"__kernel void attention_4_2_16_kernel" in source
    # Their own header comes first, in place of clang's, which has the same name.
    target = ("-target", "spir64-unknown-unknown", "-cl-std=CL2.0", "-w")
    check_source(source, "cl", *target, "-Xclang", "-fdeclare-opencl-builtins")
    inspected(opencl_code, library)


def test_one_artifact_holds_all_libraries(tiny_checkpoint: Path, dist: Path) -> None:
    compiled(tiny_checkpoint, "opencl", dist)
    library, stamp = compiled(tiny_checkpoint, "vulkan", dist)
    inspected(vulkan_code, library)
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
    # Logits are on the device: what was changed for a draw is put back there.
    more = set(target.sampling_functions(100)) - set(find_target("cpu").sampling_functions(100))
    assert more == {"take_logits", "put_logits"}
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
        cuda_compiler.find_cuda_compiler()
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
        ("cuda", "target cuda needs nvcc, .*or NVRTC; run: pip install nvidia-cuda-nvrtc"),
    ],
)
def test_a_missing_tool_is_one_line(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_linkers, "host_platform", lambda: "linux-x86_64")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(nvrtc, "_find", lambda *_: None)
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

    monkeypatch.setattr(cuda, "find_cuda_compiler", Broken)
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


KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void twice(const half* x, float* y) { *y = 2 * __half2float(*x); }
"""


def test_nvrtc_makes_what_nvcc_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path))
    try:
        compiler = nvrtc.find_nvrtc()
    except CompileError as error:
        pytest.skip(str(error))
    assert {"sm_80", "sm_90"} <= set(compiler.architectures())
    code = compiler.compile(KERNEL, ("sm_80", "sm_90"))
    assert struct.unpack_from("<I", code)[0] == FAT_BINARY and b"twice" in code
    with pytest.raises(CompileError, match=r"^NVRTC failed: kernels.cu\(1\): error: .*x"):
        compiler.compile("__device__ int y = x;", ("sm_90",))


def test_nvrtc_stands_in_for_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvcc, or without the C++ compiler that it calls."""
    monkeypatch.setattr(nvrtc, "_find", lambda library, _: Path("/lib", library))
    monkeypatch.setattr(nvcc.shutil, "which", lambda name, **_: "nvcc" if name == "nvcc" else None)
    compiler = cuda_compiler.find_cuda_compiler()
    assert compiler.description == "NVRTC /lib/libnvrtc.so"
    monkeypatch.setattr(nvcc.shutil, "which", lambda name, **_: f"/bin/{name}")
    assert cuda_compiler.find_cuda_compiler().description == "nvcc /bin/nvcc"
    monkeypatch.setattr(nvcc.shutil, "which", lambda name, **_: None)
    monkeypatch.setattr(nvrtc, "_find", lambda library, _: None if "fatbin" in library else Path())
    with pytest.raises(CompileError, match=r"needs nvFatbin, .*pip install .*nvidia-nvfatbin"):
        cuda_compiler.find_cuda_compiler()


def test_opencl_reads_bits_as_it_says_they_may_be_read() -> None:
    source = opencl._finished("uint v_ = (uint)7;\ny[0] = (*(float *)(&(v_)));\n")
    assert source.endswith("uint v_ = (uint)7;\ny[0] = (as_float(v_));\n")
