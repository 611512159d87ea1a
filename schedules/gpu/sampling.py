"""The functions that turn logits into tokens, as every library of a GPU target has them."""

from tvm import tirx

from .limits import GpuLimits
from .sampling_draw import sample_from_logits
from .sampling_logits import (
    apply_bitmask_inplace,
    apply_logit_bias_inplace,
    apply_penalty_inplace,
    put_logits,
    take_logits,
)
from .sampling_logprobs import token_logprobs

_KERNELS = {
    "apply_logit_bias_inplace": apply_logit_bias_inplace,
    "apply_penalty_inplace": apply_penalty_inplace,
    "apply_bitmask_inplace": apply_bitmask_inplace,
    "take_logits": take_logits,
    "put_logits": put_logits,
    "sample_from_logits": sample_from_logits,
    "token_logprobs": token_logprobs,
}


def sampling_functions(vocab_size: int, limits: GpuLimits) -> dict[str, tirx.PrimFunc]:
    """Name in the library → function. They are called with tensors on the device, outputs last."""
    return {
        name: kernel(vocab_size, limits).with_attr("global_symbol", name)
        for name, kernel in _KERNELS.items()
    }
