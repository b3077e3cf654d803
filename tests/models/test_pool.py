"""Pages and the batches of rows over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.models.cache import PagedCache, PagePool, query_batch
from dspark.models.config import ModelConfig

NUM_PAGES = 9


class PoolMachine(RuleBasedStateMachine):
    """A pool against its specification: lists of held pages, and the keys of kept ones, idle in order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.owned: list[list[int]] = []
        self.keys: dict[int, bytes] = {}
        self.idle: list[int] = []

    @property
    def taken(self) -> list[int]:
        return [page for pages in self.owned for page in pages]

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def allocate(self, n: int) -> None:
        free = NUM_PAGES - len(set(self.taken))
        pages = self.pool.allocate(n)
        assert (pages is None) == (n > free)
        if pages is not None:
            assert len(pages) == n
            evicted = self.idle[: max(0, n - (free - len(self.idle)))]
            assert set(evicted) <= set(pages)
            for page in evicted:
                self.idle.remove(page)
                del self.keys[page]
            assert not self.keys.keys() & set(pages)
            self.owned.append(pages)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.free(pages)
        self.idle += [page for page in pages if page in self.keys and page not in self.taken]
        if not set(pages) <= set(self.taken):
            with pytest.raises(ValueError, match="taken from this pool"):
                self.pool.free(pages)

    @precondition(lambda self: self.taken)
    @rule()
    def free_twice_in_one_call(self) -> None:
        with pytest.raises(ValueError, match="distinct"):
            self.pool.free([self.taken[0], self.taken[0]])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.owned))
        self.pool.share(pages)
        self.owned.append(list(pages))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), key=st.binary(max_size=1))
    def keep(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(self.taken))
        if self.keys.get(page, key) != key:
            with pytest.raises(ValueError, match="under another key"):
                self.pool.keep(page, key)
            return
        self.pool.keep(page, key)
        if key not in self.keys.values():
            self.keys[page] = key

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def find_and_share(self, data: st.DataObject) -> None:
        page, key = data.draw(st.sampled_from(sorted(self.keys.items())))
        assert self.pool.find(key) == page
        self.pool.share([page])
        self.owned.append([page])
        if page in self.idle:
            self.idle.remove(page)

    @invariant()
    def pages_are_held_as_often_as_they_are_owned(self) -> None:
        taken = self.taken
        assert [self.pool.holders(page) for page in range(NUM_PAGES)] == [taken.count(p) for p in range(NUM_PAGES)]
        assert self.pool.num_free == NUM_PAGES - len(set(taken))
        for page in range(NUM_PAGES):
            assert self.pool.is_kept(page) == (page in self.keys)
            assert self.pool.is_writable(page) == (taken.count(page) == 1 and page not in self.keys)


TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("pages", [[0], [3, 99], [-1]])
def test_pages_that_were_not_taken_cannot_be_freed(pages: list[int]) -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is not None
    pool.free([0])
    with pytest.raises(ValueError, match="taken from this pool"):
        pool.free(pages)
    assert pool.num_free == 1


@pytest.mark.parametrize("pages", [[1], [0, 0], [0, 99], [-1]])
def test_free_pages_cannot_be_shared(pages: list[int]) -> None:
    pool = PagePool(4)
    assert pool.allocate(1) == [0]
    with pytest.raises(ValueError, match="taken from this pool or kept in it"):
        pool.share(pages)
    assert pool.holders(0) == 1


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match="page must be taken from this pool, got 2"):
        PagePool(4).keep(2, b"key")
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(0)
    with pytest.raises(ValueError, match="n must be"):
        PagePool(1).allocate(-1)


def test_cache_has_the_shape_and_dtype_asked_for() -> None:
    config = ModelConfig(8, 16, 16, 3, 4, 2, head_dim=6)
    cache = PagedCache.allocate(config, 5, 4, torch.bfloat16, "cpu")
    assert len(cache.layers) == 3
    assert (cache.num_pages, cache.page_size) == (5, 4)
    for kv in cache.layers:
        assert kv.k.shape == kv.v.shape == (5, 4, 2, 6)
        assert kv.k.dtype == kv.v.dtype == torch.bfloat16
    cache.layers[0].k.fill_(1)
    assert not cache.layers[0].v.any()
    assert not cache.layers[1].k.any()
    with pytest.raises(ValueError, match="num_pages and page_size"):
        PagedCache.allocate(config, 0, 4, torch.float32, "cpu")


@st.composite
def row_layouts(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], int]:
    """Block table, context lengths, row counts and page size; tables may be short of pages."""
    requests, columns, page_size = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 16]))
    pages = draw(st.permutations(range(requests * columns)))
    table = [list(pages[r * columns : (r + 1) * columns]) for r in range(requests)]
    for row in table:
        have = draw(st.integers(0, columns))
        row[have:] = [-1] * (columns - have)
    context = draw(st.lists(st.integers(0, columns * page_size), min_size=requests, max_size=requests))
    if draw(st.booleans()):
        lengths = [draw(st.integers(0, 5))] * requests
    else:
        lengths = draw(st.lists(st.integers(0, 5), min_size=requests, max_size=requests))
    return table, context, lengths, page_size


@given(row_layouts(), st.booleans())
def test_rows_lie_where_a_loop_puts_them(
    layout: tuple[list[list[int]], list[int], list[int], int], bidirectional: bool
) -> None:
    table, context, lengths, page_size = layout
    batch = query_batch(torch.tensor(table), torch.tensor(context), lengths, page_size, bidirectional=bidirectional)
    positions, slots, ancestors, starts = [], [], [], [0]
    for pages, before, count in zip(table, context, lengths, strict=True):
        for position in range(before, before + count):
            column = position // page_size
            page = pages[column] if column < len(pages) else -1
            positions.append(position)
            slots.append(page * page_size + position % page_size if page >= 0 else -1)
            ancestors.append(2**count - 1)
        starts.append(starts[-1] + count)
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.query_start.tolist() == starts
    assert batch.max_query_len == max(lengths)
    assert batch.ancestors is None if not bidirectional else batch.ancestors.tolist() == ancestors
    for tensor in (batch.positions, batch.slots, batch.query_start):
        assert tensor.dtype == torch.int64


def test_longest_block_fills_an_ancestor_word() -> None:
    table, context = torch.arange(64)[None], torch.zeros(1, dtype=torch.int64)
    batch = query_batch(table, context, [63], 1, bidirectional=True)
    assert batch.ancestors is not None
    assert batch.ancestors[0].item() == 2**63 - 1
    with pytest.raises(ValueError, match="bidirectional block"):
        query_batch(table, context, [64], 1, bidirectional=True)
    assert query_batch(table, context, [64], 1).max_query_len == 64


def test_p12_pads_have_no_slots() -> None:
    """Padded requests: no context, no pages, and rows only in a bidirectional block, which are not written."""
    table = torch.tensor([[2, 0], [-1, -1]])
    batch = query_batch(table, torch.tensor([3, 0]), [2, 2], 4, bidirectional=True)
    assert batch.slots.tolist() == [11, 0, -1, -1]


@pytest.mark.parametrize(
    ("table", "requests", "lengths", "message"),
    [
        ((2, 1), 3, [1, 1], "context_len"),
        ((3, 1), 2, [1, 1], "block_table"),
        ((2,), 2, [1, 1], "block_table"),
        ((2, 1), 2, [1, -1], "lengths"),
    ],
)
def test_bad_batches_raise(table: tuple[int, ...], requests: int, lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        query_batch(torch.zeros(table, dtype=torch.int64), torch.zeros(requests, dtype=torch.int64), lengths, 4)
