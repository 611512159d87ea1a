"""The order in which logits on the CPU are changed, drawn from and reported, whoever does it."""

from typing import Protocol

import numpy as np

from ..artifact.tensor_cache import aligned_empty
from .model_runner import SampleInput, SampleOutput, TokenParts


class SamplingFunctions(Protocol):
    """The functions of `numpy_sampling`, where they are described."""

    def apply_logit_bias_inplace(
        self, logits: np.ndarray, rows: np.ndarray, token_ids: np.ndarray, logit_bias: np.ndarray
    ) -> None: ...

    def apply_penalty_inplace(
        self,
        logits: np.ndarray,
        seq_ids: np.ndarray,
        pos2seq_id: np.ndarray,
        token_ids: np.ndarray,
        token_counts: np.ndarray,
        penalties: np.ndarray,
    ) -> None: ...

    def sample_from_logits(
        self, logits: np.ndarray, rows: np.ndarray, settings: np.ndarray, num_ids: int
    ) -> np.ndarray: ...

    def token_logprobs(
        self,
        logits: np.ndarray,
        rows: np.ndarray,
        token_ids: np.ndarray,
        num_ids: int,
        num_top: int,
    ) -> TokenParts: ...


def sample_rows(
    functions: SamplingFunctions, logits: np.ndarray, draws: SampleInput
) -> SampleOutput:
    """See `ModelRunner.sample`. logits: [num_rows, vocab_size] float32, modified."""
    bias, penalties = draws.bias, draws.penalties
    raw, raw_rows = logits, None
    if draws.logprob_draws.size:
        raw_rows = draws.rows[draws.logprob_draws]
        if bias is not None or penalties is not None:
            raw = aligned_empty((len(raw_rows), logits.shape[1]), logits.dtype)
            np.take(logits, raw_rows, axis=0, out=raw)
            raw_rows = np.arange(len(raw_rows), dtype=np.int32)
    if bias is not None:
        functions.apply_logit_bias_inplace(logits, bias.rows, bias.token_ids, bias.values)
    if penalties is not None:
        functions.apply_penalty_inplace(
            logits, penalties.rows, penalties.row_index, penalties.token_ids, penalties.counts,
            penalties.values,
        )  # fmt: skip
    token_ids = functions.sample_from_logits(logits, draws.rows, draws.settings, draws.num_ids)
    if raw_rows is None:
        return SampleOutput(token_ids, None)
    # Where nothing was drawn, any token will do.
    drawn = np.maximum(token_ids[draws.logprob_draws], 0)
    logprobs = functions.token_logprobs(raw, raw_rows, drawn, draws.num_ids, draws.num_top)
    return SampleOutput(token_ids, logprobs)
