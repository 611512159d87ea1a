"""Devices other than the CPU: what there is, and tensors on one.

A device is called by TVM's name of its kind, perhaps with a number: `vulkan`, `cuda:1`.
"""

import contextlib
import ctypes
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..artifact.errors import ArtifactError, CapacityError
from .device_runtimes import KINDS, cuda_driver, load_device_runtime
from .runtime import Tensor, as_tensor, last_line, with_device_errors
from .tvm_runtime import tvm_ffi

CPU, AUTO = "cpu", "auto"
DEVICES = (*KINDS, CPU)
"""What a library can run on, best first."""
_SEVERAL_LIBRARIES = ("cuda", "rocm", CPU)
"""Kinds whose libraries are for one architecture or another."""

_EXISTS, _MAX_THREADS, _WARP, _SHARED, _VERSION, _NAME = 0, 1, 2, 3, 4, 5
_GCN_ARCH, _TOTAL_BYTES, _FREE_BYTES = 10, 14, 15
"""Of `DeviceAttrKind` in tvm/runtime/device_api.h."""

_ADVICE = {
    "vulkan": "; install the driver of the GPU, or on Debian: apt install mesa-vulkan-drivers"
}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device of this machine. Bytes are 0 where its runtime does not say."""

    kind: str
    index: int
    name: str
    driver: str
    is_gpu: bool
    """False for a driver that computes on the CPU."""
    total_bytes: int
    free_bytes: int
    features: tuple[str, ...]

    @property
    def label(self) -> str:
        """`cuda:0 (NVIDIA H200)`."""
        return f"{self.kind}:{self.index} ({self.name})"


def split_device(text: str) -> tuple[str, int]:
    """Kind and number: `vulkan:1` → ("vulkan", 1). What else follows the kind names a library
    (`cuda:sm_90`), which runs on number 0. Raises ArtifactError for an unknown kind or number."""
    kind, colon, rest = text.partition(":")
    if kind not in DEVICES:
        near = difflib.get_close_matches(kind, (AUTO, *DEVICES), n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"choose {AUTO}, {', '.join(DEVICES)}"
        raise ArtifactError(f"device '{text}' cannot be run on in this version; {hint}")
    if _is_number(rest):
        if kind == CPU and int(rest) > 0:
            raise ArtifactError(f"there is no device {text}; all processors are one device, {CPU}")
        return kind, int(rest)
    if colon and (not rest or rest[0] == "-" or kind not in _SEVERAL_LIBRARIES):
        raise ArtifactError(f"device '{text}' needs a number after the colon, such as {kind}:0")
    return kind, 0


def library_name(text: str) -> str:
    """What the device `text` names without its number: `cuda:1` → `cuda`, `cuda:sm_90` as it is."""
    kind, _, rest = text.partition(":")
    return kind if _is_number(rest) else text


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def list_devices(kind: str) -> list[DeviceInfo]:
    """The devices of a kind, in the order of their numbers; opens them. Raises ArtifactError, one
    line that says what to install, if devices of this kind cannot be used or there are none."""
    devices: list[DeviceInfo] = []
    while _exists(kind, len(devices)):
        devices.append(DeviceMemory(f"{kind}:{len(devices)}").info())
    return devices


def _exists(kind: str, index: int) -> bool:
    """Whether there is the device; ArtifactError, which says why, if there is none at all."""
    load_device_runtime(kind)
    try:
        if kind == "vulkan":  # raises, saying what is missing
            exists = index < len(tvm_ffi.get_global_func("everycast.vulkan.device_names")())
        else:
            exists = bool(DeviceMemory.ask_device(kind, index, _EXISTS))
    except Exception as error:
        raise ArtifactError(f"cannot run on {kind}: {last_line(error)}") from error
    if not exists and index == 0:
        raise ArtifactError(
            f"cannot run on {kind}: no such device is installed here{_ADVICE.get(kind, '')}"
        )
    return exists


class DeviceMemory:
    """Tensors on one device, and copies to and from it.

    Raises ArtifactError, saying what is missing, if there is no such device here.
    """

    def __init__(self, device: str) -> None:
        """`device` is `vulkan` or `vulkan:1`; what else follows the kind is not looked at."""
        kind, index = split_device(device)
        if not _exists(kind, index):
            number = 0
            while _exists(kind, number + 1):
                number += 1
            raise ArtifactError(
                f"there is no device {kind}:{index}; this machine has {kind}:0"
                + (f" to {kind}:{number}" if number else "")
            )
        get = tvm_ffi.get_global_func
        self.kind, self.index = kind, index
        self._device = tvm_ffi.device(kind, index)
        self._allocate = get("runtime.TVMTensorAllocWithScope")
        self._view = get("runtime.TVMTensorCreateView")
        self._without_offset = get("vm.builtin.ensure_zero_offset")
        self._copy = with_device_errors(get("runtime.TVMTensorCopyFromTo"))
        self._synchronize = with_device_errors(get("runtime.Device_StreamSync"))
        self._copy_from_bytes = with_device_errors(get("runtime.TVMTensorCopyFromBytes"))
        try:
            self._ask(_FREE_BYTES)  # opens the device, or says why not
        except Exception as error:
            raise ArtifactError(f"cannot run on {kind}: {last_line(error)}") from error
        self.shares_host_memory = bool(self._property("is_unified"))

    def info(self) -> DeviceInfo:
        """What is known of the device."""
        return DeviceInfo(
            self.kind,
            self.index,
            self.name(),
            self._driver(),
            self._property("device_type") != CPU,
            self.total_bytes(),
            self.free_bytes(),
            self._features(),
        )

    @property
    def label(self) -> str:
        """As `DeviceInfo.label`."""
        return f"{self.kind}:{self.index} ({self.name()})"

    def name(self) -> str:
        """What the device calls itself."""
        return str(self._try(_NAME) or self.kind)

    def architecture(self) -> str | None:
        """What machine code must be for: `sm_90`, `gfx942`; None for a kind that has no such."""
        if self.kind == "cuda":
            return "sm_" + str(self._ask(_VERSION)).replace(".", "")
        if self.kind == "rocm" and (arch := self._try(_GCN_ARCH)):
            return str(arch).partition(":")[0]
        return None

    def max_threads(self) -> int | None:
        """Most threads of a block; None where the runtime does not say."""
        return self._number(_MAX_THREADS)

    def max_shared_bytes(self) -> int | None:
        """Most shared memory of a block; None where the runtime does not say."""
        return self._number(_SHARED)

    def total_bytes(self) -> int:
        """Memory of the device; 0 where its runtime does not say."""
        return self._number(_TOTAL_BYTES) or 0

    def free_bytes(self) -> int:
        """Memory that may still be taken: all of it where the runtime knows no better."""
        free = self._number(_FREE_BYTES)
        return self.total_bytes() if free is None else free

    def max_tensor_bytes(self) -> int | None:
        """The largest tensor that a kernel can be given; None where the runtime does not say."""
        limit = self._property("max_tensor_bytes")
        return None if limit is None else int(limit)

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor with arbitrary values. Raises CapacityError if there is no room for it."""
        try:
            return self._allocate(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), self._device, None)
        except Exception as error:
            num_bytes = int(np.prod(shape, dtype=np.int64)) * tvm_ffi.dtype(dtype).itemsize
            reason = last_line(error)
            if self.kind != "vulkan":  # TVM's runtimes say no more than that there is no room
                reason = (
                    f"{self.label} has no room for {num_bytes / 1e6:.0f} MB: "
                    f"{self.free_bytes() / 1e6:.0f} of {self.total_bytes() / 1e6:.0f} MB are free "
                    f"({reason})"
                )
            raise CapacityError(
                f"{reason}; free some, take a smaller model or context, or another device"
            ) from error

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

    @staticmethod
    def ask_device(kind: str, index: int, attribute: int) -> Any:
        """A `DeviceAttrKind` of a device that need not exist."""
        number = tvm_ffi.device(kind, index).dlpack_device_type()
        return tvm_ffi.get_global_func("runtime.GetDeviceAttr")(number, index, attribute)

    def _ask(self, attribute: int) -> Any:
        return self.ask_device(self.kind, self.index, attribute)

    def _try(self, attribute: int) -> Any:
        """None for what a runtime refuses to say."""
        with contextlib.suppress(Exception):
            return self._ask(attribute)
        return None

    def _number(self, attribute: int) -> int | None:
        value = self._try(attribute)
        return None if value is None else int(value)

    def _property(self, name: str) -> Any:
        ask = tvm_ffi.get_global_func(f"device_api.{self.kind}.get_target_property", True)
        return None if ask is None else ask(self._device, name)

    def _driver(self) -> str:
        if self.kind == "cuda":
            return cuda_driver()
        return str(self._property("driver") or "")

    def _features(self) -> tuple[str, ...]:
        """For people."""
        if self.kind != "vulkan":
            warp, arch = self._number(_WARP), self.architecture()
            return (*((arch,) if arch else ()), *((f"warps of {warp}",) if warp else ()))
        has_half = self._property("supports_float16") and self._property("supports_16bit_buffer")
        least, most = (int(self._property(f"{end}_subgroup_size") or 0) for end in ("min", "max"))
        usual = int(self._property("thread_warp_size"))
        subgroups = f"{least} to {most}" if 0 < least < most else str(most or usual)
        features = {
            "fp16": has_half,
            "int8 dot product": self._property("supports_integer_dot_product"),
            f"subgroups of {subgroups}": True,
        }
        return tuple(name if is_there else f"no {name}" for name, is_there in features.items())
