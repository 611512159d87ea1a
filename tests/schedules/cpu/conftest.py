"""Random weights in every format, and compiled kernels that run on this machine."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from everycast.artifact.dtypes import numpy_dtype
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import pack_values
from everycast.quant_schemes.group import dequantize
from everycast.schedules.cpu.activation import (
    SCALE,
    WORDS,
    activation_buffers,
    quantize_activations,
)
from everycast.schedules.cpu.isa import CpuIsa, isa_of
from everycast.schedules.cpu.linear_inputs import activation_starts
from everycast.schedules.cpu.pack_weights import pack_func
from everycast.schedules.pipeline import CPU_TIR_PIPELINE
from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features, llvm_get_system_cpu

AVX512 = Target({"kind": "llvm", "mcpu": "icelake-server"})
AVX512BF16 = Target({"kind": "llvm", "mcpu": "cooperlake"})
AVX512BW = Target({"kind": "llvm", "mcpu": "skylake-avx512"})
AVX2 = Target({"kind": "llvm", "mcpu": "x86-64-v3"})
LABS = {
    "avx512": (AVX512, isa_of(AVX512)),
    "avx512bf16": (AVX512BF16, isa_of(AVX512BF16)),
    "avx512bw": (AVX512BW, isa_of(AVX512BW)),
    "avx2": (AVX2, isa_of(AVX2)),
    "word_pairs": (AVX512, replace(isa_of(AVX512), num_word_pairs=3)),
    # AVX-VNNI's instruction, in the encoding of AVX-512.
    "avxvnni": (AVX512, CpuIsa("avx2", 8, 16, "avxvnni")),
}


def _host_has(target):
    host = Target({"kind": "llvm", "mcpu": llvm_get_system_cpu()})
    features = {f for f in map(str, llvm_get_cpu_features(target)) if "avx" in f or f == "fma"}
    return features <= set(map(str, llvm_get_cpu_features(host)))


def tensor(array):
    return tvm.runtime.tensor(np.ascontiguousarray(array))


@functools.cache
def build(func, target):
    return tvm.compile(func, target=target, tir_pipeline=CPU_TIR_PIPELINE)[
        func.attrs["global_symbol"]
    ]


def random_parts(fmt: TensorFormat, n: int, k: int, rng):
    if fmt.bits is None:
        return {"weight": rng.standard_normal((n, k)).astype(numpy_dtype(fmt.dtype))}
    parts = pack_values(rng.integers(0, 1 << fmt.bits, (n, k), dtype=np.uint8), fmt)
    for part in ("q_scale", "q_min"):
        if part in fmt.parts(n, k):
            shape, dtype = fmt.parts(n, k)[part]
            parts[part] = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    return parts


def pack(weight, parts, target):
    """The packed buffer, filled with a pattern beforehand so that a gap shows."""
    packed = tensor(np.full(weight.num_bytes, 255, "uint8"))
    ordered = [tensor(parts[part]) for part in weight.format.parts(weight.n, weight.k)]
    build(pack_func(weight), target)(*ordered, packed)
    return packed


def random_weight(weight, target, rng):
    """(packed buffer, [n, k] float32)."""
    parts = random_parts(weight.format, weight.n, weight.k, rng)
    return pack(weight, parts, target), dequantize(parts, weight.format, weight.n, weight.k)


def by_token(array, terms):
    """[terms · groups, m, …] as [m, terms, groups, …]."""
    num_groups, m, *rest = array.shape
    by_term = array.reshape(terms, num_groups // terms, m, *rest)
    return np.moveaxis(by_term, 2, 0)


def quantized(x, terms, target, threshold=0.0, starts=None):
    """x in int8 terms: (kernel arguments, their groups [m, terms, groups, 12] with zeros where low
    terms are not kept, the terms [m, terms, padded K], what they stand for)."""
    m, k = x.shape
    specs = activation_buffers(k, m, terms)
    buffers = [tensor(np.full(shape, 77, dtype)) for shape, dtype in specs]
    func = quantize_activations(k, terms, threshold, starts=starts)
    build(func, target)(tensor(x), *buffers)
    groups = by_token(buffers[0].numpy(), terms).copy()
    if terms == 2:
        bits = buffers[2].numpy().view(np.uint8)
        is_kept = np.unpackbits(bits, axis=1, count=groups.shape[2], bitorder="little")
        groups[:, 1][is_kept == 0] = 0
    scales = groups[..., SCALE].view(np.float32).astype("float64")[..., None]
    xq = np.ascontiguousarray(groups[..., :WORDS]).view(np.int8)
    return (
        buffers,
        groups,
        xq.reshape(m, terms, -1),
        (xq * scales).sum(axis=1).reshape(m, -1)[:, :k],
    )


@pytest.fixture
def needs():
    """`needs(target)` skips a test whose code this machine cannot run."""

    def check(target):
        if not _host_has(target):
            pytest.skip(f"this CPU cannot run {target.attrs['mcpu']} code")

    return check


@pytest.fixture
def lab(request, needs):
    """The helpers of this file, for the key of LABS that is the test's parameter (AVX-512 if
    none)."""
    target, isa = LABS[getattr(request, "param", "avx512")]
    needs(target)
    return SimpleNamespace(
        target=target,
        isa=isa,
        rng=np.random.default_rng(0),
        tensor=tensor,
        build=lambda func: build(func, target),
        random_parts=random_parts,
        pack=lambda weight, parts: pack(weight, parts, target),
        random_weight=lambda weight, rng: random_weight(weight, target, rng),
        quantized=lambda x, terms, threshold=0.0, weights=(), isa=isa: quantized(
            x, terms, target, threshold, activation_starts(weights, isa) if weights else None
        ),
        by_token=by_token,
    )
