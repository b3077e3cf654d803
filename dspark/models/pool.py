"""Pages of a cache, counted on the host: who holds them, and which are kept for whoever needs their content again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold ``tokens`` tokens."""
    return -(-tokens // page_size)


class PagePool:
    """Pages and their holders. A request that cannot have its pages gets none, and waits.

    A page is held by any number of requests. One that none holds is free, or, if it was *kept* under a key, idle: its
    content stays, to be found by that key, until the page is needed for something else. The page that was idle longest
    goes first. A page that several hold, or that is kept, must not be written (:meth:`is_writable`).

    >>> pool = PagePool(2)
    >>> first, second = pool.allocate(2)
    >>> pool.keep(first, b"a prefix")
    >>> pool.free([second, first])
    >>> pool.num_free, pool.find(b"a prefix") == first
    (2, True)
    >>> pool.share([first])
    >>> pool.allocate(2) is None, pool.num_free
    (True, 1)
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be positive, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._key: dict[int, bytes] = {}  # of kept pages
        self._page: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept pages that nobody holds, the longest idle first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._idle)

    def is_kept(self, page: int) -> bool:
        """Whether the page can be found by a key."""
        return page in self._key

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def is_writable(self, page: int, readers: int = 0) -> bool:
        """Whether one holder alone minds what is written to the page; ``readers`` of its holders do not."""
        return self._holders[page] - readers == 1 and page not in self._key

    def allocate(self, n: int) -> list[int] | None:
        """Take ``n`` pages that nobody holds; None, and nothing taken, when there are fewer.

        Raises:
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        if n > self.num_free:
            return None
        return [self._take() for _ in range(n)]

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page[self._key.pop(page)]
        self._holders[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages once more: held ones, or idle ones that :meth:`find` found.

        Raises:
            ValueError: a page is free, or is given twice; then none is held.
        """
        distinct = set(pages)
        if len(distinct) != len(pages) or not all(self._is_held(page) or page in self._idle for page in distinct):
            raise ValueError(f"pages must be distinct, and taken from this pool or kept in it, got {list(pages)}")
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back, each by one of its holders.

        Kept pages become idle in the order given, so give the later pages of a request first: what follows a prefix is
        worth less than the prefix.

        Raises:
            ValueError: a page is not taken, or is given twice; then none is given back.
        """
        returned = set(pages)
        if len(returned) != len(pages) or not all(self._is_held(page) for page in returned):
            raise ValueError(f"pages must be distinct and taken from this pool, got {list(pages)}")
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int, key: bytes) -> None:
        """Let a held page be found by ``key``, and make it read-only. Does nothing where another page has that key.

        Raises:
            ValueError: nobody holds the page, or it is kept under another key.
        """
        if not self._is_held(page):
            raise ValueError(f"page must be taken from this pool, got {page}")
        if self._key.get(page, key) != key:
            raise ValueError(f"page {page} is kept under another key")
        if key not in self._page:
            self._page[key], self._key[page] = page, key

    def find(self, key: bytes) -> int | None:
        """The page kept under ``key``; :meth:`share` it before anything else is allocated."""
        return self._page.get(key)

    def _is_held(self, page: int) -> bool:
        return 0 <= page < self.num_pages and self._holders[page] > 0
