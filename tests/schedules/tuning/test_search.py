import pytest
from everycast.schedules.cpu.linear_schedule import LinearSchedule
from everycast.schedules.cpu.tuning.spaces import SPACES, bucket_parameters
from everycast.schedules.tuning.search import Comparison, Search, candidates_of
from hypothesis import given
from hypothesis import strategies as st


def make_search(bucket, start, seed):
    space = SPACES[bucket]
    return Search(space, candidates_of(space), start, seed)


@pytest.mark.parametrize("bucket", list(SPACES))
def test_every_candidate_comes_once(bucket):
    start = bucket_parameters(LinearSchedule(tile_tokens=8), bucket)
    search = make_search(bucket, start, "seed")
    found = []
    while (candidate := search.propose()) is not None:
        LinearSchedule(tile_tokens=8).with_parameters(candidate)
        found.append(tuple(candidate.items()))
    assert len(set(found)) == len(found) == len(candidates_of(SPACES[bucket])) - 1
    assert tuple(start.items()) not in found


def test_every_other_candidate_is_a_neighbour_of_the_best():
    search = make_search("many", bucket_parameters(LinearSchedule(tile_tokens=8), "many"), "seed")
    for turn in range(8):
        best, candidate = search.best, search.propose()
        if turn % 2 == 0:
            (changed,) = [name for name in best if best[name] != candidate[name]]
            values = SPACES["many"][changed]
            assert abs(values.index(best[changed]) - values.index(candidate[changed])) == 1
            search.best = candidate


def test_a_start_outside_the_space_has_neighbours():
    search = make_search("one", {"prefetch_one": 3000}, "seed")
    assert search.propose()["prefetch_one"] in (2048, 4096)


def test_the_same_seed_proposes_the_same():
    def first(seed):
        search = make_search("many", bucket_parameters(LinearSchedule(tile_tokens=8), "many"), seed)
        return [search.propose() for _ in range(10)]

    assert first("a") == first("a") != first("b")


@pytest.mark.parametrize(
    ("after", "is_faster"),
    [
        ([0.9] * 9, True),
        ([0.995] * 9, False),  # within the least noise
        ([0.7, 0.8, 0.9, 0.95, 0.97, 1.1, 1.2, 1.3, 1.4], False),  # noise larger than the gain
        ([1.1] * 9, False),
        ([0.9] * 8 + [9.0], True),  # one disturbance
    ],
)
def test_faster_is_by_more_than_the_noise(after, is_faster):
    assert Comparison((1.0,) * 9, tuple(after)).is_faster == is_faster


@given(st.lists(st.floats(1e-6, 1e-2), min_size=3, max_size=30))
def test_nothing_is_faster_than_itself(times):
    comparison = Comparison(tuple(times), tuple(times))
    assert not comparison.is_faster
    before, after = comparison.microseconds()
    assert before == after
