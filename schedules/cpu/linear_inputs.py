"""In which form the linear kernels take their inputs: floats, or terms of int8 or bfloat16."""

from collections.abc import Sequence
from typing import Any, Literal

from tvm import tirx

from . import dot_int8
from .activation import activation_buffers, quantize_activations
from .activation_bf16 import bf16_activation_buffer, bf16_activations
from .isa import CpuIsa
from .packing import PackedWeight

Activations = Literal["int8", "mixed", "int16", "float32"]
"""How the inputs of layers are rounded, where weights and instruction set allow for it."""
TERMS: dict[Activations, dict[str, int]] = {
    "int8": {"attention": 1, "mlp": 1, "head": 1},
    "mixed": {"attention": 2, "mlp": 1, "head": 2},
    "int16": {"attention": 2, "mlp": 2, "head": 2},
}
"""Terms of int8 by the role of a layer (`relax_models/operators.py`); one that is not here takes
floats."""
BFLOAT16_TERMS: dict[Activations, int] = {"int8": 1, "mixed": 1, "int16": 2}
"""Terms of bfloat16, for weights of bfloat16. One costs no more than chance (docs/quantization.md),
so roles make no difference."""


def num_terms(
    weights: Sequence[PackedWeight], isa: CpuIsa, activations: Activations, role: str
) -> int:
    """Terms that a call over these weights takes its activations in, of int8 or of bfloat16; 0 for
    float32."""
    if are_bfloat16(weights):
        return BFLOAT16_TERMS.get(activations, 0) if isa.has_bf16_dot else 0
    if activations not in TERMS or isa.byte_dot is None:
        return 0
    if not all(map(dot_int8.supports, weights)):
        return 0
    return TERMS[activations][role]


def activation_terms(weights: Sequence[PackedWeight], terms: int) -> tirx.PrimFunc:
    """x [m, K] float32 → the buffers of `activation_specs`: x in the terms (at least one) that a
    call over these weights takes."""
    k = weights[0].k
    return bf16_activations(k, terms) if are_bfloat16(weights) else quantize_activations(k, terms)


def activation_specs(
    weights: Sequence[PackedWeight], m: Any, terms: int
) -> list[tuple[tuple[Any, int], str]]:
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
