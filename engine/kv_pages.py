"""The page pool: which KV pages are free, owned, or idle but worth keeping."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable


class PagePool:
    """Accounts for `num_pages` pages of `page_size` tokens; it holds numbers, not tensors.

    A page is in exactly one of three states:

        owned  ref_count > 0: in the block table of that many sequences
        idle   ref_count = 0, kept: holds a cached prefix, evicted oldest first when space is short
        free   ref_count = 0, not kept: content is worthless

    Free and idle pages together are *available*: `allocate` may hand them out.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] = lambda page: None
        """Called with each idle page whose content is given up."""
        self._ref_counts = [0] * num_pages
        self._free = deque(range(num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()

    @property
    def num_available_pages(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_idle_pages(self) -> int:
        return len(self._idle)

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def can_allocate(self, num_pages: int) -> bool:
        return num_pages <= len(self._free) + len(self._idle)

    def allocate(self, num_pages: int) -> list[int]:
        """`num_pages` pages, each owned once. Ask `can_allocate` first."""
        assert self.can_allocate(num_pages), "allocate without can_allocate"
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(num_pages)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of `pages` (owned or idle)."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._idle[page]
            self._ref_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner from each of `pages`. Those released first are evicted first, so a
        sequence gives its pages back from the last to the first: a prefix outlives its sequels."""
        for page in pages:
            self._ref_counts[page] -= 1
            assert self._ref_counts[page] >= 0, f"page {page} released by nobody"
            if self._ref_counts[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Make the owned `page` idle rather than free when its last owner releases it."""
        assert self._ref_counts[page] > 0, f"page {page} has no owner"
        self._kept.add(page)

    def evict_idle(self) -> None:
        """Give up the content of every idle page."""
        while self._idle:
            self._free.append(self._evict())

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._kept.remove(page)
        self.on_evict(page)
        return page

    def check_integrity(self, block_tables: Iterable[Iterable[int]]) -> None:
        """AssertionError unless the counts are exactly what `block_tables` own; for tests."""
        owners = Counter(page for table in block_tables for page in table)
        assert self._ref_counts == [owners[page] for page in range(self.num_pages)]
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle and not free & self._kept and idle <= self._kept
        unowned = {page for page in range(self.num_pages) if owners[page] == 0}
        assert free | idle == unowned, "a page leaked"
