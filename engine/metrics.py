"""What the engine counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started; they only grow. Tokens unless named otherwise."""

    num_steps: int = 0
    step_time_s: float = 0.0
    """Time inside steps, so `step_time_s / num_steps` is the mean step."""
    execute_time_s: float = 0.0
    """The part of it that the model took; of a device, which goes on by itself, until it has been
    told what to do."""
    num_prefill_tokens: int = 0
    """Computed tokens of prompts, and of outputs after a preemption."""
    num_output_tokens: int = 0
    num_requests: int = 0
    num_finished_requests: int = 0
    num_aborted_requests: int = 0
    num_failed_requests: int = 0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One reading of the engine: its counters, and the state of queues and pages."""

    counters: EngineCounters
    num_preemptions: int
    num_prefix_hit_tokens: int
    """Tokens that the prefix cache saved from being computed."""
    num_running_sequences: int
    num_waiting_sequences: int
    num_pages: int
    num_available_pages: int
    """Free pages, and idle ones that only hold a cached prefix."""
    num_cached_pages: int
    """The idle ones among them."""
