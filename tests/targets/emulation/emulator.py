"""Runs the source that TVM writes for GPUs on a CPU: every thread a fiber, under g++'s sanitizers.

A language (`cuda_source.py`, `metal_source.py`) says how its source becomes C++.

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
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from everycast.schedules.pipeline import GPU_TIR_PIPELINE
from host_on_cpu import launch_axes, split, tensor_of, view_of
from tvm.target import codegen
from tvm.tirx.compilation_pipeline import register_tir_pipeline

HERE = Path(__file__).parent
ORDERS = (0, 1, 2)
"""Ascending, descending, random: the bits of all must be the same."""
_OPTIONS = (
    "-std=c++17", "-O1", "-g0", "-w", "-fno-strict-aliasing", "-ffp-contract=off",
    "-fsanitize=address,bounds", "-fno-sanitize-recover=all", "--param", "asan-stack=0",
)  # fmt: skip
_ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}


def compiler() -> str | None:
    return shutil.which("g++")


@tvm_ffi.register_error
class EmulationError(AssertionError):
    """A kernel did what it must not do."""


def emulator(language: ModuleType) -> SimpleNamespace:
    """`Emulated` and `EmulatedLibrary` for a language, and the target that it is written for."""
    return SimpleNamespace(
        language=language,
        SPEC=language.SPEC,
        Emulated=functools.partial(Emulated, language),
        EmulatedLibrary=functools.partial(EmulatedLibrary, language),
        EmulationError=EmulationError,
    )


class Emulated:
    """PrimFuncs compiled for emulation, all in one program: `run(name, *arrays)`."""

    def __init__(self, language: ModuleType, functions: Sequence[Any]) -> None:
        self.source, host, self._launch_axes = _build(language, functions)
        self._kinds = language.kernels(self.source)
        self._numbers = {name: number for number, name in enumerate(self._kinds)}
        self._path = _program(language, self.source)
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
            given = [tensor_of(a) if isinstance(a, np.ndarray) else a for a in arguments]
            views = [
                view_of(t, a) if isinstance(a, np.ndarray) else a
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


def _build(language: ModuleType, functions: Sequence[Any]) -> tuple[str, Any, dict[str, Any]]:
    """(the kernels' source, the host part as a module for the CPU, kernel → its launch axes)."""
    target, cpu = tvm.target.Target(dict(language.SPEC)), tvm.target.Target({"kind": "llvm"})
    module = tvm.IRModule({f.attrs["global_symbol"]: f for f in functions})
    module = tvm.tirx.transform.BindTarget(target)(module)
    pipeline, finish_host, finish_device = tvm.tirx.get_tir_pipeline(GPU_TIR_PIPELINE)
    host, device = split(pipeline, module, cpu)
    device = finish_device()(device)
    host = codegen.build_module(finish_host()(host), cpu)
    return language.source_of(device, target), host, launch_axes(device)


class EmulatedLibrary:
    """The kernels of a library whose host part runs in this process, on tensors of the CPU: without
    the sanitizers, and in one order. Compile the library with `PIPELINE`, then `attach`."""

    PIPELINE = "everycast_gpu_emulated"

    def __init__(self, language: ModuleType) -> None:
        self._language = language
        self._device: tvm.IRModule | None = None
        self.launches: collections.Counter[str] = collections.Counter()
        register_tir_pipeline(self.PIPELINE, self._passes)

    def _passes(self) -> tuple[Any, Any, Any]:
        pipeline, finish_host, finish_device = tvm.tirx.get_tir_pipeline(GPU_TIR_PIPELINE)
        cpu = tvm.target.Target({"kind": "llvm"})

        @tvm.transform.module_pass(opt_level=0)
        def keep_kernels(module: tvm.IRModule, _: Any) -> tvm.IRModule:
            host, device = split(pipeline, module, cpu)
            self._device = finish_device()(device)
            return host

        return keep_kernels, finish_host, finish_device

    def attach(self) -> None:
        """Compile the kernels, and let the library find them."""
        self.launches.clear()
        target = tvm.target.Target(dict(self._language.SPEC))
        source = self._language.source_of(self._device, target)
        options = ("-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC")
        self._library = ctypes.CDLL(_program(self._language, source, options))
        self._library.emulate.restype = ctypes.c_char_p
        axes = launch_axes(self._device)
        for number, (name, kinds) in enumerate(self._language.kernels(source).items()):
            call = functools.partial(self._launch, name, number, kinds, axes[name])
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


def _cpp(language: ModuleType, source: str) -> str:
    """The C++ program: the kernels, and a table of them."""
    calls = language.calls(source)
    functions = [
        f"static void call_{name}(const Argument* a) {{ {call} }}" for name, call in calls.items()
    ]
    table = [f'{{"{name}", call_{name}}},' for name in calls]
    return "\n".join(
        [f'#include "{HERE}/{language.HEADER}"', language.translated(source),
         "namespace emulation {", *functions, "const Kernel kernels[] = {", *table, "};",
         f"const int num_kernels = {len(table)};", "}", ""]
    )  # fmt: skip


def _program(language: ModuleType, source: str, options: Sequence[str] = _OPTIONS) -> str:
    """The compiled program, kept by what it is made of."""
    source = _cpp(language, source)
    headers = [HERE / "emulation.h", HERE / language.HEADER, HERE / "driver.cc"]
    parts = [source, *(path.read_text() for path in headers), *options]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), f"everycast-emulation-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / key
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            kernels = Path(work, "kernels.cc")
            kernels.write_text(source)
            command = [compiler() or "g++", *options, f"-I{HERE}/include"]
            command += [str(kernels), str(HERE / "driver.cc"), "-o", f"{work}/out"]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode != 0:
                raise EmulationError(f"g++ does not take the kernels: {run.stderr[:2000]}")
            os.replace(f"{work}/out", program)
    return str(program)
