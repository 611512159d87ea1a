"""A compiled library as the engine's model: inputs, KV pages, logits and tokens of each step."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..artifact.dtypes import numpy_dtype
from ..artifact.hashing import hash_json
from ..artifact.tensor_cache import aligned_empty
from .library_sampling import LibrarySampling
from .model_runner import ModelInfo, SampleInput, SampleOutput, StepInput, TokenParts
from .row_sampling import sample_rows
from .runtime import Library, Tensor, as_array, as_tensor, as_tuple, huge_array
from .thread_governor import ThreadGovernor
from .threads import choose_threads, set_threads


class PagedRunner:
    """`ModelRunner` over one library. Use it from one thread: TVM's thread pool is per thread."""

    def __init__(
        self,
        library: Library,
        parameters: list[Tensor],
        info: ModelInfo,
        num_pages: int,
        num_threads: int | None = None,
    ) -> None:
        """num_threads: at most so many; None takes what is fastest (`threads.choose_threads`)."""
        metadata = library.metadata
        self.info, self.num_pages = info, num_pages
        self._wanted_threads = num_threads
        self._governor: ThreadGovernor | None = None
        self._library_key = hash_json(metadata)[:16]
        self._forward = library.function("forward")
        self._logits = library.function("logits")
        self._leading_logits: Callable[..., Any] | None = None
        if "leading_logits" in metadata:
            self._leading_logits = library.function("leading_logits")
        self._sampling = LibrarySampling(library)
        self._step_logits = np.empty((0, info.vocab_size), np.float32)
        self._parameters = as_tuple(parameters)
        self._inputs, self._rows, self._leading = (_Int32Tensors() for _ in range(3))
        self._query_tile: int = metadata["query_tile"]
        layers, _, *rest = metadata["page_shape"]
        memory = huge_array(info.page_bytes * num_pages)
        dtype = numpy_dtype(metadata["kv_dtype"])
        self._page_array = memory.view(dtype).reshape(layers, num_pages, *rest)
        self._pages: Tensor = as_tensor(self._page_array)

    def execute(self, step: StepInput) -> np.ndarray:
        """See `ModelRunner.execute`. Rows beyond the library's limit are computed in slices."""
        if self._governor is None:
            self._governor = ThreadGovernor(self._settle_threads(), set_threads)
        self._governor.run(len(step.input_ids), lambda: self._execute(step))
        return self._step_logits

    def _settle_threads(self) -> int:
        """Before the first step: what a trial writes into page 0 is written again by its owner."""
        if self._wanted_threads is not None:
            return set_threads(self._wanted_threads)
        one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
        trial = StepInput(one, zero, np.array([0, 1], np.int32), zero[None], zero)
        return choose_threads(lambda: self._execute(trial), self._library_key)

    def _execute(self, step: StepInput) -> None:
        inputs = self._inputs.filled(
            step.input_ids,
            step.positions,
            slots_of(step, self.info.page_size),
            query_tiles(step.query_offsets, self._query_tile),
            step.block_tables,
        )
        hidden, _ = self._forward(*inputs, self._pages, self._parameters)
        num_rows, limit = len(step.logit_rows), self.info.max_num_sequence
        if num_rows and num_rows <= limit:
            self._step_logits = self._row_logits(hidden, step.logit_rows, step.arg_max_ids)
        else:
            shape = (num_rows, self.info.vocab_size)
            self._step_logits = aligned_empty(shape, np.dtype(np.float32))
            for i in range(0, num_rows, limit):
                rows = step.logit_rows[i : i + limit]
                logits = self._row_logits(hidden, rows, step.arg_max_ids)
                self._step_logits[i : i + limit] = logits

    def sample(self, draws: SampleInput) -> SampleOutput:
        """See `ModelRunner.sample`."""
        return sample_rows(self._sampling, self._step_logits, draws)

    def logprobs(
        self, rows: np.ndarray, token_ids: np.ndarray, *, num_ids: int, num_top: int
    ) -> TokenParts:
        """See `ModelRunner.logprobs`."""
        return self._sampling.token_logprobs(self._step_logits, rows, token_ids, num_ids, num_top)

    def _row_logits(self, hidden: Tensor, rows: np.ndarray, arg_max_ids: int) -> np.ndarray:
        if arg_max_ids and self._leading_logits is not None:
            inputs = self._leading.filled(rows, np.array([arg_max_ids], np.int32))
            return as_array(self._leading_logits(hidden, *inputs, self._parameters))
        return as_array(self._logits(hidden, *self._rows.filled(rows), self._parameters))

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self._page_array[:, targets] = self._page_array[:, sources]

    def close(self) -> None:
        """Give weights and pages back."""
        del self._parameters, self._pages, self._page_array, self._step_logits


def slots_of(step: StepInput, page_size: int) -> np.ndarray:
    """Where each new token's key and value go: page · page_size + offset, [num_tokens]."""
    sequences = np.arange(len(step.block_tables))
    if len(step.positions) > len(sequences):
        sequences = np.repeat(sequences, np.diff(step.query_offsets))
    blocks, offsets = np.divmod(step.positions, page_size)
    slots: np.ndarray = step.block_tables[sequences, blocks] * page_size + offsets
    return slots


def query_tiles(query_offsets: np.ndarray, tile: int) -> np.ndarray:
    """The batch cut into tiles of at most `tile` tokens of one sequence: [num_tiles, 3] of
    (sequence, first token, number of tokens)."""
    num_sequences, num_tokens = len(query_offsets) - 1, query_offsets[-1]
    if num_tokens == num_sequences:
        return _decode_tiles(num_sequences)
    counts = np.diff(query_offsets)
    per_sequence = -(-counts // tile)
    sequences = np.repeat(np.arange(len(counts)), per_sequence)
    ends = np.cumsum(per_sequence)
    within = np.arange(ends[-1]) - np.repeat(ends - per_sequence, per_sequence)
    first = query_offsets[:-1][sequences] + within * tile
    rows = np.minimum(tile, query_offsets[1:][sequences] - first)
    return np.stack([sequences, first, rows], axis=1)


@functools.cache
def _decode_tiles(num_sequences: int) -> np.ndarray:
    """Those of a batch in which every sequence has one token."""
    return np.array([(i, i, 1) for i in range(num_sequences)], np.int32)


class _Int32Tensors:
    """Tensors for the inputs of one function. They stay while the shapes do, as in steps that only
    decode: making them takes longer than filling them."""

    def __init__(self) -> None:
        self._shapes: list[tuple[int, ...]] = []
        self._arrays: list[np.ndarray] = []
        self._tensors: list[Tensor] = []

    def filled(self, *values: np.ndarray) -> list[Tensor]:
        """int32 tensors of these values, until the next call."""
        shapes = [array.shape for array in values]
        if shapes != self._shapes:
            self._shapes = shapes
            self._arrays = [aligned_empty(shape, np.dtype(np.int32)) for shape in shapes]
            self._tensors = [as_tensor(array) for array in self._arrays]
        for array, value in zip(self._arrays, values, strict=True):
            array[...] = value
        return self._tensors
