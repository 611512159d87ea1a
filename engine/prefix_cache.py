"""Which pages already hold the keys and values of a given token prefix."""

from collections.abc import Sequence as ListLike

from .kv_pages import PagePool


class PrefixNode:
    """One full page in the tree of cached prefixes: the path from the root spells all the tokens
    the page's keys and values depend on."""

    __slots__ = ("children", "page", "parent", "token_ids")

    def __init__(self, parent: "PrefixNode | None", token_ids: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.page = page
        self.children: dict[tuple[int, ...], PrefixNode] = {}


class PrefixCache:
    """A tree of full pages keyed by their token ids.

    Looking up a child hashes the page's tokens and compares them, and the parent is the very node
    reached before: two prefixes share a page only when all their tokens are equal.

    An owner of a page owns its parents too, and pages are released from the last to the first,
    hence the oldest idle page is always a leaf and eviction never cuts a path in two.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.root = PrefixNode(None, (), -1)
        self._pool = pool
        self._nodes: dict[int, PrefixNode] = {}
        pool.on_evict = self._forget

    def match(self, token_ids: ListLike[int], max_num_tokens: int) -> list[PrefixNode]:
        """The longest chain of cached pages that `token_ids` begins with, at most
        `max_num_tokens` tokens long. The pages still have to be shared by the caller."""
        page_size = self._pool.page_size
        nodes: list[PrefixNode] = []
        node: PrefixNode | None = self.root
        for end in range(page_size, max_num_tokens + 1, page_size):
            assert node is not None
            node = node.children.get(tuple(token_ids[end - page_size : end]))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def insert(self, parent: PrefixNode, token_ids: ListLike[int], page: int) -> PrefixNode:
        """The node of one full page after `parent`: a new one that holds the owned `page`, or the
        one that holds these tokens already (then the caller should use its page instead)."""
        key = tuple(token_ids)
        assert len(key) == self._pool.page_size, "only full pages are cached"
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = self._nodes[page] = PrefixNode(parent, key, page)
            self._pool.keep(page)
        return node

    def clear(self) -> None:
        """Forget every prefix that no running sequence uses."""
        self._pool.evict_idle()

    def _forget(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert node.parent is not None and not node.children, "evicted a page before its sequels"
        del node.parent.children[node.token_ids]

    def check_integrity(self) -> None:
        """AssertionError unless the tree and the page index agree; for tests."""
        seen: dict[int, PrefixNode] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node and child.token_ids == key
                assert child.page not in seen, f"page {child.page} is cached twice"
                seen[child.page] = child
                if node is not self.root:
                    assert self._pool.ref_count(node.page) >= self._pool.ref_count(child.page)
                stack.append(child)
        assert seen == self._nodes
