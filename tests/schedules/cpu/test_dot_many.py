"""Products of many tokens, where their bytes are at the ends of their ranges. All else about them
is in `test_linear`: every format, number of tokens, and the same bits as of a token alone."""

import itertools

import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import pack_values
from everycast.schedules.cpu.linear import linears
from everycast.schedules.cpu.packing import PackedWeight

FORMATS = [TensorFormat("float16", 4, 32, 8), TensorFormat("float16", 4, 32, None)]


@pytest.mark.parametrize("lab", ["avx512", "word_pairs"], indirect=True)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_no_sum_of_bytes_overflows(lab, fmt, terms):
    """Halves of groups with the largest and the smallest q, times halves of both signs."""
    n, k, m = 16, 64, 32
    halves = np.array(list(itertools.product((0, 15), repeat=4)))
    q = np.repeat(halves, 16, axis=1).astype(np.uint8)
    parts = {**pack_values(q, fmt), "q_scale": np.ones((n, k // 32), np.float16)}
    if fmt.is_affine:
        parts["q_min"] = np.full((n, k // 32), -8, np.float16)
    weight = PackedWeight(fmt, n, k)
    signs = np.repeat(list(itertools.product((-1, 1), repeat=4)), 16, axis=1)
    x = (np.concatenate([signs, -signs * 0.9]) * 3).astype("float32")
    arguments, _, xq, stands_for = lab.quantized(x, terms, 0.0, [weight])
    assert np.abs(xq[:, 0]).max() == (120 if lab.isa.num_word_pairs else 127)
    y = lab.tensor(np.full((m, n), np.nan, "float32"))
    kernel = lab.build(linears([weight], [False], isa=lab.isa, terms=terms))
    kernel(*arguments, lab.pack(weight, parts), y)
    expected = stands_for @ (q.astype(float) - 8).T
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-4)
