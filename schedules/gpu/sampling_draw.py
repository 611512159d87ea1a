"""One token for each draw from a row of logits: arg max, or temperature, min_p, top_k, top_p."""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from .kernel import bind, body, either, kernel, kernel_factory, launch, registers, store, when
from .limits import GpuLimits
from .sampling_row import LAST_ID, Measure, RowBlock, num_threads, place_of
from .wide_integers import Wide, WideRegister

NUM_SETTINGS = 5
KEEP_ALL = 0xFFFFFFFF
"""As top_p: 1."""
_TOP_K, _TOP_P, _DRAW = range(3)


@kernel_factory
def sample_from_logits(vocab_size: int, limits: GpuLimits) -> tirx.PrimFunc:
    """One token id for each draw; -1 where the logits are not numbers (NaN, or highest infinite).

    logits [num_rows, vocab_size] float32, of which the first num_ids (int32) ids count;
    rows [n] int32, the row of each draw;
    settings [n, 5] int32, the bits of each draw's
      inverse_temperature  float32, log2(e) / temperature; 0 takes the arg max (lowest id of equals)
      min_p_offset         float32, temperature · ln(min_p): keep logits of at least the highest
                           plus this
      top_k                int32: keep so many of these, the highest; 0 keeps all
      top_p                uint32, in units of 2^-32: keep the fewest of these, highest first, that
                           have this part of their probability; at least one
      uniform              uint32, in units of 2^-32: the token where the cumulative probability
                           passes it
    token_ids [n] int32, the result.

    Of equal logits the lowest ids are kept. A draw depends on its row and settings alone. A block
    of threads for each draw.
    """
    threads = num_threads(limits)
    with kernel("sample_from_logits") as (k, ib):
        logits = k.buffer("logits", ("num_rows", vocab_size), "float32")
        rows = k.buffer("rows", ("num_draws",), "int32")
        settings = k.buffer("settings", ("num_draws", NUM_SETTINGS), "int32")
        num_ids = k.scalar("num_ids", "int32")
        token_ids = k.buffer("token_ids", ("num_draws",), "int32")
        with body(), launch([k.size("num_draws")], [threads]) as ((draw,), (thread,)):
            row = RowBlock(logits, bind(rows[draw]), num_ids, thread=thread, threads=threads)
            values = [bind(settings[draw, i]) for i in range(NUM_SETTINGS)]
            token_id = registers(1, "int32")
            store(token_id, T.int32(-1), 0)
            _Draw(row, values).emit(token_id)
            with when(thread == 0):
                store(token_ids, token_id[0], draw)
    return ib.get()


class _Draw:
    def __init__(self, row: RowBlock, settings: list[Any]) -> None:
        self.row = row
        self.inverse, self.offset = (bind(T.reinterpret("float32", x)) for x in settings[:2])
        self.top_k = settings[2]
        self.top_p, self.uniform = (bind(T.reinterpret("uint32", x)) for x in settings[3:])
        self.last_place, self.last_id = registers(1, "uint32"), registers(1, "int32")

    def emit(self, token_id: Any) -> None:
        row = self.row
        row.find_highest()
        with when(row.is_number):
            either(
                self.inverse == T.float32(0),
                lambda: store(token_id, row.highest_id, 0),
                lambda: self._emit_random(token_id),
            )

    def _emit_random(self, token_id: Any) -> None:
        """top_k, top_p and the draw are three rounds of the same: code for each would be thrice as
        much to compile."""
        store(self.last_place, place_of(self.row.highest + self.offset), 0)
        store(self.last_id, T.int32(LAST_ID), 0)
        with B.serial(3) as turn:
            is_top_k, is_draw = turn == _TOP_K, turn == _DRAW
            is_wanted = T.Or(is_draw, self.top_p < T.uint32(KEEP_ALL))
            with when(T.Select(is_top_k, self.top_k > 0, is_wanted)):
                total = self.row.total(self._measure(is_top_k), self._is_kept)
                wanted = self._wanted(turn, total)
                with when(T.Or(T.Not(is_top_k), wanted.is_below(total))):
                    self._cut(turn, wanted)
        store(token_id, self.last_id[0], 0)

    def _is_kept(self, token_id: Any, place: Any) -> Any:
        """What is kept comes first in an order: highest first, and of equals the lowest id."""
        is_tied = T.And(place == self.last_place[0], token_id <= self.last_id[0])
        return T.Or(place < self.last_place[0], is_tied)

    def _measure(self, is_top_k: Any) -> Measure:
        """1 for top_k, else the weight."""

        def measure(place: Any) -> Wide:
            value = WideRegister()
            either(
                is_top_k,
                lambda: value.set(Wide.of(1)),
                lambda: value.set(self.row.weight(place, self.inverse)),
            )
            return value.get()

        return measure

    def _wanted(self, turn: Any, total: Wide) -> Wide:
        """How much of `total`, at least 1, all up to the last one together must measure."""
        wanted = WideRegister()

        def of_weights() -> None:
            part = bind(T.Select(turn == _DRAW, self.uniform, self.top_p))
            wanted.set(total.times_fraction(part))
            # A draw passes its part of the total, top_p reaches it.
            is_more = T.Or(turn == _DRAW, total.has_remainder(part))
            is_more = T.Or(is_more, wanted.get().is_equal(Wide.of(0)))
            wanted.add(Wide(T.uint32(0), T.Cast("uint32", is_more)))

        either(
            turn == _TOP_K,
            lambda: wanted.set(Wide(T.uint32(0), T.Cast("uint32", self.top_k))),
            of_weights,
        )
        return wanted.get()

    def _cut(self, turn: Any, wanted: Wide) -> None:
        """Keep the fewest that measure as much as `wanted`, in the order of `_is_kept`. For a draw
        in the order of ids, of which the last becomes `last_id`."""
        measure = self._measure(turn == _TOP_K)
        tie, is_tied, missing = registers(1, "uint32"), registers(1, "int32"), WideRegister()
        store(tie, T.uint32(0), 0)
        store(is_tied, T.int32(1), 0)
        missing.set(wanted)
        with when(turn != _DRAW):
            bound = self.row.first_place(measure, self._is_kept, wanted)
            store(tie, bound.place, 0)
            missing.set(wanted.minus(bound.before))
            with when(bound.is_whole):
                store(is_tied, T.int32(0), 0)
                with when(bound.place < self.last_place[0]):
                    store(self.last_place, bound.place, 0)
                    store(self.last_id, T.int32(LAST_ID), 0)
        with when(is_tied[0] != 0):
            last_id = self.row.first_id(
                measure,
                lambda token_id, place: T.And(
                    T.Or(turn == _DRAW, place == tie[0]), self._is_kept(token_id, place)
                ),
                missing.get(),
            )
            store(self.last_place, tie[0], 0)
            store(self.last_id, last_id, 0)
