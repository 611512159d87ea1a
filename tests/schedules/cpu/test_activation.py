import numpy as np
import pytest
from everycast.schedules.cpu.activation import activation_buffers


@pytest.mark.parametrize("k", [64, 104, 160, 9])
@pytest.mark.parametrize("m", [1, 3])
def test_rounding_and_sums(lab, k, m):
    x = lab.rng.standard_normal((m, k)).astype("float32")
    x[0, : min(k, 32)] = 0
    (xq_words, scales, sums), _ = lab.quantized(x)
    padded = -(-k // 64) * 64
    groups = np.zeros((m, padded), "float32")
    groups[:, :k] = x
    groups = groups.reshape(m, -1, 32)
    expected_scales = np.abs(groups).max(axis=2) / 127
    xq = xq_words.numpy().view(np.int8).reshape(groups.shape)
    scales = scales.numpy()
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-6, atol=1e-30)
    assert np.abs(xq * scales[..., None] - groups).max() <= expected_scales.max() * 0.5001
    assert xq.max(initial=0) <= 127 and xq.min(initial=0) >= -127
    assert not x.any() or np.abs(xq).max() == 127
    stands_for = xq * scales[..., None]
    by_32 = stands_for.sum(axis=2)
    by_16 = stands_for.reshape(m, -1, 16).sum(axis=2)
    np.testing.assert_allclose(
        sums.numpy(), np.concatenate([by_32, by_16], axis=1), rtol=1e-5, atol=1e-5
    )


def test_many_rows_take_the_parallel_path(lab):
    x = lab.rng.standard_normal((300, 64)).astype("float32")
    _, approximate = lab.quantized(x)
    np.testing.assert_allclose(approximate, x, atol=np.abs(x).max() / 127)


def test_buffers_keep_a_symbolic_size():
    assert activation_buffers(100, "m") == [
        (("m", 32), "int32"),
        (("m", 4), "float32"),
        (("m", 12), "float32"),
    ]
