"""Compile a folder of C++ against TVM's headers into a shared library, once.

The library stands in the user's cache, under a hash of the sources, of TVM's versions and of the
compiler, so that it is never stale:

    <cache>/native/<name>-<hash>.so
"""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from ..artifact.cache import cache_dir
from ..artifact.errors import CompileError
from ..artifact.files import disk_errors
from ..artifact.hashing import hash_json
from ..artifact.host import host_platform, running_versions

_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")


def find_compiler() -> Path:
    """The C++ compiler: `$CXX`, or the first that is installed. Raises CompileError, saying what
    brings one, if there is none."""
    for name in (os.environ.get("CXX"), *_COMPILERS):
        if name and (path := shutil.which(name)) is not None:
            return Path(path)
    raise CompileError("no C++ compiler is installed; run, as root: apt install g++")


def build_native(name: str, folder: Path, headers: Mapping[str, str]) -> Path:
    """The shared library made of the `.cc` files in `folder`, compiled if it is not in the cache.

    `headers` are files that the system must bring, and what to run where one is missing. Raises
    CompileError, with one line, if there is no compiler or it refuses.
    """
    sources = sorted(folder.glob("*.cc"))
    compiler = find_compiler()
    versions = running_versions()
    key = hash_json(
        [
            {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir())},
            [versions.tvm, versions.tvm_ffi, host_platform(), str(compiler), _OPTIONS],
        ]
    )[:16]
    path = cache_dir() / "native" / f"{name}-{key}.so"
    if path.is_file():
        return path
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            _compile(name, compiler, sources, headers, path)
    return path


def _compile(
    name: str, compiler: Path, sources: list[Path], headers: Mapping[str, str], path: Path
) -> None:
    tvm, tvm_ffi = package_folder("tvm"), package_folder("tvm_ffi")
    include = [f"-I{tvm / 'include'}", f"-I{tvm_ffi / 'include'}"]
    libraries = [
        f"-L{tvm / 'lib'}", "-ltvm_runtime", f"-L{tvm_ffi / 'lib'}", "-ltvm_ffi",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="everycast-native-") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [str(compiler), *_OPTIONS, *include, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for _ in pool.map(lambda command: _run(name, command, headers), commands):
                pass
        library = Path(folder) / path.name
        link = [str(compiler), "-shared", *map(str, objects), "-o", str(library), *libraries]
        _run(name, [*link, "-ldl"], headers)
        with disk_errors(path):
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            shutil.copyfile(library, temporary)
            temporary.replace(path)


def package_folder(name: str) -> Path:
    """Where a Python package is installed. Raises CompileError if it is not."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise CompileError(f"{name} is missing: pip install apache-tvm")
    return Path(spec.origin).parent


def _run(name: str, command: list[str], headers: Mapping[str, str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if run.returncode == 0:
        return
    for header, remedy in headers.items():
        if f"{header}:" in run.stderr or f"'{header}'" in run.stderr:
            raise CompileError(f"the {name} runtime needs {header}; run, as root: {remedy}")
    lines = [line for line in run.stderr.splitlines() if "error" in line] or ["no message"]
    raise CompileError(
        f"the {name} runtime does not compile with {command[0]}: {lines[0].strip()}; try another "
        "compiler (CXX=…)"
    )
