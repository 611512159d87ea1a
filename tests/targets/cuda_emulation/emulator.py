"""Runs the CUDA C that TVM writes on a CPU: every thread a fiber, under g++'s sanitizers.

What it finds: wrong numbers, barriers that not all threads come to, warp operations that not all
lanes come to, accesses outside of shared memory or a tensor or that are not aligned, reads of
shared memory that nobody wrote (NaN), and, because threads take turns in several orders which must
give the same bits, threads that do not wait for each other.

The host part, which chooses between kernels and their grids, is compiled for the CPU as it is.
"""

import collections
import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from everycast.schedules.pipeline import GPU_TIR_PIPELINE
from tvm.target import codegen
from tvm.tirx.build import split_host_device_mods
from tvm.tirx.compilation_pipeline import register_tir_pipeline

HERE = Path(__file__).parent
ORDERS = (0, 1, 2)
"""Ascending, descending, random: the bits of all must be the same."""
SPEC = {
    "kind": "cuda", "arch": "sm_80", "thread_warp_size": 32, "max_num_threads": 1024,
    "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "host": {"kind": "llvm"},
}  # fmt: skip
_OPTIONS = (
    "-std=c++17", "-O1", "-g0", "-w", "-fno-strict-aliasing", "-ffp-contract=off",
    "-fsanitize=address,bounds", "-fno-sanitize-recover=all", "--param", "asan-stack=0",
)  # fmt: skip
_ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}

_SHARED = re.compile(r"__shared__\s+(?:alignas\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[(\d+)\];")
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(([^)]*)\) \{'
)
_ASM = re.compile(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)((?:[^;"]|"[^"]*")*?)\)\s*;')
_OPERAND = re.compile(r'"[=+]?\w"\s*\(((?:[^()]|\([^()]*\))*)\)')
INSTRUCTIONS = {
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};": "ptx_mma_m16n8k16",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": "ptx_ldmatrix_x4",
    "cp.async.ca.shared.global [%0], [%1], 4;": "ptx_cp_async<4>",
    "cp.async.ca.shared.global [%0], [%1], 8;": "ptx_cp_async<8>",
    "cp.async.cg.shared.global [%0], [%1], 16;": "ptx_cp_async<16>",
    "cp.async.commit_group;": "ptx_cp_async_commit",
    **{f"cp.async.wait_group {n};": f"ptx_cp_async_wait<{n}>" for n in range(4)},
}
"""Inline PTX → the function of emulation.h in its place; all operands in order."""


def compiler() -> str | None:
    return shutil.which("g++")


@tvm_ffi.register_error
class EmulationError(AssertionError):
    """A kernel did what it must not do."""


class Emulated:
    """PrimFuncs compiled for emulation, all in one program: `run(name, *arrays)`."""

    def __init__(self, functions: Sequence[Any], spec: Mapping[str, Any] = SPEC) -> None:
        self.source, host, self._launch_axes = _build(functions, spec)
        kernels = [(match[1], match[2]) for match in _KERNEL.finditer(self.source)]
        self._numbers = {name: number for number, (name, _) in enumerate(kernels)}
        self._kinds = {name: _kinds(parameters) for name, parameters in kernels}
        self._path = _program(emulated_source(self.source, kernels))
        self._program = self._start()
        self._order, self._arrays = 0, {}
        self.launches: list[str] = []
        """Names of the kernels that the last `run` launched, for each order."""
        self._host = host

    def run(self, name: str, *arguments: Any) -> list[Any]:
        """Call a function; every array as it is afterwards. Raises EmulationError."""
        self._register()
        results = []
        self.launches = []
        for self._order in ORDERS:
            given = [_tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
            views = [
                _view(t, a) if isinstance(a, np.ndarray) else a
                for t, a in zip(given, arguments, strict=True)
            ]
            self._arrays = {a.ctypes.data: a for a in views if isinstance(a, np.ndarray)}
            self._host[name](*given)
            results.append([a.copy() if isinstance(a, np.ndarray) else a for a in views])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                if isinstance(a, np.ndarray) and a.tobytes() != b.tobytes():
                    raise EmulationError(f"{name}: what comes out depends on the order of threads")
        return results[0]

    def _register(self) -> None:
        """Let the host parts find these kernels; other programs may have some of the same names."""
        for name in self._numbers:
            call = functools.partial(self._launch, name)
            tvm_ffi.register_global_func(name, call, override=True)

    def _launch(self, name: str, *values: Any) -> None:
        kinds = self._kinds[name]
        extents = _extents(self._launch_axes[name], values[len(kinds) :])
        self.launches.append(name)
        message = [struct.pack("<9i", self._numbers[name], *extents, self._order, len(kinds))]
        arrays = []
        for kind, value in zip(kinds, values, strict=False):
            if kind == "pointer":
                array = self._arrays[getattr(value, "value", value)]
                arrays.append(array)
                message += [struct.pack("<iq", 2, array.nbytes), array.tobytes()]
            elif kind == "real":
                message.append(struct.pack("<id", 1, value))
            else:
                message.append(struct.pack("<iq", 0, int(value)))
        try:
            self._program.stdin.write(b"".join(message))
            self._program.stdin.flush()
            status = struct.unpack("<i", self._read(4))[0]
            if status:
                text = self._read(struct.unpack("<i", self._read(4))[0]).decode()
                raise EmulationError(f"{name}: {text}")
            for array in arrays:
                array.reshape(-1).view(np.uint8)[:] = np.frombuffer(
                    self._read(array.nbytes), np.uint8
                )
        except (BrokenPipeError, EOFError):
            said = self._program.stderr.read().decode(errors="replace")
            self._stop()
            self._program = self._start()
            lines = [line for line in said.splitlines() if "ERROR" in line or "runtime" in line]
            raise EmulationError(f"{name}: {(lines or ['the program ended'])[0]}") from None

    def _read(self, count: int) -> bytes:
        data = self._program.stdout.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def _start(self) -> Any:
        return subprocess.Popen(
            [self._path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
        )  # fmt: skip

    def _stop(self) -> None:
        program = self._program
        with contextlib.suppress(BrokenPipeError):
            program.stdin.close()
        program.wait()
        program.stdout.close()
        program.stderr.close()

    def close(self) -> None:
        self._stop()
        for name in self._numbers:
            if tvm_ffi.get_global_func(name, allow_missing=True) is not None:
                tvm_ffi.registry.remove_global_func(name)


def _tensor(array: np.ndarray) -> Any:
    tensor = tvm.runtime.empty(array.shape, array.dtype.name, tvm.cpu())
    _view(tensor, array)[...] = array
    return tensor


def _view(tensor: Any, array: np.ndarray) -> np.ndarray:
    """The tensor's memory, as an array like `array`."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def _build(functions: Sequence[Any], spec: Mapping[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """(CUDA C, the host part as a module for the CPU, kernel → its launch axes)."""
    target, cpu = tvm.target.Target(dict(spec)), tvm.target.Target({"kind": "llvm"})
    module = tvm.IRModule({f.attrs["global_symbol"]: f for f in functions})
    module = tvm.tirx.transform.BindTarget(target)(module)
    pipeline, finish_host, finish_device = tvm.tirx.get_tir_pipeline(GPU_TIR_PIPELINE)
    host, device = _split(pipeline, module, cpu)
    device = finish_device()(device)
    host = codegen.build_module(finish_host()(host), cpu)
    return _source(device, target), host, _launch_axes(device)


def _split(
    pipeline: Any, module: tvm.IRModule, cpu: tvm.target.Target
) -> tuple[tvm.IRModule, tvm.IRModule]:
    """(functions that launch kernels, for tensors of the CPU; the kernels)."""
    for step in pipeline.passes:
        if step.info.name == "tirx.MakePackedAPI":
            module = _with_host_on_cpu(module, cpu.with_host(cpu))
        module = step(module)
    host, devices = split_host_device_mods(module)
    (device,) = devices.values()
    return host, device


def _launch_axes(device: tvm.IRModule) -> dict[str, list[str]]:
    return {
        str(func.attrs["global_symbol"]): list(map(str, func.attrs["tirx.kernel_launch_params"]))
        for func in device.functions.values()
    }


class EmulatedLibrary:
    """The kernels of a library whose host part runs in this process, on tensors of the CPU: without
    the sanitizers, and in one order. Compile the library with `PIPELINE`, then `attach`."""

    PIPELINE = "everycast_gpu_emulated"

    def __init__(self) -> None:
        self._device: tvm.IRModule | None = None
        self.launches: collections.Counter[str] = collections.Counter()
        register_tir_pipeline(self.PIPELINE, self._passes)

    def _passes(self) -> tuple[Any, Any, Any]:
        pipeline, finish_host, finish_device = tvm.tirx.get_tir_pipeline(GPU_TIR_PIPELINE)
        cpu = tvm.target.Target({"kind": "llvm"})

        @tvm.transform.module_pass(opt_level=0)
        def keep_kernels(module: tvm.IRModule, _: Any) -> tvm.IRModule:
            host, device = _split(pipeline, module, cpu)
            self._device = finish_device()(device)
            return host

        return keep_kernels, finish_host, finish_device

    def attach(self, spec: Mapping[str, Any]) -> None:
        """Compile the kernels, and let the library find them."""
        self.launches.clear()
        source = _source(self._device, tvm.target.Target(dict(spec)))
        kernels = [(match[1], match[2]) for match in _KERNEL.finditer(source)]
        options = ("-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC")
        self._library = ctypes.CDLL(_program(emulated_source(source, kernels), options))
        self._library.emulate.restype = ctypes.c_char_p
        axes = _launch_axes(self._device)
        for number, (name, parameters) in enumerate(kernels):
            call = functools.partial(self._launch, name, number, _kinds(parameters), axes[name])
            tvm_ffi.register_global_func(name, call, override=True)

    def _launch(
        self, name: str, number: int, kinds: Sequence[str], axes: Sequence[str], *values: Any
    ) -> None:
        self.launches[name] += 1
        arguments = (ctypes.c_uint64 * len(kinds))()
        for i, (kind, value) in enumerate(zip(kinds, values, strict=False)):
            plain = int(getattr(value, "value", value) or 0) if kind != "real" else value
            packed = struct.pack("<d", plain) if kind == "real" else struct.pack("<q", plain)
            arguments[i] = struct.unpack("<Q", packed)[0]
        extents = (ctypes.c_int32 * 6)(*_extents(axes, values[len(kinds) :]))
        said = self._library.emulate(number, extents, 0, arguments)
        if said is not None:
            raise EmulationError(f"{name}: {said.decode()}")


def _extents(axes: Sequence[str], values: Sequence[Any]) -> list[int]:
    """Grid and block, x first, of a launch."""
    names = [f"{kind}Idx.{axis}" for kind in ("block", "thread") for axis in "xyz"]
    given = dict(zip(axes, map(int, values), strict=True))
    return [given.get(name, 1) for name in names]


def _with_host_on_cpu(module: tvm.IRModule, cpu: tvm.target.Target) -> tvm.IRModule:
    """Functions that launch kernels, for tensors of the CPU."""
    updated = {
        variable: func
        if "tirx.kernel_launch_params" in func.attrs
        else func.with_attr("target", cpu)
        for variable, func in module.functions.items()
    }
    return tvm.IRModule(updated, attrs=module.attrs)


def _source(device: tvm.IRModule, target: tvm.target.Target) -> str:
    said: list[str] = []

    def keep(source: str, _: object) -> str:
        said.append(source)
        return source

    callbacks = {"tvm_callback_cuda_postproc": keep, "tvm_callback_cuda_compile": lambda *_: ""}
    before = {name: tvm_ffi.get_global_func(name, allow_missing=True) for name in callbacks}
    for name, function in callbacks.items():
        tvm_ffi.register_global_func(name, function, override=True)
    try:
        codegen.build_module(device, target)
    finally:
        for name, function in before.items():
            if function is None:
                tvm_ffi.registry.remove_global_func(name)
            else:
                tvm_ffi.register_global_func(name, function, override=True)
    return said[0]


def _kinds(parameters: str) -> list[str]:
    """Of each parameter of a kernel: 'pointer', 'real' or 'integer'."""
    return [
        "pointer" if "*" in p else "real" if re.search(r"\b(float|double)\b", p) else "integer"
        for p in parameters.split(",")
    ]


def emulated_source(source: str, kernels: Sequence[tuple[str, str]]) -> str:
    """The C++ program: shared arrays that the driver gives, functions in place of instructions,
    and a table of the kernels."""
    sites = iter(range(1 << 20))
    source = _SHARED.sub(
        lambda m: (
            f"{m[1]}* {m[2]} = ({m[1]}*)"
            f"emulation::shared_array({next(sites)}, {m[3]} * sizeof({m[1]}));"
        ),
        source,
    )
    source = _ASM.sub(_instruction, source)
    calls, table = [], []
    for name, parameters in kernels:
        values = ", ".join(
            f"({parameter.rsplit(None, 1)[0].replace('__restrict__', '')})a[{i}]."
            + {"pointer": "pointer", "real": "real", "integer": "integer"}[kind]
            for i, (parameter, kind) in enumerate(
                zip(parameters.split(","), _kinds(parameters), strict=True)
            )
        )
        calls.append(f"static void call_{name}(const Argument* a) {{ {name}({values}); }}")
        table.append(f'{{"{name}", call_{name}}},')
    return "\n".join(
        [source, "namespace emulation {", *calls, "const Kernel kernels[] = {", *table, "};",
         f"const int num_kernels = {len(table)};", "}", ""]
    )  # fmt: skip


def _instruction(found: re.Match[str]) -> str:
    text = re.sub(r"\s+", " ", "".join(re.findall(r'"([^"]*)"', found[1]))).strip()
    if text not in INSTRUCTIONS:
        raise EmulationError(f"there is no emulation of the instruction: {text}")
    # A shared address is a pointer here, too long for an unsigned.
    operands = [o.replace("(unsigned)__cvta", "__cvta") for o in _OPERAND.findall(found[2])]
    return f"emulation::{INSTRUCTIONS[text]}({', '.join(['__LINE__', *operands])});"


def _program(source: str, options: Sequence[str] = _OPTIONS) -> str:
    """The compiled program, kept by what it is made of."""
    parts = [source, *((HERE / name).read_text() for name in ("emulation.h", "driver.cc"))]
    key = hashlib.sha256("\0".join([*parts, *options]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), f"everycast-cuda-emulation-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / key
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            kernels = Path(work, "kernels.cc")
            kernels.write_text(source)
            command = [compiler() or "g++", *options, f"-I{HERE}/include", "-include"]
            command += [str(HERE / "emulation.h"), str(kernels), str(HERE / "driver.cc")]
            run = subprocess.run([*command, "-o", f"{work}/out"], capture_output=True, text=True)
            if run.returncode != 0:
                raise EmulationError(f"g++ does not take the kernels: {run.stderr[:2000]}")
            os.replace(f"{work}/out", program)
    return str(program)
