"""The sampling functions of a CPU library, over arrays: `row_sampling.SamplingFunctions`."""

import numpy as np

from ..artifact.tensor_cache import aligned_empty
from .model_runner import TokenParts
from .runtime import Library, Tensor, as_tensor, num_threads


class LibrarySampling:
    """Use it from one thread, that of the runner. `logits` are arrays that TVM may share: see
    `runtime.as_tensor`."""

    def __init__(self, library: Library) -> None:
        self._apply_logit_bias = library.function("apply_logit_bias_inplace")
        self._apply_penalty = library.function("apply_penalty_inplace")
        self._sample = library.function("sample_from_logits")
        self._logprobs = library.function("token_logprobs")
        self._workspace_shape: list[int] = library.metadata["sampling_workspace"]
        self._workspace: Tensor | None = None
        self._buffers: dict[int, _DrawBuffers] = {}
        """By number of draws: making them anew takes longer than the draw itself."""

    def apply_logit_bias_inplace(
        self, logits: np.ndarray, rows: np.ndarray, token_ids: np.ndarray, logit_bias: np.ndarray
    ) -> None:
        lists = [_tensor(array) for array in (rows, token_ids, logit_bias)]
        self._apply_logit_bias(as_tensor(logits), *lists)

    def apply_penalty_inplace(
        self,
        logits: np.ndarray,
        seq_ids: np.ndarray,
        pos2seq_id: np.ndarray,
        token_ids: np.ndarray,
        token_counts: np.ndarray,
        penalties: np.ndarray,
    ) -> None:
        arrays = (seq_ids, pos2seq_id, token_ids, token_counts, penalties)
        self._apply_penalty(as_tensor(logits), *[_tensor(array) for array in arrays])

    def sample_from_logits(
        self, logits: np.ndarray, rows: np.ndarray, settings: np.ndarray, num_ids: int
    ) -> np.ndarray:
        buffers = self._buffers.get(len(rows))
        if buffers is None:
            buffers = self._buffers[len(rows)] = _DrawBuffers(len(rows), settings.shape[1])
        buffers.rows[...] = rows
        buffers.settings[...] = settings
        self._sample(as_tensor(logits), *buffers.inputs, num_ids, self._scratch(), buffers.output)
        return buffers.token_ids.copy()

    def token_logprobs(
        self,
        logits: np.ndarray,
        rows: np.ndarray,
        token_ids: np.ndarray,
        num_ids: int,
        num_top: int,
    ) -> TokenParts:
        parts = aligned_empty((len(rows), 3), np.dtype(np.float64))
        # TVM refuses the strides that NumPy gives an array of no width.
        width = max(num_top, 1)
        top_ids = aligned_empty((len(rows), width), np.dtype(np.int32))
        top_logits = aligned_empty((len(rows), width), np.dtype(np.float32))
        self._logprobs(
            as_tensor(logits), _tensor(rows), _tensor(token_ids), num_ids, self._scratch(),
            as_tensor(parts), as_tensor(top_ids), as_tensor(top_logits),
        )  # fmt: skip
        return TokenParts(parts, top_ids[:, :num_top], top_logits[:, :num_top])

    def _scratch(self) -> Tensor:
        # Made at the first draw: the number of threads is that of the thread that draws.
        if self._workspace is None:
            shape = (num_threads(), *self._workspace_shape)
            self._workspace = as_tensor(aligned_empty(shape, np.dtype(np.float32)))
        return self._workspace


class _DrawBuffers:
    """Arrays of `num_draws` draws, and the tensors that share them."""

    def __init__(self, num_draws: int, num_settings: int) -> None:
        self.rows = aligned_empty((num_draws,), np.dtype(np.int32))
        self.settings = aligned_empty((num_draws, num_settings), np.dtype(np.float64))
        self.token_ids = aligned_empty((num_draws,), np.dtype(np.int32))
        self.inputs: tuple[Tensor, ...] = (as_tensor(self.rows), as_tensor(self.settings))
        self.output: Tensor = as_tensor(self.token_ids)


def _tensor(array: np.ndarray) -> Tensor:
    """A copy that TVM may read."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return as_tensor(copy)
