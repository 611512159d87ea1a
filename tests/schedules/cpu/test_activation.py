from fractions import Fraction

import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.activation import (
    OFFSET,
    SCALE,
    START,
    STEP_SUM,
    WORDS,
    Starts,
    activation_buffers,
    quantize_activations,
)
from everycast.schedules.cpu.int8_activations import Int8Activations
from everycast.schedules.cpu.packing import PackedWeight

STEPS = {1: 127, 2: 127 + 127 / 256}
"""Steps of the high term from 0 to the largest value of a group."""
ERROR = {1: 0.5, 2: 1 / 256}
"""The largest, in steps of the high term: between two of these, all of a low one."""


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("k", [64, 104, 160, 9])
@pytest.mark.parametrize("m", [1, 3])
def test_rounding_and_sums(lab, terms, k, m):
    x = lab.rng.standard_normal((m, k)).astype("float32")
    x[0, : min(k, 32)] = 0
    (_, halves, *_), records, xq, stands_for = lab.quantized(x, terms)
    padded = -(-k // 64) * 64
    assert xq.shape == (m, terms, padded)
    assert xq[:, 0].min() >= -127
    halves = lab.by_token(halves.numpy(), terms)
    groups = np.pad(x, ((0, 0), (0, padded - k))).reshape(m, -1, 32)
    expected_scales = np.abs(groups).max(axis=2) / STEPS[terms]
    scales = records[..., SCALE].view(np.float32)
    np.testing.assert_allclose(scales[:, 0], expected_scales, rtol=1e-6, atol=1e-30)
    if terms == 2:
        np.testing.assert_array_equal(
            scales[:, 1, : -(-k // 32)] * 256, scales[:, 0, : -(-k // 32)]
        )
        assert not scales[:, 1, -(-k // 32) :].any()

    rounded = np.pad(stands_for, ((0, 0), (0, padded - k))).reshape(groups.shape)
    most = ERROR[terms] * scales[:, 0, :, None] + 1e-6 * np.abs(groups)
    assert (np.abs(rounded - groups) <= most).all()
    assert not xq[..., k:].any()
    is_there = scales > 0
    for found, size in ((records[..., STEP_SUM : OFFSET + 1], 32), (halves, 16)):
        expected = xq.astype(int).reshape(m, terms, -1, size).sum(axis=3)
        there, its_scale = (np.repeat(each, 32 // size, axis=2) for each in (is_there, scales))
        np.testing.assert_array_equal(found[there, 0], expected[there])
        sums = np.ascontiguousarray(found[..., 1]).view(np.float32)
        np.testing.assert_allclose(sums[there], (expected * its_scale)[there], rtol=1e-6)


@pytest.mark.parametrize("terms", [1, 2])
def test_extremes_use_the_whole_range(lab, terms):
    """The largest of a group becomes the last step, of either sign; its parts stay in int8."""
    x = np.zeros((2, 64), "float32")
    x[0, 3], x[1, 40] = 1e18, -1e-20
    _, _, xq, stands_for = lab.quantized(x, terms)
    np.testing.assert_allclose(stands_for, x, rtol=1e-6)
    last = [127] if terms == 1 else [127, 127]
    assert xq[0, :, 3].tolist() == last
    assert xq[1, :, 40].tolist() == [-q for q in last]
    assert np.count_nonzero(xq) == 2 * terms


def test_every_step_of_two_terms(lab):
    """All 2 · 32639 + 1 numbers come back as they were, so high and low never overflow; but for
    those between two steps of the high term."""
    steps = np.arange(-32639, 32640, dtype="float32")
    rows = np.resize(steps, (len(steps) // 31 + 1, 31))
    x = np.pad(rows, ((0, 0), (1, 0)), constant_values=32639)
    *_, stands_for = lab.quantized(x, 2)
    between = x % 256 == 128
    np.testing.assert_allclose(stands_for[~between], x[~between], rtol=1e-6)
    np.testing.assert_allclose(stands_for[between], x[between], atol=1.001)


def test_sums_of_halves_are_left_out(lab):
    """Nobody reads them where all groups of weights are of 32."""
    x = lab.rng.standard_normal((3, 104)).astype("float32")
    specs = activation_buffers(104, 3, 2)
    whole, without = ([lab.tensor(np.full(s, 77, dtype)) for s, dtype in specs] for _ in range(2))
    lab.build(quantize_activations(104, 2, 1.0))(lab.tensor(x), *whole)
    lab.build(quantize_activations(104, 2, 1.0, has_halves=False))(lab.tensor(x), *without)
    for name, all_, some in zip(("groups", "halves", "kept"), whole, without, strict=True):
        expected = np.full(some.shape, 77) if name == "halves" else all_.numpy()
        np.testing.assert_array_equal(some.numpy(), expected)


@pytest.mark.parametrize("k", [64, 104, 2048 + 96, 4096])
@pytest.mark.parametrize("threshold", [0.5, 2.0, 4.0])
def test_groups_that_keep_their_low_term(lab, k, threshold):
    """Flags, scales of low terms, and what is left out: the same as by the rule."""
    m = 5
    x = lab.rng.standard_normal((m, k)) * np.exp(lab.rng.standard_normal((m, k)))
    x[0] = 0
    x = x.astype("float32")
    (*_, flags), records, _, stands_for = lab.quantized(x, 2, threshold)
    count = -(-k // 32)
    groups = np.pad(x, ((0, 0), (0, 32 * count - k))).reshape(m, count, 32)
    squares = np.abs(groups).max(axis=2).astype("float64") ** 2
    is_kept = squares >= threshold * squares.mean(axis=1, keepdims=True)
    bits = np.unpackbits(flags.numpy().view(np.uint8), axis=1, bitorder="little").astype(bool)
    np.testing.assert_array_equal(bits[1:, :count], is_kept[1:])
    assert is_kept.any() and not is_kept[1:].all()
    assert not bits[:, count:].any()
    scales = records[..., SCALE].view(np.float32)
    np.testing.assert_array_equal(
        scales[:, 1, :count], scales[:, 0, :count] / 256 * bits[:, :count]
    )
    error = np.abs(stands_for - x)
    most = np.sqrt(squares) / STEPS[2] * np.where(is_kept, ERROR[2], ERROR[1])
    assert (error <= np.repeat(most, 32, axis=1)[:, :k] + 1e-6 * np.abs(x)).all()


@pytest.mark.parametrize("terms", [1, 2])
def test_many_rows_take_the_parallel_path(lab, terms):
    x = lab.rng.standard_normal((300, 64)).astype("float32")
    buffers, *_, stands_for = lab.quantized(x, terms)
    np.testing.assert_allclose(stands_for, x, atol=np.abs(x).max() / 127 * ERROR[terms])
    alone = lab.quantized(x[7:8], terms)[0]
    for many, one in zip(buffers, alone, strict=True):
        many, one = many.numpy(), one.numpy()
        np.testing.assert_array_equal(many.take([7], axis=many.shape.index(300)), one)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("zero_point", [0, 8])
@pytest.mark.parametrize("num_pairs", [2, 3, 4])
def test_starts_of_products_of_sums(lab, num_pairs, zero_point, terms):
    """With them, products of sums of words give the same integers as single ones."""
    m, k = 5, 104
    x = lab.rng.standard_normal((m, k)).astype("float32")
    x[0, :32], x[1, :32] = 3, np.where(np.arange(32) % 2, -7, 7)
    specs = activation_buffers(k, m, terms)
    buffers = [lab.tensor(np.full(shape, 77, dtype)) for shape, dtype in specs]
    starts = Starts(zero_point, num_pairs)
    lab.build(quantize_activations(k, terms, starts=starts))(lab.tensor(x), *buffers)
    records = buffers[0].numpy()
    xq = np.ascontiguousarray(records[..., :WORDS]).view(np.int8).astype(int)
    assert np.abs(xq).max() <= 120
    q = lab.rng.integers(0, 16, (len(records), 32))
    q[0], q[1] = 0, 15
    w = q[:, None] - 8
    paired = slice(0, 4 * num_pairs)
    one, other = xq[..., :16][..., paired], xq[..., 16:][..., paired]
    w_one, w_other = w[..., :16][..., paired], w[..., 16:][..., paired]
    sums = (one + w_other + 128, other + w_one)
    assert sums[0].min() >= 0 and sums[0].max() <= 255
    assert sums[1].min() >= -128 and sums[1].max() <= 127
    single = np.r_[4 * num_pairs : 16, 16 + 4 * num_pairs : 32]
    products = (sums[0] * sums[1]).sum(-1) + (xq * q[:, None])[..., single].sum(-1)
    of_weights = (w_one * w_other + 128 * w_one).sum(-1)
    found = products - of_weights + records[..., START]
    np.testing.assert_array_equal(found, ((q[:, None] - zero_point) * xq).sum(-1))


@pytest.mark.parametrize("starts", [None, Starts(), Starts(Fraction(3, 2))])
def test_zero_points_that_were_not_rounded_for(starts):
    x = Int8Activations(np.zeros((2, 1, 12), "int32"), None, None, starts)
    with pytest.raises(ValueError, match="no starts for a zero point of 239/32"):
        x.minus_zero(Fraction(239, 32), 32, 0, 0, 0)


@pytest.mark.parametrize("lab", ["word_pairs"], indirect=True)
@pytest.mark.parametrize("terms", [1, 2])
def test_rounding_for_products_of_sums(lab, terms):
    """As exact as with all 127 steps, but for their number; many rows are rounded 4 at a time."""
    x = lab.rng.standard_normal((38, 104)).astype("float32")
    weight = PackedWeight(TensorFormat("float16", 4, 32, 8), 16, 104)
    _, records, _, stands_for = lab.quantized(x, terms, 0.0, [weight])
    peaks = np.abs(np.pad(x, ((0, 0), (0, 24))).reshape(38, 4, 32)).max(axis=2)
    steps = {1: 120, 2: 120.5 - 1 / 240}[terms]
    scales = records[:, 0, :, SCALE].view(np.float32)
    np.testing.assert_allclose(scales, peaks / steps, rtol=1e-6)
    most = np.repeat(scales, 32, axis=1)[:, :104] * {1: 0.5, 2: 0.5 / 240}[terms]
    assert (np.abs(stands_for - x) <= most + 1e-6 * np.abs(x)).all()


def test_buffers_keep_a_symbolic_size():
    assert activation_buffers(100, "m", 1) == [((4, "m", 12), "int32"), ((8, "m", 2), "int32")]
    assert activation_buffers(100, "m", 2) == [
        ((8, "m", 12), "int32"),
        ((16, "m", 2), "int32"),
        (("m", 1), "int64"),
    ]
