"""What a model will take of this machine's memory, before anything of it is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..artifact.errors import CapacityError
from .engine_config import EngineConfig
from .model_runner import ModelInfo

_RESERVE_BYTES = 256 << 20
"""Left to the interpreter, the tokenizer and everyone else."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and what they hold. `num_tokens` is the capacity of all KV pages together."""

    weight_bytes: int
    page_bytes: int
    num_pages: int
    workspace_bytes: int
    available_bytes: int
    page_size: int
    context_window_size: int

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.num_pages * self.page_bytes + self.workspace_bytes

    def summary(self) -> str:
        """One line for people."""
        return (
            f"memory: weights {_megabytes(self.weight_bytes)}, KV pages "
            f"{_megabytes(self.num_pages * self.page_bytes)} ({self.num_tokens} tokens), workspace "
            f"{_megabytes(self.workspace_bytes)}; {_megabytes(self.total_bytes)} of "
            f"{_megabytes(self.available_bytes)} available; context {self.context_window_size}"
        )


def plan_memory(
    config: EngineConfig, info: ModelInfo, *, weight_bytes: int, workspace_bytes: int,
    available_bytes: int, max_page_bytes: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """Fit weights, workspace and as many KV pages as the config wants into `available_bytes`;
    the pages have at most `max_page_bytes`.

    Raises CapacityError, naming both numbers, if the weights do not fit, or not the number of
    tokens that was asked for by name; tokens nobody asked for are reduced to what fits.
    """
    fixed = weight_bytes + workspace_bytes + _RESERVE_BYTES
    left = available_bytes - fixed
    if max_page_bytes is not None:
        left = min(left, max_page_bytes)
    if left < info.page_bytes:
        raise CapacityError(
            f"the model needs {_megabytes(weight_bytes)} for weights, "
            f"{_megabytes(workspace_bytes)} for workspace and "
            f"{_megabytes(_RESERVE_BYTES)} for everything else, but only "
            f"{_megabytes(available_bytes)} of memory is available; free some, or take a smaller "
            "model or quantization"
        )
    wanted = -(-config.kv_tokens(info) // info.page_size)
    fitting = left // info.page_bytes
    if fitting < wanted and (config.max_total_seq_length or config.context_window_size):
        raise CapacityError(
            f"KV pages for {wanted * info.page_size} tokens need "
            f"{_megabytes(wanted * info.page_bytes)}, but {_megabytes(left)} is left beside the "
            f"weights, enough for {fitting * info.page_size} tokens; lower max_total_seq_length or "
            "context_window_size"
        )
    num_pages = min(wanted, fitting)
    context = min(config.context_tokens(info), num_pages * info.page_size)
    return MemoryPlan(
        weight_bytes, info.page_bytes, num_pages, workspace_bytes, available_bytes,
        info.page_size, context,
    )  # fmt: skip


def available_memory() -> int:
    """Bytes this process may still take: what the system has, and what its cgroup allows."""
    limits = [_system_available()]
    limits += _cgroup_left()
    return max(0, min(limits))


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_left() -> list[int]:
    """Version 2 and version 1 of the memory controller; empty where neither limits."""
    left = []
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            left.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # absent, or "max"
    return left


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
