"""Verify attention against torch's own attention in float64, and what must not leak into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.attention import verify_attention
from dspark.ops.types import PagedKV, QueryBatch
from tests.ops.attention.paged import Heads, Kind, Paged, Request, dense_attention, make_paged, make_requests
from tests.tolerances import ATTENTION

INF = float("inf")
NAN = float("nan")


def attend(case: Paged, **options: Any) -> tuple[Tensor, Tensor]:
    return verify_attention(case.q, case.kv, case.batch, return_lse=True, **options)


def check(requests: Sequence[Request], case: Paged, **options: Any) -> None:
    """The op's output and log-sum-exp equal the dense ones, and padded rows are empty."""
    out, lse = attend(case, **options)
    dense = [dense_attention(r, **options) for r in requests]
    count = sum(len(r.q) for r in requests)
    torch.testing.assert_close(out[:count].double(), torch.cat([o for o, _ in dense]), atol=ATTENTION, rtol=0)
    torch.testing.assert_close(lse[:count].double(), torch.cat([s for _, s in dense]), atol=ATTENTION, rtol=0)
    assert (out[count:] == 0).all()
    assert (lse[count:] == -INF).all()
    assert out.shape == case.q.shape


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.4},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "soft-cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"scale": 0.4, "window": 9, "soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_equals_dense_attention(kind: Kind, options: dict[str, Any]) -> None:
    requests = make_requests([0, 7, 33, 16], [8, 1, 6, 0], kind)
    check(requests, make_paged(requests, pad_rows=3, pad_columns=1), **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_prefill_chain_longer_than_an_ancestor_word(options: dict[str, Any]) -> None:
    requests = make_requests([0, 21], [70, 90])
    check(requests, make_paged(requests, pad_rows=2), **options)


@pytest.mark.parametrize("heads", [Heads(3, 3), Heads(4, 2), Heads(8, 1), Heads(6, 2, dim=8)], ids=str)
def test_head_groups(heads: Heads) -> None:
    requests = make_requests([5, 20], [4, 3], heads=heads)
    check(requests, make_paged(requests))


@pytest.mark.parametrize("kind", ["tree", "block"])
def test_sixty_four_rows_use_the_sign_bit(kind: Kind) -> None:
    requests = make_requests([3], [64], kind)
    check(requests, make_paged(requests))


def test_a_chain_by_ancestor_bits_is_a_chain() -> None:
    requests = make_requests([3, 18], [8, 5])
    case = make_paged(requests)
    rows = torch.cat([torch.arange(8), torch.arange(5)])
    by_bits = replace(case, batch=case.batch._replace(ancestors=(2 << rows) - 1))
    for window in (0, 4):
        torch.testing.assert_close(attend(by_bits, window=window), attend(case, window=window), atol=0, rtol=0)


@given(data=st.data())
def test_ragged_batches(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 16, 32]))
    edges = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size]
    count = data.draw(st.integers(1, 4))
    contexts = data.draw(
        st.lists(st.one_of(st.sampled_from(edges), st.integers(0, 70)), min_size=count, max_size=count)
    )
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any))
    requests = make_requests(
        contexts,
        lengths,
        data.draw(st.sampled_from(["chain", "tree", "block"])),
        data.draw(st.sampled_from([Heads(2, 2), Heads(4, 2), Heads(3, 1)])),
        seed=data.draw(st.integers(0, 999)),
    )
    case = make_paged(
        requests,
        page_size,
        pad_rows=data.draw(st.integers(0, 2)),
        pad_columns=data.draw(st.integers(0, 2)),
        poison=data.draw(st.sampled_from([NAN, INF, -INF])),
    )
    sinks = torch.linspace(-1, 1, requests[0].q.shape[1]) if data.draw(st.booleans()) else None
    check(
        requests,
        case,
        window=data.draw(st.sampled_from([0, 1, 3, 40])),
        soft_cap=data.draw(st.sampled_from([0.0, 2.0])),
        sinks=sinks,
    )


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_p13_page_boundaries(kind: Kind, page_size: int) -> None:
    """The context ends, and the rows end, one before, at and one after a page's edge; the widest fills its table."""
    contexts = [max(0, 2 * page_size + d) for d in (-1, 0, 1)] + [2 * page_size - 4 + d for d in (-1, 0, 1)]
    contexts = [max(0, c) for c in contexts]
    requests = make_requests(contexts, [4] * 6, kind)
    check(requests, make_paged(requests, page_size, spare_pages=0))
    full = make_requests([3 * page_size - 1], [1], kind)
    case = make_paged(full, page_size, spare_pages=0)
    assert case.batch.block_table.shape[1] == 3
    check(full, case)


@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_p12_what_is_unused_is_never_read(kind: Kind) -> None:
    """Stale slots, spare pages and padded rows: bit for bit the same whatever they hold."""
    requests = make_requests([0, 5, 31], [3, 0, 4], kind)
    clean = attend(make_paged(requests, pad_rows=2, pad_columns=1, poison=0.0), window=6)
    for poison in (NAN, INF, -INF, 1e30):
        dirty = attend(make_paged(requests, pad_rows=2, pad_columns=1, poison=poison), window=6)
        torch.testing.assert_close(dirty, clean, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
@pytest.mark.parametrize(("side", "bad"), [("k", NAN), ("v", NAN), ("v", INF), ("v", -INF)])
def test_a_bad_row_reaches_only_those_who_see_it(kind: Kind, side: str, bad: float) -> None:
    requests = make_requests([9, 4], [6, 3], kind)
    case = make_paged(requests, pad_rows=1)
    before = attend(case)
    seen = torch.tensor([j in r.ancestors(i) for r, j in zip(requests, (3, -1), strict=True) for i in range(len(r.q))])
    seen = torch.cat([seen, torch.tensor([False])])
    spoiled = getattr(case.kv, side).clone()
    spoiled.view(-1, *spoiled.shape[2:])[case.batch.slots[3], 1, 0] = bad
    after = attend(replace(case, kv=case.kv._replace(**{side: spoiled})))
    for x, y in zip(after, before, strict=True):
        torch.testing.assert_close(x[~seen], y[~seen], atol=0, rtol=0)
        # Query heads 2 and 3 read the spoiled key head.
        torch.testing.assert_close(x[seen][:, :2], y[seen][:, :2], atol=0, rtol=0)
        assert x[seen][:, 2:].isnan().all()


def test_a_missing_page_inside_the_context_is_not_seen() -> None:
    """As when pages that slid out of a window were freed."""
    requests = make_requests([40, 20], [3, 2])
    case = make_paged(requests)
    table = case.batch.block_table.clone()
    table[0, 1] = -1
    out = verify_attention(case.q, case.kv, case.batch._replace(block_table=table))
    visible = requests[0].visible()
    visible[:, 16:32] = False
    expected = torch.cat([dense_attention(requests[0], visible=visible)[0], dense_attention(requests[1])[0]])
    torch.testing.assert_close(out.double(), expected, atol=ATTENTION, rtol=0)


def test_rows_that_see_nothing_are_zero() -> None:
    requests = make_requests([0, 6], [3, 2], "tree")
    case = make_paged(requests)
    assert case.batch.ancestors is not None
    words = case.batch.ancestors.clone()
    words[1] = 0
    case = replace(case, batch=case.batch._replace(ancestors=words))
    out, lse = attend(case)
    assert (out[1] == 0).all()
    assert (lse[1] == -INF).all()
    assert (out[[0, 2, 3, 4]] != 0).all()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = attend(case, sinks=sinks)
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[1], sinks)


def test_no_rows_no_requests_no_pages() -> None:
    case = make_paged(make_requests([5], [2]))
    nothing = case.batch._replace(positions=case.batch.positions[:0], slots=case.batch.slots[:0])
    out, lse = attend(Paged(case.q[:0], case.kv, nothing))
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))
    nobody = QueryBatch(
        query_start=torch.tensor([0]),
        context_len=torch.empty(0, dtype=torch.int64),
        block_table=torch.empty(0, 3, dtype=torch.int64),
        positions=torch.tensor([0, 0]),
        slots=torch.tensor([-1, -1]),
        ancestors=None,
        max_query_len=0,
    )
    assert (verify_attention(case.q, case.kv, nobody) == 0).all()
    empty = make_requests([0, 0], [0, 1])
    check(empty, make_paged(empty))


def test_relabelled_pages_change_nothing() -> None:
    requests = make_requests([0, 19, 40], [4, 2, 5], "tree")
    case = make_paged(requests, pad_columns=1)
    new = torch.randperm(case.kv.k.shape[0], generator=torch.Generator().manual_seed(7))
    k, v = torch.empty_like(case.kv.k), torch.empty_like(case.kv.v)
    k[new], v[new] = case.kv.k, case.kv.v
    table = torch.where(case.batch.block_table < 0, -1, new[case.batch.block_table])
    moved = replace(case, kv=PagedKV(k, v), batch=case.batch._replace(block_table=table))
    torch.testing.assert_close(attend(moved), attend(case), atol=0, rtol=0)


def test_requests_may_share_pages() -> None:
    """A cached prefix: the second request's first page is the first's."""
    one, two = make_requests([16, 20], [2, 3])
    two = replace(two, k=torch.cat([one.k[:16], two.k[16:]]), v=torch.cat([one.v[:16], two.v[16:]]))
    case = make_paged([one, two])
    table = case.batch.block_table.clone()
    table[1, 0] = table[0, 0]
    check([one, two], replace(case, batch=case.batch._replace(block_table=table)))


def test_every_path_of_a_tree_is_the_chain_of_that_path() -> None:
    tree = make_requests([13], [12], "tree", seed=3)[0]
    case = make_paged([tree])
    for window in (0, 4):
        whole = verify_attention(case.q, case.kv, case.batch, window=window)
        for leaf in range(len(tree.parents)):
            path = sorted(tree.ancestors(leaf))
            keep = [*range(tree.context), *(tree.context + j for j in path)]
            chain = Request(tree.q[path], tree.k[keep], tree.v[keep], [i - 1 for i in range(len(path))], "chain")
            alone = make_paged([chain])
            out = verify_attention(alone.q, alone.kv, alone.batch, window=window)
            torch.testing.assert_close(out, whole[path], atol=ATTENTION, rtol=0)


@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_batch_composition_changes_nothing(kind: Kind) -> None:
    requests = make_requests([0, 37, 5, 16], [3, 8, 0, 1], kind)
    together = make_paged(requests, pad_columns=2)
    parts = verify_attention(together.q, together.kv, together.batch).split([3, 8, 0, 1])
    for order in ([2, 1, 3, 0], [1], [3, 1]):
        case = make_paged([requests[i] for i in order], seed=5, pad_rows=1)
        out = verify_attention(case.q, case.kv, case.batch)[:-1]
        torch.testing.assert_close(out, torch.cat([parts[i] for i in order]), atol=ATTENTION, rtol=0)


def test_float8_is_multiplied_by_its_scales() -> None:
    requests = make_requests([20, 3], [5, 2], "tree")
    case = make_paged(requests, poison=1.0)
    k, v = (x.to(torch.float8_e4m3fn) for x in (case.kv.k, case.kv.v))
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])
    exact = PagedKV(k.float() * k_scale[:, None], v.float() * v_scale[:, None])
    out = attend(replace(case, kv=PagedKV(k, v, k_scale, v_scale)))
    torch.testing.assert_close(out, attend(replace(case, kv=exact)), atol=ATTENTION, rtol=0)
    torch.testing.assert_close(
        attend(replace(case, kv=PagedKV(k, v))), attend(replace(case, kv=PagedKV(k.float(), v.float()))), atol=0, rtol=0
    )


def test_results_go_where_they_are_asked_for() -> None:
    case = make_paged(make_requests([5, 33], [2, 4]), pad_rows=1)
    expected, expected_lse = attend(case)
    given, given_lse = torch.full_like(expected, NAN), torch.full_like(expected_lse, NAN)
    out, lse = attend(case, out=given, lse=given_lse)
    assert out is given
    assert lse is given_lse
    torch.testing.assert_close((out, lse), (expected, expected_lse), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_only_at_the_end(dtype: torch.dtype) -> None:
    case = make_paged(make_requests([20], [5]))
    half = PagedKV(case.kv.k.to(dtype), case.kv.v.to(dtype))
    exact = verify_attention(case.q.to(dtype).float(), PagedKV(half.k.float(), half.v.float()), case.batch)
    out, lse = verify_attention(case.q.to(dtype), half, case.batch, return_lse=True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, exact.to(dtype), atol=0, rtol=0)


def test_caches_may_be_strided_views_and_tables_int32() -> None:
    requests = make_requests([5, 33], [2, 4], "tree")
    case = make_paged(requests)
    both = torch.stack([case.kv.k, case.kv.v], dim=1)  # [P, 2, S, Hkv, D]
    table, start, context = case.batch.block_table.int(), case.batch.query_start.int(), case.batch.context_len.int()
    batch = case.batch._replace(block_table=table, query_start=start, context_len=context)
    check(requests, Paged(case.q, PagedKV(both[:, 0], both[:, 1]), batch), window=6)


def test_p06_offsets_beyond_32_bits() -> None:
    """The second page lies more than 2^31 elements after the first; only what is touched takes memory."""
    requests = make_requests([12], [2], heads=Heads(2, 1, 8))
    case = make_paged(requests, page_size=8, spare_pages=0)
    far = []
    for pages in (case.kv.k, case.kv.v):
        storage = torch.empty(2**31 + pages[0].numel(), dtype=torch.float16)
        view = storage.as_strided(pages.shape, (2**31, *pages.stride()[1:]))
        view.copy_(pages)
        far.append(view)
    out = verify_attention(case.q, PagedKV(*far), case.batch)
    near = PagedKV(case.kv.k.half(), case.kv.v.half())
    torch.testing.assert_close(out, verify_attention(case.q, near, case.batch), atol=0, rtol=0)


def test_inputs_are_left_alone() -> None:
    case = make_paged(make_requests([5, 33], [2, 4]), pad_rows=1, poison=1.0)
    saved = [x.clone() for x in (case.q, case.kv.k, case.kv.v)]
    attend(case, window=3, soft_cap=2.0, sinks=torch.zeros(4))
    for x, y in zip((case.q, case.kv.k, case.kv.v), saved, strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=0)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "head groups": ({"q": torch.zeros(5, 3, 16)}, "q: expected Hq to be a multiple of Hkv = 2"),
    "wide heads": (
        {"q": torch.zeros(5, 4, 257), **dict.fromkeys("kv", torch.zeros(4, 16, 2, 257))},
        "q: expected D <= 256",
    ),
    "too many rows": (
        {"ancestors": torch.zeros(5).long(), "max_query_len": 65},
        "batch.max_query_len: the ancestor words name at most 64 rows of a request, got 65",
    ),
    "too few words": (
        {"ancestors": torch.zeros(5, 2).long(), "max_query_len": 129},
        "batch.max_query_len: the ancestor words name at most 128 rows of a request, got 129",
    ),
    "scale": (
        dict.fromkeys(("k_scale", "v_scale"), torch.ones(2)),
        "kv.k_scale: only a float8_e4m3fn cache has scales",
    ),
    "one scale": (
        {**dict.fromkeys("kv", torch.zeros(4, 16, 2, 16).to(torch.float8_e4m3fn)), "k_scale": torch.ones(2)},
        'kv.v_scale: expected shape "Hkv", as the other scale has',
    ),
    "no multiprocessors": ({"split": "occupancy"}, "num_sms: expected a positive number"),
    "unused multiprocessors": ({"num_sms": 132}, "num_sms: expected .*, None for others, got 132"),
    "chunk": ({"chunk": 100}, "chunk: expected a multiple of 64, for split 'fixed' only, got 100"),
    "unused chunk": ({"chunk": 64, "split": "occupancy", "num_sms": 8}, "chunk: expected a multiple of 64"),
    "unused lse": ({"lse": torch.zeros(5, 4)}, "lse: expected None without return_lse"),
    "soft cap": ({"soft_cap": -1.0}, "soft_cap: expected at least 0, got -1.0"),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_what_the_declaration_does_not_say(changes: dict[str, Any], message: str) -> None:
    case = make_paged(make_requests([5, 20], [2, 3]))
    in_batch = {name: value for name, value in changes.items() if name in case.batch._fields}
    in_kv = {name: value for name, value in changes.items() if name in case.kv._fields}
    options = {name: value for name, value in changes.items() if name not in {*in_batch, *in_kv, "q"}}
    q, kv, batch = changes.get("q", case.q), case.kv._replace(**in_kv), case.batch._replace(**in_batch)
    with pytest.raises(ValueError, match=message):
        verify_attention(q, kv, batch, **options)
