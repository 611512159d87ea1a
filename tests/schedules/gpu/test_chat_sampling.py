"""Kernels between logits and tokens of libraries for browsers, run on a Vulkan device."""

from dataclasses import replace

import numpy as np
import pytest
from everycast.schedules.webgpu.logit_updates import (
    apply_bitmask,
    apply_logit_bias,
    apply_penalty,
)
from everycast.schedules.webgpu.softmax import PARTS, softmax_with_temperature
from everycast.schedules.webgpu.top_p import sample_with_top_p, token_ids

SIZES = [1, 7, 300, 5003]


@pytest.fixture(params=["gpu", "subgroups", "cpu"])
def row_limits(gpu, request):
    """Limits of a GPU, of one whose subgroups are relied on, and of a CPU that acts as one."""
    subgroup = 4 if request.param == "subgroups" else None
    return replace(gpu.limits, subgroup=subgroup, shares_memory=request.param != "cpu")


def probabilities(rng, size: int, spread: float = 3.0) -> np.ndarray:
    logits = rng.standard_normal(size).astype("float64") * spread
    powers = np.exp(logits - logits.max())
    return (powers / powers.sum()).astype("float32")


def nucleus(row: np.ndarray, top_p: float) -> set[int]:
    """Tokens that are in, by the definition."""
    order = np.argsort(-row, kind="stable")
    before = np.concatenate([[0], np.cumsum(row[order].astype("float64"))[:-1]])
    return {int(i) for i, b in zip(order, before, strict=True) if b < top_p and row[i] > 0}


@pytest.mark.parametrize("size", SIZES)
def test_softmax(gpu, row_limits, size):
    logits = gpu.rng.standard_normal((3, 1, size)).astype("float32") * 8
    logits[1, 0, : size // 2] = -3.0e38
    temperature = np.array([0.7, 1.3, 0.0], "float32")
    func = softmax_with_temperature(size, row_limits)
    parts = np.zeros((3, PARTS, 2), "float32")
    probs = gpu.run(func, logits, temperature, np.zeros_like(logits), parts)[2]
    scaled = logits.astype(float) / np.maximum(temperature, 1e-6)[:, None, None]
    expected = np.exp(np.maximum(scaled - scaled.max(-1, keepdims=True), -700))
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(probs, expected, atol=2e-6)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)


def test_token_ids(gpu):
    *_, ids = gpu.run(
        token_ids(301, gpu.limits), np.zeros((2, 301), "float32"), np.zeros((2, 301), "int32")
    )
    np.testing.assert_array_equal(ids, np.tile(np.arange(301), (2, 1)))


def draw(gpu, probs, uniform, rows, top_p, ids=None, limits=None):
    size = probs.shape[1]
    if ids is None:
        ids = np.tile(np.arange(size, dtype="int32"), (len(probs), 1))
    func = sample_with_top_p(size, limits or gpu.limits)
    arguments = (uniform.astype("float32"), rows.astype("int32"), top_p.astype("float32"))
    return gpu.run(func, probs, ids, *arguments, np.full(len(rows), -1, "int32"))[-1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1e-5, 0.3, 0.9, 1.0])
def test_exactly_the_nucleus_is_drawn_from(gpu, row_limits, size, top_p):
    probs = np.stack([probabilities(gpu.rng, size), probabilities(gpu.rng, size, 0.1)])
    samples = 400
    uniform = (np.arange(samples) + 0.5) / samples
    rows = np.arange(samples) % 2
    tokens = draw(gpu, probs, uniform, rows, np.full(2, top_p), limits=row_limits)
    for row in range(2):
        drawn, allowed = set(tokens[rows == row].tolist()), nucleus(probs[row], top_p)
        # At the edge rounding decides.
        edge = nucleus(probs[row], top_p + 1e-5)
        assert drawn <= edge
        if size <= 7:
            kept = np.array(sorted(allowed))
            likely = kept[probs[row][kept] / probs[row][kept].sum() > 4 / samples]
            assert set(likely.tolist()) <= drawn


def test_frequencies_are_the_probabilities(gpu):
    """Chi-square over 10,000 draws, with top_p and without."""
    size, samples = 24, 10_000
    probs = probabilities(gpu.rng, size, 1.5)[None]
    for top_p in (1.0, 0.8):
        uniform = gpu.rng.random(samples)
        tokens = draw(gpu, probs, uniform, np.zeros(samples), np.array([top_p]))
        kept = sorted(nucleus(probs[0], top_p))
        assert set(tokens.tolist()) <= set(kept)
        expected = probs[0][kept].astype(float)
        expected *= samples / expected.sum()
        counts = np.bincount(tokens, minlength=size)[kept]
        chi_square = ((counts - expected) ** 2 / expected).sum()
        degrees = len(kept) - 1
        assert chi_square < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations


def test_equal_probabilities_count_from_the_first(gpu):
    probs = np.full((1, 1000), 0.001, "float32")
    uniform = (np.arange(200) + 0.5) / 200
    tokens = draw(gpu, probs, uniform, np.zeros(200), np.array([0.1]))
    assert tokens.max() <= 100 and len(set(tokens.tolist())) >= 95


def test_a_certain_token_is_drawn_whatever_the_number(gpu):
    probs = np.zeros((1, 777), "float32")
    probs[0, 555] = 1
    uniform = np.array([0.0, 0.5, 0.99999994])
    for top_p in (1e-5, 0.5, 1.0):
        tokens = draw(gpu, probs, uniform, np.zeros(3), np.array([top_p]))
        np.testing.assert_array_equal(tokens, 555)


def test_ids_are_those_of_the_row(gpu):
    probs = np.array([[0.1, 0.7, 0.2]], "float32")
    ids = np.array([[30, 10, 20]], "int32")
    tokens = draw(gpu, probs, np.array([0.5]), np.zeros(1), np.array([0.6]), ids)
    np.testing.assert_array_equal(tokens, 10)


def test_logit_bias_and_penalties(gpu):
    logits = gpu.rng.standard_normal((2, 50)).astype("float32")
    rows, tokens = np.array([0, 1, 1], "int32"), np.array([3, 3, 49], "int32")
    bias = np.array([1.5, -2, 100], "float32")
    expected = logits.copy()
    expected[rows, tokens] += bias
    biased = gpu.run(apply_logit_bias(50, gpu.limits), logits, rows, tokens, bias)[0]
    np.testing.assert_allclose(biased, expected, rtol=1e-6)

    seq_ids, counts = np.array([1, 0], "int32"), np.array([1, 4, 2], "int32")
    penalties = np.array([[0.5, 0.1, 1.5], [0.0, 0.2, 2.0]], "float32")
    expected = logits.copy()
    for row, token, count in zip(rows, tokens, counts, strict=True):
        presence, frequency, repetition = penalties[row]
        value = expected[seq_ids[row], token] - presence - count * frequency
        expected[seq_ids[row], token] = value * repetition if value < 0 else value / repetition
    func = apply_penalty(50, gpu.limits)
    penalized = gpu.run(func, logits, seq_ids, rows, tokens, counts, penalties)[0]
    np.testing.assert_allclose(penalized, expected, rtol=1e-5, atol=1e-6)


def test_bitmask(gpu):
    logits = gpu.rng.standard_normal((2, 70)).astype("float32")
    mask = gpu.rng.integers(-(2**31), 2**31, (2, 3)).astype("int32")
    masked = gpu.run(apply_bitmask(70, gpu.limits), logits, np.array([1], "int32"), mask)[0]
    bits = (mask.view("uint32")[1][np.arange(70) // 32] >> (np.arange(70) % 32)) & 1
    expected = logits.copy()
    expected[1, bits == 0] = -3.0e38
    np.testing.assert_array_equal(masked, expected)
