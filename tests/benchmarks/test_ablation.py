"""What each variant switches off is off, whatever the default is or tuning found."""

import sys

import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.benchmarks.ablation import (
    HUGE_PAGES,
    SMALL_PAGES,
    VARIANTS,
    change_schedules,
    table,
)  # fmt: skip
from everycast.benchmarks.samples import Samples
from everycast.benchmarks.workers import Worker
from everycast.benchmarks.works import parse_works
from everycast.schedules.cpu import linear_inputs
from everycast.schedules.cpu.isa import CpuIsa
from everycast.schedules.cpu.linear_schedule import LinearSchedule, default_schedule
from everycast.targets import cpu

CHANGES = {variant.name: variant.schedule for variant in VARIANTS}
AVX512 = CpuIsa("avx512", 16, 32, "avx512vnni")
AVX2 = CpuIsa("avx2", 8, 16, "avx2")
HUGE_BYTES = 32 << 20
TAKES_MEMORY = f"""
from everycast.engine.runtime import huge_array
memory = huge_array({HUGE_BYTES})
memory[:] = 1
print("{{}}", flush=True)
input()
"""


@pytest.fixture
def schedules_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test does to all schedules is undone after it."""
    monkeypatch.setattr(LinearSchedule, "__post_init__", LinearSchedule.__post_init__)


def schedules() -> list[LinearSchedule]:
    """Default ones, and with what tuning may find."""
    defaults = [
        default_schedule(isa, terms, is_quantized=True, has_pairs=True, has_many=True)
        for isa in (AVX512, AVX2)
        for terms in (1, 2)
    ]
    found = {"tile_tokens": 16, "prefetch_one": 4096, "prefetch_many": 1024}
    return defaults + [default.with_parameters(found) for default in defaults]


@pytest.mark.usefixtures("schedules_change")
def test_tiles_of_one_token_and_one_block() -> None:
    change_schedules(CHANGES["tiles of one token"])
    for schedule in schedules():
        assert schedule.tiles == (1,)
        assert (schedule.least_paired, schedule.unpack_tokens) == (0, 0)


@pytest.mark.usefixtures("schedules_change")
def test_no_weights_stay_in_registers_but_in_tiles_of_two_blocks() -> None:
    change_schedules(CHANGES["weights that stay in registers"])
    assert {(s.many_tokens, s.pair_tokens) for s in schedules()} == {(0, 4)}


def test_the_whole_head_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    head = TensorFormat("float16", 8, 32, 127)
    for module in (linear_inputs, cpu):
        monkeypatch.setattr(module, "has_planes", module.has_planes)
        assert module.has_planes(head, AVX512, "int8")
    (change,) = (v.change for v in VARIANTS if v.name == "half of the head in greedy decoding")
    assert change is not None
    change()
    assert not linear_inputs.has_planes(head, AVX512, "int8")
    assert not cpu.has_planes(head, AVX512, "int8")


@pytest.mark.usefixtures("schedules_change")
def test_no_tiles_of_two_blocks() -> None:
    change_schedules(CHANGES["two blocks of rows at once"])
    assert all(schedule.least_paired == 0 < len(schedule.tiles) - 1 for schedule in schedules())


@pytest.mark.usefixtures("schedules_change")
def test_no_prefetch() -> None:
    change_schedules(CHANGES["no prefetch of weights"])
    for schedule in schedules():
        assert {schedule.prefetch_bytes(tokens) for tokens in (1, 2, *schedule.tiles)} == {0}


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
def test_the_worker_of_small_pages_has_no_others() -> None:
    (variant,) = (variant for variant in VARIANTS if variant.name == SMALL_PAGES)
    for prefix, most in (((), None), (variant.prefix, 0)):
        with Worker("w", [*prefix, sys.executable, "-P", "-c", TAKES_MEMORY]) as worker:
            memory = worker.memory()
            assert memory.peak_rss > HUGE_BYTES
            # Whether the system grants any is its own affair.
            assert most is None or memory.on_huge_pages == most


def test_the_table() -> None:
    samples, works = Samples(), parse_works(["decode"])
    for i, variant in enumerate(VARIANTS):
        samples.figures["decode"][variant.name] = [100.0, 1000.0 / (i + 1), 9000.0]
        samples.figures[HUGE_PAGES][variant.name] = [0.0 if i else 2e8]
    lines = table(samples, works).splitlines()
    assert lines[0] == f"| without | decode | {HUGE_PAGES} |"
    assert lines[2] == "| nothing: all of it | 1000 | 200 MB |"
    assert lines[3].endswith("| 500 (2.00) | 0 MB |")
    assert len(lines) == 2 + len(VARIANTS)
    assert all(line.count("|") == 4 for line in lines)
