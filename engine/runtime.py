"""TVM's runtime without its compiler: load a library, run its Relax functions, share tensors.

`import tvm` costs a second or two and 200 MB; `tvm_ffi` with the runtime's shared objects costs a
tenth of that and runs everything a compiled library needs.
"""

import ctypes
import functools
import importlib.util
import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..artifact.errors import ArtifactError, CapacityError, DeviceError
from .threads import prepare_pools
from .tvm_runtime import runtime_file, tvm_ffi

_RUNTIME_PARTS = ("", "extra")
_HUGE_PAGE_BYTES = 2 << 20
_CPU, _POOLED_ALLOCATOR = 1, 2

_loaded_files: dict[Path, list[tuple[int, int]]] = {}
"""Path → the files, by inode and time, that were loaded as libraries from there."""

# The array that owns a tensor's memory must outlive it; DLPack does that for NumPy arrays.
Tensor = Any


@functools.cache
def load_runtime() -> None:
    """Load TVM's runtime into this process, once. Raises ArtifactError if it is not installed."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise ArtifactError("the TVM runtime is missing: pip install apache-tvm")
    prepare_pools()
    folder = Path(spec.origin).parent / "lib"
    for part in _RUNTIME_PARTS:
        try:
            ctypes.CDLL(str(folder / runtime_file(part)), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ArtifactError(
                f"the TVM runtime does not load: {error}; install apache-tvm again"
            ) from error


class Library:
    """A compiled model library. Its functions are Relax functions of the VM.

    Raises ArtifactError for a file that is none.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        """`device` (`vulkan`, `cuda:1`) is where the model runs; `devices.DeviceMemory` must have
        loaded its runtime."""
        load_runtime()
        place = tvm_ffi.device(device)
        self._is_on_device = place.dlpack_device_type() != _CPU
        try:
            self._module = tvm_ffi.load_module(_unloaded_name(path))
            self._vm = self._module["vm_load_executable"]()
            self._vm["vm_initialization"](
                place.dlpack_device_type(), place.index, _POOLED_ALLOCATOR,
                _CPU, 0, _POOLED_ALLOCATOR,
            )  # fmt: skip
            self.metadata: dict[str, Any] = json.loads(str(self._vm["_metadata"]()))
        except Exception as error:
            raise ArtifactError(
                f"{path} does not load as a model library: {last_line(error)}; compile it again"
            ) from error

    def function(self, name: str) -> Callable[..., Any]:
        """A function of the library by name: of the model, or one that takes its outputs as last
        arguments. Raises ArtifactError if the library has none."""
        try:
            func: Callable[..., Any] = self._vm.get_function(name, query_imports=True)
        except AttributeError:
            raise ArtifactError(f"the library has no function '{name}'; compile it again") from None
        return with_device_errors(func) if self._is_on_device else func

    def modules(self, kind: str) -> list[Any]:
        """The parts of the library of one kind, such as the kernels for `vulkan`."""
        found, left = [], [self._module]
        while left:
            module = left.pop()
            left += list(module.imports)
            if module.kind == kind:
                found.append(module)
        return found


def with_device_errors(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func`, a function that uses a device, raising DeviceError, one line, for what a device or
    its runtime reports."""

    def call(*args: Any) -> Any:
        try:
            return func(*args)
        except RuntimeError as error:
            raise DeviceError(last_line(error)) from error

    return call


def last_line(error: Exception) -> str:
    """What TVM's error says, without its trace."""
    return "".join(str(error).strip().splitlines()[-1:])


def _unloaded_name(path: Path) -> str:
    """A spelling of `path` under which no other file was loaded.

    The system's loader knows libraries by name: a library that was compiled again in its old place
    would be the old one for as long as this process runs.
    """
    status = path.stat()
    files = _loaded_files.setdefault(path.absolute(), [])
    file = (status.st_ino, status.st_mtime_ns)
    if file not in files:
        files.append(file)
    return f"{path.absolute().parent}/{'./' * files.index(file)}{path.name}"


def as_tensor(array: np.ndarray) -> Tensor:
    """The array as a TVM tensor, sharing memory. It must be contiguous and start on a multiple of
    64 bytes, which `aligned_empty` and `huge_array` give."""
    if array.dtype != numpy_dtype("bfloat16"):
        return tvm_ffi.from_dlpack(array)
    # NumPy's DLPack does not know this type: hand over the bits, then say what they are.
    load_runtime()
    bits = tvm_ffi.from_dlpack(array.view(np.uint16))
    create_view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
    return create_view(bits, tvm_ffi.Shape(array.shape), tvm_ffi.dtype("bfloat16"), 0)


def as_tuple(tensors: list[Tensor]) -> Any:
    """Tensors as the one tuple argument that carries a model's parameters."""
    return tvm_ffi.convert(tensors)


def as_array(tensor: Tensor) -> np.ndarray:
    """A TVM tensor on the CPU as an array, sharing memory."""
    return np.from_dlpack(tensor)


def num_threads() -> int:
    """Threads that a kernel called from this thread runs on."""
    load_runtime()
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


def huge_array(num_bytes: int) -> np.ndarray:
    """Zeroed private memory, uint8, on huge pages where the system grants them.

    A model reads all its weights for every token: with 4 kB pages the address translation alone
    costs about a fifth of the bandwidth. Physical memory is taken when a page is first written.
    Raises CapacityError if the address space is not to be had.
    """
    # Private: the default, MAP_SHARED, gets no transparent huge pages.
    size = max(num_bytes, 1) + _HUGE_PAGE_BYTES
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, size, **flags)
    except OSError as error:
        raise CapacityError(
            f"the system grants no {num_bytes / 1e6:.0f} MB of memory ({error.strerror}); free "
            "some, or raise the limit (ulimit -v)"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]
