import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import pack_values, unpack_values
from hypothesis import given, settings
from hypothesis import strategies as st

GROUP_SIZES = {3: (40, 80), 4: (32, 64, 8), 5: (32, 64), 6: (16, 32), 8: (32, 4)}


@st.composite
def packed_formats(draw: st.DrawFn) -> TensorFormat:
    bits = draw(st.sampled_from((3, 4, 5, 6, 8)))
    group_size = draw(st.sampled_from(GROUP_SIZES[bits]))
    return TensorFormat("float16", bits, group_size, 0, draw(st.sampled_from(("NK", "KN"))))


@settings(deadline=None)
@given(packed_formats(), st.integers(1, 5), st.integers(1, 130), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack(fmt: TensorFormat, n: int, k: int, seed: int) -> None:
    q = np.random.default_rng(seed).integers(0, 1 << (fmt.bits or 0), (n, k), dtype=np.uint8)
    parts = pack_values(q, fmt)
    expected = fmt.parts(n, k)
    assert {"q_scale", *parts} == set(expected)
    for part, array in parts.items():
        assert (array.shape, array.dtype.name) == expected[part]
        assert array.flags.c_contiguous
    np.testing.assert_array_equal(unpack_values(parts, fmt, n, k), q)


@settings(deadline=None)
@given(packed_formats(), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_bits_lie_where_the_pictures_say(fmt: TensorFormat, k: int, seed: int) -> None:
    """Against single bits picked out by Python integers."""
    bits = fmt.bits or 0
    q = np.random.default_rng(seed).integers(0, 1 << bits, (1, k), dtype=np.uint8)
    parts = {part: array.ravel().tolist() for part, array in pack_values(q, fmt).items()}
    low_bits = min(bits, 4) if bits != 8 else 8
    for i in range(fmt.padded_k(k)):
        word, place = divmod(i, fmt.values_per_word)
        value = parts["q_weight"][word] >> place * low_bits & (1 << low_bits) - 1
        if bits in (5, 6):
            word, place = divmod(i, 32 // (bits - 4))
            high = parts["q_high"][word] >> place * (bits - 4) & (1 << (bits - 4)) - 1
            value |= high << 4
        assert value == (q[0, i] if i < k else 0)


def test_known_words() -> None:
    eight = np.arange(1, 9, dtype=np.uint8)[None]
    words = pack_values(eight, TensorFormat("float16", 4, 8, 7))["q_weight"]
    assert words.tolist() == [[0x87654321]]
    words = pack_values(np.full((1, 10), 7, np.uint8), TensorFormat("float16", 3, 10, 3))
    assert words["q_weight"].tolist() == [[(1 << 30) - 1]]


def test_too_large_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="value 16 does not fit in 4 bits"):
        pack_values(np.full((1, 32), 16, np.uint8), TensorFormat("float16", 4, 32, 7))


@pytest.mark.parametrize(("bits", "group_size"), [(3, 32), (4, 12), (5, 16), (6, 8)])
def test_groups_that_do_not_fill_words_are_refused(bits: int, group_size: int) -> None:
    fmt = TensorFormat("float16", bits, group_size, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"groups of {group_size} do not fill words"):
        pack_values(np.zeros((1, group_size), np.uint8), fmt)


def test_wrong_parts_are_refused() -> None:
    fmt = TensorFormat("float16", 5, 32, 16)
    parts = pack_values(np.zeros((2, 32), np.uint8), fmt)
    with pytest.raises(ValueError, match="part q_weight is uint32"):
        unpack_values(parts, fmt, 3, 32)
    with pytest.raises(ValueError, match="part q_high is missing"):
        unpack_values({"q_weight": parts["q_weight"]}, fmt, 2, 32)
    with pytest.raises(ValueError, match="no packed values"):
        unpack_values(parts, TensorFormat("float16"), 2, 32)
