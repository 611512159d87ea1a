"""RoPE frequencies against transformers, and the spellings of rope settings."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.config_fields import Fields
from everycast.relax_models.rope import (
    RopeConfig,
    gguf_rope,
    hf_rope,
    hf_rope_settings,
    inverse_frequencies,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(config: Mapping[str, Any], head_dim: int = 64) -> RopeConfig:
    fields = Fields({"max_position_embeddings": 131072, **config}, source="config.json")
    return hf_rope(fields, hf_rope_settings(fields), head_dim=head_dim)


def read_gguf(metadata: Mapping[str, Any], **kwargs: Any) -> RopeConfig:
    fields = Fields(metadata, source="model.gguf", prefix="llama.")
    return gguf_rope(fields, head_dim=64, context_length=131072, **kwargs)


@given(
    head_dim=st.sampled_from([32, 64, 80, 128, 256]),
    theta=st.floats(100, 1e7),
    factor=st.floats(1, 64),
    context=st.integers(64, 65536),
    spread=st.floats(1.5, 8),
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    yarn=st.fixed_dictionaries(
        {},
        optional={
            "attention_factor": st.floats(0.5, 2),
            "beta_fast": st.floats(8, 64),
            "beta_slow": st.floats(0.5, 4),
            "mscale": st.floats(0.5, 2),
            "mscale_all_dim": st.floats(0.5, 2),
            "truncate": st.booleans(),
        },
    ),
)
@settings(max_examples=60, deadline=None)
def test_frequencies_equal_transformers(
    head_dim: int,
    theta: float,
    factor: float,
    context: int,
    spread: float,
    kind: str,
    yarn: dict[str, Any],
) -> None:
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="it is the oracle")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        parameters["factor"] = factor
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = context
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": spread}
    if kind == "yarn":
        parameters |= yarn
    hf = LlamaConfig(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    if kind == "default":
        expected, attention_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(hf)
    else:
        expected, attention_factor = utils.ROPE_INIT_FUNCTIONS[kind](hf)

    rope = read({"rope_parameters": parameters}, head_dim)

    frequencies = inverse_frequencies(rope)
    assert frequencies.dtype == np.float32 and frequencies.shape == (head_dim // 2,)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2e-6)
    assert math.isclose(rope.attention_factor, attention_factor)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": LLAMA3},
    ],
)
def test_old_and_new_spelling_say_the_same(config: dict[str, Any]) -> None:
    assert read(config) == RopeConfig(
        64,
        5e5,
        "llama3",
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_absent_and_null_settings_are_the_default() -> None:
    assert read({}) == read({"rope_scaling": None}) == RopeConfig(64, 10_000.0)
    assert read({"rope_scaling": {"type": "linear", "factor": 2}}).factor == 2.0


def test_yarn_derives_what_is_left_out() -> None:
    rope = read({"rope_scaling": {"type": "yarn", "factor": 4}})
    assert rope.original_max_position_embeddings == 131072
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    rope = read({"rope_scaling": {**YARN, "factor": None}})
    assert rope.factor == 131072 / 32768


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "'mrope'"),
        ({"rope_scaling": {"type": "novel"}}, "default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "contradicts"),
        ({"rope_scaling": {"factor": 2.0}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "'2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be positive"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "alpha": 3}}, "alpha"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "below high_freq_factor"),
        ({"rope_scaling": LLAMA3, "rope_parameters": YARN}, "contradicts rope_parameters"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "contradicts rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
    ],
)
def test_what_is_not_understood_is_an_error(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(config)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gguf_scaling_types() -> None:
    base = {"llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 64}
    assert read_gguf({}) == RopeConfig(64, 10_000.0)
    assert read_gguf({**base, "llama.rope.scaling.type": "none"}) == RopeConfig(64, 5e5)
    linear = {**base, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
    assert read_gguf(linear) == RopeConfig(64, 5e5, "linear", factor=8.0)
    assert read_gguf({**base, "llama.rope.scale_linear": 8.0}) == read_gguf(linear)
    yarn = {
        **base,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32768,
    }
    assert read_gguf(yarn) == read({"rope_theta": 5e5, "rope_scaling": YARN})


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type = 'longrope'"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5},
            "yarn_ext_factor",
        ),
    ],
)
def test_gguf_settings_that_are_not_understood(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_gguf(metadata)


def test_gguf_frequency_factors_divide_the_frequencies() -> None:
    divisors = tuple(float(i + 1) for i in range(32))
    scaled = inverse_frequencies(read_gguf({}, divisors=divisors))
    np.testing.assert_allclose(
        scaled, inverse_frequencies(RopeConfig(64)) / np.array(divisors), rtol=1e-6
    )
    with pytest.raises(CheckpointError, match="frequency factors must be 32"):
        read_gguf({}, divisors=(1.0, 2.0))
    with pytest.raises(CheckpointError, match="positive numbers"):
        read_gguf({}, divisors=(0.0,) * 32)
