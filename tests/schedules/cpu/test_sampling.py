"""The sampling kernels against their definition in NumPy, over odd sizes and hard logits."""

import functools

import numpy as np
import pytest
import tvm
from everycast.engine import numpy_sampling as oracle
from everycast.schedules.cpu.sampling import sampling_functions
from everycast.schedules.cpu.sampling_draw import workspace_shape
from everycast.schedules.pipeline import CPU_TIR_PIPELINE
from hypothesis import given, settings
from sampling_cases import (
    ANY_FILTERS,
    ANY_LOGITS,
    FILTERS,
    assert_drawn_at,
    assert_follows_distribution,
    hard_rows,
    interval_middles,
    kept_weights,
    random_logits,
    setting,
)
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


def check_draws(row: np.ndarray, target: Target, **filters) -> None:
    """Draw in the middle of the interval of every id that the oracle keeps, and at both ends."""
    kept, weights = kept_weights(row, **filters)
    some, middles = interval_middles(weights, 10, 997)
    values = [setting(u, **filters) for u in (*middles, 0.0, np.nextafter(1, 0))]
    drawn = sample(row[None], [0] * len(values), values, target=target)
    assert drawn[:-2].tolist() == kept[some].tolist()
    is_likely = weights > 1e-30
    assert drawn[-2] == kept[is_likely][0] and drawn[-1] in kept[weights > 0]


@sizes
def test_greedy_is_the_arg_max_and_the_lowest_of_equals(size, target) -> None:
    rows = hard_rows(size)
    drawn = sample(rows, [*range(7)], [setting(temperature=0)] * 7, target=target)
    assert drawn.tolist() == rows.argmax(axis=1).tolist()


@sizes
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_are_those_of_the_oracle(size, target, filters) -> None:
    for row in hard_rows(size):
        check_draws(row, target, **filters)


@settings(max_examples=150, deadline=None)
@given(**ANY_LOGITS, **ANY_FILTERS)
def test_any_row_and_filters(seed, spread, decimals, **filters) -> None:
    row = random_logits(SMALL, seed, spread=spread)[0].round(decimals)
    uniforms = (0.37, 0.999)
    drawn = sample(row[None], [0, 0], [setting(u, **filters) for u in uniforms])
    assert_drawn_at(row, drawn, uniforms, **filters)


def test_ten_thousand_draws_follow_the_distribution() -> None:
    row = random_logits(SMALL, 5)
    filters = {"temperature": 1.3, "top_k": 60, "top_p": 0.95}
    uniforms = np.random.default_rng(1).random(10_000)
    drawn = sample(row, [0] * 10_000, [setting(u, **filters) for u in uniforms])
    assert_follows_distribution(row[0], drawn, **filters)


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
