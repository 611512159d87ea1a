"""Worker: what this machine can do at best, measured by two kernels that do nothing else.

    TVM_NUM_THREADS=N python -m everycast.benchmarks.worker_limits

`read`: bytes a second of a stream through memory in huge pages, by all threads. `multiply`: int8
(where the CPU has AVX-512 VNNI, else float32) multiply-adds · 2 a second from registers.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.runtime import num_threads as thread_count
from tvm.script import tirx as T
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu
from tvm.tirx.script import builder as B

from ..engine.runtime import huge_array
from ..schedules.cpu.isa import isa_of
from ..schedules.cpu.kernel import body, kernel
from ..schedules.cpu.vectors import LANES, constant, ramp, splat

STREAM_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
CHAINS = 12
"""Independent sums, enough to hide the latency of multiplying and of reading."""
PEAK_STEPS = 4_000_000
REPEATS = 5


def read_func() -> tirx.PrimFunc:
    """Adds up all words of a buffer, a chunk a unit."""
    chunk, step = CHUNK_BYTES // 4, 4 * LANES
    with kernel("read") as (k, ib):
        data = k.buffer("data", ("size",), "float32")
        out = k.buffer("out", ("chunks", LANES), "float32")
        with body(), B.parallel(k.size("chunks")) as unit:
            acc = B.alloc_buffer((4 * LANES,), "float32", scope="local")
            for i in range(4):
                B.buffer_store(acc, constant(0.0), [ramp(i * LANES)])
            with B.serial(T.int64(chunk // step)) as line:
                for i in range(4):
                    at = ramp(i * LANES)
                    value = data[ramp(unit * chunk + line * step + i * LANES)]
                    B.buffer_store(acc, acc[at] + value, [at])
            total = acc[ramp(0)]
            for i in range(1, 4):
                total = total + acc[ramp(i * LANES)]
            B.buffer_store(out, total, [unit, ramp(0)])
    return ib.get()


def multiply_func(has_vnni: bool) -> tirx.PrimFunc:
    """Independent chains of the instruction that the kernels multiply with, on every thread."""
    dtype = "int32" if has_vnni else "float32"
    with kernel("multiply") as (k, ib):
        data = k.buffer("data", (LANES,), dtype)
        out = k.buffer("out", ("threads", CHAINS * LANES), dtype)
        with body(), B.parallel(k.size("threads")) as thread:
            acc = B.alloc_buffer((CHAINS * LANES,), dtype, scope="local")
            factor = B.Bind(data[ramp(0)])
            for i in range(CHAINS):
                B.buffer_store(acc, splat(tirx.const(i, dtype)), [ramp(i * LANES)])
            with B.serial(T.int64(PEAK_STEPS)):
                for i in range(CHAINS):
                    at = ramp(i * LANES)
                    B.buffer_store(acc, _multiply_add(acc[at], factor, has_vnni), [at])
            for i in range(CHAINS):
                at = ramp(i * LANES)
                B.buffer_store(out, acc[at], [thread, at])
    return ib.get()


def _multiply_add(acc: Any, factor: Any, has_vnni: bool) -> Any:
    if not has_vnni:
        return acc * factor + factor
    operands = (T.reinterpret("uint8x64", factor), T.reinterpret("int8x64", factor))
    return T.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpbusd.512", acc, *operands)


def _build(func: tirx.PrimFunc, target: Target) -> Callable[..., None]:
    function: Callable[..., None] = tvm.compile(func, target=target)[func.attrs["global_symbol"]]
    return function


def main() -> None:
    target = Target({"kind": "llvm", "mcpu": llvm_get_system_cpu()})
    has_vnni, threads = isa_of(target).byte_dot == "avx512vnni", thread_count()
    dtype, per_lane = ("int32", 8) if has_vnni else ("float32", 2)
    stream = huge_array(STREAM_BYTES)
    stream[:] = 0  # else every page is the one shared page of zeros
    read_args = [
        tvm_ffi.from_dlpack(stream.view(np.float32)),
        tvm.runtime.tensor(np.zeros((STREAM_BYTES // CHUNK_BYTES, LANES), "float32")),
    ]
    multiply_args = [
        tvm.runtime.tensor(np.zeros(LANES, dtype)),
        tvm.runtime.tensor(np.zeros((threads, CHAINS * LANES), dtype)),
    ]
    operations = threads * PEAK_STEPS * CHAINS * LANES * per_lane
    works = {
        "read": (_build(read_func(), target), read_args, STREAM_BYTES),
        "multiply": (_build(multiply_func(has_vnni), target), multiply_args, operations),
    }
    print(json.dumps({"multiplies": "int8" if has_vnni else "float32"}), flush=True)
    for line in sys.stdin:
        run, args, amount = works[line.strip()]
        best = float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            run(*args)
            best = min(best, time.perf_counter() - start)
        print(json.dumps({"per_second": amount / best}), flush=True)


if __name__ == "__main__":
    main()
