"""The integer kernels of arm64, run by an emulator, against NumPy and this machine's kernels."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi.libinfo
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu import leading_logits
from everycast.schedules.cpu.activation import activation_buffers, quantize_activations
from everycast.schedules.cpu.isa import isa_of
from everycast.schedules.cpu.linear import linears
from everycast.schedules.cpu.packing import PackedWeight
from tvm.target import Target

EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
COMPILER = "aarch64-linux-gnu-gcc"
CPUS = {"dotprod": "cortex-a76", "i8mm": "neoverse-v1"}
FORMATS = [
    TensorFormat("float16", 4, 32, None),
    TensorFormat("float16", 8, 32, 127),
    TensorFormat("float16", 6, 16, 32),
    TensorFormat("bfloat16", 5, 32, None),
]


def target_of(cpu):
    return Target({"kind": "llvm", "mtriple": "aarch64-unknown-linux-gnu", "mcpu": cpu})


@pytest.fixture(params=CPUS)
def arm64(request, tmp_path):
    """(target, `run(func, arrays)`: a kernel's arguments after a call in the emulator)."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None or shutil.which(COMPILER) is None:
        pytest.skip(f"arm64 kernels need {EMULATORS[0]} and {COMPILER} to run here")
    target = target_of(CPUS[request.param])

    def run(func, arrays):
        kernel, program, data = (tmp_path / name for name in ("kernel.o", "program", "data"))
        tvm.compile(func, target=target).mod.write_to_file(str(kernel), "o")
        includes = tvm_ffi.libinfo.include_paths()
        command = [
            COMPILER, "-static", "-O1", f"-DKERNEL=__tvm_ffi_{func.attrs['global_symbol']}",
            *(f"-I{path}" for path in includes), "-o", str(program),
            str(Path(__file__).with_name("arm64_main.c")), str(kernel), "-lm",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        with data.open("wb") as file:
            file.write(np.int64(len(arrays)).tobytes())
            for array in arrays:
                code = {"i": 0, "u": 1, "f": 2}[array.dtype.kind]
                header = [code, array.itemsize * 8, array.ndim, *array.shape, array.nbytes]
                file.write(np.array(header, "int64").tobytes())
                file.write(np.ascontiguousarray(array).tobytes())
        subprocess.run([emulator, "-cpu", "max", str(program), str(data)], check=True, timeout=60)
        written, results, start = data.read_bytes(), [], 0
        for array in arrays:
            result = np.frombuffer(written, array.dtype, array.size, start)
            results.append(result.reshape(array.shape))
            start += array.nbytes
        return results

    return target, run


def assert_same_bits(one, other):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))


@pytest.mark.parametrize("lab", ["avx2"], indirect=True)
@pytest.mark.parametrize("terms", [1, 2])
def test_rounding_of_activations(arm64, lab, terms):
    _, run = arm64
    x = lab.rng.standard_normal((3, 104)).astype("float32")
    x[0, :32] = 0
    outputs = [np.full(shape, 77, dtype) for shape, dtype in activation_buffers(104, 3, terms)]
    results = run(quantize_activations(104, terms, 1.0), [x, *outputs])[1:]
    for result, expected in zip(results, lab.quantized(x, terms, 1.0)[0], strict=True):
        assert_same_bits(result, expected.numpy())


@pytest.mark.parametrize("lab", ["avx2"], indirect=True)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(
    ("fmt", "planes"), [*((fmt, False) for fmt in FORMATS), (FORMATS[1], True)], ids=str
)
def test_same_bits_as_on_x86(arm64, lab, fmt, planes, terms):
    target, run = arm64
    weight = PackedWeight(fmt, 40, 136, planes)
    packed, values = lab.random_weight(weight, lab.rng)
    x = lab.rng.standard_normal((7, weight.k)).astype("float32")
    x_arguments, *_, stands_for = lab.quantized(x, terms, 1.0, [weight])
    y = np.full((7, weight.n), np.nan, "float32")

    host = lab.tensor(y)
    lab.build(linears([weight], [False], isa=lab.isa, terms=terms))(*x_arguments, packed, host)
    func = linears([weight], [False], isa=isa_of(target), terms=terms)
    x_arguments, *_ = lab.quantized(x, terms, 1.0, [weight], isa_of(target))
    arguments = [argument.numpy() for argument in (*x_arguments, packed)]
    result = run(func, [*arguments, y])[-1]
    expected = stands_for @ values.T
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()
    assert_same_bits(result, host.numpy())


@pytest.mark.parametrize("lab", ["avx2"], indirect=True)
def test_upper_logits_as_on_x86(arm64, lab):
    target, run = arm64
    head = PackedWeight(FORMATS[1], 40, 136, planes=True)
    packed, _ = lab.random_weight(head, lab.rng)
    x = lab.rng.standard_normal((7, head.k)).astype("float32")
    inputs, *_ = lab.quantized(x, 2, 1.0, [head])
    shared = [*inputs, packed, lab.tensor(np.array([35], np.int32))]
    outputs = [np.zeros(shape, "float32") for shape in ((7, 40), (7, 16))]
    host = [lab.tensor(output) for output in outputs]
    lab.build(leading_logits.upper_logits(head, lab.isa, 2))(*shared, *host)
    func = leading_logits.upper_logits(head, isa_of(target), 2)
    results = run(func, [*(argument.numpy() for argument in shared), *outputs])[-2:]
    for result, expected in zip(results, host, strict=True):
        assert_same_bits(result, expected.numpy())


@pytest.mark.parametrize(("byte_dot", "instruction"), [("dotprod", "sdot"), ("i8mm", "usdot")])
def test_the_instruction_that_a_cpu_has(byte_dot, instruction):
    target = target_of(CPUS[byte_dot])
    weight = PackedWeight(FORMATS[0], 16, 64)
    func = linears([weight], [False], isa=isa_of(target), terms=1)
    assert f"\t{instruction}\t" in tvm.compile(func, target=target).mod.inspect_source("asm")
