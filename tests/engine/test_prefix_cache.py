"""The tree of cached prefixes: exact matches only, and eviction from the leaves."""

import pytest
from everycast.engine.kv_pages import PagePool
from everycast.engine.prefix_cache import PrefixCache, PrefixNode


def cached(pool: PagePool, cache: PrefixCache, token_ids: list[int]) -> list[int]:
    """Pages of a finished sequence of full pages that is now in the cache."""
    pages = pool.allocate(len(token_ids) // pool.page_size)
    node = cache.root
    for block, page in enumerate(pages):
        tokens = token_ids[block * pool.page_size : (block + 1) * pool.page_size]
        node = cache.insert(node, tokens, page)
    pool.release(reversed(pages))
    return pages


def pages_of(nodes: list[PrefixNode]) -> list[int]:
    return [node.page for node in nodes]


@pytest.fixture
def pool() -> PagePool:
    return PagePool(num_pages=6, page_size=2)


def test_the_longest_chain_of_full_pages_is_matched(pool: PagePool) -> None:
    cache = PrefixCache(pool)
    pages = cached(pool, cache, [1, 2, 3, 4, 5, 6])
    assert pages_of(cache.match([1, 2, 3, 4, 5, 6, 7], 6)) == pages
    assert pages_of(cache.match([1, 2, 3, 4, 5, 6], 5)) == pages[:2]
    assert pages_of(cache.match([1, 2, 3, 9, 5, 6], 6)) == pages[:1]
    assert cache.match([3, 4, 5, 6], 4) == []
    assert cache.match([1], 1) == []


def test_equal_pages_after_different_prefixes_are_not_shared(pool: PagePool) -> None:
    cache = PrefixCache(pool)
    first = cached(pool, cache, [1, 2, 7, 7])
    second = cached(pool, cache, [3, 4, 7, 7])
    assert pages_of(cache.match([1, 2, 7, 7], 4)) == first
    assert pages_of(cache.match([3, 4, 7, 7], 4)) == second
    assert set(first).isdisjoint(second)


def test_equal_hashes_are_not_taken_for_equal_tokens(pool: PagePool) -> None:
    cache = PrefixCache(pool)
    assert hash((-1, 0)) == hash((-2, 0))  # CPython: -1 and -2 hash alike
    cached(pool, cache, [-1, 0])
    assert cache.match([-2, 0], 2) == []


def test_inserting_what_is_cached_gives_the_first_page(pool: PagePool) -> None:
    cache = PrefixCache(pool)
    (first,) = pool.allocate(1)
    (second,) = pool.allocate(1)
    assert cache.insert(cache.root, [1, 2], first).page == first
    assert cache.insert(cache.root, [1, 2], second).page == first
    pool.release([second, first])
    assert pool.num_idle_pages == 1


def test_eviction_takes_the_end_of_the_oldest_chain_first(pool: PagePool) -> None:
    cache = PrefixCache(pool)
    old = cached(pool, cache, [1, 2, 3, 4, 5, 6])
    new = cached(pool, cache, [1, 2, 8, 8])  # shares nothing: its first page is a duplicate
    cache.check_integrity()
    pool.allocate(6 - len(old) - 1)
    pool.allocate(1)
    assert pages_of(cache.match([1, 2, 3, 4, 5, 6], 6)) == old[:2]
    assert pages_of(cache.match([1, 2, 8, 8], 4)) == [old[0], new[1]]
    cache.check_integrity()


def test_clear_forgets_all_idle_prefixes(pool: PagePool) -> None:
    cache = PrefixCache(pool)
    cached(pool, cache, [1, 2, 3, 4])
    cache.clear()
    assert cache.match([1, 2, 3, 4], 4) == []
    assert pool.num_available_pages == 6 and pool.num_idle_pages == 0
    cache.check_integrity()
