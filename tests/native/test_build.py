"""Compiling the runtimes: once, and with a message where something is missing."""

import ctypes
from pathlib import Path

import pytest
from everycast.artifact.errors import CompileError
from everycast.native.build import build_native, find_compiler


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.cc").write_text('extern "C" int answer();\n')
    (folder / "b.cc").write_text(
        '#include "b.h"\n'
        'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    (folder / "b.h").write_text("#define ANSWER 42\n")
    return folder


def test_sources_are_compiled_once_and_again_when_they_change(folder: Path) -> None:
    first = build_native("test", folder, {})
    assert ctypes.CDLL(str(first)).answer() == 42
    time = first.stat().st_mtime_ns
    assert build_native("test", folder, {}) == first and first.stat().st_mtime_ns == time
    (folder / "b.h").write_text("#define ANSWER 43\n")
    second = build_native("test", folder, {})
    assert second != first and ctypes.CDLL(str(second)).answer() == 43


def test_what_is_missing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.cc").write_text("#include <no/such_header.h>\n")
    with pytest.raises(CompileError, match=r"needs no/such_header\.h; run, as root: get it"):
        build_native("test", folder, {"no/such_header.h": "get it"})
    (folder / "a.cc").write_text("this is no C++\n")
    with pytest.raises(CompileError, match=r"the test runtime does not compile with .*: .*error"):
        build_native("test", folder, {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError, match=r"no C\+\+ compiler is installed; run, as root: apt"):
        find_compiler()
