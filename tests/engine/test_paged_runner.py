from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from everycast.engine import paged_runner
from everycast.engine.model_runner import ModelInfo, StepInput
from everycast.engine.paged_runner import PagedRunner, query_tiles, slots_of
from hypothesis import example, given
from hypothesis import strategies as st

PAGE = 4
SEQUENCES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=8)
"""(tokens before, new tokens) of each sequence."""


def step_of(sequences: list[tuple[int, int]], rows: list[int] | None = None) -> StepInput:
    """Sequence i owns the pages i·100, i·100 + 1, …"""
    counts = [count for _, count in sequences]
    positions = np.concatenate([np.arange(start, start + n) for start, n in sequences])
    tables = np.arange(len(sequences))[:, None] * 100 + np.arange(40)
    return StepInput(
        np.zeros(sum(counts), np.int32),
        positions.astype(np.int32),
        np.cumsum([0, *counts]).astype(np.int32),
        tables.astype(np.int32),
        np.array([] if rows is None else rows, np.int32),
    )


@given(SEQUENCES)
@example([(5, 1), (0, 1), (31, 1)])  # all decode
def test_every_token_has_a_slot_of_its_own_sequence(sequences: list[tuple[int, int]]) -> None:
    slots = slots_of(step_of(sequences), PAGE)
    expected = [
        (i * 100 + position // PAGE) * PAGE + position % PAGE
        for i, (start, count) in enumerate(sequences)
        for position in range(start, start + count)
    ]
    assert slots.tolist() == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(1, 20))
@example([1, 1, 1], 16)  # all decode
def test_tiles_cut_every_sequence_without_gaps(counts: list[int], tile: int) -> None:
    tiles = query_tiles(np.cumsum([0, *counts]).astype(np.int32), tile)
    expected, first = [], 0
    for sequence, count in enumerate(counts):
        for start in range(0, count, tile):
            expected.append([sequence, first + start, min(tile, count - start)])
        first += count
    assert tiles.tolist() == expected


class FakeLibrary:
    """A model of one layer whose hidden states are the input ids, and logits [id, row count]."""

    metadata: ClassVar = {
        "query_tile": 4, "page_shape": [1, -1, 2, 8], "kv_dtype": "float16", "max_num_sequence": 3,
        "sampling_workspace": [4, 256],
    }  # fmt: skip

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def function(self, name: str):
        return getattr(self, f"_{name}", None)

    def _forward(self, ids, positions, slots, tiles, tables, pages, parameters):
        return ids, pages

    def _logits(self, hidden, rows, parameters):
        self.num_rows.append(len(rows))
        return np.stack([hidden[rows], np.full(len(rows), len(rows))], 1).astype(np.float32)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> PagedRunner:
    """Over arrays in place of TVM's tensors."""
    for name in ("as_tensor", "as_array", "as_tuple"):
        monkeypatch.setattr(paged_runner, name, lambda value: value)
    monkeypatch.setattr(paged_runner, "choose_threads", lambda *_: 1)
    info = ModelInfo(2, 64, PAGE, 32, 512, max_num_sequence=3)
    return PagedRunner(FakeLibrary(), [], info, num_pages=6)


@pytest.mark.parametrize(
    ("rows", "slices"),
    [([], []), ([7], [1]), ([0, 2, 9], [3]), ([9, 8, 7, 6], [3, 1]), ([*range(8)], [3, 3, 2])],
)
def test_logits_of_the_rows_asked_for(
    runner: PagedRunner, rows: list[int], slices: list[int]
) -> None:
    """More rows than the library takes are computed in slices."""
    step = step_of([(0, 10)], rows)
    step.input_ids[:] = np.arange(10) * 5
    logits = runner.execute(step)
    assert logits.shape == (len(rows), 2) and logits.dtype == np.float32
    assert logits[:, 0].tolist() == [row * 5 for row in rows]
    assert runner._logits.__self__.num_rows == slices


def test_leading_logits_where_the_library_has_them(runner: PagedRunner) -> None:
    step = replace(step_of([(0, 10)], [0, 2, 9, 4]), arg_max_ids=2)
    assert runner.execute(step)[:, 1].tolist() == [3, 3, 3, 1]
    calls = []

    def leading(hidden, rows, num_ids, parameters):
        calls.append((rows.tolist(), num_ids.tolist()))
        return np.zeros((len(rows), 2), np.float32)

    runner._leading_logits = leading
    assert not runner.execute(step).any()
    assert calls == [([0, 2, 9], [2]), ([4], [2])]
    assert runner.execute(replace(step, arg_max_ids=0)).any()


def test_pages_are_copied_whole(runner: PagedRunner) -> None:
    pages = runner._page_array
    assert pages.shape == (1, 6, 2, 8) and not pages.any()
    pages[:] = np.arange(6)[None, :, None, None]
    runner.copy_pages([0, 1], [4, 2])
    assert pages[0, :, 0, 0].tolist() == [0, 1, 1, 3, 0, 5]
    assert (pages == pages[:, :, :1, :1]).all()
    runner.copy_pages([], [])


def test_inputs_are_aligned_int32() -> None:
    """Also when the tensors of the step before are filled again."""
    tensors = paged_runner._Int32Tensors()
    for start, shapes in enumerate([((1,), (2, 3)), ((17,), (1, 3)), ((17,), (1, 3)), ((2,),)]):
        first = 2**31 - 20 - start
        values = [np.arange(np.prod(shape)).reshape(shape) + first for shape in shapes]
        for tensor, value in zip(tensors.filled(*values), values, strict=True):
            array = np.from_dlpack(tensor)
            assert array.dtype == np.int32 and array.ctypes.data % 64 == 0
            assert array.tolist() == value.tolist()
