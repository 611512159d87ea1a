"""A model on a device: what is copied there, and what comes back."""

from typing import Any, ClassVar

import numpy as np
import pytest
from everycast.artifact.errors import ArtifactError
from everycast.engine import device_runner
from everycast.engine.device_runner import DeviceRunner, load_device_parameters
from everycast.engine.model_runner import ModelInfo, StepInput

PAGE = 4


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
    """Hidden states are the input ids; logits are [id, rows in this call]."""

    metadata: ClassVar = {
        "query_tile": 4, "page_shape": [2, -1, 2, 8], "kv_dtype": "float16", "max_num_sequence": 3,
        "sampling_workspace": [4, 256],
    }  # fmt: skip

    def __init__(self) -> None:
        self.inputs: list[np.ndarray] = []

    def function(self, name: str) -> Any:
        return getattr(self, f"_{name}", None)

    def _forward(self, *inputs):
        self.inputs = [array.copy() for array in inputs[:5]]
        return inputs[0], inputs[5]

    def _logits(self, hidden, rows, parameters):
        return np.stack([hidden[rows], np.full(len(rows), len(rows))], 1).astype(np.float32)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> DeviceRunner:
    for name in ("as_tensor", "as_tuple"):
        monkeypatch.setattr(device_runner, name, lambda value: value)
    info = ModelInfo(2, 64, PAGE, 64, 512, max_num_sequence=3)
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
    logits = runner.execute(step(rows))
    assert logits.shape == (len(rows), 2) and logits.dtype == np.float32
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


def test_pages_begin_as_zeros_and_are_copied_whole(runner: DeviceRunner) -> None:
    pages = runner._pages
    assert pages.shape == (2, 6, 2, 8) and not pages.any()
    pages[:] = np.arange(6)[None, :, None, None]
    runner.copy_pages([0, 1], [4, 2])
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


def test_parameters_are_uploaded_as_they_are_stored() -> None:
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
