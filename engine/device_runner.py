"""A compiled library on a device of its own memory, as the engine's model.

Weights and KV pages live on the device. A step copies its integers there in one piece, runs the
model, and copies the logits back, from which tokens are drawn on the CPU.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..artifact.errors import ArtifactError
from ..artifact.tensor_cache import TensorCacheReader, aligned_empty
from .devices import DeviceMemory
from .library_sampling import LibrarySampling
from .model_runner import ModelInfo, SampleInput, SampleOutput, StepInput, TokenParts
from .paged_runner import query_tiles, slots_of
from .parameters import Progress, check_sources, read_parameters
from .row_sampling import sample_rows
from .runtime import Library, Tensor, as_tensor, as_tuple, huge_array
from .threads import set_threads

_INPUT_ALIGNMENT = 256
"""Bytes: no device wants its tensors to start on larger multiples."""


class DeviceRunner:
    """`ModelRunner` over one library. Use it from one thread."""

    def __init__(
        self,
        library: Library,
        memory: DeviceMemory,
        parameters: list[Tensor],
        info: ModelInfo,
        num_pages: int,
        num_threads: int | None = None,
    ) -> None:
        """`parameters` are on the device. num_threads: of the CPU, for sampling."""
        metadata = library.metadata
        self.info, self.num_pages = info, num_pages
        self._memory = memory
        self._num_threads = num_threads
        self._forward = library.function("forward")
        self._logits = library.function("logits")
        self._sampling = LibrarySampling(library)
        self._step_logits = np.empty((0, info.vocab_size), np.float32)
        self._parameters = as_tuple(parameters)
        self._query_tile: int = metadata["query_tile"]
        layers, _, *page = metadata["page_shape"]
        self._page_shape, self._kv_dtype = (layers, num_pages, *page), metadata["kv_dtype"]
        self._pages = memory.empty(self._page_shape, self._kv_dtype)
        self._clear_pages()
        self._inputs = _Inputs(memory)

    def execute(self, step: StepInput) -> np.ndarray:
        """See `ModelRunner.execute`. Rows beyond the library's limit are computed in slices."""
        if self._num_threads is not None:
            set_threads(self._num_threads)
            self._num_threads = None
        num_rows, limit = len(step.logit_rows), self.info.max_num_sequence
        slices = [step.logit_rows[i : i + limit] for i in range(0, num_rows, limit)]
        ids, positions, slots, tiles, tables, *rows = self._inputs.upload(
            [
                step.input_ids,
                step.positions,
                slots_of(step, self.info.page_size),
                query_tiles(step.query_offsets, self._query_tile),
                step.block_tables,
                *slices,
            ]
        )
        hidden, _ = self._forward(
            ids, positions, slots, tiles, tables, self._pages, self._parameters
        )
        shape = (num_rows, self.info.vocab_size)
        logits = self._step_logits = aligned_empty(shape, np.dtype(np.float32))
        for i, part in enumerate(rows):
            self._memory.download(
                self._logits(hidden, part, self._parameters), logits[i * limit : (i + 1) * limit]
            )
        return logits

    def sample(self, draws: SampleInput) -> SampleOutput:
        """See `ModelRunner.sample`."""
        return sample_rows(self._sampling, self._step_logits, draws)

    def logprobs(
        self, rows: np.ndarray, token_ids: np.ndarray, *, num_ids: int, num_top: int
    ) -> TokenParts:
        """See `ModelRunner.logprobs`."""
        return self._sampling.token_logprobs(self._step_logits, rows, token_ids, num_ids, num_top)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """See `ModelRunner.copy_pages`."""
        for source, target in zip(sources, targets, strict=True):
            for layer in range(self._page_shape[0]):
                self._memory.copy(self._page(layer, source), self._page(layer, target))

    def close(self) -> None:
        """Give weights and pages back."""
        del self._parameters, self._pages, self._inputs, self._step_logits

    def _page(self, layer: int, page: int) -> Tensor:
        _, num_pages, *shape = self._page_shape
        num_bytes = self._bytes(shape)
        offset = (layer * num_pages + page) * num_bytes
        return self._memory.view(self._pages, shape, self._kv_dtype, offset)

    def _clear_pages(self) -> None:
        """Attention multiplies what it must not see by zero: it has to be a number."""
        layers, *shape = self._page_shape
        num_bytes = self._bytes(shape)
        zeros = as_tensor(huge_array(num_bytes))
        for layer in range(layers):
            view = self._memory.view(self._pages, (num_bytes,), "uint8", layer * num_bytes)
            self._memory.copy(zeros, view)

    def _bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * numpy_dtype(self._kv_dtype).itemsize


class _Inputs:
    """The integers of a step, on the device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._shapes: list[tuple[int, ...]] = []
        self._arrays: list[np.ndarray] = []
        self._tensors: list[Tensor] = []
        self._host: Tensor = None
        self._device: Tensor = None

    def upload(self, values: Sequence[np.ndarray]) -> list[Tensor]:
        """Each array as an int32 tensor, until the next call; all of them are one copy. The tensors
        stay while the shapes do, as in steps that only decode."""
        shapes = [array.shape for array in values]
        if shapes != self._shapes:
            self._make(shapes)
        for array, value in zip(self._arrays, values, strict=True):
            array[...] = value
        self._memory.copy(self._host, self._device)
        return self._tensors

    def _make(self, shapes: list[tuple[int, ...]]) -> None:
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(end)
            end += -(-4 * math.prod(shape) // _INPUT_ALIGNMENT) * _INPUT_ALIGNMENT
        host = aligned_empty((end,), np.dtype(np.uint8))
        self._shapes = shapes
        self._host, self._device = as_tensor(host), self._memory.empty((end,), "uint8")
        self._arrays = [
            host[offset : offset + 4 * math.prod(shape)].view(np.int32).reshape(shape)
            for shape, offset in zip(shapes, offsets, strict=True)
        ]
        self._tensors = [
            self._memory.argument(self._device, shape, "int32", offset)
            for shape, offset in zip(shapes, offsets, strict=True)
        ]


def load_device_parameters(
    library: Library,
    weights: TensorCacheReader,
    memory: DeviceMemory,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Every parameter of `library` on the device, as the artifact stores it.

    `progress(done, total)` is called with bytes. Raises ArtifactError for a tensor that is missing
    or corrupted, CapacityError if they do not fit on the device.
    """
    parameters, _ = read_parameters(library.metadata)
    if packed := [parameter.name for parameter in parameters if parameter.pack is not None]:
        raise ArtifactError(
            f"the library packs {packed[0]}, which devices do not; compile it again"
        )
    check_sources(parameters, weights)
    weights.verify()
    total = sum(parameter.num_bytes for parameter in parameters)
    tensors, done = [], 0
    for parameter in parameters:
        array = np.ascontiguousarray(weights.read(parameter.sources[0]))
        tensors.append(memory.upload(array, parameter.dtype))
        done += parameter.num_bytes
        if progress is not None:
            progress(done, total)
    return tensors
