"""What is searched: every candidate is a kernel that the target's limits allow."""

import functools
from dataclasses import replace

import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.gpu.limits import GemmTile, GpuLimits, MatrixTile
from everycast.schedules.gpu.linear import linear
from everycast.schedules.gpu.linear_operator import LinearOperator
from everycast.schedules.gpu.linear_schedule import (
    check_parameters,
    default_schedule,
    parameters_of,
    with_parameters,
)
from everycast.schedules.gpu.tuning.demands import Demands, demands_of
from everycast.schedules.gpu.tuning.spaces import BUCKETS, candidates, rows_of, space_of
from everycast.schedules.gpu.weight import GpuWeight
from hypothesis import given, settings
from hypothesis import strategies as st

LIMITS = {
    "vulkan": GpuLimits(max_threads=256, shared_bytes=32 << 10),
    "least": GpuLimits(
        max_threads=128, shared_bytes=16 << 10, gemm_tiles=(GemmTile(16, 32, 16, 4, 4),)
    ),
    "cuda": GpuLimits(
        max_threads=1024, shared_bytes=48 << 10, gemv_tokens=2, gemv_passes=1, gemv_words=4,
        gemv_stages=3, gemv_blocks=256, subgroup=32,
        matrix_tiles=(MatrixTile(16, 64, 64, 16, 16), MatrixTile(128, 128, 32, 64, 32)),
    ),
}  # fmt: skip
FORMATS = {
    "q4": TensorFormat("float16", 4, 32, 8),
    "q3": TensorFormat("float16", 3, 40),
    "q6": TensorFormat("float16", 6, 16, 32),
    "kn": TensorFormat("float16", 4, 32, 8, "KN"),
    "float": TensorFormat("float32"),
}


def make(fmt: str, gated: bool) -> LinearOperator:
    weight = GpuWeight(FORMATS[fmt], 96, 320)
    if not gated:
        return LinearOperator((weight,), (True,), residual=True)
    return LinearOperator((weight, weight), (False, False), activation="silu")


@functools.cache
def found(fmt: str, gated: bool, bucket: str, target: str):
    return candidates(make(fmt, gated), bucket, LIMITS[target])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(FORMATS)), st.booleans(), st.sampled_from(BUCKETS),
    st.sampled_from(list(LIMITS)), st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_candidate_builds_legal_limits(fmt, gated, bucket, target, random):
    limits, operator = LIMITS[target], make(fmt, gated)
    space = space_of(operator, bucket, limits)
    chosen = random.choice(found(fmt, gated, bucket, target))
    assert all(chosen[name] in values for name, values in space.items())
    check_parameters(bucket, chosen)
    new = with_parameters(limits, chosen)  # raises what the limits do not allow
    assert (new.max_threads, new.shared_bytes) == (limits.max_threads, limits.shared_bytes)
    assert parameters_of(new, list(space)) == chosen
    schedule = default_schedule(limits).with_parameters(bucket, chosen)
    func = linear(operator, limits, schedule)
    if bucket == "many" and new.shares_memory:
        assert demands_of(func).fit(limits)
    assert demands_of(func).threads <= limits.max_threads


@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_candidates_are_different_and_the_default_is_the_first(bucket, target):
    operator = make("q4", False)
    all_of_them = found("q4", False, bucket, target)
    names = list(space_of(operator, bucket, LIMITS[target]))
    assert all_of_them[0] == parameters_of(LIMITS[target], names)
    assert len({tuple(c.items()) for c in all_of_them}) == len(all_of_them) > 50


def test_what_does_not_matter_keeps_its_default():
    limits = LIMITS["vulkan"]
    for candidate in found("q4", False, "one", "vulkan"):
        if candidate["shares_memory"]:
            assert candidate["register_columns"] == limits.register_columns
        else:
            assert candidate["gemv_lanes"] == limits.gemv_lanes


def test_many_rows_of_a_target_with_matrices_are_matrix_tiles():
    limits = LIMITS["cuda"]
    assert "warp_rows" in space_of(make("q4", False), "many", limits)
    assert "thread_rows" in space_of(make("float", False), "many", limits)
    assert "thread_rows" in space_of(make("q4", False), "many", replace(limits, matrix_tiles=()))


def test_a_head_never_gets_more_rows_than_there_are_sequences():
    head = LinearOperator((GpuWeight(FORMATS["q4"], 151936, 64),), (False,))
    assert rows_of(head, "many") == (64,) and rows_of(head, "one") == (1,)
    assert rows_of(make("q4", False), "many") == (256,)


def test_demands():
    limits = LIMITS["vulkan"]
    demands = demands_of(linear(make("q4", False), limits))
    assert demands == Demands(128, 4 * (64 + 64) * (32 + 4))
    assert not demands.fit(replace(limits, shared_bytes=18431, gemm_tiles=limits.gemm_tiles[:1]))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tile_tokens": 1}, "has no tile_tokens"),
        ({"gemv_lanes": 0}, "gemv_lanes of a linear schedule cannot be 0"),
        ({"gemv_lanes": 2.0}, "cannot be 2.0"),
        ({"shares_memory": True}, "cannot be True"),
        ({"gemv_lanes": 24}, "powers of two"),
        ({"gemv_threads": 512}, "512 threads a block, 256 may be"),
        ({"thread_rows": 7}, "do not fill"),
        ({"tile_rows": 128, "tile_columns": 128, "tile_depth": 64}, "may be shared"),
        ({"matrix_rows": 64}, "no matrix tiles"),
    ],
)
def test_parameters_that_no_kernel_has(parameters, message):
    with pytest.raises(ValueError, match=message):
        with_parameters(LIMITS["vulkan"], parameters)


def test_smaller_tiles_than_the_largest_stay():
    tiles = with_parameters(LIMITS["vulkan"], {"tile_rows": 32}).gemm_tiles
    assert [tile.rows for tile in tiles] == [16, 32]
    with pytest.raises(ValueError, match="no bucket 'most'"):
        check_parameters("most", {})
