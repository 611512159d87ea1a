from dataclasses import replace

import numpy as np
import pytest
from everycast.schedules.gpu.norm import rms_norm, take_rows
from everycast.schedules.gpu.rotary import rotary_table


@pytest.mark.parametrize("size", [1, 5, 64, 576, 1000])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("subgroup", [None, 4])
def test_rms_norm(gpu, size, has_residual, subgroup):
    rows = 7
    x, residual = gpu.rng.standard_normal((2, rows, size)).astype("float32")
    weight = gpu.rng.standard_normal(size).astype("float32")
    func = rms_norm(size, 1e-5, has_residual, replace(gpu.limits, subgroup=subgroup))
    tensors = [x, weight, *([residual] if has_residual else [])]
    *_, y = gpu.run(func, *tensors, np.zeros_like(x))
    expected = x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(y, expected + has_residual * residual, atol=1e-5)


def test_take_rows(gpu):
    x = gpu.rng.standard_normal((9, 70)).astype("float32")
    rows = np.array([3, 0, 8, 8, 1], "int32")
    *_, y = gpu.run(take_rows(70, gpu.limits), x, rows, np.zeros((5, 70), "float32"))
    np.testing.assert_array_equal(y, x[rows])


@pytest.mark.parametrize(("half", "scale"), [(1, 1.0), (32, 1.0), (40, 1.25)])
def test_rotary_table_is_as_exact_as_float32_angles(gpu, half, scale):
    positions = np.array([0, 1, 2, 7, 100, 4095, 65_536, 131_071], "int32")
    inv_freq = (500_000.0 ** (-np.arange(half) / half)).astype("float32")
    func = rotary_table(half, scale, gpu.limits)
    shape = (len(positions), 2 * half)
    *_, table = gpu.run(func, positions, inv_freq, np.zeros(shape, "float32"))
    angles = positions[:, None].astype(float) * inv_freq
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * scale
    allowed = 2e-6 + positions[:, None] * 2.0**-23
    assert (np.abs(table - expected) < allowed).all()
