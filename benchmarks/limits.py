"""What the machine allows at most, from its measured bandwidth and peak: a roofline.

A decoding step reads all weights once for all its streams, and the keys and values of each; and it
multiplies every weight with every stream. It takes at least the longer of the two times. A prompt
reads the weights once and multiplies them with each of its tokens, the head with the last alone.
"""

from dataclasses import dataclass

from .works import Work


@dataclass(frozen=True, slots=True)
class Machine:
    """What small kernels measured beside the engines, with as many threads."""

    bytes_per_s: float
    operations_per_s: float
    """Multiplications and additions of int8."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    weight_bytes: int
    """That a decoding step reads at most."""
    kv_bytes_per_token: float
    num_block_parameters: int
    num_head_parameters: int
    unread_weight_bytes: int = 0
    """Of those, what a greedy step of ours leaves out: it does not need all bits of the head."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one pass through the model, which gives `tokens` tokens."""

    num_bytes: float
    operations: float
    tokens: int

    def seconds(self, machine: Machine) -> float:
        """The least time it can take."""
        return max(self.num_bytes / machine.bytes_per_s, self.operations / machine.operations_per_s)

    def bound(self, machine: Machine) -> str:
        """What limits it, with the measured number."""
        if self.num_bytes / machine.bytes_per_s >= self.operations / machine.operations_per_s:
            return f"{machine.bytes_per_s / 1e9:.1f} GB/s"
        return f"{machine.operations_per_s / 1e9:.0f} GOP/s"


def step_cost(work: Work, model: ModelCost) -> StepCost | None:
    """None for a work that is no such pass, or does not have the machine for itself."""
    if work.is_beside_others:
        return None
    per_token = 2 * model.num_block_parameters
    read = model.weight_bytes - model.unread_weight_bytes
    if work.kind in ("decode", "batch"):
        context = work.prompt_tokens + work.timed_tokens / 2
        return StepCost(
            read + work.streams * context * model.kv_bytes_per_token,
            work.streams * (per_token + 2 * model.num_head_parameters),
            work.streams,
        )
    if work.kind == "prefill":
        tokens = work.prompt_tokens
        operations = tokens * per_token + 2 * model.num_head_parameters
        return StepCost(read, operations, tokens)
    return None
