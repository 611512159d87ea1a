"""Every scheme, compiled, gives the logits of its own dequantized weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.quant_schemes.group import dequantize
from everycast.quant_schemes.scheme import DEFAULT_SCHEME, SCHEMES, Role, formats_for
from everycast.relax_models import registry
from everycast.relax_models.checkpoint.huggingface import HuggingFaceCheckpoint
from everycast.relax_models.name_map import EMBEDDING, HEAD, parameter_shapes

FAST = ("q3f16_1", "q4f16_0", "q0bf16")
"""Formats that no other test of this folder compiles; the rest take a minute more."""
IDS = np.random.default_rng(6).integers(3, 300, 40)


def stored_weights(folder: Path, scheme: str, config: Any) -> Mapping[str, np.ndarray]:
    """The artifact's weights as float32, by the NumPy reference of each format."""
    cache = TensorCacheReader(folder)
    shapes = parameter_shapes(config)
    roles: dict[str, Role] = {EMBEDDING: "embedding", HEAD: "head"}
    matrices = [(n, roles.get(n, "linear")) for n, shape in shapes.items() if len(shape) == 2]
    formats = formats_for(SCHEMES[scheme], matrices)
    weights = {}
    for name, shape in shapes.items():
        if name not in formats:
            weights[name] = np.asarray(cache.read(name), np.float32)
            continue
        fmt, prefix = formats[name], name.rpartition(".")[0]
        parts = {part: cache.read(f"{prefix}.{part}") for part in fmt.parts(*shape)}
        weights[name] = dequantize(parts, fmt, *shape)
    return weights


def tolerance(scheme: str) -> float:
    """Keys and values in float16 are what costs most."""
    return 1e-3 if SCHEMES[scheme].dtype == "float32" else 3e-3


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in SCHEMES
        if name != DEFAULT_SCHEME
    ],
)
def test_a_scheme(
    scheme: str, small: Path, tmp_path: Path, reference: ModuleType, build: Callable[..., Path],
    compiled: Callable[[Path], Any],
) -> None:  # fmt: skip
    folder = build(small, quantization=scheme, output=tmp_path, activations="int16")
    check(folder, small, scheme, reference, compiled)


def test_the_default_scheme(
    built: Any, tiny: Path, reference: ModuleType, compiled: Callable[[Path], Any]
) -> None:
    # As it is built by default: random weights make no outliers, so nearly all inputs are int8.
    assert check(built.folder, tiny, DEFAULT_SCHEME, reference, compiled, limit=1e-1) < 5e-2


def check(
    folder: Path, source: Path, scheme: str, reference: ModuleType,
    compiled: Callable[[Path], Any], limit: float | None = None,
) -> float:  # fmt: skip
    """The root mean square of the error, relative to that of the logits."""
    config = registry.load_config(HuggingFaceCheckpoint(source))
    expected = reference.reference_logits(config, stored_weights(folder, scheme, config), IDS)
    logits = compiled(folder).logits(IDS)
    limit = tolerance(scheme) if limit is None else limit
    assert np.abs(logits - expected).max() < limit * np.abs(expected).max()
    return float(np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2)))


@pytest.fixture(scope="module")
def small(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer whose matrices are nearly all of one shape: few kernels to compile."""
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("small"),
        num_hidden_layers=1,
        num_key_value_heads=4,
        intermediate_size=64,
    )
