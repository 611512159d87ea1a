"""In which form the linear kernels take their inputs: floats, or terms of int8 or bfloat16."""

from collections.abc import Sequence
from typing import Any, Literal

from tvm import tirx

from ...artifact.tensor_format import TensorFormat
from . import dot_int8
from .activation import GROUP, Starts, activation_buffers, quantize_activations
from .activation_bf16 import bf16_activation_buffer, bf16_activations
from .byte_dots import BYTE_DOTS
from .isa import CpuIsa
from .packing import PackedWeight, can_have_planes

Activations = Literal["int8", "mixed", "int16", "float32"]
"""How the inputs of layers are rounded, where weights and instruction set allow for it."""
INT8_TERMS: dict[Activations, int] = {"int8": 1, "mixed": 2, "int16": 2}
"""Terms of int8; other modes take floats."""
THRESHOLDS: dict[Activations, dict[str, float]] = {
    "mixed": {"attention": 2.0, "mlp": 4.0, "head": 2.0},
    "int16": {"attention": 0.0, "mlp": 0.0, "head": 0.0},
}
"""By the role of a layer (`relax_models/operators.py`), from which size on groups keep their low
term (see `activation`). Errors in front of query and key, and of the head, show most."""
_OF_FEWER_STEPS = 0.75
"""Of a threshold, where the high term has 120 steps and not 127: so many more groups keep their low
term that the divergence is the same (docs/quantization.md)."""
BFLOAT16_TERMS: dict[Activations, int] = {"int8": 1, "mixed": 1, "int16": 2}
"""Terms of bfloat16, for weights of bfloat16. One costs no more than chance
(docs/quantization.md)."""


def num_terms(weights: Sequence[PackedWeight], isa: CpuIsa, activations: Activations) -> int:
    """Terms that a call over these weights takes its activations in, of int8 or of bfloat16; 0 for
    float32."""
    if are_bfloat16(weights):
        return BFLOAT16_TERMS.get(activations, 0) if isa.has_bf16_dot else 0
    if isa.byte_dot is None or not all(map(dot_int8.supports, weights)):
        return 0
    return INT8_TERMS.get(activations, 0)


def has_planes(fmt: TensorFormat, isa: CpuIsa, activations: Activations) -> bool:
    """Whether a head (or an embedding, which may be one) of a format is stored in two planes, for
    `leading_logits`. Who wants two terms of all inputs wants no less of the head."""
    return can_have_planes(fmt) and isa.byte_dot is not None and activations in ("int8", "mixed")


def activation_starts(weights: Sequence[PackedWeight], isa: CpuIsa) -> Starts | None:
    """What the sums of these weights begin with; None where they differ in it."""
    unit = BYTE_DOTS[isa.byte_dot or ""]
    zeros = {dot_int8.zero_of_sums(weight, unit) for weight in weights}
    if len(zeros) > 1 or any(weight.group != GROUP for weight in weights):
        return None
    if all(weight.planes for weight in weights):
        return Starts(dot_int8.upper_zero(weights[0]), isa.num_word_pairs)
    can_pair = all(weight.is_nibbles for weight in weights)
    return Starts(zeros.pop(), isa.num_word_pairs if can_pair else 0)


def activation_terms(
    weights: Sequence[PackedWeight], terms: int, activations: Activations, role: str, isa: CpuIsa
) -> tirx.PrimFunc:
    """x [m, K] float32 → the buffers of `activation_specs`: x in the terms (at least one) that a
    call over these weights takes, in a layer of that role."""
    k = weights[0].k
    if are_bfloat16(weights):
        return bf16_activations(k, terms)
    has_halves = any(weight.group < GROUP for weight in weights)
    threshold = THRESHOLDS[activations][role] if terms == 2 else 0.0
    starts = activation_starts(weights, isa)
    if starts is not None and starts.num_pairs:
        threshold *= _OF_FEWER_STEPS
    return quantize_activations(k, terms, threshold, has_halves, starts)


def activation_specs(
    weights: Sequence[PackedWeight], m: Any, terms: int
) -> list[tuple[tuple[Any, ...], str]]:
    """Shapes and dtypes of what a call over these weights takes for x, for m tokens (a number or
    symbolic)."""
    k = weights[0].k
    if not terms:
        return [((m, k), "float32")]
    if are_bfloat16(weights):
        return [bf16_activation_buffer(k, m, terms)]
    return activation_buffers(k, m, terms)


def are_bfloat16(weights: Sequence[PackedWeight]) -> bool:
    """Whether terms of a call over these weights are of bfloat16, not of int8."""
    return all(weight.is_bfloat16 for weight in weights)
