"""A compiled library on a device of its own memory, as the engine's model.

Weights and KV pages live on the device, and so do a step's hidden states and logits. A step copies
its integers there in one piece and starts the model; a draw copies what it depends on and waits for
the tokens, which alone come back.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..artifact.errors import ArtifactError
from ..artifact.tensor_cache import TensorCacheReader, aligned_empty
from .device_block import DeviceBlock
from .device_sampling import DeviceSampling
from .devices import DeviceMemory
from .model_runner import ModelInfo, SampleInput, SampleOutput, StepInput, TokenParts
from .paged_runner import query_tiles, slots_of
from .parameters import Progress, check_sources, read_parameters
from .runtime import Library, Tensor, as_tensor, as_tuple, huge_array
from .verified_weights import verify_once


class DeviceRunner:
    """`ModelRunner` over one library. Use it from one thread."""

    def __init__(
        self,
        library: Library,
        memory: DeviceMemory,
        parameters: list[Tensor],
        info: ModelInfo,
        num_pages: int,
    ) -> None:
        """`parameters` are on the device."""
        metadata = library.metadata
        self.info, self.num_pages = info, num_pages
        self._memory = memory
        self._forward = library.function("forward")
        self._logits = library.function("logits")
        self._sampling = DeviceSampling(library, memory)
        self._hidden: Tensor = None
        self._logit_rows = np.empty(0, np.int32)
        self._parameters = as_tuple(parameters)
        self._query_tile: int = metadata["query_tile"]
        layers, _, *page = metadata["page_shape"]
        self._page_shape, self._kv_dtype = (layers, num_pages, *page), metadata["kv_dtype"]
        self._page_tensors = [
            memory.empty(self._page_shape, self._kv_dtype) for _ in range(info.page_tensors)
        ]
        self._clear_pages()
        several = info.page_tensors > 1
        self._pages: Any = as_tuple(self._page_tensors) if several else self._page_tensors[0]
        self._inputs = DeviceBlock(memory)

    def execute(self, step: StepInput) -> None:
        """See `ModelRunner.execute`. Does not wait for the device."""
        ids, positions, slots, tiles, tables = self._inputs.upload(
            [
                step.input_ids,
                step.positions,
                slots_of(step, self.info.page_size),
                query_tiles(step.query_offsets, self._query_tile),
                step.block_tables,
            ]
        )
        self._hidden, _ = self._forward(
            ids, positions, slots, tiles, tables, self._pages, self._parameters
        )
        self._logit_rows = step.logit_rows

    def logits(self) -> np.ndarray:
        """The logits of the last step, [num_rows, vocab_size] float32, for checks: the engine does
        without."""
        limit, rows = self.info.max_num_sequence, self._logit_rows
        logits = aligned_empty((len(rows), self.info.vocab_size), np.dtype(np.float32))
        inputs = DeviceBlock(self._memory)
        for i in range(0, len(rows), limit):
            (part,) = inputs.upload([rows[i : i + limit]])
            self._memory.download(self._make_logits(part), logits[i : i + limit])
        return logits

    def sample(self, draws: SampleInput) -> SampleOutput:
        """See `ModelRunner.sample`."""
        return self._sampling.sample(self._make_logits, self._logit_rows, draws)

    def logprobs(
        self, rows: np.ndarray, token_ids: np.ndarray, *, num_ids: int, num_top: int
    ) -> TokenParts:
        """See `ModelRunner.logprobs`. Rows beyond the library's limit are computed in slices."""
        limit, tokens = self.info.max_num_sequence, self._logit_rows[rows]
        slices = [
            self._sampling.logprobs(
                self._make_logits, tokens[i : i + limit], token_ids[i : i + limit],
                num_ids=num_ids, num_top=num_top,
            )
            for i in range(0, len(rows), limit)
        ]  # fmt: skip
        return TokenParts(*(
            np.concatenate([getattr(part, name) for part in slices])
            for name in ("parts", "top_ids", "top_logits")
        ))  # fmt: skip

    def _make_logits(self, tokens: Tensor) -> Tensor:
        """Logits on the device, of tokens of the last step: at most `max_num_sequence`."""
        return self._logits(self._hidden, tokens, self._parameters)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """See `ModelRunner.copy_pages`."""
        for source, target in zip(sources, targets, strict=True):
            for tensor in self._page_tensors:
                for layer in range(self._page_shape[0]):
                    self._memory.copy(
                        self._page(tensor, layer, source), self._page(tensor, layer, target)
                    )

    def close(self) -> None:
        """Give weights and pages back."""
        del self._parameters, self._pages, self._page_tensors, self._inputs, self._hidden
        del self._sampling

    def _page(self, tensor: Tensor, layer: int, page: int) -> Tensor:
        _, num_pages, *shape = self._page_shape
        num_bytes = self._bytes(shape)
        offset = (layer * num_pages + page) * num_bytes
        return self._memory.view(tensor, shape, self._kv_dtype, offset)

    def _clear_pages(self) -> None:
        """Attention multiplies what it must not see by zero: it has to be a number."""
        layers, *shape = self._page_shape
        num_bytes = self._bytes(shape)
        zeros = as_tensor(huge_array(num_bytes))
        for tensor in self._page_tensors:
            for layer in range(layers):
                view = self._memory.view(tensor, (num_bytes,), "uint8", layer * num_bytes)
                self._memory.copy(zeros, view)

    def _bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * numpy_dtype(self._kv_dtype).itemsize


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
    verify_once(weights)
    total = sum(parameter.num_bytes for parameter in parameters)
    tensors, done = [], 0
    for parameter in parameters:
        array = np.ascontiguousarray(weights.read(parameter.sources[0]))
        tensors.append(memory.upload(array, parameter.dtype))
        done += parameter.num_bytes
        if progress is not None:
            progress(done, total)
    return tensors
