"""``verify_attention`` and ``append_kv``: the references."""

from __future__ import annotations

import torch

from benchmarks.setup import CONTEXT, ROWS, Benchmark
from dspark.ops import PagedKV, QueryBatch, append_kv, verify_attention

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 16, 16


def make_batch(requests: int) -> tuple[PagedKV, QueryBatch]:
    columns = (CONTEXT + ROWS) // PAGE_SIZE
    pages = requests * columns
    positions = CONTEXT + torch.arange(ROWS).repeat(requests)
    batch = QueryBatch(
        query_start=torch.arange(requests + 1) * ROWS,
        context_len=torch.full((requests,), CONTEXT),
        block_table=torch.arange(pages).view(requests, columns),
        positions=positions,
        slots=(torch.arange(requests).repeat_interleave(ROWS) * columns * PAGE_SIZE) + positions,
        ancestors=None,
        max_query_len=ROWS,
    )
    k, v = torch.randn(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    return PagedKV(k, v), batch


def test_verify_reference(benchmark: Benchmark, requests: int) -> None:
    kv, batch = make_batch(requests)
    out = benchmark(verify_attention, torch.randn(requests * ROWS, QUERY_HEADS, HEAD_DIM), kv, batch)
    assert out.isfinite().all()


def test_append_reference(benchmark: Benchmark, requests: int) -> None:
    kv, batch = make_batch(requests)
    k, v = torch.randn(2, requests * ROWS, KV_HEADS, HEAD_DIM)
    benchmark(append_kv, k, v, kv, batch.slots)
    assert torch.equal(kv.k.flatten(0, 1)[batch.slots], k)
