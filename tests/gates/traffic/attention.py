"""Calls of ``verify_attention`` whose traffic is counted."""

from __future__ import annotations

import torch

from dspark.ops.attention import verify_attention
from dspark.ops.cost import AttentionCall, Cost, attention_cost
from dspark.ops.types import PagedKV, QueryBatch
from tests.gates.traffic.case import Case

DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def attention_case(call: AttentionCall) -> Case:
    """A call on zeros; every request has pages of its own, and of a tree each row sees itself alone."""
    columns, lengths = call.capacity // call.page_size, torch.tensor(call.lengths)
    num_rows, requests = int(lengths.sum()) + call.padding, len(lengths)
    shape = (requests * columns, call.page_size, call.kv_heads, call.head_dim)
    k, v = torch.zeros(2, *shape).to(DTYPES[call.kv_itemsize])
    scale = torch.ones(call.kv_heads) if call.scales else None
    words = torch.zeros(num_rows, max(call.words, 1), dtype=torch.int64)
    batch = QueryBatch(
        query_start=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        context_len=torch.tensor(call.contexts),
        block_table=torch.arange(requests * columns).view(requests, columns),
        positions=torch.zeros(num_rows, dtype=torch.int64),
        slots=torch.zeros(num_rows, dtype=torch.int64),
        ancestors=words if call.words else None,
        max_query_len=call.longest,
    )
    q = torch.zeros(num_rows, call.num_heads, call.head_dim).to(DTYPES[call.itemsize])
    sinks = torch.zeros(call.num_heads) if call.sinks else None
    kv = PagedKV(k, v, scale, scale)

    def run() -> Cost:
        verify_attention(q, kv, batch, sinks=sinks, return_lse=call.lse, chunk=call.chunk, backend="triton")  # type: ignore[call-overload]
        return attention_cost(call)

    kind = "tree" if call.words else "chain"
    rows = "+".join(f"{c}:{n}" for c, n in zip(call.contexts, call.lengths, strict=True))
    heads = f"{call.num_heads}/{call.kv_heads}x{call.head_dim}"
    return Case("attend", f"{rows}, {heads}, S {call.page_size}", kind, run)


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for, one request each."""
    heads = [(32, 8, 128), (40, 8, 128), (16, 8, 256)]
    calls = [AttentionCall([2048], [8], *shape, words=1) for shape in heads]
    calls += [AttentionCall([2048], [rows], words=rows > 1) for rows in (1, 4, 16, 64)]
    return [attention_case(call) for call in calls]


def cases() -> list[Case]:
    """Small calls of every kind: ragged ones, split and not, gathered and by the page."""
    small = {"num_heads": 4, "kv_heads": 2, "head_dim": 16}
    calls = [
        AttentionCall([130, 5, 0], [2, 1, 0], 2, 1, 16, max_query_len=3, chunk=64, padding=2, lse=True),
        AttentionCall([130, 70], [2, 1], **small, words=1, chunk=64, sinks=True, page_size=64),
        AttentionCall([70], [5], **small, words=2, columns=9, kv_itemsize=1, scales=True),
        AttentionCall([31], [70], 2, 1, 8, page_size=32, itemsize=4, kv_itemsize=4),
    ]
    return [attention_case(call) for call in calls]
