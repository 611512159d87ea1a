"""The sampling kernels against their definition in NumPy, over odd sizes and hard logits."""

import functools
import math

import numpy as np
import pytest
import tvm
from everycast.engine import numpy_sampling as oracle
from everycast.schedules.cpu.sampling import sampling_functions
from everycast.schedules.cpu.sampling_draw import workspace_shape
from everycast.schedules.pipeline import CPU_TIR_PIPELINE
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu

AVX512 = Target({"kind": "llvm", "mcpu": "icelake-server"})
AVX2 = Target({"kind": "llvm", "mcpu": "x86-64-v3"})
HOST = Target({"kind": "llvm", "mcpu": llvm_get_system_cpu()})
SIZES = (1, 15, 16, 17, 1000, 49152 + 3, 151936)
SMALL = 1000
CASES = [pytest.param(size, HOST, id=f"{size}") for size in SIZES]
CASES.append(pytest.param(SMALL, AVX2, id=f"{SMALL}-avx2"))
sizes = pytest.mark.parametrize(("size", "target"), CASES)


@functools.cache
def function(name: str, size: int, target: Target = HOST):
    module = tvm.IRModule({name: sampling_functions(size)[name]})
    return tvm.compile(module, target=target, tir_pipeline=CPU_TIR_PIPELINE)[name]


def tensor(array):
    return tvm.runtime.tensor(np.ascontiguousarray(array))


def sample(logits, rows, values, *, num_ids=None, num_tasks=2, target=HOST) -> np.ndarray:
    """As `oracle.sample_from_logits`; the scratch memory holds NaN beforehand."""
    size = logits.shape[1]
    workspace = np.full((num_tasks, *workspace_shape(size)), np.nan, np.float32)
    token_ids = tensor(np.full(len(rows), -7, np.int32))
    function("sample_from_logits", size, target)(
        tensor(logits), tensor(np.array(rows, np.int32)), tensor(np.array(values, np.float64)),
        size if num_ids is None else num_ids, tensor(workspace), token_ids,
    )  # fmt: skip
    return token_ids.numpy()


def setting(
    uniform: float = 0.0, *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[float, ...]:  # fmt: skip
    if temperature == 0:
        return (0.0, -math.inf, 0.0, 1.0, uniform)
    offset = temperature * math.log(min_p) if min_p else -math.inf
    return (math.log2(math.e) / temperature, offset, float(top_k), top_p, uniform)


def random_logits(size: int, seed: int = 0, *, rows: int = 1, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng([size, seed])
    return (rng.standard_normal((rows, size)) * spread).astype(np.float32)


def hard_rows(size: int) -> np.ndarray:
    """Rows with ties, forbidden tokens, one value for all, zeros of both signs, and extremes."""
    rng = np.random.default_rng(size)
    rows = random_logits(size, 1, rows=7)
    rows[1] = rows[1].round()
    rows[2, rng.random(size) < 0.7] = -np.inf
    rows[2, -1] = 0.5
    rows[3] = 2.25
    rows[4] = rng.choice(np.array([0.0, -0.0, -1.0], np.float32), size)
    rows[5] *= 1e6
    rows[6] = -np.inf
    rows[6, size // 2] = -3e38
    return rows


def check_draws(row: np.ndarray, target: Target, **filters) -> None:
    """Draw in the middle of the interval of every id that the oracle keeps, and at both ends."""
    *fixed, _ = setting(**filters)
    kept = oracle.kept_ids(row, *fixed)
    inverse = fixed[0]
    weights = np.exp2((row[kept].astype(np.float64) - float(row.max())) * inverse)
    ends = np.cumsum(weights) / weights.sum()
    starts = np.append(0.0, ends[:-1])
    # An interval narrower than the rounding of float32 weights cannot be hit on purpose; of many
    # the first and last, and some between.
    wide = np.flatnonzero(ends - starts > 1e-5)
    is_wide = np.zeros(len(kept), np.bool_)
    is_wide[np.concatenate([wide[:10], wide[10:-10:997], wide[-10:]])] = True
    uniforms = [*((starts + ends) / 2)[is_wide], 0.0, np.nextafter(1, 0)]
    drawn = sample(row[None], [0] * len(uniforms), [(*fixed, u) for u in uniforms], target=target)
    assert drawn[:-2].tolist() == kept[is_wide].tolist()
    is_likely = weights > 1e-30
    assert drawn[-2] == kept[is_likely][0] and drawn[-1] in kept[weights > 0]


@sizes
def test_greedy_is_the_arg_max_and_the_lowest_of_equals(size, target) -> None:
    rows = hard_rows(size)
    drawn = sample(rows, [*range(7)], [setting(temperature=0)] * 7, target=target)
    assert drawn.tolist() == rows.argmax(axis=1).tolist()


@sizes
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 300, "temperature": 0.5},
        {"top_p": 0.9, "temperature": 0.7},
        {"top_p": 0.5, "temperature": 4.0},
        {"top_p": 0.0},
        {"top_p": 0.9999999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 0.02, "top_k": 40, "top_p": 0.8, "temperature": 1.3},
        {"temperature": 1e-5, "top_p": 0.9},
        {"temperature": 1e25, "top_k": 11},
    ],
    ids=str,
)
def test_draws_are_those_of_the_oracle(size, target, filters) -> None:
    for row in hard_rows(size):
        check_draws(row, target, **filters)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    decimals=st.integers(0, 6),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0, 50.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.3]),
    top_k=st.integers(0, 1100),
    top_p=st.floats(0, 1),
)
def test_any_row_and_filters(seed, spread, decimals, temperature, min_p, top_k, top_p) -> None:
    row = random_logits(SMALL, seed, spread=spread)[0].round(decimals)
    drawn = sample(
        row[None], [0, 0], [setting(u, temperature=temperature, min_p=min_p, top_k=top_k,
                                    top_p=top_p) for u in (0.37, 0.999)]
    )  # fmt: skip
    *fixed, _ = setting(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    kept = oracle.kept_ids(row, *fixed)
    # Where top_p cuts in the middle of a rounding error, one id more or less is right as well.
    more = oracle.kept_ids(row, *fixed[:3], min(1.0, top_p * (1 + 1e-6) + 1e-9))
    assert set(drawn) <= set(more)
    weights = np.exp2((row[kept].astype(np.float64) - float(row.max())) * fixed[0])
    ends = np.cumsum(weights) / weights.sum()
    for token, uniform in zip(drawn, (0.37, 0.999), strict=True):
        if token in kept:
            place = int(np.searchsorted(kept, token))
            slack = 1e-5 + (len(more) - len(kept)) * weights.min() / weights.sum()
            assert (ends[place - 1] if place else 0) - slack <= uniform <= ends[place] + slack


def test_ten_thousand_draws_follow_the_distribution() -> None:
    row = random_logits(SMALL, 5)
    filters = {"temperature": 1.3, "top_k": 60, "top_p": 0.95}
    uniforms = np.random.default_rng(1).random(10_000)
    drawn = sample(row, [0] * 10_000, [setting(u, **filters) for u in uniforms])
    *fixed, _ = setting(**filters)
    kept = oracle.kept_ids(row[0], *fixed)
    weights = np.exp2((row[0, kept].astype(np.float64) - float(row.max())) * fixed[0])
    expected = weights / weights.sum() * 10_000
    observed = np.bincount(drawn, minlength=SMALL)[kept]
    assert observed.sum() == 10_000
    freedom = len(kept) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_a_draw_does_not_depend_on_the_others() -> None:
    logits = random_logits(SMALL, rows=9)
    values = [
        setting(u, temperature=1.5, top_p=p, top_k=k)
        for u, p, k in zip(
            np.linspace(0, 0.999, 27), [0.3, 0.9, 1.0] * 9, [0, 0, 0, 50] * 6 + [7] * 3, strict=True
        )
    ]
    rows = [*range(9)] * 3
    alone = [sample(logits[r : r + 1], [0], [v])[0] for r, v in zip(rows, values, strict=True)]
    for num_tasks in (1, 2, 3, 40):
        assert sample(logits, rows, values, num_tasks=num_tasks).tolist() == alone


@sizes
def test_padding_is_never_drawn(size, target) -> None:
    num_ids = max(1, size - size // 3)
    logits = random_logits(size)
    logits[:, num_ids:] = 1e30
    for filters in ({"temperature": 0}, {"temperature": 50.0}, {"top_k": 3}, {"top_p": 0.99}):
        values = [setting(u, **filters) for u in np.linspace(0, 0.9999, 20)]
        drawn = sample(logits, [0] * 20, values, num_ids=num_ids, target=target)
        assert 0 <= drawn.min() and drawn.max() < num_ids


@sizes
def test_what_is_not_a_number_is_found(size, target) -> None:
    rows = random_logits(size, rows=6)
    rows[0, size // 2] = np.nan
    rows[1, -1] = np.inf
    rows[2] = -np.inf
    rows[3, 0] = -np.nan
    rows[4, 0] = np.nan
    rows[4, -1] = 100.0
    for filters in ({"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}):
        drawn = sample(rows, [*range(6)], [setting(0.5, **filters)] * 6, target=target)
        # Row 4 of one id is only the 100.
        assert (drawn < 0).tolist() == [True, True, True, True, size > 1, False]


@sizes
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities(size, target, num_top) -> None:
    logits = np.concatenate([hard_rows(size), np.full((1, size), np.nan, np.float32)])
    rows = np.array([*range(8), 0], np.int32)
    token_ids = np.random.default_rng(3).integers(0, size, 9).astype(np.int32)
    expected = oracle.token_logprobs(logits, rows, token_ids, size, num_top)
    workspace = np.full((2, *workspace_shape(size)), np.nan, np.float32)
    outputs = [
        tensor(np.full((9, 3), 7, np.float64)),
        tensor(np.full((9, num_top), 7, np.int32)),
        tensor(np.full((9, num_top), 7, np.float32)),
    ]
    function("token_logprobs", size, target)(
        tensor(logits), tensor(rows), tensor(token_ids), size, tensor(workspace), *outputs
    )
    parts, top_ids, top_logits = (output.numpy() for output in outputs)
    np.testing.assert_allclose(parts, expected.parts, rtol=2e-6)
    assert top_ids.tolist() == expected.top_ids.tolist()
    assert np.array_equal(top_logits, expected.top_logits)


def test_no_temperature_or_id_makes_a_sum_of_nothing() -> None:
    """The log-sum-exp of very different logits is that of the highest."""
    logits = np.array([[3e38, -3e38, 0.0]], np.float32)
    assert sample(logits, [0], [setting(0.999, temperature=1e10)]).tolist() == [0]


@sizes
def test_bias(size, target) -> None:
    logits = random_logits(size, rows=3)
    rng = np.random.default_rng(0)
    count = min(size, 40)
    rows = np.repeat([2, 0], count).astype(np.int32)
    ids = np.concatenate([rng.permutation(size)[:count] for _ in range(2)]).astype(np.int32)
    bias = rng.standard_normal(2 * count).astype(np.float32)
    bias[0] = -np.inf
    changed = tensor(logits)
    function("apply_logit_bias_inplace", size, target)(
        changed, tensor(rows), tensor(ids), tensor(bias)
    )
    oracle.apply_logit_bias_inplace(logits, rows, ids, bias)
    assert np.array_equal(changed.numpy(), logits)


@sizes
def test_penalties(size, target) -> None:
    logits = random_logits(size, rows=4)
    logits[3, 0] = -np.inf
    rng = np.random.default_rng(0)
    count = min(size, 5000)
    index = np.repeat([0, 1], count).astype(np.int32)
    ids = np.concatenate([rng.permutation(size)[:count] for _ in range(2)]).astype(np.int32)
    counts = rng.integers(0, 4, 2 * count).astype(np.int32)
    arrays = (
        np.array([3, 1], np.int32), index, ids, counts,
        np.array([[0.5, 0.3, 1.2], [-0.5, -0.1, 0.7]], np.float32),
    )  # fmt: skip
    changed = tensor(logits)
    function("apply_penalty_inplace", size, target)(changed, *map(tensor, arrays))
    oracle.apply_penalty_inplace(logits, *arrays)
    np.testing.assert_allclose(changed.numpy(), logits, rtol=1e-5, atol=1e-6)


@sizes
def test_bitmask(size, target) -> None:
    logits = random_logits(size, rows=3)
    rng = np.random.default_rng(0)
    words = -(-size // 32)
    mask = rng.integers(-(2**31), 2**31, (2, words)).astype(np.int32)
    rows = np.array([2, 0], np.int32)
    changed = tensor(logits)
    function("apply_bitmask_inplace", size, target)(changed, tensor(rows), tensor(mask))
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").reshape(2, -1)[:, :size]
    expected = logits.copy()
    expected[rows] = np.where(allowed, logits[rows], -np.inf)
    oracle.apply_bitmask_inplace(logits, rows, mask)
    assert np.array_equal(logits, expected)
    assert np.array_equal(changed.numpy(), expected)


@pytest.mark.parametrize("name", [*sampling_functions(SMALL)])
def test_all_compile_for_arm(name: str) -> None:
    target = Target({
        "kind": "llvm", "mtriple": "aarch64-unknown-linux-gnu", "mcpu": "cortex-a76"
    })  # fmt: skip
    module = tvm.IRModule({name: sampling_functions(SMALL)[name]})
    built = tvm.compile(module, target=target, tir_pipeline=CPU_TIR_PIPELINE)
    assert "aarch64" in built.mod.inspect_source("ll")


def test_vectors_are_as_wide_as_the_machine() -> None:
    module = tvm.IRModule({"f": sampling_functions(SMALL)["sample_from_logits"]})
    built = tvm.compile(module, target=AVX512, tir_pipeline=CPU_TIR_PIPELINE)
    assert "zmm" in built.mod.inspect_source("asm")
