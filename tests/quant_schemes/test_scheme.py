import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes import (
    DEFAULT_SCHEME,
    SCHEMES,
    bits_per_weight,
    find_scheme,
    formats_for,
    num_bytes,
)

WEIGHTS = [("embed", "embedding"), ("layers.0.qkv", "linear"), ("lm_head", "head")]


def test_the_names_that_are_promised() -> None:
    promised = "q0f16 q0f32 q4f16_1 q4f16_0 q4f16_2 q4f32_1 q3f16_1 q8f16_1".split()
    assert set(promised) <= set(SCHEMES)
    assert DEFAULT_SCHEME in SCHEMES
    assert all(scheme.name == name for name, scheme in SCHEMES.items())


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    assert find_scheme("q4f16_1") is SCHEMES["q4f16_1"]
    with pytest.raises(CompileError, match=r"unknown quantization 'int9'; known: q0f32, .*q4f16_1"):
        find_scheme("int9")
    with pytest.raises(CompileError, match=r"unknown quantization 'Q4F16-1'; did you mean q4f16_1"):
        find_scheme("Q4F16-1")


def test_formats_follow_the_roles() -> None:
    scheme = find_scheme("q4f16_2")
    formats = formats_for(scheme, WEIGHTS)
    assert formats["layers.0.qkv"].bits == 4
    assert formats["embed"] == formats["lm_head"] == TensorFormat("float16")


@pytest.mark.parametrize("order", [1, -1])
def test_a_tied_weight_has_the_embeddings_format(order: int) -> None:
    """q4f16_0's head is stored K x N; a tied one must be looked up by row."""
    tied = [("embed", "embedding"), ("embed", "head")][::order]
    formats = formats_for(find_scheme("q4f16_0"), tied)
    assert formats == {"embed": TensorFormat("float16", 4, 32, zero_point=7)}


def test_bits_per_weight() -> None:
    assert num_bytes(SCHEMES["q4f16_1"].linear, 2, 64) == 2 * (32 + 4)
    shapes = {"embed": (100, 64), "layers.0.qkv": (300, 64), "lm_head": (100, 64)}

    def bits(name: str) -> float:
        return bits_per_weight(formats_for(find_scheme(name), WEIGHTS), shapes)

    assert bits("q0f16") == 16
    assert bits("q4f16_1") == 4.5
    assert bits("q4f32_1") == 5
    assert bits("q8f16_1") == 8.5
    assert bits("q4af16_e8") == pytest.approx((300 * 5 + 200 * 8.5) / 500)
    # 64 columns are two groups of 40: padding is stored too.
    assert bits("q3f16_1") == pytest.approx(2 * (4 * 32 + 16) / 64)
