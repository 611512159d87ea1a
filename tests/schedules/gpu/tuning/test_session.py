"""The whole search over a tiny layer, on this machine's Vulkan device."""

from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.gpu.linear_operator import LinearOperator
from everycast.schedules.gpu.tuning import measure
from everycast.schedules.gpu.tuning.measure import GpuLab, Kernel, LayerBench, LinearLayer
from everycast.schedules.gpu.tuning.records import record_name, tuned_schedule
from everycast.schedules.gpu.tuning.spaces import BUCKETS
from everycast.schedules.gpu.weight import GpuWeight
from everycast.schedules.tuning.records import Record, Records
from everycast.schedules.tuning.session import Task, tune
from everycast.targets.target import find_target

WEIGHT = GpuWeight(TensorFormat("float16", 4, 32), 40, 96)
OPERATOR = LinearOperator((WEIGHT,), (True,), residual=True)


@pytest.fixture(scope="module")
def lab(vulkan_device):
    target, device = vulkan_device
    return GpuLab(target, device, find_target("vulkan").compiling)


@pytest.fixture(scope="module")
def layer():
    limits = find_target("vulkan").limits
    return LinearLayer(OPERATOR, limits)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Nothing is timed here: samples are as short as can be."""
    monkeypatch.setattr(measure, "_SAMPLE_S", 1e-6)
    monkeypatch.setattr(measure, "_COLD_BYTES", 1 << 13)
    monkeypatch.setattr(measure, "_COMPARISON_S", 0.0)


def test_search(lab, layer):
    events, kept, known = [], [], Records("x")
    tune(
        [layer], lab, known, trials=2, is_over=lambda: False,
        keep=lambda task, record: kept.append((task.bucket, record)), report=events.append,
    )  # fmt: skip
    assert [bucket for bucket, _ in kept] == list(BUCKETS)
    assert all(record.trials == 2 and record.default_us > 0 for _, record in kept)
    assert [event.kind for event in events if event.kind != "trial"] == ["done"] * 3
    tuned_schedule(known, OPERATOR, layer.limits)  # is one that the limits allow
    events.clear()
    tune(
        [layer], lab, known, trials=2, is_over=lambda: False,
        keep=lambda task, record: kept.append(task), report=events.append,
    )  # fmt: skip
    assert [event.kind for event in events] == ["skip"] * 3 and len(kept) == 3


def test_candidates_give_the_defaults_results(lab, layer):
    for bucket, parameters in (
        ("one", {"shares_memory": 0}),
        ("one", {"gemv_lanes": 8, "gemv_threads": 64, "gemv_words": 4}),
        ("few", {"gemv_tokens": 2, "gemv_passes": 1}),
        ("many", {"tile_rows": 32, "tile_columns": 32, "thread_rows": 4, "thread_columns": 4}),
        ("many", {"shares_memory": 0, "register_rows": 4}),
    ):
        bench = LayerBench(lab, Task(layer, bucket), Records("x"))
        kernel = bench.kernel({**bench.default, **parameters})
        assert kernel is not None and bench.is_right(kernel), (bucket, parameters)
        assert bench.kernel({**bench.default, **parameters}) is None  # was there before
        comparison = bench.compare(kernel, kernel, 9)
        assert len(comparison.before) == len(comparison.after) == 5
        assert bench.kernel({**bench.default, "gemv_threads": 1 << 12}) is None


def test_wrong_results_and_failures(lab, layer):
    bench = LayerBench(lab, Task(layer, "one"), Records("x"))
    bench._expected[0][0, 0] += 1e-3 * np.abs(bench._expected[0]).max()
    assert not bench.is_right(bench._reference)

    def fails(*arguments):
        raise RuntimeError("device lost\nVK_ERROR_DEVICE_LOST")

    assert not bench.is_right(Kernel(fails, ()))
    bench._reference = Kernel(fails, ())
    with pytest.raises(CompileError, match=r"do not run on vulkan.*VK_ERROR_DEVICE_LOST$"):
        bench.is_right(Kernel(fails, ()))


def test_records_of_other_limits_are_refused(layer):
    records = Records("x")
    records.add(layer.name, "one", Record({"gemv_threads": 1024}, 1, 2.0, 1.0))
    with pytest.raises(CompileError, match=r"of x do not fit.*1024 threads.*tune again"):
        tuned_schedule(records, OPERATOR, layer.limits)
    schedule = tuned_schedule(records, replace(OPERATOR, residual=False), layer.limits)
    assert schedule.one == schedule.few == schedule.many == layer.limits
    assert record_name(OPERATOR, layer.limits) == OPERATOR.name
