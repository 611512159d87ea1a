"""What the tiles of a batch ask for, by running the schedule's arithmetic."""

import numpy as np
import pytest
from everycast.schedules.cpu.kernel import body, kernel
from everycast.schedules.cpu.linear_schedule import LinearSchedule
from everycast.schedules.cpu.tile_prefetch import tile_ahead
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

STEPS = 10
SCHEDULE = LinearSchedule(tile_tokens=8, pair_tokens=4, prefetch_tile=100, prefetch_many=2000)


def asked(lab, schedule, batch, tokens, is_pair):
    """[tiles, STEPS]: how far ahead a tile asks in a step, 0 for nothing."""
    num_tiles = batch // tokens
    with kernel("asked") as (func, ib):
        out = func.buffer("out", (num_tiles, STEPS), "int64")
        with body(), B.serial(T.int64(num_tiles)) as tile:
            first = tile * tokens + 3
            ahead = tile_ahead(
                schedule, first, tokens, T.int64(3), T.int64(3 + batch), is_pair=is_pair
            )
            with B.serial(T.int64(STEPS)) as step, ahead.in_turn(step):
                B.buffer_store(out, T.Cast("int64", ahead.distance), [tile, step])
    result = lab.tensor(np.zeros((num_tiles, STEPS), np.int64))
    lab.build(ib.get())(result)
    return result.numpy()


@pytest.mark.parametrize(("tokens", "is_pair"), [(8, False), (4, True)])
@pytest.mark.parametrize("num_tiles", [2, 3, 4, 9, 16])
def test_tiles_share_the_next_block(lab, tokens, is_pair, num_tiles):
    steps = asked(lab, SCHEDULE, num_tiles * tokens, tokens, is_pair)
    # Each step's part is asked for once, by tiles that take the same number of steps each.
    assert (np.count_nonzero(steps, axis=0) == 1).all()
    assert set(steps.ravel()) == {0, 2000}
    turns = min(8, 1 << (num_tiles.bit_length() - 1))
    assert steps.any(axis=1).sum() == turns
    np.testing.assert_array_equal(np.argmax(steps, axis=0), np.arange(STEPS) % turns)


def test_an_only_tile_asks_for_what_it_needs_next(lab):
    assert (asked(lab, SCHEDULE, 8, 8, False) == 100).all()
    # With a smaller tile behind it, it alone asks for the next block.
    assert (asked(lab, SCHEDULE, 11, 8, False) == 2000).all()


def test_smaller_tiles_have_distances_of_their_own(lab):
    schedule = LinearSchedule(tile_tokens=8, prefetch_one=0, prefetch_few=30)
    assert (asked(lab, schedule, 2, 2, False) == 30).all()
    assert not asked(lab, schedule, 1, 1, False).any()
    ahead = tile_ahead(schedule, 0, 1, 0, 1, is_pair=False)
    assert ahead.is_nothing


def test_nothing_is_asked_for_at_distance_0(lab):
    schedule = LinearSchedule(tile_tokens=8, prefetch_tile=0, prefetch_many=2000)
    assert not asked(lab, schedule, 8, 8, False).any()
    assert asked(lab, schedule, 16, 8, False).any()
