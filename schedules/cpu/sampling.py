"""The functions that turn logits into tokens, as every library of a CPU target has them."""

from tvm import tirx

from .sampling_draw import sample_from_logits, workspace_shape
from .sampling_logits import apply_bitmask_inplace, apply_logit_bias_inplace, apply_penalty_inplace
from .sampling_logprobs import token_logprobs

__all__ = ["sampling_functions", "workspace_shape"]

_KERNELS = {
    "apply_logit_bias_inplace": apply_logit_bias_inplace,
    "apply_penalty_inplace": apply_penalty_inplace,
    "apply_bitmask_inplace": apply_bitmask_inplace,
    "sample_from_logits": sample_from_logits,
    "token_logprobs": token_logprobs,
}


def sampling_functions(vocab_size: int) -> dict[str, tirx.PrimFunc]:
    """Name in the library → function. They are called with tensors, outputs last."""
    return {
        name: kernel(vocab_size).with_attr("global_symbol", name)
        for name, kernel in _KERNELS.items()
    }
