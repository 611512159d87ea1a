from dataclasses import replace
from pathlib import Path

import pytest
from everycast.artifact.errors import CapacityError
from everycast.engine import memory_plan
from everycast.engine.engine_config import EngineConfig
from everycast.engine.memory_plan import MemoryPlan, available_memory, plan_memory
from everycast.engine.model_runner import ModelInfo
from hypothesis import given
from hypothesis import strategies as st

MB = 1_000_000
RESERVE = 256 << 20
INFO = ModelInfo(
    vocab_size=1000, context_window_size=4096, page_size=16, page_bytes=MB,
    prefill_chunk_size=512, max_num_sequence=64,
)  # fmt: skip


def plan(
    available: int, info: ModelInfo = INFO, *, max_page_bytes: int | None = None, **config: int
) -> MemoryPlan:
    return plan_memory(
        EngineConfig(**config), info, weight_bytes=100 * MB, workspace_bytes=7 * MB,
        available_bytes=available, max_page_bytes=max_page_bytes,
    )  # fmt: skip


def room(num_pages: int) -> int:
    """Memory that holds weights, workspace, the reserve and so many pages, to the byte."""
    return 107 * MB + RESERVE + num_pages * MB


def test_all_that_is_wanted_fits() -> None:
    made = plan(10**12, max_total_seq_length=1000)
    assert (made.num_pages, made.num_tokens) == (63, 1008)
    assert made.total_bytes == (100 + 7 + 63) * MB
    assert made.context_window_size == 1008  # one sequence may take all pages, and no more
    assert plan(10**12).num_tokens == 2 * 4096 and plan(10**12).context_window_size == 4096


def test_the_summary_names_every_number() -> None:
    text = plan(2_500 * MB).summary()
    for part in (
        "weights 100 MB", "KV pages 512 MB (8192 tokens)", "workspace 7 MB", "619 MB of 2.50 GB",
        "context 4096",
    ):  # fmt: skip
        assert part in text
    assert "\n" not in text


def test_what_nobody_asked_for_is_reduced() -> None:
    made = plan(room(10))
    assert (made.num_pages, made.num_tokens, made.context_window_size) == (10, 160, 160)
    assert plan(room(10) - 1).num_pages == 9
    assert plan(room(10), max_page_bytes=8 * MB - 1).num_pages == 7
    assert plan(room(10), max_page_bytes=11 * MB).num_pages == 10


@pytest.mark.parametrize("asked", [{"max_total_seq_length": 512}, {"context_window_size": 256}])
def test_what_was_asked_for_is_refused_with_both_numbers(asked: dict[str, int]) -> None:
    assert plan(room(32), **asked).num_pages == 32
    with pytest.raises(CapacityError) as caught:
        plan(room(31), **asked)
    message = str(caught.value)
    assert "512 tokens need 32 MB" in message
    assert "31 MB is left" in message and "enough for 496 tokens" in message
    assert "lower max_total_seq_length or context_window_size" in message


@pytest.mark.parametrize("available", [0, 50 * MB, room(1) - 1])
def test_no_room_for_the_weights(available: int) -> None:
    parts = r"needs 100 MB for weights, 7 MB for workspace and 268 MB .* only \d+ MB .*available"
    with pytest.raises(CapacityError, match=parts):
        plan(available)
    assert plan(room(1)).num_pages == 1


@given(
    available=st.integers(0, 20_000 * MB),
    page_bytes=st.integers(1, 50 * MB),
    asked=st.none() | st.integers(1, 100_000),
)
def test_a_plan_never_takes_more_than_there_is(
    available: int, page_bytes: int, asked: int | None
) -> None:
    config = {} if asked is None else {"max_total_seq_length": asked}
    try:
        made = plan(available, replace(INFO, page_bytes=page_bytes), **config)
    except CapacityError:
        return
    assert 1 <= made.num_pages and made.total_bytes + RESERVE <= available
    assert 1 <= made.context_window_size <= min(4096, made.num_tokens)
    if asked is not None:
        assert asked <= made.num_tokens < asked + INFO.page_size


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`system({path: content})`: a machine with these files and no others."""

    class Files:
        def __init__(self, path: str) -> None:
            self.path = tmp_path / path.lstrip("/")

        def read_text(self) -> str:
            return self.path.read_text()

    def set_up(files: dict[str, str]) -> None:
        for path, content in files.items():
            file = tmp_path / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        monkeypatch.setattr(memory_plan, "Path", Files)

    return set_up


MEMINFO = {"/proc/meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\nBuffers: 1\n"}
V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8000 * 1024),
        ({f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "5\n"}, 8000 * 1024),
        ({f"{V2}/memory.max": "3000000\n", f"{V2}/memory.current": "1000000\n"}, 2_000_000),
        ({f"{V2}/memory.max": "1000\n", f"{V2}/memory.current": "2000\n"}, 0),
        ({f"{V2}/memory.max": "1000\n"}, 8000 * 1024),
        (
            {
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/memory.usage_in_bytes": "5\n",
            },
            8000 * 1024,
        ),
        (
            {f"{V1}/memory.limit_in_bytes": "70000\n", f"{V1}/memory.usage_in_bytes": "5\n"},
            69_995,
        ),
        ({f"{V2}/memory.max": "garbage\n", f"{V2}/memory.current": "5\n"}, 8000 * 1024),
    ],
)
def test_what_is_available_is_what_the_system_and_the_cgroup_allow(
    system, files: dict[str, str], expected: int
) -> None:
    system({**MEMINFO, **files})
    assert available_memory() == expected


def test_without_proc_half_of_the_memory_counts(system, monkeypatch: pytest.MonkeyPatch) -> None:
    system({})
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(memory_plan.os, "sysconf", sizes.__getitem__)
    assert available_memory() == 2_048_000
    system({"/proc/meminfo": "MemAvailable: many kB\n"})
    assert available_memory() == 2_048_000


def test_this_machine_has_memory() -> None:
    assert available_memory() > 1 << 20
