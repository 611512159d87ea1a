"""Every instruction set adds up the same integers."""

import numpy as np
import pytest
import tvm
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import pack_values
from everycast.schedules.cpu.byte_dots import BYTE_DOTS
from everycast.schedules.cpu.isa import isa_of
from everycast.schedules.cpu.kernel import body, kernel
from everycast.schedules.cpu.linear import linears
from everycast.schedules.cpu.packing import PackedWeight
from everycast.schedules.cpu.vectors import ramp
from everycast.schedules.pipeline import CPU_TIR_PIPELINE
from tvm.script import tirx as T
from tvm.target import Target
from tvm.tirx.script import builder as B

Q4 = TensorFormat("float16", 4, 32, None)
Q8 = TensorFormat("float16", 8, 32, 127)
Q6 = TensorFormat("float16", 6, 16, 32)
FORMATS = [Q4, Q8, Q6, TensorFormat("bfloat16", 5, 32, None)]
STEPS = 8  # as in a group of 32 k
START = -1234567
LABS = ["avx2", "avx512", "avx512bw", "avxvnni"]


def sums_func(unit):
    """q [STEPS, 4 lanes] uint8, x alike int8 → [lanes] int32, from START on."""
    width = 4 * unit.lanes
    with kernel("sums") as (k, ib):
        q = k.buffer("q", (STEPS, width), "uint8")
        x = k.buffer("x", (STEPS, width), "int8")
        y = k.buffer("y", (unit.lanes,), "int32")
        with body(unit.llvm_source):
            start = T.broadcast(T.int32(START), unit.lanes)
            sums = unit.before(start)
            for i in range(STEPS):
                sums = unit.multiply_add(sums, q[i, ramp(0, width)], x[i, ramp(0, width)])
                sums = unit.in_order(sums)
            B.buffer_store(y, unit.total(sums, start), [ramp(0, unit.lanes)])
    return ib.get()


@pytest.mark.parametrize("lab", LABS, indirect=True)
@pytest.mark.parametrize("extreme", [False, True])
def test_sums_are_exact(lab, extreme):
    """At the largest q with the largest x of either sign, too: nothing saturates."""
    unit = BYTE_DOTS[lab.isa.byte_dot]
    shape = (STEPS, 4 * unit.lanes)
    if extreme:
        q = np.full(shape, unit.largest_q, "uint8")
        x = np.resize(np.repeat([127, -128], 4), shape).astype("int8")
    else:
        q = lab.rng.integers(0, unit.largest_q + 1, shape, dtype="uint8")
        x = lab.rng.integers(-128, 128, shape, dtype="int8")
    expected = (q.astype(int) * x).reshape(STEPS, -1, 4).sum(axis=(0, 2))
    y = lab.tensor(np.zeros(unit.lanes, "int32"))
    lab.build(sums_func(unit))(lab.tensor(q), lab.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), START + expected)


@pytest.mark.parametrize("lab", ["avx2", "avx512bw", "avxvnni"], indirect=True)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_same_bits_as_avx512_vnni(lab, needs, fmt, terms):
    vnni = Target({"kind": "llvm", "mcpu": "icelake-server"})
    needs(vnni)
    weight = PackedWeight(fmt, 40, 136)
    packed, _ = lab.random_weight(weight, lab.rng)
    x = lab.rng.standard_normal((21, 136)).astype("float32")
    x_arguments, *_ = lab.quantized(x, terms, 1.0, [weight])
    results = []
    for isa, target in ((lab.isa, lab.target), (isa_of(vnni), vnni)):
        y = lab.tensor(np.full((21, weight.n), np.nan, "float32"))
        func = linears([weight], [False], isa=isa, terms=terms)
        built = tvm.compile(func, target=target, tir_pipeline=CPU_TIR_PIPELINE)
        built[func.attrs["global_symbol"]](*x_arguments, packed, y)
        results.append(y.numpy().view(np.int32))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("lab", LABS, indirect=True)
def test_the_largest_values_of_a_group(lab):
    """All q at their largest and all x equal: sums near the ends of their ranges."""
    weight = PackedWeight(Q8, 16, 64)
    parts = pack_values(np.full((16, 64), 255, "uint8"), Q8)
    parts["q_scale"] = np.ones(Q8.parts(16, 64)["q_scale"][0], "float16")
    packed = lab.pack(weight, parts)
    x = np.repeat([[-3.0], [3.0]], 64, axis=1).astype("float32")
    for terms in (1, 2):
        x_arguments, *_, stands_for = lab.quantized(x, terms, 0.0, [weight])
        y = lab.tensor(np.zeros((2, 16), "float32"))
        lab.build(linears([weight], [False], isa=lab.isa, terms=terms))(*x_arguments, packed, y)
        expected = np.repeat(stands_for.sum(axis=1, keepdims=True) * (255 - 127), 16, axis=1)
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("cpu", ["alderlake", "sierraforest", "arrowlake"])
def test_avx_vnni_in_its_own_encoding(cpu):
    target = Target({"kind": "llvm", "mcpu": cpu})
    func = linears([PackedWeight(Q4, 16, 64)], [False], isa=isa_of(target), terms=1)
    asm = tvm.compile(func, target=target).mod.inspect_source("asm")
    assert "{vex}\tvpdpbusd" in asm and "zmm" not in asm
