"""Calls of ``verify_attention`` as a server makes them: 64 requests, pages of bfloat16, tables for 32,768 tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.attention import verify_attention
from dspark.ops.types import PagedKV, QueryBatch
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets, meta

REQUESTS, CAPACITY = 64, 32_768

BUDGETS = {
    "attention_kernel": budgets(Budget(255, 163_840), amd=Budget(256, 65_536)),
    "merge_kernel": budgets(Budget(64, 4096), amd=Budget(64, 4096)),
}
"""The most that one program of a kernel may use, whatever its configuration. Up to 32 lines a program, the launch
itself holds the pass over the keys to 128 registers, and it must not spill then."""

_PIPELINED = dict.fromkeys(NVIDIA_TARGETS, (r"^LDGSTS\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
CLAIMS = {"attention_kernel": _PIPELINED}
"""What a kernel is meant to compile to; keys and values come 16 bytes at a time while earlier ones are computed on."""


def _attend(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    *,
    rows: int = 8,
    page_size: int = 16,
    tree: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> None:
    num_rows = REQUESTS * rows
    pages = meta(1024, page_size, kv_heads, head_dim, dtype=dtype)
    scale = meta(kv_heads, dtype=torch.float32) if dtype is torch.float8_e4m3fn else None
    batch = QueryBatch(
        query_start=meta(REQUESTS + 1),
        context_len=meta(REQUESTS),
        block_table=meta(REQUESTS, CAPACITY // page_size),
        positions=meta(num_rows),
        slots=meta(num_rows),
        ancestors=meta(num_rows) if tree else None,
        max_query_len=rows,
    )
    verify_attention(
        meta(num_rows, heads, head_dim, dtype=torch.bfloat16 if scale is not None else dtype),
        PagedKV(pages, pages, scale, scale),
        batch,
        window=window,
        soft_cap=soft_cap,
        sinks=meta(heads, dtype=torch.bfloat16) if sinks else None,
        backend="triton",
    )


CALLS: dict[str, Callable[[], None]] = {
    "attention": _attend,
    "attention, chain": lambda: _attend(tree=False, page_size=64),
    "attention, 64 rows": lambda: _attend(rows=64),
    "attention, D 256": lambda: _attend(16, 8, 256),
    "attention, D 80": lambda: _attend(32, 32, 80, page_size=128),
    "attention, float8": lambda: _attend(dtype=torch.float8_e4m3fn, page_size=64),
    "attention, window": lambda: _attend(64, 8, 64, window=128, sinks=True, tree=False),
    "attention, soft cap": lambda: _attend(8, 4, 256, soft_cap=50.0, page_size=64),
    "attention, prefill": lambda: _attend(rows=2048, tree=False),
}
"""Calls that between them launch the kernels in every configuration of note."""
