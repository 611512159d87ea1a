"""Leading logits against those of the whole head: the same arg max, for which less is read."""

import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import pack_values
from everycast.schedules.cpu import leading_logits
from everycast.schedules.cpu.activation import SCALE, WORDS
from everycast.schedules.cpu.linear import linears
from everycast.schedules.cpu.packing import PackedWeight

Q8 = TensorFormat("float16", 8, 32, 127)
ALL_ISAS = pytest.mark.parametrize(
    "lab", ["avx2", "avx512bw", "avxvnni", "avx512", "word_pairs"], indirect=True
)
KEPT_FROM = 2.0


class Head:
    """A head of q with scales [n, k/32], and its kernels."""

    def __init__(self, lab, q, scales, terms=2, fmt=Q8):
        self.lab, self.terms = lab, terms
        self.q, self.scales = q.astype(np.int64), np.repeat(scales.astype("float64"), 32, axis=1)
        self.weight = PackedWeight(fmt, *q.shape, planes=True)
        stored = np.zeros((q.shape[0], fmt.padded_k(q.shape[1])), np.uint8)
        stored[:, : q.shape[1]] = q
        self.packed = lab.pack(self.weight, {**pack_values(stored, fmt), "q_scale": scales})

    def kernel(self, factory, *args):
        return self.lab.build(factory(self.weight, *args))

    def empty(self, shape, dtype="float32"):
        return self.lab.tensor(np.full(shape, 77, dtype))

    def exact(self, inputs, m):
        func = linears([self.weight], [False], isa=self.lab.isa, terms=self.terms)
        y = self.empty((m, self.weight.n))
        self.lab.build(func)(*inputs, self.packed, y)
        return y.numpy()

    def run(self, x, num_ids=None):
        """(leading logits, exact ones, those from the upper plane, high groups of x)."""
        lab, weight, m = self.lab, self.weight, len(x)
        inputs, groups, _, _ = lab.quantized(x, self.terms, KEPT_FROM, [weight])
        what = (lab.isa, self.terms)
        ids = lab.tensor(np.array([weight.n if num_ids is None else num_ids], np.int32))
        shared = [*inputs, self.packed, ids]
        norms = self.empty((m, weight.num_groups))
        self.kernel(leading_logits.group_norms)(lab.tensor(x), norms)
        y, highest = self.empty((m, weight.n)), self.empty(leading_logits.highest_shape(weight, m))
        self.kernel(leading_logits.upper_logits, *what)(*shared, y, highest)
        upper = y.numpy().copy()
        least, doubts = self.empty((m,)), self.empty((m,), "int32")
        self.kernel(leading_logits.least_highest, *what)(*shared, highest, least, doubts)
        self.kernel(leading_logits.refine, *what)(*shared, norms, highest, least, y, doubts)
        self.kernel(leading_logits.refine_doubted, *what)(*shared, doubts, y)
        return y.numpy(), self.exact(inputs, m), upper, groups[:, 0]


def random_head(lab, n, k, terms=2, fmt=Q8):
    rng = lab.rng
    q = np.clip(np.rint(rng.standard_normal((n, k)) * 50), -127, 127) + fmt.zero_point
    scales = rng.uniform(0.5, 1, fmt.parts(n, k)["q_scale"][0]) / 1000
    scales *= rng.choice([-1, 1], scales.shape)
    return Head(lab, q.astype(np.uint8), scales.astype(fmt.dtype), terms, fmt)


def random_x(lab, m, k):
    outliers = np.where(lab.rng.random((m, k)) < 1 / 64, 10, 1)
    return (lab.rng.standard_normal((m, k)) * outliers).astype("float32")


@ALL_ISAS
@pytest.mark.parametrize("terms", [1, 2])
def test_upper_logits_are_those_of_the_upper_bits(lab, terms):
    for n, k, m in ((40, 96, 1), (300, 100, 3), (560, 64, 17)):
        head = random_head(lab, n, k, terms)
        _, _, upper, groups = head.run(random_x(lab, m, k))
        high = np.ascontiguousarray(groups[..., :WORDS]).view(np.int8)
        x_scales = groups[..., SCALE].view(np.float32).astype("float64")
        x = (high * x_scales[..., None]).reshape(m, -1)[:, :k]
        middle = (head.q >> 4) * 16 + 7.5 - 127
        expected = x @ (middle * head.scales[:, :k]).T
        # Zero points are rounded to a step of the upper plane, in each group.
        rounding = 8 * np.abs(head.scales[:, :k]).max() * x_scales.sum(axis=1)
        assert (np.abs(upper - expected) <= rounding[:, None] * 1.001).all()


@ALL_ISAS
@pytest.mark.parametrize("terms", [1, 2])
def test_the_highest_is_exact_and_the_rest_lower(lab, terms):
    for n, k, m in ((16, 32, 1), (40, 96, 2), (304, 100, 5), (1000, 64, 18), (4400, 64, 3)):
        head = random_head(lab, n, k, terms)
        leading, exact, upper, _ = head.run(random_x(lab, m, k))
        rows = np.arange(m)
        best = exact.argmax(axis=1)
        np.testing.assert_array_equal(leading.argmax(axis=1), best)
        np.testing.assert_array_equal(leading[rows, best], exact[rows, best])
        is_exact = leading == exact
        assert (is_exact | (leading == upper)).all()
        if n == 4400:  # most blocks were not worth the rest
            assert is_exact.mean() < 0.5


def test_other_formats(lab):
    fmt = TensorFormat("float32", 8, 64, 128)
    head = random_head(lab, 1000, 128, fmt=fmt)
    leading, exact, _, _ = head.run(random_x(lab, 4, 128))
    np.testing.assert_array_equal(leading.argmax(axis=1), exact.argmax(axis=1))
    np.testing.assert_array_equal(leading.max(axis=1), exact.max(axis=1))


@pytest.mark.parametrize("num_ids", [1, 15, 16, 17, 250, 299])
def test_padded_ids_do_not_count(lab, num_ids):
    head = random_head(lab, 300, 64)
    q = head.q.copy()
    x = random_x(lab, 4, 64)
    # The padding has the highest logits by far.
    q[num_ids:] = np.where(x[0] > 0, 254, 0)
    head = Head(lab, q.astype(np.uint8), np.full((300, 2), 1 / 1000, np.float16))
    leading, exact, _, _ = head.run(x, num_ids)
    ids = slice(0, num_ids)
    np.testing.assert_array_equal(leading[:, ids].argmax(axis=1), exact[:, ids].argmax(axis=1))
    np.testing.assert_array_equal(leading[:, ids].max(axis=1), exact[:, ids].max(axis=1))


@pytest.mark.parametrize("lab", ["avx2", "avx512"], indirect=True)
def test_lower_bits_that_are_not_chance(lab):
    """Their sums are far larger than independent ones would be: everything is computed."""
    n, k = 2000, 256
    x = random_x(lab, 3, k)
    high = lab.rng.integers(2, 14, (n, k))
    share = lab.rng.random((n, 1))
    low = np.where(lab.rng.random((n, k)) < share, np.where(x[1] > 0, 15, 0), 8)
    head = Head(lab, (high * 16 + low).astype(np.uint8), np.full((n, k // 32), 1e-3, np.float16))
    leading, exact, _, _ = head.run(x)
    np.testing.assert_array_equal(leading[1], exact[1])
    np.testing.assert_array_equal(leading.argmax(axis=1), exact.argmax(axis=1))


@pytest.mark.parametrize("lab", ["avx2", "avx512"], indirect=True)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_numbers_stay_no_numbers(lab, value):
    head = random_head(lab, 300, 64)
    x = random_x(lab, 3, 64)
    x[1, 7] = value
    with np.errstate(invalid="ignore"):
        leading, exact, _, _ = head.run(x)
    assert not np.isfinite(exact[1]).all()
    assert not np.isfinite(leading[1]).all()
    for row in (0, 2):
        assert leading[row].argmax() == exact[row].argmax()
