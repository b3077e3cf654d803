"""Host overhead of the ops: what a call costs when there is next to nothing to compute.

The shapes are so small that checks, allocation and dispatch are most of the time, on one thread. The figures do not
tell how fast an op is on a real model. Run with ``make bench`` and compare medians: means follow the machine's load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dspark.ops import (
    ConfidenceHead,
    MarkovHead,
    PagedKV,
    QueryBatch,
    Sampling,
    Stream,
    accept,
    draft_walk,
    sample,
    schedule_prefix,
    verify_attention,
)

DRAFT_LEN, VOCAB, RANK, HIDDEN = 7, 256, 16, 32
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, CONTEXT = 4, 2, 16, 16, 40
ROWS = DRAFT_LEN + 1

Benchmark = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 8], ids="R={}".format)
def requests(request: pytest.FixtureRequest, benchmark: Any) -> int:
    benchmark.extra_info |= {"torch": torch.__version__, "threads": 1, "G": DRAFT_LEN, "V": VOCAB}
    count: int = request.param
    return count


@pytest.fixture(params=[0.0, 1.0], ids="T={}".format)
def sampling(request: pytest.FixtureRequest, requests: int) -> Sampling:
    return Sampling(
        temperature=torch.full((requests,), request.param),
        top_k=torch.zeros(requests, dtype=torch.int64),
        top_p=torch.ones(requests),
        min_p=torch.zeros(requests),
        seed=torch.arange(requests),
        all_greedy=request.param == 0,
        any_truncation=False,
    )


def test_sample(benchmark: Benchmark, requests: int, sampling: Sampling) -> None:
    tokens = benchmark(sample, torch.randn(requests, VOCAB), sampling, torch.full((requests,), CONTEXT))
    assert tokens.shape == (requests,)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_accept(benchmark: Benchmark, requests: int, sampling: Sampling, rule: str) -> None:
    verdict = benchmark(
        accept,
        torch.randn(requests * ROWS, VOCAB),
        torch.randint(VOCAB, (requests * ROWS,)),
        torch.arange(requests + 1) * ROWS,
        rule=rule,
        sampling=sampling,
        position=torch.full((requests,), CONTEXT),
        max_query_len=ROWS,
        draft_logits=torch.randn(requests, DRAFT_LEN, VOCAB) if rule == "ratio" else None,
    )
    assert verdict.num_emitted.min() >= 1


def test_draft_walk(benchmark: Benchmark, requests: int, sampling: Sampling) -> None:
    w1, w2 = torch.randn(VOCAB, RANK), torch.randn(VOCAB, RANK)
    draft = benchmark(
        draft_walk,
        torch.randn(requests, DRAFT_LEN, VOCAB),
        torch.randint(VOCAB, (requests,)),
        head=MarkovHead(w1, w2),
        hidden=torch.randn(requests, DRAFT_LEN, HIDDEN),
        confidence_head=ConfidenceHead(torch.randn(HIDDEN + RANK), torch.zeros(()), w1),
        sampling=sampling,
        position=torch.full((requests,), CONTEXT),
        stream=Stream.TARGET,
        return_logits=False,
    )
    assert draft.tokens.min() >= 0


def test_verify_attention(benchmark: Benchmark, requests: int) -> None:
    columns = (CONTEXT + ROWS) // PAGE_SIZE
    pages = requests * columns
    block_table = torch.arange(pages).view(requests, columns)
    positions = CONTEXT + torch.arange(ROWS).repeat(requests)
    batch = QueryBatch(
        query_start=torch.arange(requests + 1) * ROWS,
        context_len=torch.full((requests,), CONTEXT),
        block_table=block_table,
        positions=positions,
        slots=(torch.arange(requests).repeat_interleave(ROWS) * columns * PAGE_SIZE) + positions,
        ancestors=None,
        max_query_len=ROWS,
    )
    k, v = torch.randn(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    q = torch.randn(requests * ROWS, QUERY_HEADS, HEAD_DIM)
    out = benchmark(verify_attention, q, PagedKV(k, v), batch)
    assert out.isfinite().all()


@pytest.mark.parametrize("mode", ["early_stop", "global", "budget"])
def test_schedule_prefix(benchmark: Benchmark, requests: int, mode: str) -> None:
    steps_per_second = 1000 / (10 + torch.arange(requests * ROWS + 1, dtype=torch.float64))
    budget = torch.tensor(3) if mode == "budget" else None
    confidence = torch.rand(requests, DRAFT_LEN)
    lengths = benchmark(schedule_prefix, confidence, steps_per_second, mode=mode, budget=budget)
    assert lengths.shape == (requests,)
