"""Random weights and batches of a linear layer, on a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....artifact.dtypes import numpy_dtype
from ..linear_operator import LinearOperator
from ..weight import GpuWeight

Tensor = Callable[[np.ndarray], Any]
"""Copies an array to the device."""
_SCALE = 0.02
"""Standard deviation of floats of a weight: of the size that models have."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a layer takes for some rows, apart from its weights."""

    before: tuple[Any, ...]
    """x, and what `half_rows` makes of it where kernels take that."""
    after: tuple[Any, ...]
    """The residual, if there is one."""
    y: Any

    def arguments(self, weights: Sequence[Any], more: Sequence[Any]) -> tuple[Any, ...]:
        """Of a kernel; `more` are its outputs beside y."""
        return (*self.before, *weights, *self.after, self.y, *more)


def random_weights(
    operator: LinearOperator, tensor: Tensor, count: int, rng: np.random.Generator
) -> list[list[Any]]:
    """`count` copies of the layer's weights and biases, as kernels take them."""
    arrays: list[np.ndarray] = []
    for weight, has_bias in zip(operator.weights, operator.biases, strict=True):
        arrays += _parts(weight, rng)
        if has_bias:
            arrays.append(rng.standard_normal(weight.n, dtype=np.float32))
    return [[tensor(array) for array in arrays] for _ in range(count)]


def _parts(weight: GpuWeight, rng: np.random.Generator) -> list[np.ndarray]:
    made = []
    for shape, dtype in weight.format.parts(weight.n, weight.k).values():
        kind = numpy_dtype(dtype)
        if np.issubdtype(kind, np.integer):
            made.append(rng.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True))
        else:
            floats = rng.standard_normal(shape, dtype=np.float32) * np.float32(_SCALE)
            made.append(floats.astype(kind))
    return made


def random_batch(
    operator: LinearOperator,
    num_rows: int,
    tensor: Tensor,
    halves_of: Callable[[Any], tuple[Any, ...]],
    rng: np.random.Generator,
) -> Batch:
    """A batch of this many rows; `halves_of` gives what kernels take beside x."""
    x = tensor(rng.standard_normal((num_rows, operator.k), dtype=np.float32))
    shape = (num_rows, operator.n)
    residual = rng.standard_normal(shape, dtype=np.float32)
    after = (tensor(residual),) if operator.residual else ()
    y = tensor(np.full(shape, np.nan, np.float32))
    return Batch((x, *halves_of(x)), after, y)
