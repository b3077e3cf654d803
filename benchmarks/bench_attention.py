"""``verify_attention``: the reference, what a call costs the host before kernels run, and the kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_timing
from benchmarks.setup import CONTEXT, ROWS, Benchmark
from dspark.ops import PagedKV, QueryBatch, append_kv, verify_attention
from dspark.ops.launch import recorded_launches
from dspark.testing import bounds

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 16, 16


def make_batch(
    requests: int,
    context: int = CONTEXT,
    rows: int = ROWS,
    heads: tuple[int, int] = (KV_HEADS, HEAD_DIM),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[PagedKV, QueryBatch]:
    """Chains after committed tokens, every request with pages of its own."""
    columns = -(-(context + rows) // PAGE_SIZE)
    pages = requests * columns
    positions = context + torch.arange(rows, device=device).repeat(requests)
    owner = torch.arange(requests, device=device)
    batch = QueryBatch(
        query_start=torch.arange(requests + 1, device=device) * rows,
        context_len=torch.full((requests,), context, device=device),
        block_table=torch.arange(pages, device=device).view(requests, columns),
        positions=positions,
        slots=owner.repeat_interleave(rows) * columns * PAGE_SIZE + positions,
        ancestors=None,
        max_query_len=rows,
    )
    k, v = torch.randn(2, pages, PAGE_SIZE, *heads, device=device).to(dtype)
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


@pytest.mark.parametrize(("context", "launches"), [(CONTEXT, 1), (2000, 2)])
def test_host_overhead(benchmark: Benchmark, requests: int, context: int, launches: int) -> None:
    """Checks, configuration, allocation and the arguments of every launch; the launches themselves do nothing."""
    kv, batch = make_batch(requests, context)
    q = torch.randn(requests * ROWS, QUERY_HEADS, HEAD_DIM)
    with recorded_launches() as recorded:

        def call() -> Tensor:
            recorded.clear()
            return verify_attention(q, kv, batch, backend="triton")

        call()  # the first one imports the kernels
        benchmark(call)
        assert len(recorded) == launches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("num_requests", "context"), [(1, 8192), (8, 8192), (64, 8192), (1, 131_072)])
def test_device_time(benchmark: Any, num_requests: int, context: int, rows: int) -> None:
    """32 query heads and 8 key heads of 128 in bfloat16."""
    calls, num_rows = [], num_requests * rows
    for _ in range(2 if num_requests * context > 2**18 else 8):
        kv, batch = make_batch(num_requests, context, rows, (8, 128), torch.bfloat16, "cuda")
        q = torch.randn(num_rows, 32, 128, device="cuda").bfloat16()
        calls.append(lambda q=q, kv=kv, batch=batch: verify_attention(q, kv, batch))
    keys = num_requests * (context + rows)
    bound = bounds.verify_attention(keys, num_rows, num_heads=32, kv_heads=8, head_dim=128)
    benchmark.extra_info |= {"R": num_requests, "context": context, "rows": rows}
    flops = 4 * num_rows * 32 * 128 * (context + rows)
    gpu_timing.measure(benchmark, calls, bound, flops)
