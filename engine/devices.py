"""Devices other than the CPU: their runtimes, and tensors on them.

A device is called by TVM's name of its kind, such as `vulkan`; number 0 is used. Its runtime
decides which of several devices that is.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..artifact.errors import ArtifactError, CapacityError, CompileError
from ..native.vulkan_runtime import load_vulkan_runtime
from .runtime import Tensor, as_tensor, load_runtime
from .tvm_runtime import tvm_ffi

_RUNTIMES: dict[str, Callable[[], None]] = {"vulkan": load_vulkan_runtime}
"""Kind of device → what loads its runtime, where TVM's wheel has none."""

_EXISTS, _TOTAL_BYTES, _FREE_BYTES = 0, 14, 15
"""Of `DeviceAttrKind` in tvm/runtime/device_api.h."""


class DeviceMemory:
    """Tensors on one device, and copies to and from it.

    Raises ArtifactError, saying what is missing, if there is no such device here.
    """

    def __init__(self, kind: str) -> None:
        load_runtime()
        try:
            _RUNTIMES.get(kind, lambda: None)()
        except CompileError as error:
            raise ArtifactError(str(error)) from None
        get = tvm_ffi.get_global_func
        self.kind = kind
        self._device = tvm_ffi.device(kind, 0)
        self._attribute = get("runtime.GetDeviceAttr")
        self._allocate = get("runtime.TVMTensorAllocWithScope")
        self._view = get("runtime.TVMTensorCreateView")
        self._without_offset = get("vm.builtin.ensure_zero_offset")
        self._copy = get("runtime.TVMTensorCopyFromTo")
        self._synchronize = get("runtime.Device_StreamSync")
        self._copy_from_bytes = get("runtime.TVMTensorCopyFromBytes")
        try:
            self._ask(_FREE_BYTES)  # opens the device, or says why not
            exists = bool(self._ask(_EXISTS))
        except Exception as error:
            raise ArtifactError(f"cannot run on {kind}: {last_line(error)}") from error
        if not exists:
            raise ArtifactError(f"cannot run on {kind}: no such device is installed here")
        self.shares_host_memory = bool(self._property("is_unified"))

    def total_bytes(self) -> int:
        """Memory of the device; 0 where its runtime does not say."""
        return int(self._ask(_TOTAL_BYTES) or 0)

    def free_bytes(self) -> int:
        """Memory that may still be taken: all of it where the runtime knows no better."""
        free = self._ask(_FREE_BYTES)
        return self.total_bytes() if free is None else int(free)

    def max_tensor_bytes(self) -> int | None:
        """The largest tensor that a kernel can be given; None where the runtime does not say."""
        limit = self._property("max_tensor_bytes")
        return None if limit is None else int(limit)

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor with arbitrary values. Raises CapacityError if there is no room for it."""
        try:
            return self._allocate(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), self._device, None)
        except Exception as error:
            raise CapacityError(last_line(error)) from error

    def upload(self, array: np.ndarray, dtype: str) -> Tensor:
        """The array's bytes as a tensor of `dtype`, which NumPy may know by another name. The array
        must be contiguous, may be read-only, and is not needed afterwards."""
        tensor = self.empty(array.shape, dtype)
        if array.nbytes:
            self._copy_from_bytes(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
        return tensor

    def view(self, tensor: Tensor, shape: Sequence[int], dtype: str, byte_offset: int) -> Tensor:
        """A part of a tensor, to copy from or to."""
        return self._view(tensor, tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), byte_offset)

    def argument(
        self, tensor: Tensor, shape: Sequence[int], dtype: str, byte_offset: int
    ) -> Tensor:
        """A part of a tensor, for kernels. The offset must be a multiple of 256. Only for devices
        whose pointers the host may count with, as Vulkan's here and CUDA's."""
        return self._without_offset(self.view(tensor, shape, dtype, byte_offset))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy between tensors of one shape, here or on the CPU (`runtime.as_tensor`). Copies to
        the CPU are complete on return, others ordered before what follows on the device."""
        self._copy(source, target)

    def download(self, tensor: Tensor, array: np.ndarray) -> None:
        """Copy a tensor into an array of its shape, aligned as `as_tensor` wants."""
        self.copy(tensor, as_tensor(array))

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self._synchronize(self._device, 0)

    def _ask(self, attribute: int) -> Any:
        return self._attribute(self._device.dlpack_device_type(), self._device.index, attribute)

    def _property(self, name: str) -> Any:
        ask = tvm_ffi.get_global_func(f"device_api.{self.kind}.get_target_property", True)
        return None if ask is None else ask(self._device, name)


def last_line(error: Exception) -> str:
    """What TVM's error says, without its trace."""
    return "".join(str(error).strip().splitlines()[-1:])
