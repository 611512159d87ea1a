"""Pictures of what there is data for."""

from pathlib import Path
from typing import Any

import pytest
from everycast.benchmarks.limits import Machine, ModelCost
from everycast.benchmarks.plots import draw
from everycast.benchmarks.rows import Row, Subject, rows_of
from everycast.benchmarks.samples import OURS, Samples
from everycast.benchmarks.works import GROUPS, parse_work

COST = ModelCost(10**8, 2e4, 10**8, 3 * 10**7)
MACHINES = {threads: Machine(3e10 * threads, 4.7e11 * threads) for threads in (1, 2)}


def rows(*works: str, peers: tuple[str, ...] = ("llama.cpp", "openvino")) -> list[Row]:
    found: list[Row] = []
    for threads in (1, 2):
        for number, work in enumerate(works, 1):
            samples = Samples()
            samples.limits["read"], samples.limits["multiply"] = [3e10], [4.7e11]
            for engine in (OURS, *peers):
                samples.figures[work][engine] = [100.0 * threads / number]
            subject = Subject("m", threads, "int8", "native", 4.5, 4.5, COST)
            found += rows_of(subject, [parse_work(work)], samples)
    return found


def names(paths: list[Path]) -> set[str]:
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return {path.stem for path in paths}


@pytest.mark.parametrize(
    ("chosen", "charts"),
    [
        (rows("decode", "prefill_128"), {"peers", "roofline"}),
        (rows(*GROUPS["contexts"]), {"peers", "context", "roofline"}),
        (rows(*GROUPS["batches"], peers=()), {"batch", "roofline"}),
        (rows("memory", peers=()), set()),
        (rows("decode_128", "decode_512"), {"context", "roofline"}),
        ([], set()),
    ],
)
def test_a_picture_for_each_kind_of_data(
    chosen: list[Row], charts: set[str], tmp_path: Path
) -> None:
    assert names(draw(chosen, MACHINES, tmp_path / "plots")) == charts


def test_all_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out" / "all.png"
    assert draw(rows("decode", *GROUPS["batches"]), MACHINES, path) == [path]
    assert names([path]) == {"all"}


def test_the_roofline_is_above_the_points(tmp_path: Path, monkeypatch: Any) -> None:
    """At 100 % of the limit a point lies on the roof."""
    from everycast.benchmarks import plots
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    (row,) = (r for r in rows("decode", peers=()) if r.threads == 1)
    assert row.bytes_per_step is not None and row.operations_per_step is not None
    plots._roofline(axes, [row], MACHINES)
    point = axes.lines[-1]
    intensity = row.operations_per_step / row.bytes_per_step
    assert point.get_xdata()[0] == intensity
    assert point.get_ydata()[0] == pytest.approx(row.operations_per_step * row.ours / 1e9)
