"""Activations in bfloat16 terms against the rounding of ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from everycast.schedules.cpu.activation_bf16 import bf16_activation_buffer, bf16_activations

both_vectors = pytest.mark.parametrize("lab", ["avx2", "avx512"], indirect=True)


def nearest(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def terms_of(lab, x, terms):
    """The kernel's terms, [m, terms, padded K] float32, and the words as they lie."""
    m, k = x.shape
    shape, dtype = bf16_activation_buffer(k, m, terms)
    words = lab.tensor(np.full(shape, 77, dtype))
    lab.build(bf16_activations(k, terms))(lab.tensor(x), words)
    lines = words.numpy()[:, : -(-k // 32) * terms * 16].view(ml_dtypes.bfloat16)
    lines = lines.reshape(m, -1, terms, 32).transpose(0, 2, 1, 3)
    return lines.reshape(m, terms, -1).astype(np.float32), words.numpy()


@both_vectors
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("k", [1, 15, 31, 32, 33, 64, 100, 161])
@pytest.mark.parametrize("m", [1, 3])
def test_every_term_is_the_nearest_to_what_is_left(lab, terms, k, m):
    x = lab.rng.standard_normal((m, k), dtype=np.float32) * np.float32(10) ** lab.rng.integers(
        -20, 20, (m, k)
    ).astype(np.float32)
    got, _ = terms_of(lab, x, terms)
    assert not got[..., k:].any()
    high = nearest(x)
    np.testing.assert_array_equal(got[:, 0, :k], high)
    if terms == 2:
        np.testing.assert_array_equal(got[:, 1, :k], nearest(x - high))
        assert (np.abs(got[..., :k].sum(axis=1) - x) <= np.abs(x) * 2.0**-17).all()


def test_ties_go_to_even(lab):
    """Every number of 9 bits with its sign: half of them lie between two bfloat16."""
    steps = np.arange(-512, 513, dtype=np.float32)[None]
    got, _ = terms_of(lab, steps, 2)
    np.testing.assert_array_equal(got[:, 0, : steps.size], nearest(steps))
    np.testing.assert_array_equal(got.sum(axis=1)[:, : steps.size], steps)


def test_what_is_not_a_number_shows(lab):
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0]], np.float32)
    got, _ = terms_of(lab, x, 1)
    np.testing.assert_array_equal(got[:, 0, :5], x)


@pytest.mark.parametrize("terms", [1, 2])
def test_rows_lie_in_different_sets_of_the_cache(terms):
    for k in (1, 64, 576, 2048, 8192):
        ((_, words), dtype) = bf16_activation_buffer(k, 3, terms)
        assert dtype == "int32" and words % 32 == 16 and words >= -(-k // 32) * 16 * terms


@pytest.mark.parametrize("terms", [1, 2])
def test_many_rows_take_the_parallel_path(lab, terms):
    x = lab.rng.standard_normal((300, 64), dtype=np.float32)
    got, _ = terms_of(lab, x, terms)
    np.testing.assert_array_equal(got[7:8], terms_of(lab, x[7:8], terms)[0])
    np.testing.assert_array_equal(got[:, 0], nearest(x))


def test_padding_is_left_alone(lab):
    """An even number of lines is followed by one that nobody reads or writes."""
    _, words = terms_of(lab, np.ones((2, 64), np.float32), 1)
    assert words.shape == (2, 48)
    assert (words[:, 32:] == 77).all() and (words[:, :32] == 0x3F803F80).all()
