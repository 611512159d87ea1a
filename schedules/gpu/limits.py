"""What a kernel must know of a GPU: data, one record for each target."""

from dataclasses import dataclass
from typing import Literal


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
class MatrixTile:
    """What a block of warps computes of y = x Wᵀ by matrix instructions on halves: [rows, columns],
    over `depth` of K at a time.

    Two weights at once (a gated MLP) have half the columns each.
    """

    rows: int
    columns: int
    depth: int
    warp_rows: int
    """Rows, and columns, that one warp keeps in registers."""
    warp_columns: int

    def __post_init__(self) -> None:
        wholes = (
            (self.rows, self.warp_rows), (self.columns, self.warp_columns),
            (self.warp_rows, 16), (self.warp_columns, 16), (64, self.depth), (self.depth, 32),
            (self.rows * self.depth // 8, self.num_threads),
            (self.columns // 2 * self.depth // 8, self.num_threads),
        )  # fmt: skip
        if any(whole % part for whole, part in wholes):
            raise ValueError(f"the warps' or threads' parts do not fill {self}")

    @property
    def num_threads(self) -> int:
        return 32 * (self.rows // self.warp_rows) * (self.columns // self.warp_columns)

    @property
    def shared_bytes(self) -> int:
        """Two stages of halves."""
        return 2 * 2 * (self.rows + self.columns) * self.depth

    @property
    def sums_bytes(self) -> int:
        """Eight rows of each warp's sums: what Apple's instructions need beside."""
        return self.num_threads // 32 * 8 * self.warp_columns * 4


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Bounds that kernels keep, and the shapes of their work that suit the device.

    Without `subgroup` and `matrix_tiles`, kernels are right for any subgroup width: threads meet at
    barriers and in shared memory.
    """

    max_threads: int
    """Threads of a block that every such device takes."""
    shared_bytes: int
    """Shared memory that a block may take."""
    max_shared_bytes: int | None = None
    """What every such device has, for attention that cannot do with `shared_bytes`; None: those."""
    gemv_threads: int = 128
    """Threads of a block that multiplies few rows by a weight."""
    gemv_lanes: int = 32
    """How many of them share a row of weights, side by side in memory."""
    gemv_columns: int = 4
    """Columns of the result that a thread computes with what it has read of x."""
    gemv_tokens: int = 4
    """Most rows that go through one read of the weights."""
    gemv_passes: int = 2
    """How often the weights are read for rows beyond that, before `gemm` takes over."""
    gemv_words: int = 1
    """Words of a row of weights that a lane reads at once; more than 1: by `wide_gemv`, if words of
    a row are neighbours."""
    gemv_stages: int = 0
    """How many reads of a lane are under way at the same time, through shared memory, by NVIDIA's
    instructions; 0: through registers, as the compiler likes."""
    gemv_blocks: int = 1
    """Threads compute fewer columns where there would be fewer blocks than this."""
    subgroup: int | None = None
    """Threads that can hand each other values without shared memory; None: not relied on."""
    gemm_tiles: tuple[GemmTile, ...] = (
        GemmTile(16, 64, 32, 4, 4),
        GemmTile(32, 64, 32, 4, 8),
        GemmTile(64, 64, 32, 8, 8),
    )
    """By the number of rows: the first that takes all rows, else the last."""
    matrix_tiles: tuple[MatrixTile, ...] = ()
    """In place of `gemm_tiles` where weights can be multiplied as halves. By the number of rows,
    but the last only for so much work that it fills the device; empty: none."""
    matrix_unit: Literal["tensor core", "simdgroup"] = "tensor core"
    """Whose instructions multiply them: NVIDIA's or Apple's."""
    matrix_blocks: int = 96
    """How many blocks of the last of `matrix_tiles` fill the device."""
    attention_threads: int = 128
    attention_rows: int = 32
    """Most rows (tokens times query heads of a key-value head) that attend together."""
    attention_splits: int = 8
    """Parts in which a few tokens' long contexts are attended to side by side; 1: never."""
    max_buffers: int | None = None
    """Tensors that a kernel may take; None: as many as it likes."""
    max_weight_bytes: int | None = None
    """Bytes of a weight's tensor that a kernel may take: larger ones come in parts (`row_parts`);
    None: as many as there are."""
    has_float16: bool = True
    """Whether kernels can read 16-bit floats; else such weights come as words of two."""
    shares_memory: bool = True
    """Whether a linear layer's threads work together in shared memory; else each keeps to itself,
    as suits a CPU that acts as a GPU."""
    register_threads: int = 16
    """Threads of a block whose threads keep to themselves (`register_linear`)."""
    register_columns: int = 4
    """Columns of the result that such a thread computes; half as many of a single row."""
    register_rows: int = 8
    """Rows that it computes, where there are more than `gemv` takes."""

    @property
    def gemv_rows(self) -> int:
        """Most rows that are multiplied by `gemv`."""
        return self.gemv_passes * self.gemv_tokens

    def __post_init__(self) -> None:
        has_sums = self.matrix_unit == "simdgroup"
        shared = max(
            0,
            *(4 * (t.rows + t.columns) * (t.depth + 4) for t in self.gemm_tiles),
            *(t.shared_bytes + has_sums * t.sums_bytes for t in self.matrix_tiles),
        )
        if shared > self.shared_bytes:
            raise ValueError(f"a tile takes {shared} bytes, {self.shared_bytes} may be shared")
        if self.matrix_tiles and self.max_weight_bytes is not None:
            raise ValueError("matrix instructions take whole weights")
        if any(n & (n - 1) for n in (self.gemv_threads, self.gemv_lanes)):
            raise ValueError("sums over lanes need powers of two")
        tiles: tuple[GemmTile | MatrixTile, ...] = (*self.gemm_tiles, *self.matrix_tiles)
        of_kernels = (self.gemv_threads, self.register_threads, self.attention_threads)
        threads = max(*of_kernels, *(t.num_threads for t in tiles))
        if threads > self.max_threads:
            raise ValueError(f"a kernel has {threads} threads a block, {self.max_threads} may be")
