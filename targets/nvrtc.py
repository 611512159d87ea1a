"""NVIDIA's run-time compiler, which compiles ahead of time too: a library, no C++ compiler needed.

Standard library only, for `doctor`. Sources: NVRTC's <nvrtc.h>, nvFatbin's <nvFatbin.h>.
"""

import ctypes
import os
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifact.cache import cache_dir
from ..artifact.errors import CompileError

INSTALL = "pip install nvidia-cuda-nvrtc nvidia-nvfatbin"
_INSTALL_HEADERS = (
    "pip install --upgrade nvidia-cuda-nvrtc (or: pip install nvidia-cuda-runtime nvidia-cuda-cccl)"
)
_HEADERS = ("cuda_fp16.h", "cuda/std/cstdint")
"""What TVM's kernels include; for float16, and C++'s own."""
_OPTIONS = ("--std=c++17", "--disable-warnings")


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """NVRTC, and the library that makes one file of its results."""

    path: str
    fatbin_path: str

    @property
    def description(self) -> str:
        return f"NVRTC {self.path}"

    def architectures(self) -> tuple[str, ...]:
        """What it can make machine code for (`sm_90`), oldest first."""
        nvrtc = _load(self.path)
        count = ctypes.c_int()
        _check(nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "NVRTC")
        numbers = (ctypes.c_int * count.value)()
        _check(nvrtc.nvrtcGetSupportedArchs(numbers), "NVRTC")
        return tuple(f"sm_{number}" for number in sorted(numbers))

    def compile(self, source: str, architectures: tuple[str, ...]) -> bytes:
        """A fat binary with machine code for each architecture, and PTX of the last for later ones.
        CompileError with the compiler's first line if it does not take the source."""
        nvrtc = _load(self.path)
        folders = _header_folders(nvrtc)
        # The library does the work without Python's lock.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(
                pool.map(lambda name: _compile(nvrtc, source, name, folders), architectures)
            )
        with _fat_binary(_load(self.fatbin_path)) as (fatbin, handle):
            numbers = [name.removeprefix("sm_").encode() for name in architectures]
            for number, (code, _) in zip(numbers, compiled, strict=True):
                added = fatbin.nvFatbinAddCubin(handle, code, len(code), number, b"kernels")
                _check(added, "nvFatbin")
            number, ptx = numbers[-1], compiled[-1][1]
            added = fatbin.nvFatbinAddPTX(handle, ptx, len(ptx), number, b"kernels", None)
            _check(added, "nvFatbin")
            size = ctypes.c_size_t()
            _check(fatbin.nvFatbinSize(handle, ctypes.byref(size)), "nvFatbin")
            binary = ctypes.create_string_buffer(size.value)
            _check(fatbin.nvFatbinGet(handle, binary), "nvFatbin")
            return binary.raw


def find_nvrtc() -> Nvrtc:
    """From NVIDIA's Python packages or a toolkit; CompileError, with the command that brings it, if
    it or nvFatbin is missing."""
    nvrtc, fatbin = _find("libnvrtc.so", "cuda_nvrtc"), _find("libnvfatbin.so", "nvfatbin")
    if nvrtc is None or fatbin is None:
        missing = "NVRTC" if nvrtc is None else "nvFatbin, which goes with NVRTC"
        raise CompileError(f"target cuda needs {missing}; run: {INSTALL}")
    return Nvrtc(str(nvrtc), str(fatbin))


def _find(library: str, package: str) -> Path | None:
    """The newest library of that name. Wheels of CUDA 12 have a folder for each package."""
    site = Path(sysconfig.get_path("purelib"), "nvidia")
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    for folder in (
        *sorted(site.glob("cu*[0-9]/lib"), reverse=True),
        site / package / "lib",
        *(Path(toolkit, "lib64") for toolkit in toolkits if toolkit),
    ):
        # Such as libnvrtc.so.13, not libnvrtc.alt.so.13.
        if found := sorted(folder.glob(f"{library}*")):
            return found[-1]
    return None


def _load(path: str) -> Any:
    try:
        # What NVRTC opens by name: not every release finds it beside itself.
        for part in Path(path).parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(part))
        return ctypes.CDLL(path)
    except OSError as error:
        raise CompileError(f"{path} does not load: {error}; run: {INSTALL}") from None


def _compile(nvrtc: Any, source: str, arch: str, folders: list[str]) -> tuple[bytes, bytes]:
    """(machine code, PTX) for one architecture."""
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    _check(created, "NVRTC")
    try:
        texts = [f"--gpu-architecture={arch}", *_OPTIONS, *(f"-I{path}" for path in folders)]
        options = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        if nvrtc.nvrtcCompileProgram(program, len(texts), options) != 0:
            log = _result(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            lines = [line for line in log.splitlines() if "error" in line] or log.splitlines()
            raise CompileError(f"NVRTC failed: {lines[0].strip() if lines else 'no message'}")
        return _result(nvrtc, "CUBIN", program), _result(nvrtc, "PTX", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _result(nvrtc: Any, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "NVRTC")
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, content), "NVRTC")
    return content.raw


def _header_folders(nvrtc: Any) -> list[str]:
    """Where `_HEADERS` are. NVRTC brings them from 13.3 on; before, other packages do."""
    if hasattr(nvrtc, "nvrtcInstallBundledHeaders"):
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "NVRTC")
        folder = cache_dir() / "nvrtc" / f"{major.value}.{minor.value}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        message = ctypes.c_char_p()
        installed = nvrtc.nvrtcInstallBundledHeaders(str(folder).encode(), 0, ctypes.byref(message))
        if installed != 0:
            said = (message.value or b"no message").decode(errors="replace")
            raise CompileError(f"NVRTC could not write its headers to {folder}: {said}")
        return [str(folder), str(folder / "cccl")]
    site = Path(sysconfig.get_path("purelib"), "nvidia")
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = [
        *sorted(site.glob("cu*[0-9]/include"), reverse=True),
        *(site / package / "include" for package in ("cuda_runtime", "cuda_cccl")),
        *(Path(toolkit, "include") for toolkit in toolkits if toolkit),
    ]
    places = [folder for place in places for folder in (place, place / "cccl")]
    for header in _HEADERS:
        if not any((folder / header).is_file() for folder in places):
            raise CompileError(f"NVRTC needs {header}, which is missing; run: {_INSTALL_HEADERS}")
    return [str(folder) for folder in places if folder.is_dir()]


@contextmanager
def _fat_binary(fatbin: Any) -> Iterator[tuple[Any, ctypes.c_void_p]]:
    handle = ctypes.c_void_p()
    options = (ctypes.c_char_p * 2)(b"-64", b"-cuda")
    _check(fatbin.nvFatbinCreate(ctypes.byref(handle), options, ctypes.c_size_t(2)), "nvFatbin")
    fatbin.nvFatbinAddCubin.argtypes = (
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p,
    )  # fmt: skip
    fatbin.nvFatbinAddPTX.argtypes = (*fatbin.nvFatbinAddCubin.argtypes, ctypes.c_char_p)
    try:
        yield fatbin, handle
    finally:
        fatbin.nvFatbinDestroy(ctypes.byref(handle))


def _check(result: int, what: str) -> None:
    if result != 0:
        raise CompileError(f"{what} failed with error {result}; install it again: {INSTALL}")
