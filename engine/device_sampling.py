"""Tokens and log probabilities from logits on a device: nothing else comes back from it.

The functions are the library's (`schedules/gpu/sampling.py`), called in the order of
`row_sampling`. Where log probabilities are wanted, logits that a draw changed are put back.
"""

from collections.abc import Callable

import numpy as np

from .device_block import DeviceBlock, Spec
from .devices import DeviceMemory
from .model_runner import SampleInput, SampleOutput, TokenParts
from .runtime import Library, Tensor

MakeLogits = Callable[[Tensor], Tensor]
"""Tokens of the step, [n] int32 → their logits, [n, vocab_size] float32, on the device."""

_WORD = 2.0**32
_SUM_UNIT = 2.0**-40
"""Of the sums of exponentials, see `schedules/gpu/sampling_logprobs.py`."""


class DeviceSampling:
    """Use it from one thread, that of the runner."""

    def __init__(self, library: Library, memory: DeviceMemory) -> None:
        self._apply_logit_bias = library.function("apply_logit_bias_inplace")
        self._apply_penalty = library.function("apply_penalty_inplace")
        self._take = library.function("take_logits")
        self._put = library.function("put_logits")
        self._sample = library.function("sample_from_logits")
        self._logprobs = library.function("token_logprobs")
        self._inputs, self._outputs = DeviceBlock(memory), DeviceBlock(memory)
        self._saved = DeviceBlock(memory)

    def sample(
        self, make_logits: MakeLogits, row_tokens: np.ndarray, draws: SampleInput
    ) -> SampleOutput:
        """See `ModelRunner.sample`. Rows of `draws` are counted among `row_tokens`, the tokens of
        the step whose logits are wanted."""
        picks = draws.logprob_draws
        inputs = _inputs(row_tokens, draws)
        tensors = dict(zip(inputs, self._inputs.upload([*inputs.values()]), strict=True))
        outputs: list[Spec] = [((len(draws.rows),), "int32")]
        if picks.size:
            outputs += _parts_specs(len(picks), draws.num_top)
        token_ids, *parts = self._outputs.make(outputs)

        logits = make_logits(tensors["tokens"])
        changed = _changed_lists(inputs) if picks.size else []
        saved = self._saved.make([(inputs[ids].shape, "float32") for _, ids in changed])
        for (rows, ids), values in zip(changed, saved, strict=True):
            self._take(logits, tensors[rows], tensors[ids], values)
        if draws.bias is not None:
            self._apply_logit_bias(logits, *(tensors[name] for name in _BIAS))
        if draws.penalties is not None:
            self._apply_penalty(logits, *(tensors[name] for name in _PENALTIES))
        self._sample(logits, tensors["rows"], tensors["settings"], draws.num_ids, token_ids)
        if picks.size:
            for (rows, ids), values in zip(changed, saved, strict=True):
                self._put(logits, tensors[rows], tensors[ids], values)
            pick_rows, pick_draws = tensors["pick_rows"], tensors["picks"]
            self._logprobs(logits, pick_rows, pick_draws, token_ids, draws.num_ids, *parts)
        drawn, *values = self._outputs.download()
        return SampleOutput(drawn.copy(), token_parts(values, draws.num_top) if values else None)

    def logprobs(
        self,
        make_logits: MakeLogits,
        row_tokens: np.ndarray,
        token_ids: np.ndarray,
        *,
        num_ids: int,
        num_top: int,
    ) -> TokenParts:
        """Parts of the log probability of token_ids[i] after token row_tokens[i] of the step."""
        each = np.arange(len(token_ids))
        tokens, rows, ids = self._inputs.upload([row_tokens, each, token_ids])
        parts = self._outputs.make(_parts_specs(len(token_ids), num_top))
        self._logprobs(make_logits(tokens), rows, rows, ids, num_ids, *parts)
        return token_parts(self._outputs.download(), num_top)


_BIAS = ("bias_rows", "bias_ids", "bias")
_PENALTIES = ("seq_ids", "pos2seq_id", "penalty_ids", "counts", "penalties")
"""Arguments of the functions, after the logits, among `_inputs`."""


def _inputs(row_tokens: np.ndarray, draws: SampleInput) -> dict[str, np.ndarray]:
    """What the device must know. Rows are counted among those that are drawn from."""
    rows, places = np.unique(draws.rows, return_inverse=True)
    arrays = {
        "tokens": row_tokens[rows], "rows": places, "settings": device_settings(draws.settings),
    }  # fmt: skip
    if draws.logprob_draws.size:
        arrays |= {"picks": draws.logprob_draws, "pick_rows": places[draws.logprob_draws]}
    if (bias := draws.bias) is not None:
        bias_rows = np.searchsorted(rows, bias.rows)
        arrays |= dict(zip(_BIAS, (bias_rows, bias.token_ids, bias.values), strict=True))
    if (penalties := draws.penalties) is not None:
        seq_ids = np.searchsorted(rows, penalties.rows)
        arrays |= {
            "seq_ids": seq_ids, "pos2seq_id": penalties.row_index,
            "penalty_ids": penalties.token_ids, "counts": penalties.counts,
            "penalties": penalties.values, "penalty_rows": seq_ids[penalties.row_index],
        }  # fmt: skip
    return arrays


def _changed_lists(inputs: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """Names of rows and ids of the logits that are changed before a draw."""
    lists = [("bias_rows", "bias_ids"), ("penalty_rows", "penalty_ids")]
    return [(rows, ids) for rows, ids in lists if rows in inputs]


def device_settings(settings: np.ndarray) -> np.ndarray:
    """`SampleInput.settings` as the library's `sample_from_logits` takes them on a device:
    [num_draws, 5] int32, of which some are the bits of float32 and uint32."""
    inverse, offset, top_k, top_p, uniform = settings.T
    words = np.empty(settings.shape, np.uint32)
    words[:, 0] = inverse.astype(np.float32).view(np.uint32)
    words[:, 1] = offset.astype(np.float32).view(np.uint32)
    words[:, 2] = np.minimum(top_k, 2**31 - 1)
    words[:, 3] = np.minimum(np.floor(top_p * _WORD), _WORD - 1)
    words[:, 4] = np.floor(uniform * _WORD)
    return words.view(np.int32)


def _parts_specs(num_tokens: int, num_top: int) -> list[Spec]:
    # TVM refuses the strides of a tensor of no width.
    width = max(num_top, 1)
    return [
        ((num_tokens, 4), "int32"),
        ((num_tokens, width), "int32"),
        ((num_tokens, width), "float32"),
    ]


def token_parts(values: list[np.ndarray], num_top: int) -> TokenParts:
    """What the library's `token_logprobs` left: words [n, 4] int32, ids and logits [n, num_top]."""
    words, top_ids, top_logits = values
    unsigned, floats = words.view(np.uint32).astype(np.float64), words.view(np.float32)
    sums = (unsigned[:, 1] * _WORD + unsigned[:, 2]) * _SUM_UNIT
    parts = np.stack([floats[:, 0], sums, floats[:, 3]], axis=1, dtype=np.float64)
    parts[np.isnan(parts[:, 0])] = np.nan
    return TokenParts(parts, top_ids[:, :num_top].copy(), top_logits[:, :num_top].copy())
