import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.host import host_platform
from everycast.targets import linker
from everycast.targets.linker import Linker, find_linker

HOST, ARM = "linux-x86_64", "linux-aarch64"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine("cc", "ld.lld", ziglang=True)`: a linux-x86_64 with these programs and no more."""
    monkeypatch.setattr(linker, "host_platform", lambda: HOST)

    def set_up(*programs: str, ziglang: bool = False) -> None:
        for program in programs:
            (tmp_path / program).write_text("#!/bin/sh\nexit 0\n")
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        spec = object() if ziglang else None
        monkeypatch.setattr(linker.importlib.util, "find_spec", lambda name: spec)

    return set_up


@pytest.mark.parametrize(
    ("platform", "programs", "chosen"),
    [
        (HOST, ("cc", "gcc", "clang", "ld.lld", "ld"), "cc"),
        (HOST, ("clang", "ld"), "clang"),
        (HOST, ("ld.lld", "aarch64-linux-gnu-gcc"), "ld.lld"),
        (ARM, ("cc", "gcc", "ld.lld", "aarch64-linux-gnu-gcc"), "aarch64-linux-gnu-gcc"),
        (ARM, ("cc", "ld", "ld.lld"), "ld.lld"),
    ],
)
def test_the_best_linker_for_the_platform(
    machine: Any, platform: str, programs: tuple[str, ...], chosen: str
) -> None:
    machine(*programs, ziglang=True)
    found = find_linker(platform)
    assert found.name == Path(found.command[0]).name == chosen


@pytest.mark.parametrize("platform", [HOST, ARM])
def test_ziglang_links_where_nothing_else_does(machine: Any, platform: str) -> None:
    machine(ziglang=True)
    assert find_linker(platform).command[:4] == (sys.executable, "-m", "ziglang", "ld.lld")


@pytest.mark.parametrize(
    ("platform", "programs", "package"),
    [(HOST, (), "gcc"), (HOST, ("aarch64-linux-gnu-gcc",), "gcc"), (ARM, ("cc", "ld"), "lld")],
)
def test_a_missing_linker_is_named_with_what_brings_one(
    machine: Any, platform: str, programs: tuple[str, ...], package: str
) -> None:
    machine(*programs)
    with pytest.raises(CompileError) as caught:
        find_linker(platform)
    message = str(caught.value)
    assert f"no linker for {platform}" in message and "\n" not in message
    assert "pip install ziglang" in message and f"apt install {package})" in message


def test_other_platforms(machine: Any) -> None:
    machine()
    with pytest.raises(CompileError, match="xcode-select --install"):
        find_linker("macos-aarch64")
    with pytest.raises(CompileError, match="linux-riscv64"):
        find_linker("linux-riscv64")


def test_a_failed_link_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "a.o"
    broken.write_bytes(b"no object at all")
    with pytest.raises(CompileError, match=r"could not link m\.so \(exit code \d+\): ") as caught:
        find_linker(host_platform()).link(tmp_path / "m.so", [str(broken)])
    assert "\n" not in str(caught.value)
    with pytest.raises(CompileError, match="gone does not start"):
        Linker("gone", (str(tmp_path / "gone"),)).link(tmp_path / "m.so", [str(broken)])


def elf_machine(path: Path) -> int:
    """`e_machine` of an ELF file (gABI, chapter 4)."""
    header = path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", header, 18)
    return int(machine)


@pytest.mark.parametrize(
    ("triple", "platform", "machine"),
    [("x86_64-unknown-linux-gnu", HOST, 0x3E), ("aarch64-unknown-linux-gnu", ARM, 0xB7)],
)
def test_a_linked_library_is_of_its_platform(
    tmp_path: Path, triple: str, platform: str, machine: int
) -> None:
    import tvm
    from tvm import te

    try:
        found = find_linker(platform)
    except CompileError as error:
        pytest.skip(str(error))
    x = te.placeholder((16,), "float32")
    func = te.create_prim_func([x, te.compute((16,), lambda i: x[i] + 1.0)])
    module = tvm.compile(
        tvm.IRModule({"main": func}), tvm.target.Target({"kind": "llvm", "mtriple": triple})
    )
    path = tmp_path / "模型 a'b.so"
    module.export_library(
        str(path), fcompile=lambda output, objects, **_: found.link(Path(output), objects)
    )
    assert elf_machine(path) == machine
    if platform == host_platform():
        x, y = np.arange(16, dtype="float32"), np.zeros(16, "float32")
        tvm.runtime.load_module(str(path))["main"](x, y)
        assert (y == x + 1).all()
