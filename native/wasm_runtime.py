"""Libraries for browsers: a model's WebAssembly objects linked with TVM's runtime.

The runtime is compiled by Emscripten from the sources in TVM's wheels, together with our own
(`web/`) and the small headers that the wheels lack (`tvm_headers/`). It is compiled once, and kept
in the user's cache under a hash of sources, versions and options:

    <cache>/native/wasm-<hash>/*.o
"""

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from ..artifact.cache import cache_dir
from ..artifact.errors import CompileError
from ..artifact.files import atomic_folder, atomic_write, disk_errors
from ..artifact.hashing import hash_json
from ..artifact.host import running_versions
from .build import package_folder

_HERE = Path(__file__).parent
_OWN_SOURCES = _HERE / "web"
_HEADERS = _HERE / "tvm_headers"

_UNITS = ("wasm_runtime", "tvmjs_support", "webgpu_runtime")
"""Sources in `tvm/web/emcc`. They include the others."""
_REMOTE = ("channel", "endpoint", "event_impl", "local_session", "module", "session")
_LEFT_OUT = (
    "src/runtime/vm/paged_kv_cache.cc",
    "src/runtime/vm/attn_backend.cc",
    "src/runtime/vm/rnn_state.cc",
    "src/runtime/extra/contrib/sort/sort.cc",
    *(f"src/runtime/rpc/rpc_{part}.cc" for part in _REMOTE),
    "3rdparty/tvm-ffi/src/ffi/testing/testing.cc",
)
"""What our libraries and WebLLM never call: nearly half of the runtime."""
_REMOTE_SESSION = ("web/emcc/tvmjs_support.cc", "\nnamespace tvm {\n")
"""A source and where in it the session for remote calls begins, which is its rest."""
_COMPILE_OPTIONS = (
    # The kernels are not here: a step is some hundred calls, and the size is downloaded.
    *("-std=c++17", "-Os", "-fwasm-exceptions", "-Wno-ignored-attributes"),
    # Else every function of the runtime's classes would be kept, called or not.
    "-DTVM_RUNTIME_DLL=",
)
_LINK_OPTIONS = (
    "-O1",
    # Without exceptions an error ends the instance, and says nothing.
    "-fwasm-exceptions",
    "--no-entry",
    *("-s", "STANDALONE_WASM=1"),
    *("-s", "WASM_BIGINT=1"),
    *("-s", "ALLOW_MEMORY_GROWTH=1"),
    # A seventh smaller than -O1 alone, and ten times faster than -O2, which saves another tenth.
    *("-s", "BINARYEN_EXTRA_PASSES=--dce,--vacuum,--strip-debug,--strip-producers"),
)
_FROM_JAVASCRIPT = """\
mergeInto(LibraryManager.library, {
  TVMFFIWasmSafeCall: () => {},
  TVMFFIWasmFunctionDeleter: () => {},
});
"""
"""The functions that the page brings (`@mlc-ai/web-runtime`). Any other that is missing is an error
of the link, and not of the page."""


def find_emscripten() -> Path:
    """Emscripten's compiler. Raises CompileError, saying what brings it, if there is none."""
    path = shutil.which("emcc")
    if path is None:
        raise CompileError(
            "target webgpu needs Emscripten, which is not installed; run, as root: "
            "apt install emscripten"
        )
    return Path(path)


def link_wasm(objects: Sequence[Path], output: Path) -> None:
    """Write the WebAssembly module of TVM's runtime and `objects` to `output`.

    The first call compiles the runtime (about a minute). Raises CompileError, with one line, if
    there is no Emscripten or it refuses.
    """
    emscripten = find_emscripten()
    runtime = _runtime_objects(emscripten)
    with tempfile.TemporaryDirectory(prefix="everycast-wasm-") as name:
        javascript, linked = Path(name) / "imports.js", Path(name) / "linked.wasm"
        javascript.write_text(_FROM_JAVASCRIPT, encoding="utf-8")
        command = [str(emscripten), *_LINK_OPTIONS, "--js-library", str(javascript)]
        inputs = [str(path) for path in (*runtime, *objects)]
        _run([*command, "-o", str(linked), *inputs], "link a library for browsers")
        atomic_write(output, linked.read_bytes())


def _runtime_objects(emscripten: Path) -> list[Path]:
    """The objects of the runtime, compiled if they are not in the cache."""
    versions = running_versions()
    own = sorted((*_OWN_SOURCES.glob("*.cc"), *_HEADERS.rglob("*.h")))
    key = hash_json(
        [
            {path.relative_to(_HERE).as_posix(): path.read_text(encoding="utf-8") for path in own},
            [versions.tvm, versions.tvm_ffi, _version(emscripten)],
            [_COMPILE_OPTIONS, _UNITS, _LEFT_OUT, _REMOTE_SESSION],
        ]
    )[:16]
    folder = cache_dir() / "native" / f"wasm-{key}"
    if not folder.is_dir():
        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                with atomic_folder(folder) as new:
                    _compile_runtime(emscripten, new)
    return sorted(folder.glob("*.o"))


def _compile_runtime(emscripten: Path, folder: Path) -> None:
    tvm, tvm_ffi = package_folder("tvm"), package_folder("tvm_ffi")
    with tempfile.TemporaryDirectory(prefix="everycast-wasm-") as name:
        # The sources include each other by relative paths: they need their usual places.
        tree = Path(name)
        shutil.copytree(tvm / "src", tree / "src")
        shutil.copytree(tvm / "web" / "emcc", tree / "web" / "emcc")
        shutil.copytree(tvm_ffi / "src", tree / "3rdparty" / "tvm-ffi" / "src")
        shutil.copytree(_HEADERS / "src", tree / "src", dirs_exist_ok=True)
        for left_out in _LEFT_OUT:
            (tree / left_out).write_bytes(b"")
        name_of_source, start = _REMOTE_SESSION
        source = tree / name_of_source
        source.write_text(source.read_text(encoding="utf-8").partition(start)[0] + "\n")
        include = [
            tree,
            _HEADERS / "include",
            tvm / "include",
            tvm_ffi / "include",
            tvm_ffi / "3rdparty" / "dlpack" / "include",
        ]
        options = [*_COMPILE_OPTIONS, *(f"-I{path}" for path in include)]
        sources = [tree / "web" / "emcc" / f"{unit}.cc" for unit in _UNITS]
        sources += sorted(_OWN_SOURCES.glob("*.cc"))

        def compile_one(source: Path) -> None:
            command = [str(emscripten), *options, "-c", str(source), "-o"]
            _run([*command, str(folder / f"{source.stem}.o")], "compile TVM's runtime")

        with ThreadPoolExecutor() as pool:
            for _ in pool.map(compile_one, sources):
                pass


def _version(emscripten: Path) -> str:
    return _run([str(emscripten), "--version"], "run").splitlines()[0]


def _run(command: list[str], purpose: str) -> str:
    """The standard output of Emscripten; CompileError, with its first error, if it fails."""
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if run.returncode != 0:
        lines = [line.strip() for line in run.stderr.splitlines() if "error" in line]
        raise CompileError(
            f"Emscripten ({command[0]}) cannot {purpose}: {(lines or ['no message'])[0]}"
        )
    return run.stdout
