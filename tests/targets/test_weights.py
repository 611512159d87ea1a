"""Which format each tensor gets, and that nothing is lost on the way."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from everycast.artifact.errors import CheckpointError, CompileError
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.group import dequantize
from everycast.relax_models.checkpoint.resolve import open_checkpoint
from everycast.relax_models.checkpoint.source import TensorInfo
from everycast.relax_models.name_map import EMBEDDING, HEAD
from everycast.relax_models.registry import load_config, weight_map
from everycast.relax_models.weights import WeightSource
from everycast.targets.weights import (
    LOSSLESS,
    WeightPlan,
    plan_weights,
    rope_parameters,
    stored_tensors,
)

RNG = np.random.default_rng(0)
W = RNG.standard_normal((8, 64)).astype(np.float32)
Q4_1 = gguf.quants.quantize(W, gguf.GGMLQuantizationType.Q4_1)


class Fake:
    """A checkpoint of arrays: float ones, or (blocks, their type, shape)."""

    path = Path("fake.gguf")

    def __init__(self, kind: str, **arrays: Any) -> None:
        self.kind, self.arrays, self.tensors = kind, {}, {}
        names = {np.dtype("float32"): "F32", np.dtype("float16"): "F16"}
        for name, value in arrays.items():
            array, dtype, shape = (
                value if isinstance(value, tuple) else (value, names[value.dtype], value.shape)
            )
            self.arrays[name] = array
            self.tensors[name] = TensorInfo(name, shape, dtype, array.nbytes)

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def stored(checkpoint: Any, formats: dict[str, TensorFormat], name: str, **source: Any) -> Any:
    plan = WeightPlan(source.pop("quantization", LOSSLESS), formats, "float16")
    sources = {"layer.weight": WeightSource(name, **source)}
    ((parameter, parts),) = stored_tensors(checkpoint, sources, plan)
    assert parameter == "layer.weight"
    return parts


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> Iterator[Any]:
    checkpoint = open_checkpoint(str(tiny_checkpoint))
    config = load_config(checkpoint)
    yield SimpleNamespace(
        checkpoint=checkpoint, config=config, sources=weight_map(config, checkpoint)
    )


def test_a_float_checkpoint_gets_the_scheme(tiny: Any) -> None:
    plan = plan_weights(tiny.checkpoint, tiny.config, tiny.sources, None, "q4f16_1")
    assert plan.quantization == "q4f16_1" and plan.dtype == "float16"
    assert {f.bits for f in plan.formats.values()} == {4}
    assert {EMBEDDING, HEAD} <= set(plan.formats)
    assert not any("norm" in name for name in plan.formats)
    two = plan_weights(tiny.checkpoint, tiny.config, tiny.sources, "q4f16_2", "q4f16_1")
    assert two.formats[EMBEDDING].bits is None and two.formats[HEAD].bits is None


def test_lossless_is_for_ggufs(tiny: Any) -> None:
    with pytest.raises(CheckpointError, match=r"is no GGUF.*q4f16_1"):
        plan_weights(tiny.checkpoint, tiny.config, tiny.sources, LOSSLESS, "q4f16_1")
    with pytest.raises(CompileError, match="q4f16_9"):
        plan_weights(tiny.checkpoint, tiny.config, tiny.sources, "q4f16_9", "q4f16_1")


def test_every_parameter_is_stored_once(tiny: Any) -> None:
    plan = plan_weights(tiny.checkpoint, tiny.config, tiny.sources, "q0f32", "q4f16_1")
    names = [name for name, _ in stored_tensors(tiny.checkpoint, tiny.sources, plan)]
    assert names == list(tiny.sources) and len(set(names)) == len(names)


def test_blocks_are_kept_bit_for_bit() -> None:
    checkpoint = Fake("gguf", w=(Q4_1, "Q4_1", (8, 64)))
    fmt = TensorFormat("float16", 4)
    parts = stored(checkpoint, {"layer.weight": fmt}, "w")
    assert set(parts) == {"layer.q_weight", "layer.q_scale", "layer.q_min"}
    plain = {name.removeprefix("layer."): part for name, part in parts.items()}
    expected = gguf.quants.dequantize(Q4_1, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(dequantize(plain, fmt, 8, 64), expected)


def test_rows_of_blocks_are_selected() -> None:
    """Un-permuted Q and K, and parts of fused projections."""
    checkpoint = Fake("gguf", w=(Q4_1, "Q4_1", (8, 64)))
    formats = {"layer.weight": TensorFormat("float16", 4)}
    whole = stored(checkpoint, formats, "w")["layer.q_weight"]
    rows = np.array([6, 1, 3])
    np.testing.assert_array_equal(
        stored(checkpoint, formats, "w", rows=rows)["layer.q_weight"], whole[rows]
    )
    np.testing.assert_array_equal(
        stored(checkpoint, formats, "w", rows=slice(2, 4))["layer.q_weight"], whole[2:4]
    )


def test_blocks_are_requantized_when_a_scheme_is_asked_for() -> None:
    checkpoint = Fake("gguf", w=(Q4_1, "Q4_1", (8, 64)))
    parts = stored(checkpoint, {"layer.weight": TensorFormat("float32")}, "w", quantization="q0f32")
    expected = gguf.quants.dequantize(Q4_1, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(parts["layer.weight"], expected)


def test_vectors_are_float32_with_their_offset() -> None:
    norm = np.arange(4, dtype=np.float16)
    parts = stored(Fake("huggingface", norm=norm), {}, "norm", add=1.0)
    (array,) = parts.values()
    assert array.dtype == np.float32 and array.tolist() == [1, 2, 3, 4]


def test_a_quantized_vector_is_refused_by_name() -> None:
    checkpoint = Fake("gguf", norm=(Q4_1[:1], "Q4_1", (64,)))
    with pytest.raises(CheckpointError, match="tensor norm is stored as Q4_1"):
        stored(checkpoint, {}, "norm")


def test_nan_is_refused_by_name() -> None:
    broken = W.copy()
    broken[3, 5] = np.nan
    for formats in ({"layer.weight": TensorFormat("float16", 4, zero_point=7)}, {}):
        with pytest.raises(CheckpointError, match=r"\bw\b"):
            stored(Fake("huggingface", w=broken), formats, "w", quantization="q4f16_1")


def test_rope_frequencies_are_stored(tiny: Any) -> None:
    (frequencies,) = rope_parameters(tiny.config).values()
    assert frequencies.dtype == np.float32
    half = tiny.config.head_dim // 2
    expected = 10000.0 ** (-np.arange(half) / half)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
