"""Block tables of requests over one pool: prefixes that are found again, look-ahead, copies before a write."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from dspark.models.pool import PagePool, pages_for


class BlockTables:
    """Hands out block tables whose pages several caches share: the target's and, page for page, the drafter's.

    A request's page is kept for later requests once it is full and *every* cache holds its tokens: a prefix that the
    target knows and the drafter does not would be decoded rightly and drafted badly. Kept pages are found by a
    cryptographic hash of all tokens from the start of the prompt to the page's end, of 128 bits.

    Args:
        pool: the pages.
        page_size: tokens in a page.
        caches: names of the caches that are indexed by these tables.
        reuse: whether full pages are kept and prompts look for them.

    Raises:
        ValueError: ``page_size`` is not positive, or ``caches`` is empty or names one twice.
    """

    def __init__(
        self, pool: PagePool, page_size: int, caches: Sequence[str] = ("target",), *, reuse: bool = True
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be positive, got {page_size}")
        if not caches or len(set(caches)) != len(caches):
            raise ValueError(f"caches: expected distinct names, at least one, got {list(caches)}")
        self.pool, self.page_size, self.caches, self.reuse = pool, page_size, tuple(caches), reuse
        self._copies: list[tuple[int, int]] = []
        self._sources: Counter[int] = Counter()  # pages that wait to be copied, which holds them

    def admit(self, prompt: Sequence[int], capacity: int) -> BlockTable | None:
        """A table with room for ``capacity`` tokens, which begins with the pages kept of the longest known prefix.

        At most ``len(prompt) - 1`` tokens are taken from there, and whole pages only: the last token has to be run, for
        its logits.

        Returns:
            None, and nothing taken, when the pool has too few pages.

        Raises:
            ValueError: ``capacity`` is less than the prompt.
        """
        if capacity < len(prompt):
            raise ValueError(f"capacity: expected at least the prompt's {len(prompt)} tokens, got {capacity}")
        found, digest = self._find(prompt)
        self.pool.share(found)
        rest = self.pool.allocate(pages_for(capacity, self.page_size) - len(found))
        if rest is None:
            self.pool.free(found[::-1])
            return None
        hit = len(found) * self.page_size
        held = dict.fromkeys(self.caches, hit)
        return BlockTable(found + rest, list(prompt), hit, self, held, len(found), digest)

    def _find(self, prompt: Sequence[int]) -> tuple[list[int], bytes]:
        found: list[int] = []
        digest = b""
        if self.reuse:
            for start in range(0, len(prompt) - self.page_size, self.page_size):
                key = page_key(digest, prompt[start : start + self.page_size])
                page = self.pool.find(key)
                if page is None:
                    break
                found.append(page)
                digest = key
        return found, digest

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages to copy, ``(source, target)``, in every cache, before anything that was reserved is written.

        Call it once all requests of a round have reserved. Sources are held until then, so that no target is one.
        """
        copies, self._copies = self._copies, []
        self._sources.clear()
        for source, _ in copies:
            self.pool.free([source])
        return copies

    def _is_writable(self, page: int) -> bool:
        return self.pool.is_writable(page, readers=self._sources[page])  # who waits to copy it minds no later write

    def _replace(self, page: int, new: int, *, copied: bool) -> None:
        """Give up a holder's page for a new one. Where its content is wanted, the copy to come holds it."""
        if copied:
            self._copies.append((page, new))
            self._sources[page] += 1
        else:
            self.pool.free([page])

    def _free(self, pages: Sequence[int]) -> None:
        """Give pages back; what was to be copied onto them is not."""
        for source, target in self._copies:
            if target in pages:
                self._sources[source] -= 1
                self.pool.free([source])
        self._copies = [copy for copy in self._copies if copy[1] not in pages]
        self.pool.free(pages)


@dataclass(eq=False, repr=False)
class BlockTable:
    """The pages of one request. Made by :meth:`BlockTables.admit` and :meth:`fork`.

    Attributes:
        pages: the request's row of the block table.
        tokens: its committed tokens; the last one's keys and values are in no cache yet.
        hit: tokens of the prompt that every cache held on admission.
    """

    pages: list[int]
    tokens: list[int]
    hit: int
    _tables: BlockTables
    _held: dict[str, int]
    _num_kept: int  # pages offered to the pool
    _digest: bytes  # the key of the last of them

    @property
    def length(self) -> int:
        """Tokens whose keys and values every cache holds: what may be written starts here."""
        return min(self._held.values())

    def reserve(self, end: int) -> bool:
        """Make positions :attr:`length` to ``end - 1`` writable: look-ahead of any cache included.

        Missing pages are taken from the pool. A page in that range that others see, or that is kept, is replaced; if a
        cache holds tokens in it, :meth:`BlockTables.take_copies` tells of the copy that has to be made first.

        Returns:
            False, and nothing changed, when the pool has too few pages.
        """
        tables, size = self._tables, self._tables.page_size
        needed = range(self.length // size, pages_for(end, size))
        shared = [i for i in needed if i < len(self.pages) and not tables._is_writable(self.pages[i])]
        missing = max(0, needed.stop - len(self.pages))
        new = tables.pool.allocate(len(shared) + missing)
        if new is None:
            return False
        longest = max(self._held.values())
        for i in shared:
            old, self.pages[i] = self.pages[i], new.pop()
            tables._replace(old, self.pages[i], copied=i * size < longest)
        self.pages += new
        return True

    def commit(self, tokens: Sequence[int], **held: int) -> None:
        """Append committed tokens, and say how many tokens each cache holds now.

        >>> tables = BlockTables(PagePool(4), page_size=2, caches=("target", "draft"))
        >>> request = tables.admit([5, 6, 7], capacity=6)
        >>> request.commit([8], target=3, draft=3)  # the prompt was run; token 8 has no keys and values yet
        >>> request.release()
        >>> tables.admit([5, 6, 9, 9], capacity=6).hit
        2

        Raises:
            ValueError: an unknown cache, fewer tokens than before, or more than are committed.
        """
        for name, length in held.items():
            most = len(self.tokens) + len(tokens)
            if not self._held.get(name, most + 1) <= length <= most:
                known = ", ".join(f"{cache} {count}" for cache, count in self._held.items())
                raise ValueError(f"{name}: expected no fewer than before ({known}) and at most {most}, got {length}")
        self.tokens += tokens
        self._held |= held
        tables, size = self._tables, self._tables.page_size
        while tables.reuse and (self._num_kept + 1) * size <= self.length:
            start = self._num_kept * size
            self._digest = page_key(self._digest, self.tokens[start : start + size])
            tables.pool.keep(self.pages[self._num_kept], self._digest)
            self._num_kept += 1

    def fork(self) -> BlockTable:
        """Another request with the same tokens, which shares the pages that hold them, the last one included.

        Neither writes into a shared page: :meth:`reserve` replaces it for the first that would.
        """
        shared = self.pages[: pages_for(max(self._held.values()), self._tables.page_size)]
        self._tables.pool.share(shared)
        return replace(self, pages=shared, tokens=list(self.tokens), _held=dict(self._held))

    def trim(self) -> None:
        """Give back the pages past all that a cache holds: look-ahead that was not accepted."""
        used = pages_for(max(self._held.values()), self._tables.page_size)
        self._tables._free(self.pages[used:])
        del self.pages[used:]

    def release(self) -> None:
        """Give all pages back; those that are kept stay findable until they are needed."""
        self._tables._free(self.pages[::-1])
        self.pages = []


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page: a hash of its tokens, keyed by that of the page before (none: ``b""``)."""
    return blake2b(array("q", tokens).tobytes(), digest_size=16, key=before).digest()
