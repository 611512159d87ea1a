"""How close the CPU's linear kernels come to what this machine can do.

    TVM_NUM_THREADS=1 python -m everycast.benchmarks.cpu_kernels [--n N] [--k K] [--mcpu CPU]

Weights are streamed through many copies in huge pages (more than the caches hold), as in decoding.
For each format and kind of activations, and for each number of tokens: GB/s of packed weights and
10⁹ multiply-adds · 2 a second, beside the measured limits: a kernel that only reads, one that only
multiplies. Times are processor time of the best round; run it on an idle machine.
"""

import argparse
import functools
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu
from tvm.tirx.script import builder as B

from ..artifact.tensor_format import TensorFormat
from ..schedules.cpu.dot_bf16 import LLVM_SOURCE
from ..schedules.cpu.isa import CpuIsa, isa_of
from ..schedules.cpu.kernel import body, kernel
from ..schedules.cpu.linear import linears
from ..schedules.cpu.linear_inputs import (
    Activations,
    activation_specs,
    activation_terms,
    num_terms,
)
from ..schedules.cpu.packing import PackedWeight
from ..schedules.cpu.vectors import LANES, constant, ramp, splat

FORMATS = {
    "q4 affine": TensorFormat("float16", 4, 32, None),
    "q4": TensorFormat("float16", 4, 32, 7),
    "q6, group 16": TensorFormat("float16", 6, 16, 32),
    "q8": TensorFormat("float16", 8, 32, 127),
    "float16": TensorFormat("float16"),
    "bfloat16": TensorFormat("bfloat16"),
    "float32": TensorFormat("float32"),
}
KINDS: tuple[Activations, ...] = ("int8", "mixed", "int16", "float32")
TOKENS = (1, 2, 4, 8, 64, 256)
STREAM_BYTES = 160 * 2**20
PEAK_STEPS = 1_000_000
PEAK_CHAINS = 12


def build(func: tirx.PrimFunc, target: Target) -> Callable[..., None]:
    function: Callable[..., None] = tvm.compile(func, target=target)[func.attrs["global_symbol"]]
    return function


def read_func(num_bytes: int) -> tirx.PrimFunc:
    """Adds up all words of a buffer."""
    lines = num_bytes // 64
    with kernel("read") as (k, ib):
        data = k.buffer("data", (lines * LANES,), "float32")
        out = k.buffer("out", (4 * LANES,), "float32")
        with body():
            acc = B.alloc_buffer((4 * LANES,), "float32", scope="local")
            for i in range(4):
                B.buffer_store(acc, constant(0.0), [ramp(i * LANES)])
            with B.serial(T.int64(lines // 4)) as step:
                for i in range(4):
                    at = ramp(i * LANES)
                    value = acc[at] + data[ramp((step * 4 + i) * LANES)]
                    B.buffer_store(acc, value, [at])
            for i in range(4):
                B.buffer_store(out, acc[ramp(i * LANES)], [ramp(i * LANES)])
    return ib.get()


def peak_func(kind: str) -> tirx.PrimFunc:
    """Independent chains of the instruction that the kernels multiply with."""
    dtype = "int32" if kind == "int8" else "float32"
    with kernel(f"peak_{kind}") as (k, ib):
        data = k.buffer("data", (LANES,), dtype)
        out = k.buffer("out", (PEAK_CHAINS * LANES,), dtype)
        with body(), B.attr(T.int32(0), "pragma_import_llvm", LLVM_SOURCE):
            acc = B.alloc_buffer((PEAK_CHAINS * LANES,), dtype, scope="local")
            factor = B.Bind(data[ramp(0)])
            for i in range(PEAK_CHAINS):
                B.buffer_store(acc, splat(tirx.const(i, dtype)), [ramp(i * LANES)])
            with B.serial(T.int64(PEAK_STEPS)):
                for i in range(PEAK_CHAINS):
                    at = ramp(i * LANES)
                    B.buffer_store(acc, _multiply_add(acc[at], factor, kind), [at])
            for i in range(PEAK_CHAINS):
                B.buffer_store(out, acc[ramp(i * LANES)], [ramp(i * LANES)])
    return ib.get()


def _multiply_add(acc: Any, factor: Any, kind: str) -> Any:
    if kind == "float32":
        return acc * factor + factor
    if kind == "bfloat16":
        pairs = T.reinterpret("int32x16", factor)
        return T.call_extern("float32x16", "everycast_dot_bf16", acc, pairs, pairs)
    operands = (T.reinterpret("uint8x64", factor), T.reinterpret("int8x64", factor))
    return T.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpbusd.512", acc, *operands)


def huge_pages(num_bytes: int) -> np.ndarray:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + 2**21, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % 2**21
    pages = array[start : start + num_bytes]
    pages[:] = 0  # else every page is the one shared page of zeros
    return pages


def best_seconds(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best


def limits(target: Target, isa: CpuIsa, seconds: float) -> Iterator[str]:
    data = tvm_ffi.from_dlpack(huge_pages(STREAM_BYTES).view(np.float32))
    out = tvm.runtime.tensor(np.zeros(4 * LANES, "float32"))
    read = build(read_func(STREAM_BYTES), target)
    yield f"reads {STREAM_BYTES / best_seconds(lambda: read(data, out), seconds) / 1e9:.1f} GB/s"
    per_lane = {"float32": 2}
    if isa.has_bf16_dot:
        per_lane["bfloat16"] = 4
    if isa.byte_dot == "avx512vnni":
        per_lane["int8"] = 8
    for kind, operations in per_lane.items():
        dtype = "int32" if kind == "int8" else "float32"
        peak = build(peak_func(kind), target)
        zeros = [tvm.runtime.tensor(np.zeros(n * LANES, dtype)) for n in (1, PEAK_CHAINS)]
        rate = PEAK_STEPS * PEAK_CHAINS * LANES * operations / 1e9
        took = best_seconds(functools.partial(peak, *zeros), seconds)
        yield f"{kind} {rate / took:.0f} GOP/s"


def random_inputs(rng: np.random.Generator, m: int, k: int) -> np.ndarray:
    """x [m, k] float32 with an outlier in every tenth group of 32, as layers have them."""
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[:, ::320] *= 20
    return x


def measure(
    weight: PackedWeight,
    activations: Activations,
    target: Target,
    tokens: list[int],
    seconds: float,
) -> Iterator[str]:
    terms = num_terms([weight], isa_of(target), activations)
    rng = np.random.default_rng(0)
    stride = -(-weight.num_bytes // 4096) * 4096
    copies = max(1, STREAM_BYTES // stride)
    memory = huge_pages(stride * copies)
    # Any bits do for integers; as scales they must be ordinary numbers.
    pattern = rng.integers(0x3030, 0x3838, weight.num_bytes // 2, dtype=np.uint16).view(np.uint8)
    starts = [i * stride for i in range(copies)]
    for start in starts:
        memory[start : start + len(pattern)] = pattern
    packed = [tvm_ffi.from_dlpack(memory[s : s + weight.num_bytes]) for s in starts]
    run = build(linears([weight], [False], isa=isa_of(target), terms=terms), target)
    for m in tokens:
        x = tvm.runtime.tensor(random_inputs(rng, m, weight.k))
        y = tvm.runtime.tensor(np.zeros((m, weight.n), "float32"))
        inputs = [x]
        if terms:
            specs = activation_specs([weight], m, terms)
            inputs = [tvm.runtime.empty(shape, dtype) for shape, dtype in specs]
            rounding = activation_terms([weight], terms, activations, "mlp", isa_of(target))
            build(rounding, target)(x, *inputs)
        used = packed if m <= 8 else packed[:1]

        def round_(inputs: list[Any] = inputs, y: Any = y, used: list[Any] = used) -> None:
            for copy in used:
                run(*inputs, copy, y)

        took = best_seconds(round_, seconds) / len(used)
        operations = 2 * m * weight.n * weight.k
        yield f"{weight.num_bytes / took / 1e9:6.1f} {operations / took / 1e9:5.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=2048, help="output rows")
    parser.add_argument("--k", type=int, default=2048, help="inputs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="M")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one measurement")
    parser.add_argument("--mcpu", default=llvm_get_system_cpu(), help="LLVM name of the CPU")
    options = parser.parse_args()
    if os.environ.get("TVM_NUM_THREADS") != "1":
        parser.error("set TVM_NUM_THREADS=1: processor time is that of one thread")
    target = Target({"kind": "llvm", "mcpu": options.mcpu})
    isa = isa_of(target)
    print(f"{platform.machine()} {options.mcpu} ({isa.name}), TVM {tvm.__version__}")
    print("limits:", ", ".join(limits(target, isa, options.seconds)))
    print(f"{options.n} x {options.k}, GB/s and GOP/s for tokens: {options.tokens}")
    for name in options.formats:
        weight = PackedWeight(FORMATS[name], options.n, options.k)
        for activations in KINDS:
            if activations != "float32" and not num_terms([weight], isa, activations):
                continue
            row = measure(weight, activations, target, options.tokens, options.seconds)
            print(f"{name:13} {activations:8}", " |".join(row), flush=True)


if __name__ == "__main__":
    main()
