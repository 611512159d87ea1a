import numpy as np
import pytest
from everycast.schedules.cpu.activation import activation_buffers

STEPS = {1: 127, 2: 32639}
"""Steps from 0 to the largest value of a group."""


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("k", [64, 104, 160, 9])
@pytest.mark.parametrize("m", [1, 3])
def test_rounding_and_sums(lab, terms, k, m):
    x = lab.rng.standard_normal((m, k)).astype("float32")
    x[0, : min(k, 32)] = 0
    (_, scales, sums, step_sums), xq, stands_for = lab.quantized(x, terms)
    padded = -(-k // 64) * 64
    assert xq.shape == (m, terms, padded)
    assert xq[:, terms - 1].min() >= -127
    groups = np.pad(x, ((0, 0), (0, padded - k))).reshape(m, -1, 32)
    expected_scales = np.abs(groups).max(axis=2) / STEPS[terms]
    scales = scales.numpy()
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-6, atol=1e-30)

    rounded = np.pad(stands_for, ((0, 0), (0, padded - k))).reshape(groups.shape)
    half_step = 0.5 * scales[..., None] + 1e-6 * np.abs(groups)
    assert (np.abs(rounded - groups) <= half_step).all()
    assert not xq[..., k:].any()
    steps = np.einsum("t,mtk->mk", [1, 256][:terms], xq.astype(int))
    expected = [steps.reshape(m, -1, size).sum(axis=2) for size in (32, 16)]
    np.testing.assert_array_equal(step_sums.numpy(), np.concatenate(expected, axis=1))
    expected = [rounded.reshape(m, -1, size).sum(axis=2) for size in (32, 16)]
    expected_sums = np.concatenate(expected, axis=1)
    np.testing.assert_allclose(sums.numpy(), expected_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("terms", [1, 2])
def test_extremes_use_the_whole_range(lab, terms):
    """The largest of a group becomes the last step, of either sign; its parts stay in int8."""
    x = np.zeros((2, 64), "float32")
    x[0, 3], x[1, 40] = 1e30, -1e-20
    _, xq, stands_for = lab.quantized(x, terms)
    np.testing.assert_allclose(stands_for, x, rtol=1e-6)
    last = [127] if terms == 1 else [127, 127]
    assert xq[0, :, 3].tolist() == last
    assert xq[1, :, 40].tolist() == [-q for q in last]
    assert np.count_nonzero(xq) == 2 * terms


def test_every_step_of_two_terms(lab):
    """All 2 · 32639 + 1 numbers come back as they were, so high and low never overflow."""
    steps = np.arange(-32639, 32640, dtype="float32")
    rows = np.resize(steps, (len(steps) // 31 + 1, 31))
    x = np.pad(rows, ((0, 0), (1, 0)), constant_values=32639)
    _, _, stands_for = lab.quantized(x, 2)
    np.testing.assert_allclose(stands_for, x, rtol=1e-6)


@pytest.mark.parametrize("terms", [1, 2])
def test_many_rows_take_the_parallel_path(lab, terms):
    x = lab.rng.standard_normal((300, 64)).astype("float32")
    buffers, _, stands_for = lab.quantized(x, terms)
    np.testing.assert_allclose(stands_for, x, atol=np.abs(x).max() / STEPS[terms])
    alone = lab.quantized(x[7:8], terms)[0]
    for many, one in zip(buffers, alone, strict=True):
        np.testing.assert_array_equal(many.numpy()[7:8], one.numpy())


@pytest.mark.parametrize("terms", [1, 2])
def test_buffers_keep_a_symbolic_size(terms):
    assert activation_buffers(100, "m", terms) == [
        (("m", 32 * terms), "int32"),
        (("m", 4), "float32"),
        (("m", 12), "float32"),
        (("m", 12), "int32"),
    ]
