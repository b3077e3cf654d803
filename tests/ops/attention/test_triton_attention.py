"""The kernels of ``verify_attention`` in Triton's interpreter: what the reference and torch's own attention give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.attention import verify_attention
from dspark.ops.attention.launch import AttentionConfig
from dspark.ops.launch import padded
from dspark.ops.op import OPS
from dspark.ops.types import PagedKV, QueryBatch
from dspark.testing.guards import guarded, poisoned_empty
from tests.ops.attention.paged import Heads, Kind, Paged, Request, dense_attention, make_paged, make_requests
from tests.strategies import TreeCase, paged_trees
from tests.tolerances import ATTENTION, ONE_ULP

pytestmark = pytest.mark.triton

INF = float("inf")
NAN = float("nan")
SMALL = Heads(2, 1, 8)
SINKS = torch.tensor([0.5, -1.0])


def tiny(head_dim: int = 8, *, lines: int = 16, chunk: int = 32) -> AttentionConfig:
    """16 lines and keys a tile, so that a few tokens make several tiles and chunks."""
    return AttentionConfig(lines, 16, max(16, head_dim), 2, chunk, num_warps=4, num_stages=2)


def attend(
    case: Paged,
    config: AttentionConfig | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the kernels write, into memory that holds what they would not."""
    out = torch.full_like(case.q, 77.0) if out is None else out
    lse = torch.full(case.q.shape[:2], 77.0) if lse is None else lse
    values = (case.q, case.kv, case.batch, scale, window, soft_cap, sinks, True, "fixed", None, None, out, lse)
    config = config or tiny(case.q.shape[2])
    result: tuple[Tensor, Tensor] = OPS["verify_attention"]("triton", *values, workspace=workspace, config=config)
    assert (result[0] is out, result[1] is lse) == (True, True)
    return result


def assert_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


def assert_agrees(case: Paged, config: AttentionConfig | None = None, **options: Any) -> None:
    """The kernels give what the reference gives, and leave nothing unwritten."""
    expected = verify_attention(case.q, case.kv, case.batch, return_lse=True, backend="reference", **options)
    torch.testing.assert_close(attend(case, config, **options), expected, atol=ATTENTION, rtol=0)


def assert_dense(requests: Sequence[Request], case: Paged, config: AttentionConfig | None, **options: Any) -> None:
    """The kernels give what torch's attention gives in float64 on dense copies."""
    out, lse = attend(case, config, **options)
    dense = [dense_attention(request, **options) for request in requests]
    count = sum(len(request.q) for request in requests)
    torch.testing.assert_close(out[:count].double(), torch.cat([o for o, _ in dense]), atol=ATTENTION, rtol=0)
    torch.testing.assert_close(lse[:count].double(), torch.cat([s for _, s in dense]), atol=ATTENTION, rtol=0)
    assert (out[count:] == 0).all()
    assert (lse[count:] == -INF).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "all": {"scale": 0.4, "window": 19, "soft_cap": 2.0, "sinks": SINKS},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_equals_dense_attention(kind: Kind, options: dict[str, Any]) -> None:
    requests = make_requests([0, 37, 12], [5, 3, 0], kind, SMALL)
    case = make_paged(requests, 4, pad_rows=2, pad_columns=1)
    assert_dense(requests, case, None, **options)


@settings(max_examples=10)
@given(data=st.data())
def test_ragged_batches_agree_with_the_reference(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 4, 16, 32]))
    edges = [e for p in (page_size, 16, 32) for e in (p - 1, p, p + 1)]
    count = data.draw(st.integers(1, 2))
    contexts = data.draw(st.lists(st.sampled_from([0, *edges, 50]), min_size=count, max_size=count))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count).filter(any))
    heads = data.draw(st.sampled_from([Heads(2, 2, 8), SMALL, Heads(3, 1, 16)]))
    kind = data.draw(st.sampled_from(["chain", "tree", "block"]))
    requests = make_requests(contexts, lengths, kind, heads, seed=data.draw(st.integers(0, 999)))
    case = make_paged(
        requests,
        page_size,
        pad_rows=data.draw(st.integers(0, 2)),
        pad_columns=data.draw(st.integers(0, 1)),
        poison=data.draw(st.sampled_from([NAN, INF, -INF])),
    )
    assert_agrees(
        case,
        tiny(heads.dim, chunk=data.draw(st.sampled_from([0, 16, 32]))),
        window=data.draw(st.sampled_from([0, 0, 1, 3, 20])),
        soft_cap=data.draw(st.sampled_from([0.0, 2.0])),
        sinks=torch.linspace(-1, 1, heads.queries) if data.draw(st.booleans()) else None,
    )


@settings(max_examples=4)
@given(case=paged_trees(max_requests=2, max_nodes=4))
def test_drawn_trees_agree_with_the_reference(case: TreeCase) -> None:
    assert_agrees(case.paged, tiny(case.paged.q.shape[2]))


PAGE_SIZES = [1, 16, 32, 64, 128, 256]
HEADS = [Heads(2, 2, 64), Heads(5, 1, 80), Heads(3, 1, 96), Heads(4, 2, 128), Heads(2, 1, 256)]


@pytest.mark.parametrize(
    ("page_size", "heads"),
    [
        pytest.param(size, heads, marks=() if (i + j) % 5 == 0 else pytest.mark.slow)
        for i, size in enumerate(PAGE_SIZES)
        for j, heads in enumerate(HEADS)
    ],
    ids=str,
)
def test_page_sizes_and_heads_that_ship(page_size: int, heads: Heads) -> None:
    """With the tiles that are launched."""
    requests = make_requests([70], [3], "tree", heads)
    case = make_paged(requests, page_size, spare_pages=0)
    out, lse = verify_attention(case.q, case.kv, case.batch, return_lse=True, chunk=64, backend="triton")
    dense, dense_lse = dense_attention(requests[0])
    torch.testing.assert_close((out.double(), lse.double()), (dense, dense_lse), atol=ATTENTION, rtol=0)


@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_sixty_four_rows_and_several_blocks_of_lines(kind: Kind) -> None:
    requests = make_requests([9], [64], kind, Heads(3, 1, 8))
    assert_dense(requests, make_paged(requests, 32), tiny(lines=64, chunk=0))


@pytest.mark.parametrize(("nodes", "num_words"), [(100, 2), pytest.param(256, 4, marks=pytest.mark.slow)])
def test_large_trees_have_several_words(nodes: int, num_words: int) -> None:
    """Words are cut at any alignment by the tiles of keys."""
    requests = make_requests([39], [nodes], "tree", SMALL)
    case = make_paged(requests, 16, num_words=num_words)
    assert_dense(requests, case, replace(tiny(lines=128, chunk=0), block_keys=64))
    assert_agrees(case, tiny(lines=128, chunk=0), window=7)


def test_prefill_is_the_same_call() -> None:
    """Tiles that every row of a block sees are taken whole, also those of the chain itself."""
    requests = make_requests([21], [50], "chain", SMALL)
    case = make_paged(requests, 16, pad_rows=1)
    for window in (0, 30):
        assert_dense(requests, case, tiny(chunk=0), window=window)


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.float32)],
)
def test_half_precision(dtype: torch.dtype, cache: torch.dtype) -> None:
    case = make_paged(make_requests([37], [3], "tree", SMALL))
    case = Paged(case.q.to(dtype), PagedKV(case.kv.k.to(cache), case.kv.v.to(cache)), case.batch)
    out, lse = attend(case)
    expected, expected_lse = verify_attention(case.q, case.kv, case.batch, return_lse=True, backend="reference")
    tolerance = ONE_ULP[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(out, expected, atol=ATTENTION, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=ATTENTION, rtol=0)


@pytest.mark.parametrize("scaled", [True, False])
def test_float8(scaled: bool) -> None:
    case = make_paged(make_requests([37], [3], "tree", Heads(4, 2, 8)))
    k, v = (x.to(torch.float8_e4m3fn) for x in (case.kv.k, case.kv.v))
    scales = (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])) if scaled else (None, None)
    case = replace(case, kv=PagedKV(k, v, *scales))
    assert_agrees(case)
    assert_agrees(case, tiny(chunk=0))


def test_every_byte_of_float8_is_decoded() -> None:
    """All 256 of them as values, each seen alone; two are NaN."""
    bits = torch.arange(256, dtype=torch.uint8).view(16, 16)
    v = bits.view(torch.float8_e4m3fn).view(16, 1, 1, 16)
    k = torch.zeros(16, 1, 1, 16).to(torch.float8_e4m3fn)
    batch = QueryBatch(
        query_start=torch.arange(17),
        context_len=torch.zeros(16, dtype=torch.int64),
        block_table=torch.arange(16).view(16, 1),
        positions=torch.zeros(16, dtype=torch.int64),
        slots=torch.zeros(16, dtype=torch.int64),
        ancestors=None,
        max_query_len=1,
    )
    case = Paged(torch.zeros(16, 1, 16), PagedKV(k, v), batch)
    (out, _), values = attend(case), v.float().view(16, 1, 16)
    bad = values.isnan().any(-1, keepdim=True).expand_as(values)
    assert_same_bits([out], [torch.where(bad, NAN, values)])


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_p13_page_and_chunk_boundaries(kind: Kind) -> None:
    """The context ends, and the rows end, one before, at and one after the edge of a page that is a chunk's too."""
    for context in (28, 29, 30, 31, 32, 33):
        requests = make_requests([context], [3], kind, SMALL)
        assert_dense(requests, make_paged(requests, 16, spare_pages=0), None)
    full = make_requests([63], [1], kind, SMALL)
    assert_dense(full, make_paged(full, 16, spare_pages=0), None)


@pytest.mark.parametrize(("kind", "page_size"), [("chain", 1), ("tree", 16)])
def test_p12_what_is_unused_is_never_read(kind: Kind, page_size: int) -> None:
    """P7 too: tables are padded with -1. Bit for bit the same whatever stale slots and padded rows hold."""
    requests = make_requests([35, 5], [2, 1], kind, SMALL)
    clean = attend(make_paged(requests, page_size, pad_rows=2, pad_columns=1, poison=0.0), window=6)
    for poison in (NAN, 1e30):
        dirty = make_paged(requests, page_size, pad_rows=2, pad_columns=1, poison=poison)
        assert_same_bits(attend(dirty, window=6), clean)


@pytest.mark.parametrize("page_size", [4, 16])
def test_p07_a_missing_page_inside_the_context_is_not_seen(page_size: int) -> None:
    """As when pages that slid out of a window were freed; page 0 then belongs to somebody else, and may hold NaN."""
    requests = make_requests([40], [3], "tree", SMALL)
    case = make_paged(requests, page_size)
    table = case.batch.block_table.clone()
    freed = table[0, 16 // page_size].item()
    table[0, 16 // page_size] = -1
    case.kv.k[freed], case.kv.v[freed] = NAN, NAN
    case.kv.k[0 if freed else 1, 0], case.kv.v[0 if freed else 1, 0] = case.kv.k[0 if freed else 1, 0], NAN
    case = replace(case, batch=case.batch._replace(block_table=table))
    expected = verify_attention(case.q, case.kv, case.batch, backend="reference")
    torch.testing.assert_close(attend(case)[0], expected, atol=ATTENTION, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("side", "bad"), [("k", NAN), ("v", NAN), ("v", INF), ("v", -INF)])
@pytest.mark.parametrize(("kind", "place"), [("tree", 0), ("tree", 38), ("chain", 37)])
def test_a_bad_row_reaches_only_those_who_see_it(kind: Kind, place: int, side: str, bad: float) -> None:
    """Among committed tokens, that all see, and among the rows."""
    requests = make_requests([35, 20], [4, 1], kind, Heads(2, 2, 8), seed=1)
    case, config = make_paged(requests, 16), tiny(chunk=0 if kind == "chain" else 32)
    before = attend(case, config)
    ancestors = [requests[0].ancestors(i) for i in range(4)]
    seen = torch.tensor([*(place < 35 or place - 35 in row for row in ancestors), False])
    assert 0 < seen.sum() < (5 if place else 6)
    spoiled = getattr(case.kv, side).clone()
    spoiled[case.batch.block_table[0, place // 16], place % 16, 1, 0] = bad
    after = attend(replace(case, kv=case.kv._replace(**{side: spoiled})), config)
    assert_same_bits([x[~seen] for x in after], [x[~seen] for x in before])
    assert_same_bits([x[seen][:, 0] for x in after], [x[seen][:, 0] for x in before])
    assert all(x[seen][:, 1].isnan().all() for x in after)


def test_rows_that_see_nothing_are_zero() -> None:
    case = make_paged(make_requests([0, 6], [3, 2], "tree", SMALL))
    assert case.batch.ancestors is not None
    words = case.batch.ancestors.clone()
    words[1] = 0
    case = replace(case, batch=case.batch._replace(ancestors=words))
    out, lse = attend(case)
    assert (out[1] == 0).all()
    assert (lse[1] == -INF).all()
    assert (out[[0, 2, 3, 4]] != 0).all()
    out, lse = attend(case, sinks=SINKS)
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[1], SINKS)


def test_no_rows_no_requests_no_pages() -> None:
    case = make_paged(make_requests([5], [2], heads=SMALL))
    rows = {name: getattr(case.batch, name)[:0] for name in ("positions", "slots")}
    none = Paged(case.q[:0], case.kv, case.batch._replace(**rows))
    assert attend(none)[0].shape == (0, 2, 8)
    integers = torch.zeros(2, dtype=torch.int64)
    nobody = QueryBatch(integers[:1], integers[:0], integers.view(2, 1)[:0], integers, integers, None, 0)
    out, lse = attend(Paged(case.q, case.kv, nobody))
    assert (out == 0).all()
    assert (lse == -INF).all()
    idle = nobody._replace(query_start=integers, context_len=integers[:1], block_table=integers.view(1, 2))
    out, lse = attend(Paged(case.q, case.kv, idle))
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_strided_views_and_int32_tables() -> None:
    requests = make_requests([35], [4], "tree", SMALL)
    case = make_paged(requests)
    both = torch.stack([case.kv.k, case.kv.v], dim=1)  # [P, 2, S, Hkv, D]
    integers = ("block_table", "query_start", "context_len", "positions")
    batch = case.batch._replace(**{name: getattr(case.batch, name).int() for name in integers})
    wide = torch.zeros(4, 3, 8)
    wide[:, :2] = case.q
    assert_dense(requests, Paged(wide[:, :2], PagedKV(both[:, 0], both[:, 1]), batch), None, window=6)


def test_p06_offsets_beyond_32_bits() -> None:
    """The second page lies more than 2^31 elements after the first; only what is touched takes memory."""
    requests = make_requests([12], [2], heads=SMALL)
    case = make_paged(requests, page_size=8, spare_pages=0)
    far = []
    for pages in (case.kv.k, case.kv.v):
        view = torch.empty(2**31 + pages[0].numel(), dtype=torch.float16).as_strided(
            pages.shape, (2**31, *pages.stride()[1:])
        )
        far.append(view.copy_(pages))
    near = PagedKV(case.kv.k.half(), case.kv.v.half())
    assert_same_bits(attend(replace(case, kv=PagedKV(*far))), attend(replace(case, kv=near)))


LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "values of other strides": ({"v": torch.zeros(16, 7, 1, 8).transpose(0, 1)}, "kv.v: the kernels need the strides"),
    "small workspace": ({"workspace": torch.zeros(8, dtype=torch.uint8)}, r'workspace: expected shape "bytes" with'),
}


@pytest.mark.parametrize(("changes", "message"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_that_the_kernels_cannot_read(changes: dict[str, Any], message: str) -> None:
    case = make_paged(make_requests([70], [2], heads=SMALL))
    kv = case.kv._replace(v=changes.get("v", case.kv.v))
    workspace = changes.get("workspace")
    with pytest.raises(ValueError, match=message):
        verify_attention(case.q, kv, case.batch, chunk=64, workspace=workspace, backend="triton")


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_all_of_the_result_is_written_and_nothing_else(kind: Kind) -> None:
    """Inputs and outputs lie between canaries; what the allocator gives holds NaN."""
    case = make_paged(make_requests([37, 5], [2, 3], kind, SMALL), pad_rows=2)
    expected = attend(case)
    q, k, v = guarded(case.q, row_gap=8), guarded(case.kv.k), guarded(case.kv.v)
    with poisoned_empty():
        out, lse = guarded(torch.empty_like(case.q)), guarded(torch.empty(case.q.shape[:2]))
        chunks = tiny().chunks(case.batch.block_table.shape[1] * 16)
        floats = 2 * padded(7 * 2 * chunks) + padded(7 * 2 * chunks * 8)
        workspace = guarded(torch.empty(4 * floats, dtype=torch.uint8))
    moved = Paged(q.tensor, PagedKV(k.tensor, v.tensor), case.batch)
    result = attend(moved, out=out.tensor, lse=lse.tensor, workspace=workspace.tensor)
    for band in (q, k, v, out, lse, workspace):
        band.check()
    assert_same_bits(result, expected)
