"""A call of a linear kernel, apart from how it is scheduled: what tuning records are kept for."""

from dataclasses import dataclass

from tvm import tirx

from . import linear, linear_inputs
from .isa import CpuIsa
from .linear_schedule import LinearSchedule
from .packing import PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOperator:
    """The arguments of `linear.linears`, or with an `activation` those of `linear.gated_mlp`."""

    weights: tuple[PackedWeight, ...]
    biases: tuple[bool, ...]
    terms: int
    residual: bool = False
    activation: linear.Activation | None = None

    @property
    def name(self) -> str:
        """Readable, and another one for each operator:
        `gated_mlp_silu-1536x576.q4_group32_zero8_float16-…-int8x2`."""
        parts = [f"gated_mlp_{self.activation}" if self.activation else "linears"]
        for weight, has_bias in zip(self.weights, self.biases, strict=True):
            bias = "+bias" if has_bias else ""
            parts.append(f"{weight.n}x{weight.k}.{weight.layout_key}{bias}")
        if self.residual:
            parts.append("residual")
        if linear_inputs.are_bfloat16(self.weights) and self.terms:
            parts.append(f"bfloat16x{self.terms}")
        else:
            parts.append(f"int8x{self.terms}" if self.terms else "float32")
        return "-".join(parts)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)

    def default_schedule(self, isa: CpuIsa) -> LinearSchedule:
        return linear.schedule_for(self.weights, isa, self.terms)

    def kernel(self, isa: CpuIsa, schedule: LinearSchedule | None = None) -> tirx.PrimFunc:
        """The operator's function; without a schedule it has the default one."""
        if self.activation is None:
            return linear.linears(
                self.weights, self.biases, isa=isa, terms=self.terms, residual=self.residual,
                schedule=schedule,
            )  # fmt: skip
        gate, up = self.weights
        return linear.gated_mlp(
            gate, up, self.activation, self.biases, isa=isa, terms=self.terms, schedule=schedule
        )
