"""Work for the Vulkan runtime, in a process of its own: `vulkan_exercise.py LIBRARY`.

The library has a kernel add_one(x, y): y = x + 1 over 256 int32. Prints the counters as JSON.
"""

import json
import sys

import numpy as np
from everycast.artifact.tensor_cache import aligned_empty
from everycast.engine.devices import DeviceMemory
from everycast.engine.runtime import as_tensor
from everycast.engine.tvm_runtime import tvm_ffi


def download(memory: DeviceMemory, tensor, shape, dtype) -> np.ndarray:
    array = aligned_empty(shape, np.dtype(dtype))
    memory.download(tensor, array)
    return array


def copy_parts(memory: DeviceMemory) -> None:
    """Copies of odd sizes at odd places, in both directions and on the device, against NumPy."""
    random = np.random.default_rng(0)
    size = 40_000_000  # larger than what is staged at once
    expected = random.integers(0, 256, size, dtype=np.uint8)
    tensor = memory.upload(expected, "uint8")
    for _ in range(60):
        count = int(random.choice([1, 3, 7, 100, 4097, 1_000_003, 9_000_001]))
        source, target = (int(random.integers(0, size - count)) for _ in range(2))
        if random.random() < 0.5:
            values = aligned_empty((count,), np.dtype(np.uint8))
            values[...] = random.integers(0, 256, count, dtype=np.uint8)
            memory.copy(as_tensor(values), memory.view(tensor, (count,), "uint8", target))
            expected[target : target + count] = values
        elif abs(source - target) >= count:
            memory.copy(
                memory.view(tensor, (count,), "uint8", source),
                memory.view(tensor, (count,), "uint8", target),
            )
            expected[target : target + count] = expected[source : source + count]
        if random.random() < 0.3:
            part = memory.view(tensor, (count,), "uint8", source)
            got = download(memory, part, (count,), np.uint8)
            assert (got == expected[source : source + count]).all()
    assert (download(memory, tensor, (size,), np.uint8) == expected).all()


def chain(memory: DeviceMemory, add_one, length: int) -> None:
    """Each kernel reads what the one before wrote; small copies come in between."""
    buffers = [memory.upload(np.zeros(256, np.int32), "int32") for _ in range(2)]
    start = aligned_empty((256,), np.dtype(np.int32))
    start[...] = np.arange(256)
    memory.copy(as_tensor(start), buffers[0])
    for i in range(length):
        add_one(buffers[i % 2], buffers[1 - i % 2])
    got = download(memory, buffers[length % 2], (256,), np.int32)
    assert (got == np.arange(256) + length).all(), (got[:4], length)
    for i in range(50):  # written while kernels that read it may still run
        start[...] = i
        memory.copy(as_tensor(start), buffers[0])
        add_one(buffers[0], buffers[1])
    assert (download(memory, buffers[1], (256,), np.int32) == 50).all()


def main(path: str) -> None:
    memory = DeviceMemory("vulkan")
    add_one = tvm_ffi.load_module(path)["add_one"]
    copy_parts(memory)
    chain(memory, add_one, 3000)
    counters = dict(tvm_ffi.get_global_func("everycast.vulkan.counters")(0))
    print(json.dumps({str(name): int(value) for name, value in counters.items()}))


main(sys.argv[1])
