"""What a row of attention does not depend on, bit for bit (contract C8), and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.ops.attention import attention_workspace, verify_attention
from dspark.ops.attention.launch import attention_config, occupancy_chunk
from dspark.ops.launch import recorded_launches
from dspark.ops.types import PagedKV, QueryBatch
from dspark.testing.registry import KernelEntry, entry_of_launch, meta
from tests.ops.attention.paged import Heads, Kind, Paged, Request, make_paged, make_requests
from tests.ops.attention.test_triton_attention import SMALL, assert_same_bits, attend, tiny
from tests.tolerances import ATTENTION

pytestmark = pytest.mark.triton

WIDE = Heads(4, 1, 16)


def of_requests(results: Sequence[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    """The rows of each request, of each result; padding is left out."""
    count = sum(lengths)
    return [list(parts) for parts in zip(*(x[:count].split(list(lengths)) for x in results), strict=True)]


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_p19_a_request_is_the_same_alone_permuted_and_padded(kind: Kind) -> None:
    """Also beside requests of other lengths, which widen the table: with one chunk nothing is merged."""
    requests = make_requests([20, 37, 0], [2, 2, 1], kind, SMALL)
    lengths = [len(r.q) for r in requests]
    together = of_requests(attend(make_paged(requests, 16), window=25), lengths)
    for order in ([0], [1], [2, 1, 0]):
        case = make_paged([requests[i] for i in order], 16, seed=5, pad_rows=1, pad_columns=order[0])
        parts = of_requests(attend(case, window=25), [lengths[i] for i in order])
        for i, part in zip(order, parts, strict=True):
            assert_same_bits(part, together[i])


def test_p19_the_step_of_max_query_len_is_all_that_matters() -> None:
    requests = make_requests([37, 5], [2, 3], "tree", SMALL)
    case = make_paged(requests, 16)
    results = [attend(replace(case, batch=case.batch._replace(max_query_len=n))) for n in (3, 8)]
    assert_same_bits(results[1], results[0])
    step = [attention_config(4, 128, n, 16) for n in range(1, 9)]
    assert len(set(step)) == 1
    assert attention_config(4, 128, 9, 16) != step[0]
    assert attention_config(4, 128, 9, 16) == attention_config(4, 128, 16, 16)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products of the interpreter that do not depend on a row's place in the tile, as its library's do."""

    def product(a: Any, b: Any, dtype: Any = None) -> Any:
        return np.einsum("mk,kn->mn", a.astype(np.float64), b.astype(np.float64)).astype(dtype or a.dtype)

    monkeypatch.setattr(np, "matmul", product)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("context", "window"), [(13, 0), (29, 0), (31, 10), (45, 10)])
def test_p19_a_verified_chain_is_what_decoding_token_by_token_computes(context: int, window: int) -> None:
    """Tiles and chunks lie at fixed positions, wherever the committed tokens end."""
    (request,) = make_requests([context], [4], "chain", SMALL)
    chain = attend(make_paged([request], 16), window=window)
    for i in range(4):
        seen = context + i + 1
        one = Request(request.q[i : i + 1], request.k[:seen], request.v[:seen], [-1], "chain")
        assert_same_bits(attend(make_paged([one], 16), window=window), [x[i : i + 1] for x in chain])


@pytest.mark.usefixtures("exact_products")
def test_a_tree_of_one_path_is_the_chain() -> None:
    (request,) = make_requests([29], [5], "chain", SMALL)
    chain, tree = (make_paged([replace(request, kind=kind)], 16) for kind in ("chain", "tree"))
    assert chain.batch.ancestors is None
    assert tree.batch.ancestors is not None
    assert_same_bits(attend(tree), attend(chain))


def test_every_path_of_a_tree_is_the_chain_of_that_path() -> None:
    (tree,) = make_requests([29], [7], "tree", SMALL, seed=3)
    case = make_paged([tree])
    for window in (0, 4):
        whole = attend(case, window=window)
        for leaf in set(range(7)) - set(tree.parents):
            path = sorted(tree.ancestors(leaf))
            keep = [*range(29), *(29 + j for j in path)]
            chain = Request(tree.q[path], tree.k[keep], tree.v[keep], [i - 1 for i in range(len(path))], "chain")
            alone = attend(make_paged([chain]), window=window)
            torch.testing.assert_close(alone, tuple(x[path] for x in whole), atol=ATTENTION, rtol=0)


def test_relabelled_pages_change_nothing() -> None:
    case = make_paged(make_requests([40, 19], [2, 3], "tree", SMALL), pad_columns=1)
    new = torch.randperm(case.kv.k.shape[0], generator=torch.Generator().manual_seed(7))
    k, v = torch.empty_like(case.kv.k), torch.empty_like(case.kv.v)
    k[new], v[new] = case.kv.k, case.kv.v
    table = torch.where(case.batch.block_table < 0, -1, new[case.batch.block_table])
    moved = Paged(case.q, PagedKV(k, v), case.batch._replace(block_table=table))
    assert_same_bits(attend(moved), attend(case))


def test_a_chunk_of_another_size_rounds_otherwise() -> None:
    """So the tests above could fail: the order of a sum shows in its bits."""
    case = make_paged(make_requests([60], [3], "tree", WIDE))
    whole, split = (attend(case, tiny(16, chunk=chunk))[0] for chunk in (0, 16))
    assert not torch.equal(whole, split)
    torch.testing.assert_close(whole, split, atol=ATTENTION, rtol=0)


def compiled(requests: int, rows: int, columns: int) -> list[tuple[object, ...]]:
    """What decides the code of each kernel that a call of these sizes launches."""
    pages = meta(64, 16, 8, 128, dtype=torch.bfloat16)
    batch = QueryBatch(
        query_start=meta(requests + 1),
        context_len=meta(requests),
        block_table=meta(requests, columns),
        positions=meta(requests * rows),
        slots=meta(requests * rows),
        ancestors=meta(requests * rows),
        max_query_len=rows,
    )
    q = meta(requests * rows, 32, 128, dtype=torch.bfloat16)
    with recorded_launches() as launches:
        verify_attention(q, PagedKV(pages, pages), batch, backend="triton")
    entries: list[KernelEntry] = [entry_of_launch("", launch, {}) for launch in launches]
    return [(e.kernel, e.signature, e.constexprs, e.aligned, e.num_warps, e.num_stages, e.options) for e in entries]


def test_one_kernel_serves_every_batch() -> None:
    """All numbers of requests, rows up to eight and columns take the same compiled code."""
    expected = compiled(64, 8, 512)
    assert len(expected) == 2
    for sizes in [(1, 1, 512), (16, 3, 511), (3, 8, 64)]:
        assert compiled(*sizes) == expected
    assert compiled(64, 9, 512) != expected


def test_occupancy_follows_the_batch() -> None:
    assert occupancy_chunk(32_768, programs=8, num_sms=132) < occupancy_chunk(32_768, programs=64, num_sms=132)
    assert occupancy_chunk(32_768, programs=512, num_sms=132) == 32_768
    assert occupancy_chunk(100, programs=1, num_sms=132) == 128
    case = make_paged(make_requests([200], [2], heads=SMALL))
    expected = verify_attention(case.q, case.kv, case.batch, backend="reference")
    for num_sms in (1, 132):
        out = verify_attention(case.q, case.kv, case.batch, split="occupancy", num_sms=num_sms, backend="triton")
        torch.testing.assert_close(out, expected, atol=ATTENTION, rtol=0)


@pytest.mark.parametrize("split", ["fixed", "occupancy"])
def test_the_stated_workspace_is_enough_and_not_too_much(split: str) -> None:
    case = make_paged(make_requests([200], [2], heads=SMALL))
    options = {"split": split, "chunk": 64} if split == "fixed" else {"split": split, "num_sms": 132}
    needed = attention_workspace(
        1, 2, 208, num_heads=2, kv_heads=1, head_dim=8, max_query_len=2, dtype=torch.float32, **options
    )  # type: ignore[arg-type]
    assert needed > 0
    workspace = torch.full((needed,), 255, dtype=torch.uint8)
    options["backend"] = "triton"
    expected = verify_attention(case.q, case.kv, case.batch, **options)  # type: ignore[call-overload]
    out = verify_attention(case.q, case.kv, case.batch, workspace=workspace, **options)  # type: ignore[call-overload]
    assert_same_bits([out], [expected])
    with pytest.raises(ValueError, match="workspace: expected"):
        verify_attention(case.q, case.kv, case.batch, workspace=workspace[:-16], **options)  # type: ignore[call-overload]
    assert not attention_workspace(1, 4096, 32_768, num_heads=32, kv_heads=8, head_dim=128, max_query_len=4096)


def test_workspace_of_many_long_requests() -> None:
    """A larger chunk takes less; the keys of these requests take 137 GB a layer."""
    for chunk, expected in ((None, 5_827_461_120), (4096, 1_090_519_040)):
        needed = attention_workspace(
            256, 2048, 131_072, num_heads=32, kv_heads=8, head_dim=128, max_query_len=8, chunk=chunk
        )
        assert needed == expected
