import numpy as np
import pytest
from everycast.schedules.cpu.activation import activation_buffers, quantize_activations

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
    (_, scales, sums, step_sums, *_), xq, stands_for = lab.quantized(x, terms)
    padded = -(-k // 64) * 64
    assert xq.shape == (m, terms, padded)
    assert xq[:, 0].min() >= -127
    groups = np.pad(x, ((0, 0), (0, padded - k))).reshape(m, -1, 32)
    expected_scales = np.abs(groups).max(axis=2) / STEPS[terms]
    scales = scales.numpy().reshape(m, terms, -1)
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
    expected = [xq.astype(int).reshape(m, terms, -1, size).sum(axis=3) for size in (32, 16)]
    expected_steps = np.concatenate(expected, axis=2)
    scales_of_sums = np.concatenate([scales, np.repeat(scales, 2, axis=2)], axis=2)
    step_sums = np.where(scales_of_sums > 0, step_sums.numpy().reshape(m, terms, -1), 0)
    np.testing.assert_array_equal(step_sums, expected_steps)
    scales_of_sums = scales_of_sums[:, 0]
    np.testing.assert_allclose(sums.numpy(), expected_steps[:, 0] * scales_of_sums, rtol=1e-6)


@pytest.mark.parametrize("terms", [1, 2])
def test_extremes_use_the_whole_range(lab, terms):
    """The largest of a group becomes the last step, of either sign; its parts stay in int8."""
    x = np.zeros((2, 64), "float32")
    x[0, 3], x[1, 40] = 1e18, -1e-20
    _, xq, stands_for = lab.quantized(x, terms)
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
    _, _, stands_for = lab.quantized(x, 2)
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
    names = ("xq", "scales", "sums", "steps", "kept")
    for name, all_, some in zip(names, whole, without, strict=True):
        all_, some = all_.numpy(), some.numpy()
        if name in ("sums", "steps"):
            of_halves = np.arange(all_.shape[1]) % 12 >= 4
            assert (some[:, of_halves] == 77).all()
            all_, some = all_[:, ~of_halves], some[:, ~of_halves]
        np.testing.assert_array_equal(all_, some)


@pytest.mark.parametrize("k", [64, 104, 2048 + 96, 4096])
@pytest.mark.parametrize("threshold", [0.5, 2.0, 4.0])
def test_groups_that_keep_their_low_term(lab, k, threshold):
    """Flags, scales of low terms, and what is left out: the same as by the rule."""
    m = 5
    x = lab.rng.standard_normal((m, k)) * np.exp(lab.rng.standard_normal((m, k)))
    x[0] = 0
    x = x.astype("float32")
    (_, scales, _, _, flags), _, stands_for = lab.quantized(x, 2, threshold)
    count = -(-k // 32)
    groups = np.pad(x, ((0, 0), (0, 32 * count - k))).reshape(m, count, 32)
    squares = np.abs(groups).max(axis=2).astype("float64") ** 2
    is_kept = squares >= threshold * squares.mean(axis=1, keepdims=True)
    bits = np.unpackbits(flags.numpy().view(np.uint8), axis=1, bitorder="little").astype(bool)
    np.testing.assert_array_equal(bits[1:, :count], is_kept[1:])
    assert is_kept.any() and not is_kept[1:].all()
    assert not bits[:, count:].any()
    low_scales = scales.numpy().reshape(m, 2, -1)[:, 1]
    np.testing.assert_array_equal(low_scales[1:, :count] > 0, is_kept[1:])
    error = np.abs(stands_for - x)
    most = np.sqrt(squares) / STEPS[2] * np.where(is_kept, ERROR[2], ERROR[1])
    assert (error <= np.repeat(most, 32, axis=1)[:, :k] + 1e-6 * np.abs(x)).all()


@pytest.mark.parametrize("terms", [1, 2])
def test_many_rows_take_the_parallel_path(lab, terms):
    x = lab.rng.standard_normal((300, 64)).astype("float32")
    buffers, _, stands_for = lab.quantized(x, terms)
    np.testing.assert_allclose(stands_for, x, atol=np.abs(x).max() / 127 * ERROR[terms])
    alone = lab.quantized(x[7:8], terms)[0]
    for many, one in zip(buffers, alone, strict=True):
        np.testing.assert_array_equal(many.numpy()[7:8], one.numpy())


def test_buffers_keep_a_symbolic_size():
    assert activation_buffers(100, "m", 1) == [
        (("m", 32), "int32"),
        (("m", 4), "float32"),
        (("m", 12), "float32"),
        (("m", 12), "int32"),
    ]
    assert activation_buffers(100, "m", 2) == [
        (("m", 64), "int32"),
        (("m", 8), "float32"),
        (("m", 12), "float32"),
        (("m", 24), "int32"),
        (("m", 1), "int64"),
    ]
