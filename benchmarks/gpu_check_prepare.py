"""The part of `gpu_check` that compiles, on any machine that has the target's tools."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from ..artifact.tensor_cache import TensorCacheReader, TensorCacheWriter
from ..artifact.tensor_format import TensorFormat
from ..engine.loader import model_info
from ..engine.paged_runner import PagedRunner
from ..engine.parameters import load_parameters
from ..engine.runtime import Library
from ..quant_schemes.group import quantize
from ..quant_schemes.scheme import QuantScheme, Role, find_scheme, formats_for
from ..relax_models.config import DecoderConfig
from ..relax_models.name_map import EMBEDDING, HEAD, parameter_shapes
from ..relax_models.rope import RopeConfig
from ..schedules.gpu.kernel import bind, body, kernel, launch, load_vector, registers, store
from ..targets.library import build_library
from ..targets.target import CompileTarget, find_target
from ..targets.weights import rope_parameters
from .gpu_check_files import (
    CHECK_JSON,
    EXPECTED,
    LIMITS_LIBRARY,
    MODEL_LIBRARY,
    NUM_PAGES,
    ROPES,
    STEPS,
    VOCAB_SIZE,
    step_input,
)  # fmt: skip
from .shapes import Shape

CONTEXT = 4096
"""Most tokens of a sequence that the libraries of shapes are compiled for."""
SCHEME = "q4f16_1"
"""Of the shapes."""

READ_BLOCKS, READ_THREADS, READ_STEPS = 4096, 256, 64
READ_BYTES = READ_BLOCKS * READ_THREADS * READ_STEPS * 16
MULTIPLY_BLOCKS, MULTIPLY_STEPS, CHAINS = 2048, 1024, 16
OPERATIONS = MULTIPLY_BLOCKS * READ_THREADS * MULTIPLY_STEPS * CHAINS * 2

_LLAMA3 = RopeConfig(32, 500_000.0, "llama3", 8.0, 64)
_YARN = RopeConfig(32, 10_000.0, "yarn", 4.0, 64)
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama, q4f16_1": ("q4f16_1", {"attention_bias": True, "mlp_bias": True}),
    "llama, q4f32_1": ("q4f32_1", {"ropes": (_LLAMA3,)}),
    "llama, q0f32": ("q0f32", {"tie_word_embeddings": True}),
    "windows, q8f16_1": (
        "q8f16_1", {"layer_windows": (40, None), "qk_norm": True, "post_norms": True},
    ),
    "odd sizes, q4af16_e8": (
        "q4af16_e8",
        {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6,
         "num_key_value_heads": 3, "ropes": (_YARN,)},
    ),
    "large heads, q3f16_1": (
        "q3f16_1", {"hidden_size": 160, "intermediate_size": 320, "head_dim": 128,
                    "ropes": (RopeConfig(128),), "activation": "gelu_tanh"},
    ),
}  # fmt: skip
"""Name → scheme, and what differs from a small llama."""


def prepare(folder: Path, target: str, shapes: Mapping[str, Shape], num_cases: int) -> None:
    """Write all that `gpu_check_run` needs for `target`, on all CPUs. Raises CompileError without
    the target's tools."""
    find_target(target)
    folder.mkdir(parents=True, exist_ok=True)
    cases = list(CASES)[:num_cases]
    # Processes, because most of compiling holds Python's lock.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        parts = [pool.submit(_build_limits, target, folder / LIMITS_LIBRARY)]
        for name, shape in shapes.items():
            parts.append(pool.submit(_prepare_shape, shape, target, folder / "shapes" / name))
        for name in cases:
            parts.append(pool.submit(_prepare_case, name, target, folder / "cases" / name))
        for part in parts:
            part.result()
    document = {
        "target": target,
        "cases": cases,
        "shapes": list(shapes),
        "read_bytes": READ_BYTES,
        "operations": OPERATIONS,
    }
    (folder / CHECK_JSON).write_text(json.dumps(document, indent=2))


def decoder_config(shape: Shape) -> DecoderConfig:
    """The model of a shape."""
    return DecoderConfig(
        model_type=shape.architecture,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=CONTEXT,
        attention_scale=shape.head_dim**-0.5,
        ropes=(RopeConfig(shape.head_dim, shape.rope_theta),),
        layer_ropes=(0,) * shape.num_layers,
        layer_windows=(None,) * shape.num_layers,
        tie_word_embeddings=shape.is_tied,
        qk_norm=shape.has_head_norms,
    )


_TINY = Shape("llama", 2, 64, 96, 4, 2, 32, VOCAB_SIZE, 10_000.0, False)


def _formats(config: DecoderConfig, scheme: QuantScheme) -> dict[str, TensorFormat]:
    def role(name: str) -> Role:
        return "embedding" if name == EMBEDDING else "head" if name == HEAD else "linear"

    shapes = parameter_shapes(config)
    return formats_for(scheme, [(n, role(n)) for n, shape in shapes.items() if len(shape) == 2])


def _build(
    config: DecoderConfig, scheme: QuantScheme, target: CompileTarget, path: Path
) -> Mapping[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return build_library(
        config,
        _formats(config, scheme),
        target,
        path,
        scheme_dtype=scheme.dtype,
        context_window_size=config.max_position_embeddings,
    ).metadata


def _prepare_case(name: str, target: str, folder: Path) -> None:
    scheme_name, changes = CASES[name]
    config = replace(decoder_config(_TINY), **changes)
    scheme = find_scheme(scheme_name)
    _build(config, scheme, find_target(target), folder / MODEL_LIBRARY)
    with TensorCacheWriter(folder, {}) as writer:
        for part, array in _random_parts(config, scheme):
            writer.add(part, array)
    # Exact inputs of the linear layers, as on a GPU.
    cpu = find_target("cpu", activations="float32")
    path = folder / "cpu.so"
    metadata = _build(config, scheme, cpu, path)
    library = Library(path)
    parameters = load_parameters(folder, library, TensorCacheReader(folder))
    runner = PagedRunner(library, parameters, model_info(metadata), NUM_PAGES, 1)
    expected = [np.array(runner.execute(step_input(step))) for step in STEPS]
    np.savez(folder / EXPECTED, *expected)
    path.unlink()


def _random_parts(config: DecoderConfig, scheme: QuantScheme) -> Sequence[tuple[str, np.ndarray]]:
    """Stored tensors of a random model; norms and biases are random too."""
    random = np.random.default_rng(0)
    formats = _formats(config, scheme)
    parts: list[tuple[str, np.ndarray]] = []
    for name, shape in parameter_shapes(config).items():
        noise = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            parts.append((name, 0.3 * noise + np.float32("norm" in name)))
        elif name in formats:
            weight = noise * np.float32(1.5 / math.sqrt(shape[1]))
            prefix = name.rpartition(".")[0]
            stored = quantize(weight, formats[name], scheme.rounding, name=name)
            parts += [(f"{prefix}.{part}", array) for part, array in stored.items()]
    return [*parts, *rope_parameters(config).items()]


def _prepare_shape(shape: Shape, target: str, folder: Path) -> None:
    config = decoder_config(shape)
    _build(config, find_scheme(SCHEME), find_target(target), folder / MODEL_LIBRARY)
    np.savez(folder / ROPES, allow_pickle=False, **rope_parameters(config))


def _build_limits(target_name: str, path: Path) -> None:
    """`read(x, y)`: sums of a large array. `multiply(x, y)`: chains of multiply-adds in registers,
    in float32."""
    target = find_target(target_name)
    module = tvm.IRModule({"read": _read(), "multiply": _multiply()})
    with target.compiling():
        executable = tvm.compile(
            module, target=tvm.target.Target(target.spec), tir_pipeline=target.tir_pipeline
        )
    target.export(executable, path)


def _read() -> tirx.PrimFunc:
    with kernel("read") as (k, ib):
        x = k.buffer("x", (READ_BYTES // 4,), "float32")
        y = k.buffer("y", (READ_BLOCKS * READ_THREADS,), "float32")
        with body(), launch([READ_BLOCKS], [READ_THREADS]) as ((block,), (thread,)):
            sums = registers(4)
            for lane in range(4):
                store(sums, T.float32(0), lane)
            with B.serial(READ_STEPS) as step:
                first = ((step * READ_BLOCKS + block) * READ_THREADS + thread) * 4
                for lane, value in enumerate(load_vector(x, [], first, 4)):
                    store(sums, sums[lane] + value, lane)
            store(y, sums[0] + sums[1] + sums[2] + sums[3], block * READ_THREADS + thread)
    return ib.get()


def _multiply() -> tirx.PrimFunc:
    with kernel("multiply") as (k, ib):
        x = k.buffer("x", (2,), "float32")
        y = k.buffer("y", (MULTIPLY_BLOCKS * READ_THREADS,), "float32")
        with body(), launch([MULTIPLY_BLOCKS], [READ_THREADS]) as ((block,), (thread,)):
            sums = registers(CHAINS)
            factor, summand = bind(x[0]), bind(x[1])
            for chain in range(CHAINS):
                store(sums, T.float32(chain), chain)
            with B.serial(MULTIPLY_STEPS):
                for chain in range(CHAINS):
                    store(sums, sums[chain] * factor + summand, chain)
            total = sums[0]
            for chain in range(1, CHAINS):
                total = total + sums[chain]
            store(y, total, block * READ_THREADS + thread)
    return ib.get()
