"""How many threads work on a row of logits together."""

from ..gpu.limits import GpuLimits


def row_threads(limits: GpuLimits) -> int:
    """Threads of a block, a power of two. A CPU that acts as a GPU leaves and enters each of them
    at every barrier: two of its vectors are enough there."""
    return min(limits.max_threads, 256) if limits.shares_memory else 8
