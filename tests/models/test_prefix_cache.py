"""Block tables, pages and two caches against a dense model of every request; read-only pages are held to their bits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from torch import Tensor

from dspark.models import block_table
from dspark.models.block_table import BlockTable, BlockTables
from dspark.models.cache import PagedCache, query_batch
from dspark.models.config import ModelConfig
from dspark.models.pool import PagePool, pages_for
from dspark.ops import append_kv, commit_kv, copy_pages
from dspark.ops.types import PagedKV
from tests.ops.cache.caches import rows_at
from tests.strategies import tree_parents

NUM_PAGES = 10
BLOCK = 3
"""Rows that the drafter writes past the committed tokens."""

TOKENS = st.integers(0, 1)
LAYERS = {"target": 2, "draft": 1}


def value(prefix: Sequence[int], layer: int, cache: str) -> float:
    """What a cache holds of a prefix's last token: a number of all its tokens, exact in float32."""
    return float(zlib.crc32(bytes([len(cache), layer, *prefix])) % 2**22)


@dataclass
class Live:
    """A request as the dense model has it: its tokens, and how many of them each cache holds."""

    table: BlockTable
    tokens: list[int]
    held: dict[str, int]


class CacheMachine(RuleBasedStateMachine):
    """Requests come, run rounds over trees, are forked, fall behind in one cache, and go."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(NUM_PAGES)
        self.tables = BlockTables(self.pool, page_size, ("target", "draft"))
        self.live: list[Live] = []
        self.caches = {
            name: PagedCache.allocate(ModelConfig(2, 2, 2, layers, 1, 1, 2), NUM_PAGES, page_size, torch.float32, "cpu")
            for name, layers in LAYERS.items()
        }

    # What an engine does

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=9), more=st.integers(0, 4), first=TOKENS, lags=st.booleans())
    def admit(self, prompt: list[int], more: int, first: int, lags: bool) -> None:
        free = self.pool.num_free
        table = self.tables.admit(prompt, len(prompt) + more)
        if table is None:
            assert pages_for(len(prompt) + more, self.page_size) > free or self.pool.num_free == free
            return
        assert table.hit % self.page_size == 0
        assert table.hit < len(prompt)
        request = Live(table, list(prompt), dict.fromkeys(LAYERS, table.hit))
        self.live.append(request)
        self.check(request)
        assert table.reserve(len(prompt))
        self.flush()
        self.fill("target", request, len(prompt))
        if not lags:
            self.fill("draft", request, len(prompt))
        request.tokens.append(first)
        request.table.commit([first], **request.held)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def round(self, data: st.DataObject) -> None:
        """Reserve for some requests, copy once, then let each verify a tree of which one path is accepted."""
        chosen = [request for request in self.live if data.draw(st.booleans())]
        trees = [data.draw(tree_parents(data.draw(st.integers(1, 5)))) for _ in chosen]
        ready = [
            (request, parents)
            for request, parents in zip(chosen, trees, strict=True)
            if request.table.reserve(request.held["target"] + max(len(parents), BLOCK))
        ]
        self.flush()
        for request, parents in ready:
            self.verify(request, parents, data)

    def verify(self, request: Live, parents: list[int], data: st.DataObject) -> None:
        context = request.held["target"]
        drafts = data.draw(st.lists(TOKENS, min_size=len(parents), max_size=len(parents)))
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        prefixes = [request.tokens + [drafts[node] for node in path[1:]] for path in paths]
        look_ahead = torch.full((BLOCK, 1, 2), float("nan"))
        self.write("draft", request, context, [look_ahead] * LAYERS["draft"])
        rows = [self.rows("target", prefixes, layer) for layer in range(LAYERS["target"])]
        batch = self.write("target", request, context, rows)

        path = paths[data.draw(st.integers(0, len(parents) - 1))]
        padded = torch.tensor([[*path, *[-1] * (len(parents) - len(path))]])
        stacked = self.caches["target"].stacked
        with self.spares_read_only_pages():
            rows = rows_at(torch.tensor([0, len(parents)]), batch, len(parents))
            commit_kv(stacked, padded, torch.tensor([len(path)]), rows, batch)
        request.held["target"] = context + len(path)
        new = [drafts[node] for node in path[1:]] + [data.draw(TOKENS)]
        caught_up = request.held["draft"] == context
        request.tokens += new
        if caught_up and data.draw(st.booleans()):
            self.fill("draft", request, context + len(path))
        request.table.commit(new, **request.held)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        """The drafter writes what it had skipped, maybe into a page that was shared meanwhile."""
        request = data.draw(st.sampled_from(self.live))
        if request.table.reserve(request.held["target"]):
            self.flush()
            self.fill("draft", request, request.held["target"])
            request.table.commit([], **request.held)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.append(Live(request.table.fork(), list(request.tokens), dict(request.held)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ends=st.booleans())
    def release_or_trim(self, data: st.DataObject, ends: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        if ends:
            request.table.release()
            self.live.remove(request)
        else:
            request.table.trim()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release_between_reserving_and_copying(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        for other in self.live:
            other.table.reserve(other.held["target"] + 1)
        request.table.release()
        self.live.remove(request)
        self.flush()

    # How it does it

    def flush(self) -> None:
        copies = self.tables.take_copies()
        if copies:
            source, target = torch.tensor(copies).T
            with self.spares_read_only_pages():
                for cache in self.caches.values():
                    copy_pages(cache.stacked, source, target)

    def fill(self, cache: str, request: Live, end: int) -> None:
        """Write the keys and values of committed tokens, as prefill and the drafter's ``extend`` do."""
        start = request.held[cache]
        prefixes = [request.tokens[: position + 1] for position in range(start, end)]
        if prefixes:
            rows = [self.rows(cache, prefixes, layer) for layer in range(LAYERS[cache])]
            self.write(cache, request, start, rows)
        request.held[cache] = end

    def rows(self, cache: str, prefixes: Sequence[Sequence[int]], layer: int) -> Tensor:
        numbers = torch.tensor([value(prefix, layer, cache) for prefix in prefixes])
        return torch.stack([numbers, numbers + 1], dim=1)[:, None]  # [n, 1, 2]

    def write(self, cache: str, request: Live, start: int, rows: Sequence[Tensor]) -> Tensor:
        """Write rows of every layer, from a position on; returns their slots."""
        table, context = torch.tensor([request.table.pages]), torch.tensor([start])
        slots = query_batch(table, context, [len(rows[0])], self.page_size).slots
        with self.spares_read_only_pages():
            for kv, new in zip(self.caches[cache].layers, rows, strict=True):
                append_kv(new, -new, kv, slots)
        return slots

    @contextmanager
    def spares_read_only_pages(self) -> Iterator[None]:
        """What several requests hold, or what is kept for others, has the same bits after a write as before it."""
        pages = [p for p in range(NUM_PAGES) if self.pool.is_kept(p) or self.pool.holders(p) > 1]

        def contents() -> list[Tensor]:
            stacks = [cache.stacked for cache in self.caches.values()]
            return [x[:, pages].view(torch.int32) for kv in stacks for x in (kv.k, kv.v)]

        before = contents()
        yield
        assert all(map(torch.equal, contents(), before)), "a read-only page was written"

    # What holds after every step

    def check(self, request: Live) -> None:
        """Every cache holds what the dense model says of every token that it is said to hold."""
        for name, length in request.held.items():
            slots = torch.tensor([p * self.page_size + i for p in request.table.pages for i in range(self.page_size)])
            prefixes = [request.tokens[: position + 1] for position in range(length)]
            for layer, kv in enumerate(self.caches[name].layers if length else []):
                expected = self.rows(name, prefixes, layer)
                assert torch.equal(kv.k.flatten(0, 1)[slots[:length]], expected), f"{name} holds something else"
                assert torch.equal(kv.v.flatten(0, 1)[slots[:length]], -expected), f"{name} holds something else"

    @invariant()
    def caches_hold_what_the_dense_model_does(self) -> None:
        for request in getattr(self, "live", []):
            assert request.table.tokens == request.tokens
            assert request.table.length == min(request.held.values())
            self.check(request)

    @invariant()
    def pages_are_counted(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = [page for request in self.live for page in request.table.pages]
        held += [source for source, _ in self.tables._copies]
        assert [held.count(page) for page in range(NUM_PAGES)] == [self.pool.holders(p) for p in range(NUM_PAGES)]
        assert self.pool.num_free == NUM_PAGES - len(set(held))


TestCaches = CacheMachine.TestCase
TestCaches.settings = settings(max_examples=40, stateful_step_count=50)


@pytest.mark.slow
def test_caches_for_long() -> None:
    run(CacheMachine, settings=settings(max_examples=1000, stateful_step_count=60))


take_copies = BlockTables.take_copies
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "look-ahead and appends go into shared pages": (BlockTables, "_is_writable", lambda self, page: True),
    "no copy before a write": (BlockTables, "take_copies", lambda self: take_copies(self) and []),
    "a page is kept when the target alone holds it": (BlockTable, "length", property(lambda x: max(x._held.values()))),
    "a page is known by its own tokens": (block_table, "page_key", lambda before, tokens: bytes(tokens)),
    "a page that was found is not held": (PagePool, "share", lambda self, pages: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_p09_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    quick = settings(max_examples=100, stateful_step_count=50, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, ValueError)):
        run(CacheMachine, settings=quick)


def tables_of(num_pages: int = 8, page_size: int = 4, **options: Any) -> BlockTables:
    return BlockTables(PagePool(num_pages), page_size, ("target", "draft"), **options)


def admitted(tables: BlockTables, prompt: Sequence[int], capacity: int | None = None) -> BlockTable:
    table = tables.admit(prompt, len(prompt) if capacity is None else capacity)
    assert table is not None
    return table


def ran(tables: BlockTables, prompt: Sequence[int], **held: int) -> None:
    """A request that ran its prompt and went."""
    table = admitted(tables, prompt)
    table.commit([], **(held or {"target": len(prompt), "draft": len(prompt)}))
    table.release()


LENGTHS = [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (20, 8)]
OTHERS = [([0, 1, 2, 3, 4, 5, 6, 6, 8], 4), ([9, 1, 2, 3, 4, 5, 6, 7, 8], 0)]


@pytest.mark.parametrize(("prompt", "hit"), [*((range(n), hit) for n, hit in LENGTHS), *OTHERS])
def test_p13_whole_pages_before_the_last_token_are_found(prompt: Sequence[int], hit: int) -> None:
    """Lengths at page boundaries and one beside them, and prompts with another token; eight tokens were run."""
    tables = tables_of()
    ran(tables, range(9))
    assert admitted(tables, prompt).hit == hit


def test_p09_a_prefix_that_one_cache_lacks_is_not_found() -> None:
    """The drafter's context would be missing for it: accepted lengths fall, and nothing else shows it."""
    tables = tables_of()
    ran(tables, range(9), target=9, draft=3)
    assert admitted(tables, range(9)).hit == 0
    ran(tables, range(9), target=9, draft=7)
    assert admitted(tables, range(9)).hit == 4


def test_the_longest_idle_page_goes_first_and_the_tail_before_the_prefix() -> None:
    tables = tables_of(num_pages=4)
    ran(tables, range(8))  # two pages are kept
    ran(tables, range(10, 15))  # one more
    first = admitted(tables, range(20, 26))  # takes the free page and the tail of the first prompt
    assert tables.admit(range(9), 12) is None
    first.release()
    table = admitted(tables, range(8))
    assert table.hit == 4
    table.release()
    assert admitted(tables, range(10, 15)).hit == 4


def test_nothing_is_kept_where_reuse_is_off() -> None:
    tables = tables_of(reuse=False)
    ran(tables, range(9))
    assert admitted(tables, range(9)).hit == 0
    assert tables.pool.num_free == 8 - 3


def test_a_refused_request_takes_nothing() -> None:
    tables = tables_of(num_pages=3)
    ran(tables, range(9))
    assert tables.admit(range(9), 13) is None
    assert tables.pool.num_free == 3
    table = admitted(tables, range(9), 12)
    assert not table.reserve(13)
    assert len(table.pages) == 3


def test_p09_look_ahead_never_lies_in_a_shared_page() -> None:
    """Of a fork in the middle of a page the first to write gets a copy, the second writes in place."""
    tables = tables_of()
    table = admitted(tables, range(6))
    table.commit([9], target=6, draft=6)
    fork = table.fork()
    assert fork.pages == table.pages
    shared = list(table.pages)
    assert table.reserve(10)
    assert fork.reserve(10)
    assert tables.take_copies() == [(shared[1], table.pages[1])]
    assert table.pages[0] == fork.pages[0] == shared[0]
    assert fork.pages[1] == shared[1] != table.pages[1]
    assert len({*table.pages[1:], *fork.pages[1:]}) == 4


def test_a_shared_page_without_tokens_is_replaced_and_not_copied() -> None:
    tables = tables_of()
    table = admitted(tables, range(4), 8)
    table.commit([9], target=4, draft=4)
    fork = table.fork()
    assert len(fork.pages) == 1
    assert fork.reserve(6)
    assert tables.take_copies() == []
    table.trim()
    assert len(table.pages) == 1


def test_rejected_tokens_need_no_call() -> None:
    """Rollback is bookkeeping: the next round writes over what was not accepted, in pages that are there already."""
    tables = tables_of()
    table = admitted(tables, range(3))
    table.commit([7], target=3, draft=3)
    assert table.reserve(3 + 6)
    pages = list(table.pages)
    table.commit([8], target=4, draft=4)  # one of six rows was accepted
    assert table.reserve(4 + 5)
    assert table.pages == pages
    assert tables.take_copies() == []


def test_p12_rows_past_the_reserved_pages_have_no_slot() -> None:
    tables = tables_of()
    table = admitted(tables, range(7))
    slots = query_batch(torch.tensor([table.pages]), torch.tensor([6]), [4], 4).slots.tolist()
    assert slots[2:] == [-1, -1]
    assert table.reserve(10)
    slots = query_batch(torch.tensor([table.pages]), torch.tensor([6]), [4], 4).slots.tolist()
    assert slots == [table.pages[1] * 4 + 2, table.pages[1] * 4 + 3, table.pages[2] * 4, table.pages[2] * 4 + 1]


def test_wrong_arguments_raise() -> None:
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page_size must be positive, got 0"):
        BlockTables(pool, 0)
    with pytest.raises(ValueError, match=r"caches: expected distinct names, at least one, got \[\]"):
        BlockTables(pool, 4, ())
    tables = tables_of()
    with pytest.raises(ValueError, match="capacity: expected at least the prompt's 3 tokens, got 2"):
        tables.admit(range(3), 2)
    table = admitted(tables, range(3))
    table.commit([4], target=3)
    for held in ({"other": 1}, {"target": 2}, {"target": 5}):
        with pytest.raises(ValueError, match="expected no fewer than before"):
            table.commit([], **held)


def test_a_float8_cache_has_scales_of_every_layer() -> None:
    cache = PagedCache.allocate(ModelConfig(2, 2, 2, 3, 2, 2, 4), 2, 4, torch.float8_e4m3fn, "cpu")
    layer: PagedKV = cache.layers[1]
    assert layer.k_scale is not None
    assert layer.k_scale.tolist() == [1.0, 1.0]
    assert cache.stacked.k_scale is None
