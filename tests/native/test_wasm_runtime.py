"""Linking for browsers: what a module imports and exports, and what is said where it fails."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from everycast.artifact.errors import CompileError
from everycast.native.wasm_runtime import find_emscripten, link_wasm

OF_THE_PAGE = {"TVMFFIWasmSafeCall", "TVMFFIWasmFunctionDeleter", "emscripten_notify_memory_growth"}


@pytest.fixture
def compile_object(tmp_path: Path):
    """C → an object, as the compiler's own are."""
    if shutil.which("emcc") is None or shutil.which("node") is None:
        pytest.skip("Emscripten is not installed: apt install emscripten")

    def compile_object(source: str) -> Path:
        (tmp_path / "model.c").write_text(source)
        run = ["emcc", "-O1", "-c", str(tmp_path / "model.c"), "-o", str(tmp_path / "model.o")]
        subprocess.run(run, check=True)
        return tmp_path / "model.o"

    return compile_object


def imports_and_exports(path: Path) -> tuple[dict[str, set[str]], set[str]]:
    script = """
        const module = new WebAssembly.Module(require("fs").readFileSync(process.argv[1]));
        const names = [WebAssembly.Module.imports(module), WebAssembly.Module.exports(module)];
        console.log(JSON.stringify(names));
    """
    run = subprocess.run(["node", "-e", script, str(path)], capture_output=True, check=True)
    imports, exports = json.loads(run.stdout)
    by_module: dict[str, set[str]] = {}
    for item in imports:
        by_module.setdefault(item["module"], set()).add(item["name"])
    return by_module, {item["name"] for item in exports}


def test_a_module_needs_only_what_pages_bring(compile_object, tmp_path: Path) -> None:
    source = '__attribute__((used, visibility("default"))) int answer(void) { return 42; }'
    output = tmp_path / "model.wasm"
    link_wasm([compile_object(source)], output)
    imports, exports = imports_and_exports(output)
    assert imports.keys() == {"env", "wasi_snapshot_preview1"}
    assert imports["env"] == OF_THE_PAGE
    assert {"answer", "memory", "_initialize", "TVMFFIFunctionCall"} <= exports
    assert output.stat().st_size < 4_000_000


def test_a_missing_function_is_an_error_of_the_link(compile_object, tmp_path: Path) -> None:
    source = (
        "int missing_function(void);"
        '__attribute__((used, visibility("default"))) int answer(void)'
        "{ return missing_function(); }"
    )
    output = tmp_path / "model.wasm"
    with pytest.raises(CompileError, match=r"cannot link .* undefined symbol: missing_function"):
        link_wasm([compile_object(source)], output)
    assert not output.exists()


def test_without_emscripten_one_line_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompileError, match=r"not installed; run, as root: apt install emscripten"):
        find_emscripten()
