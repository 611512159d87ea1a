"""What a kernel must know of a GPU: data, one record for each target."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmTile:
    """What a block of threads computes of y = x Wᵀ: [rows, columns], over `depth` of K at a time.

    Two weights at once (a gated MLP) have half the columns each.
    """

    rows: int
    columns: int
    depth: int
    thread_rows: int
    """Rows, and columns, that one thread keeps in registers."""
    thread_columns: int

    def __post_init__(self) -> None:
        pairs = (
            (self.rows, self.thread_rows),
            (self.columns, self.thread_columns),
            (self.columns // 2, max(self.thread_columns // 2, 1)),
        )
        if any(whole % part for whole, part in pairs):
            raise ValueError(f"the threads' parts do not fill {self}")

    @property
    def num_threads(self) -> int:
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Bounds that kernels keep, and the shapes of their work that suit the device.

    Every kernel is right for any subgroup width: threads meet at barriers and in shared memory.
    """

    max_threads: int
    """Threads of a block that every such device takes."""
    shared_bytes: int
    """Shared memory of a block that every such device has."""
    gemv_threads: int = 128
    """Threads of a block that multiplies few rows by a weight."""
    gemv_lanes: int = 32
    """How many of them share a row of weights, side by side in memory."""
    gemv_columns: int = 4
    """Columns of the result that a thread computes with what it has read of x."""
    gemv_tokens: int = 4
    """Most rows that go through one read of the weights."""
    gemm_tiles: tuple[GemmTile, ...] = (
        GemmTile(16, 64, 32, 4, 4),
        GemmTile(32, 64, 32, 4, 8),
        GemmTile(64, 64, 32, 8, 8),
    )
    """By the number of rows: the first that takes all rows, else the last."""
    attention_threads: int = 128
    attention_rows: int = 32
    """Most rows (tokens times query heads of a key-value head) that attend together."""
    attention_splits: int = 8
    """Parts in which a few tokens' long contexts are attended to side by side; 1: never."""

    def __post_init__(self) -> None:
        shared = max(4 * (t.rows + t.columns) * (t.depth + 4) for t in self.gemm_tiles)
        if shared > self.shared_bytes:
            raise ValueError(f"a tile takes {shared} bytes, {self.shared_bytes} may be shared")
        if any(n & (n - 1) for n in (self.gemv_threads, self.gemv_lanes)):
            raise ValueError("sums over lanes need powers of two")
        threads = max(
            self.gemv_threads, self.attention_threads, *(t.num_threads for t in self.gemm_tiles)
        )
        if threads > self.max_threads:
            raise ValueError(f"a kernel has {threads} threads a block, {self.max_threads} may be")
