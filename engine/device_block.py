"""Tensors in one piece of a device's memory, which is copied whole."""

import math
from collections.abc import Sequence

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..artifact.tensor_cache import aligned_empty
from .devices import DeviceMemory
from .runtime import Tensor, as_tensor

Spec = tuple[tuple[int, ...], str]
"""Shape and dtype."""

_ALIGNMENT = 256
"""Bytes: no device wants its tensors to start on larger multiples."""
_LEAST_BYTES = 16 << 10


class DeviceBlock:
    """Tensors on the device, and arrays that have the same places in a piece of the host's memory.

    Both stay while the specs do, as in steps that only decode: making them takes longer than
    filling them. The memory grows and never shrinks.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._specs: list[Spec] = []
        self._host_bytes = aligned_empty((0,), np.dtype(np.uint8))
        self._device_bytes: Tensor = None
        self._host: Tensor = None
        self._device: Tensor = None
        self.arrays: list[np.ndarray] = []
        self.tensors: list[Tensor] = []

    def make(self, specs: Sequence[Spec]) -> list[Tensor]:
        """Tensors of these shapes and dtypes, with arbitrary values, until the next call."""
        specs = list(specs)
        if not specs:
            return []
        if specs != self._specs:
            self._make(specs)
        return self.tensors

    def upload(self, values: Sequence[np.ndarray]) -> list[Tensor]:
        """Tensors of these values, until the next call: float32 as it is, integers as int32. All of
        them are one copy."""
        self.make([(value.shape, _input_dtype(value)) for value in values])
        for array, value in zip(self.arrays, values, strict=True):
            array[...] = value
        self._memory.copy(self._host, self._device)
        return self.tensors

    def download(self) -> list[np.ndarray]:
        """What the tensors hold, until the next call, in one copy. Waits for the device."""
        self._memory.copy(self._device, self._host)
        return self.arrays

    def _make(self, specs: list[Spec]) -> None:
        offsets, end = [], 0
        for shape, dtype in specs:
            offsets.append(end)
            num_bytes = math.prod(shape) * numpy_dtype(dtype).itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._host_bytes):
            room = max(_LEAST_BYTES, 1 << (end - 1).bit_length())
            self._host_bytes = aligned_empty((room,), np.dtype(np.uint8))
            self._device_bytes = self._memory.empty((room,), "uint8")
        self._host = as_tensor(self._host_bytes[:end])
        self._device = self._memory.view(self._device_bytes, (end,), "uint8", 0)
        self.arrays = [
            self._host_bytes[offset : offset + math.prod(shape) * numpy_dtype(dtype).itemsize]
            .view(numpy_dtype(dtype))
            .reshape(shape)
            for (shape, dtype), offset in zip(specs, offsets, strict=True)
        ]
        self.tensors = [
            self._memory.argument(self._device_bytes, shape, dtype, offset)
            for (shape, dtype), offset in zip(specs, offsets, strict=True)
        ]
        self._specs = specs


def _input_dtype(value: np.ndarray) -> str:
    if value.dtype == np.float32:
        return "float32"
    assert value.dtype.kind == "i", f"inputs of {value.dtype} would be cut to int32"
    return "int32"
