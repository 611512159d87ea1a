"""What the sampling functions of a compiled library do, defined in NumPy, with a plain sort.

Names and arguments are those of the library (`engine/paged_runner.py` calls them), without its
scratch memory, and outputs are returned. The compiled functions are tested against these; a runner
without a library (`engine/scripted_model.py`) samples with them.

An entry of a list names its row; a list holds no (row, token) twice.
"""

import numpy as np

from .model_runner import TokenParts


def apply_logit_bias_inplace(
    logits: np.ndarray, rows: np.ndarray, token_ids: np.ndarray, logit_bias: np.ndarray
) -> None:
    """logits[rows[i], token_ids[i]] += logit_bias[i]; a bias of -inf forbids the token.

    logits: [num_rows, vocab_size] float32; rows, token_ids: [n] int32; logit_bias: [n] float32.
    """
    logits[rows, token_ids] += logit_bias


def apply_penalty_inplace(
    logits: np.ndarray,
    seq_ids: np.ndarray,
    pos2seq_id: np.ndarray,
    token_ids: np.ndarray,
    token_counts: np.ndarray,
    penalties: np.ndarray,
) -> None:
    """Repetition, frequency and presence penalties of the tokens seen so far, in this order.

    Entry i is a token of sequence s = pos2seq_id[i] that stands token_counts[i] times in its
    output, 0 if only in its prompt; sequence s has the logits of row seq_ids[s].

    logits: [num_rows, vocab_size] float32; lists: int32; penalties: [num_sequences, 3] float32 of
    (presence, frequency, repetition).
    """
    rows = seq_ids[pos2seq_id]
    presence, frequency, repetition = penalties[pos2seq_id].T
    values = logits[rows, token_ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * token_counts.astype(np.float32)
    logits[rows, token_ids] = values - np.where(token_counts > 0, presence, np.float32(0))


def apply_bitmask_inplace(logits: np.ndarray, seq_ids: np.ndarray, bitmask: np.ndarray) -> None:
    """Forbid (-inf) the tokens of row seq_ids[s] whose bit in bitmask[s] is 0.

    logits: [num_rows, vocab_size] float32; seq_ids: [n] int32; bitmask: [n, vocab_size / 32,
    rounded up] int32, token t is bit t % 32, from the lowest, of word t // 32.
    """
    token = np.arange(logits.shape[1])
    is_allowed = (bitmask[:, token // 32] >> (token % 32).astype(np.int32)) & 1
    logits[seq_ids] = np.where(is_allowed != 0, logits[seq_ids], np.float32(-np.inf))


def sample_from_logits(
    logits: np.ndarray, rows: np.ndarray, settings: np.ndarray, num_ids: int
) -> np.ndarray:
    """One token id for each draw, [n] int32; -1 where the logits are not numbers.

    logits: [num_rows, vocab_size] float32, of which the first num_ids ids count; rows: [n] int32;
    settings: [n, 5] float64, see `model_runner.SampleInput`.
    """
    drawn = [
        _draw(logits[row, :num_ids], *values)
        for row, values in zip(rows, settings.tolist(), strict=True)
    ]
    return np.array(drawn, dtype=np.int32)


def kept_ids(
    row: np.ndarray, inverse_temperature: float, min_p_offset: float, top_k: float, top_p: float
) -> np.ndarray:
    """The ids that a draw may take, ascending. Equal logits: the lowest ids are kept.

    min_p first, then top_k of what it left, then top_p of the probability of what that left.
    """
    lowest = row.max() + np.float32(min_p_offset)
    order = np.argsort(-row, kind="stable")
    order = order[row[order] >= lowest]
    if top_k > 0:
        order = order[: int(top_k)]
    if top_p < 1:
        mass = np.cumsum(_weights(row[order], row.max(), inverse_temperature))
        order = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    kept: np.ndarray = np.sort(order)
    return kept


def token_logprobs(
    logits: np.ndarray, rows: np.ndarray, token_ids: np.ndarray, num_ids: int, num_top: int
) -> TokenParts:
    """The parts of log probabilities, see `model_runner.TokenParts`.

    logits: [num_rows, vocab_size] float32, of which the first num_ids ids count; rows and
    token_ids: [n] int32.
    """
    parts = np.full((len(rows), 3), np.nan)
    top_ids = np.full((len(rows), num_top), -1, np.int32)
    top_logits = np.full((len(rows), num_top), -np.inf, np.float32)
    for i, (number, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        row = logits[number, :num_ids]
        if not _is_number(row):
            continue
        highest = row.max()
        total = np.exp((row - highest).astype(np.float64)).sum()
        parts[i] = (highest, total, row[token_id])
        best = np.argsort(-row, kind="stable")[:num_top]
        top_ids[i, : len(best)] = best
        top_logits[i, : len(best)] = row[best]
    return TokenParts(parts, top_ids, top_logits)


def _draw(
    row: np.ndarray,
    inverse_temperature: float,
    min_p_offset: float,
    top_k: float,
    top_p: float,
    uniform: float,
) -> int:
    if not _is_number(row):
        return -1
    if inverse_temperature == 0:
        return int(row.argmax())
    ids = kept_ids(row, inverse_temperature, min_p_offset, top_k, top_p)
    cumulative = np.cumsum(_weights(row[ids], row.max(), inverse_temperature))
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    # Rounding can put the target at the very end: the last id with weight is meant then.
    return int(ids[min(place, np.searchsorted(cumulative, cumulative[-1]))])


def _weights(logits: np.ndarray, highest: np.float32, inverse_temperature: float) -> np.ndarray:
    """Probabilities relative to the highest, whose weight is 1, so that none overflows."""
    differences = logits.astype(np.float64) - float(highest)
    weights: np.ndarray = np.exp2(differences * inverse_temperature)
    return weights


def _is_number(row: np.ndarray) -> bool:
    return not np.isnan(row).any() and bool(np.isfinite(row.max()))
