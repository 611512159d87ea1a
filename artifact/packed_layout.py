"""Where a model's parameters lie in their packed file, and in the one buffer that it is read to."""

from collections.abc import Sequence

from .tensor_cache import ALIGNMENT


def packed_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """First byte of each parameter, given their bytes in call order, and the bytes of all.

    Each starts on a multiple of `ALIGNMENT`.
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
