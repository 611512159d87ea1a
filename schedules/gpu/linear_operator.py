"""What a linear layer computes, and how it ends: the part that `gemv` and `gemm` share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tvm.script import tirx as T

from .kernel import bind, store
from .weight import GpuWeight, WeightReader

Activation = Literal["silu", "gelu_tanh"]
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class LinearOperator:
    """A weight that x goes through, and what becomes of the result: a `residual` is added or, with
    an `activation`, multiplied after the activation.

    Or with an `activation` two weights of the same shape and format, gate and up.
    """

    weights: tuple[GpuWeight, ...]
    biases: tuple[bool, ...]
    residual: bool = False
    activation: Activation | None = None

    def __post_init__(self) -> None:
        if any(weight.format != self.weights[0].format for weight in self.weights):
            raise ValueError("a kernel reads its weights in step: they must have the same format")

    @property
    def n(self) -> int:
        return self.weights[0].n

    @property
    def k(self) -> int:
        return self.weights[0].k

    @property
    def name(self) -> str:
        kind = self.activation or "linear"
        tail = ("_add" if self.activation is None else "_gate") if self.residual else ""
        bias = "_bias" if any(self.biases) else ""
        return "_".join([kind, *dict.fromkeys(w.key for w in self.weights)]) + bias + tail


@dataclass(slots=True)
class LinearArguments:
    """The operator's tensors inside its PrimFunc."""

    operator: LinearOperator
    x: Any
    readers: list[WeightReader]
    biases: list[Any]
    residual: Any
    y: Any
    rows: Any
    """Rows of x, an int32."""
    x_half: Any = None
    """x as halves and the scales of its rows (`half_rows`), where matrix instructions take it."""
    scale: Any = None
    workspace: Any = None
    """Where blocks leave sums, if K is split among them."""
    first_column: int = 0
    """Of y, that the first row of the weights is for, if they are part of larger ones."""

    def finish(self, row: Any, column: Any, sums: Sequence[Any]) -> None:
        """Store y[row, column] from the products with each weight; `column` is a row of those."""
        store(self.y, self.value(row, column, sums), row, self.first_column + column)

    def value(self, row: Any, column: Any, sums: Sequence[Any]) -> Any:
        """What `finish` stores."""
        column = self.first_column + column
        values = [
            value if bias is None else value + bias[column]
            for value, bias in zip(sums, self.biases, strict=True)
        ]
        *others, value = values
        if self.residual is not None:
            others.append(self.residual[row, column])
        if not others:
            return value
        (other,) = others
        if self.operator.activation is not None:
            return activate(bind(other), self.operator.activation) * value
        return other + value


def activate(value: Any, activation: Activation) -> Any:
    """SiLU, or GELU in its tanh form: v / (1 + exp(-t)), as (1 + tanh(t / 2)) / 2 is a sigmoid."""
    t = value
    if activation == "gelu_tanh":
        cubic = T.float32(0.044715) * value * value * value
        t = T.float32(2 * 0.7978845608028654) * (value + cubic)
    # Bounded, so that no device needs infinities; beyond, the quotient is 0 in float32.
    power = T.min(t * T.float32(-_LOG2_E), T.float32(126))
    return value / (T.float32(1) + T.exp2(power))
