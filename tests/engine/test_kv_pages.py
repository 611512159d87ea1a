"""The page pool: states, order of eviction, and that its own check can fail."""

import pytest
from everycast.engine.kv_pages import PagePool
from hypothesis import given
from hypothesis import strategies as st


def test_pages_are_owned_once_and_come_back() -> None:
    pool = PagePool(num_pages=4, page_size=8)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    assert pool.can_allocate(1) and not pool.can_allocate(2)
    pool.check_integrity([pages])
    pool.release(pages)
    assert pool.num_available_pages == 4
    pool.check_integrity([])


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(num_pages=1, page_size=8)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert not pool.can_allocate(1)
    pool.release([page])
    assert pool.can_allocate(1)


def test_kept_pages_are_evicted_last_and_oldest_first() -> None:
    pool = PagePool(num_pages=4, page_size=8)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    a, b, c = pool.allocate(3)
    pool.keep(a)
    pool.keep(b)
    pool.release([b, a, c])
    assert pool.num_idle_pages == 2 and pool.num_available_pages == 4
    pool.allocate(2)
    assert evicted == []
    pool.allocate(1)
    assert evicted == [b]
    pool.share([a])
    assert not pool.can_allocate(1)
    pool.release([a])
    pool.evict_idle()
    assert evicted == [b, a]
    pool.allocate(1)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]]])
def test_the_integrity_check_notices_a_wrong_owner(tables: list[list[int]]) -> None:
    pool = PagePool(num_pages=2, page_size=8)
    assert pool.allocate(1) == [0]
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_releasing_a_page_nobody_owns_is_noticed() -> None:
    with pytest.raises(AssertionError, match="released by nobody"):
        PagePool(num_pages=2, page_size=8).release([1])


@given(st.data(), st.integers(1, 12))
def test_random_use_keeps_the_books(data: st.DataObject, num_pages: int) -> None:
    pool = PagePool(num_pages, page_size=4)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["allocate", "fork", "release", "keep"]))
        if action == "allocate":
            wanted = data.draw(st.integers(1, 4))
            if pool.can_allocate(wanted):
                tables.append(pool.allocate(wanted))
        elif tables:
            table = data.draw(st.sampled_from(tables))
            if action == "fork":
                pool.share(table)
                tables.append(list(table))
            elif action == "keep":
                pool.keep(table[0])
            else:
                tables.remove(table)
                pool.release(reversed(table))
        pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    pool.evict_idle()
    assert pool.num_available_pages == num_pages and pool.num_idle_pages == 0
