"""A model on a device: what is copied there, and what comes back."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from everycast.artifact.errors import ArtifactError
from everycast.engine import device_block, device_runner, numpy_sampling
from everycast.engine.device_runner import DeviceRunner, load_device_parameters
from everycast.engine.model_runner import (
    LogitBias,
    ModelInfo,
    Penalties,
    SampleInput,
    StepInput,
    TokenParts,
)
from everycast.engine.row_sampling import sample_rows

PAGE, NUM_IDS = 4, 30


class FakeMemory:
    """A device whose tensors are arrays."""

    def __init__(self) -> None:
        self.num_copies = 0

    def empty(self, shape, dtype: str) -> np.ndarray:
        return np.full(shape, 77, dtype)

    def upload(self, array: np.ndarray, dtype: str) -> np.ndarray:
        assert array.flags.c_contiguous
        return array.copy()

    def view(self, tensor: np.ndarray, shape, dtype: str, byte_offset: int) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        part = tensor.reshape(-1).view(np.uint8)[byte_offset : byte_offset + size]
        return part.view(dtype).reshape(shape)

    def argument(self, tensor: np.ndarray, shape, dtype: str, byte_offset: int) -> np.ndarray:
        assert byte_offset % 256 == 0
        return self.view(tensor, shape, dtype, byte_offset)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.num_copies += 1
        target[...] = source

    def download(self, tensor: np.ndarray, array: np.ndarray) -> None:
        array[...] = tensor


class FakeLibrary:
    """Hidden states are the input ids; logits begin with [id, rows in this call]. Samples by the
    definition."""

    metadata: ClassVar = {
        "query_tile": 4, "page_shape": [2, -1, 2, 8], "kv_dtype": "float16", "max_num_sequence": 3,
    }  # fmt: skip

    def __init__(self) -> None:
        self.inputs: list[np.ndarray] = []

    def function(self, name: str) -> Any:
        return getattr(self, f"_{name}", None) or getattr(numpy_sampling, name)

    def _forward(self, *inputs):
        self.inputs = [array.copy() for array in inputs[:5]]
        return inputs[0], inputs[5]

    def _logits(self, hidden, rows, parameters):
        logits = np.stack([random_row(token) for token in hidden[rows]])
        logits[:, 0], logits[:, 1] = hidden[rows], len(rows)
        return logits

    def _take_logits(self, logits, rows, token_ids, values) -> None:
        values[...] = logits[rows, token_ids]

    def _put_logits(self, logits, rows, token_ids, values) -> None:
        logits[rows, token_ids] = values

    def _sample_from_logits(self, logits, rows, settings, num_ids, token_ids) -> None:
        words = settings.view(np.uint32)
        inverse, offset = words[:, :2].view(np.float32).T.astype(float)
        top_p, uniform = words[:, 3:].T * 2.0**-32
        values = np.stack([inverse, offset, settings[:, 2], top_p, uniform], 1)
        token_ids[...] = numpy_sampling.sample_from_logits(logits, rows, values, num_ids)

    def _token_logprobs(
        self, logits, rows, picks, token_ids, num_ids, words, top_ids, top_logits
    ) -> None:
        drawn = np.maximum(token_ids[picks], 0)
        found = numpy_sampling.token_logprobs(logits, rows, drawn, num_ids, top_ids.shape[1])
        floats = words.view(np.float32)
        floats[:, 0], floats[:, 3] = found.parts[:, 0], found.parts[:, 2]
        sums = (np.nan_to_num(found.parts[:, 1]) * 2.0**40).astype(np.uint64)
        words.view(np.uint32)[:, 1], words.view(np.uint32)[:, 2] = sums >> 32, sums & 0xFFFFFFFF
        top_ids[...], top_logits[...] = found.top_ids, found.top_logits


def random_row(token: int) -> np.ndarray:
    """Of padded ids as well."""
    return np.random.default_rng(token).standard_normal(NUM_IDS + 2).astype(np.float32) * 3


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> DeviceRunner:
    for module in (device_runner, device_block):
        for name in ("as_tensor", "as_tuple"):
            monkeypatch.setattr(module, name, lambda value: value, raising=False)
    info = ModelInfo(NUM_IDS + 2, 64, PAGE, 64, 512, max_num_sequence=3)
    return DeviceRunner(FakeLibrary(), FakeMemory(), [], info, num_pages=6)


def step(rows: list[int]) -> StepInput:
    """Two sequences with 6 and 4 tokens, of which 3 were there before."""
    return StepInput(
        np.arange(10, dtype=np.int32) * 5,
        np.array([*range(6), *range(3, 7)], np.int32),
        np.array([0, 6, 10], np.int32),
        np.array([[4, 2], [1, 3]], np.int32),
        np.array(rows, np.int32),
    )


@pytest.mark.parametrize(
    ("rows", "sizes"), [([], []), ([7], [1]), ([0, 2, 9], [3] * 3), ([9, 8, 7, 6], [3] * 3 + [1])]
)
def test_logits_of_the_rows_asked_for(runner: DeviceRunner, rows: list, sizes: list) -> None:
    runner.execute(step(rows))
    logits = runner.logits()
    assert logits.shape == (len(rows), NUM_IDS + 2) and logits.dtype == np.float32
    assert logits[:, 0].tolist() == [row * 5 for row in rows]
    assert logits[:, 1].tolist() == sizes


def test_all_integers_of_a_step_are_one_copy(runner: DeviceRunner) -> None:
    before = runner._memory.num_copies
    runner.execute(step([5]))
    assert runner._memory.num_copies == before + 1
    ids, positions, slots, tiles, tables = runner._forward.__self__.inputs
    assert all(array.dtype == np.int32 for array in (ids, positions, slots, tiles, tables))
    assert ids.tolist() == [*range(0, 50, 5)] and positions.tolist() == [*range(6), *range(3, 7)]
    assert slots.tolist() == [16, 17, 18, 19, 8, 9, 7, 12, 13, 14]
    assert tiles.tolist() == [[0, 0, 4], [0, 4, 2], [1, 6, 4]]
    assert tables.tolist() == [[4, 2], [1, 3]]


SETTINGS = np.array([
    (1.4, -np.inf, 0, 1.0, 0.25), (0, -np.inf, 0, 1.0, 0), (0.7, -3.0, 9, 0.75, 0.625),
    (1.4, -np.inf, 0, 0.875, 0.5),
])  # fmt: skip
BIAS = LogitBias(
    np.array([3, 1], np.int32), np.array([7, 2], np.int32), np.array([-np.inf, 9], np.float32)
)
PENALTIES = Penalties(
    np.array([3, 1], np.int32), np.array([[0.5, 0.25, 1.5], [9, 9, 9]], np.float32),
    np.array([0, 0, 1], np.int32), np.array([7, 4, 2], np.int32), np.array([0, 2, 1], np.int32),
)  # fmt: skip


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("penalties", [None, PENALTIES])
@pytest.mark.parametrize("picks", [[], [2, 1]])
def test_tokens_are_those_of_the_definition_and_alone_come_back(
    runner: DeviceRunner, bias: LogitBias | None, penalties: Penalties | None, picks: list
) -> None:
    """Draws from rows 3 (twice), 1 and 0 of four."""
    draws = SampleInput(
        NUM_IDS, np.array([3, 1, 3, 0], np.int32), SETTINGS, bias, penalties,
        np.array(picks, np.int32), num_top=3,
    )  # fmt: skip
    runner.execute(step([0, 2, 9, 5]))
    before = runner._memory.num_copies
    ours = runner.sample(draws)
    assert runner._memory.num_copies == before + 2
    logits = np.stack([random_row(token) for token in (0, 10, 45, 25)])
    # As many rows as are drawn from.
    logits[:, 0], logits[:, 1] = (0, 10, 45, 25), 3
    theirs = sample_rows(numpy_sampling, logits, draws)
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    if picks:
        same_parts(ours.logprobs, theirs.logprobs)
    else:
        assert ours.logprobs is None


def same_parts(ours: TokenParts | None, theirs: TokenParts | None) -> None:
    assert ours is not None and theirs is not None
    np.testing.assert_allclose(ours.parts, theirs.parts, rtol=1e-6)
    assert ours.top_ids.tolist() == theirs.top_ids.tolist()
    assert np.array_equal(ours.top_logits, theirs.top_logits)


def test_log_probabilities_of_more_rows_than_the_library_takes(runner: DeviceRunner) -> None:
    runner.execute(step([1, 2, 3, 4, 5, 6]))
    rows, ids = np.array([5, 0, 2, 1], np.int32), np.array([4, 3, 2, 9], np.int32)
    ours = runner.logprobs(rows, ids, num_ids=NUM_IDS, num_top=2)
    tokens = np.array([6, 1, 3, 2]) * 5
    logits = np.stack([random_row(token) for token in tokens])
    logits[:, 0], logits[:, 1] = tokens, [3, 3, 3, 1]
    same_parts(ours, numpy_sampling.token_logprobs(logits, np.arange(4), ids, NUM_IDS, 2))


@pytest.mark.parametrize("page_tensors", [1, 3])
def test_pages_begin_as_zeros_and_are_copied_whole(runner: DeviceRunner, page_tensors: int) -> None:
    info = replace(runner.info, page_tensors=page_tensors)
    runner = DeviceRunner(FakeLibrary(), FakeMemory(), [], info, num_pages=6)
    tensors = [runner._pages] if page_tensors == 1 else runner._pages
    assert len(tensors) == page_tensors
    for pages in tensors:
        assert pages.shape == (2, 6, 2, 8) and not pages.any()
        pages[:] = np.arange(6)[None, :, None, None]
    runner.copy_pages([0, 1], [4, 2])
    for pages in tensors:
        assert pages[1, :, 0, 0].tolist() == [0, 1, 1, 3, 0, 5]
        assert (pages == pages[:1, :, :1, :1]).all()
    runner.copy_pages([], [])
    runner.close()


class FakeWeights:
    folder = "somewhere"

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors, self.is_verified = tensors, False

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> np.ndarray:
        array = self.tensors[name]
        return type("Info", (), {"shape": array.shape, "dtype": str(array.dtype)})()

    def read(self, name: str) -> np.ndarray:
        assert self.is_verified
        return self.tensors[name]

    def verify(self) -> None:
        self.is_verified = True


def _library(pack: str | None) -> Any:
    library = FakeLibrary()
    library.metadata = {
        "parameters": [
            {"name": n, "shape": [2, 3], "dtype": "float16", "sources": [n], "pack": pack}
            for n in ("a", "b")
        ]
    }
    return library


def test_parameters_are_uploaded_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runner, "verify_once", lambda weights: weights.verify())
    arrays = {name: np.random.rand(2, 3).astype(np.float16) for name in ("b", "a")}
    reports: list[tuple[int, int]] = []
    weights: Any = FakeWeights(arrays)
    memory: Any = FakeMemory()
    tensors = load_device_parameters(
        _library(None), weights, memory, lambda done, total: reports.append((done, total))
    )
    assert [tensor.tolist() for tensor in tensors] == [arrays["a"].tolist(), arrays["b"].tolist()]
    assert reports == [(12, 24), (24, 24)]
    with pytest.raises(ArtifactError, match="packs a, which devices do not"):
        load_device_parameters(_library("pack_a"), weights, memory)
    del arrays["b"]
    with pytest.raises(ArtifactError, match="lacks 1 tensors that its library needs: b"):
        load_device_parameters(_library(None), weights, memory)
