"""Calls of the ops on the paged cache whose traffic is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.ops.cache import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.cache.launch import cache_config
from dspark.ops.cost import Cost
from dspark.ops.cost.cache import CacheShape, append_kv_cost, commit_kv_cost, copy_pages_cost, rope_append_kv_cost
from dspark.ops.types import PagedKV, Rows
from tests.gates.traffic.case import Case

PAGE_SIZE = 16


def _stack(shape: CacheShape, num_pages: int, dtype: torch.dtype) -> PagedKV:
    storage = torch.zeros(shape.layers, 2, num_pages, PAGE_SIZE, shape.heads, shape.head_dim).to(dtype)
    return PagedKV(storage[:, 0], storage[:, 1])


def _layer(shape: CacheShape, num_pages: int, dtype: torch.dtype) -> PagedKV:
    kv = _stack(shape, num_pages, dtype)
    scale = torch.ones(shape.heads) if shape.scaled else None
    return PagedKV(kv.k[0], kv.v[0], scale, scale)


def _slots(num_rows: int, num_written: int) -> torch.Tensor:
    return torch.tensor([*range(num_written), *[-1] * (num_rows - num_written)])


def append_case(shape: CacheShape, num_rows: int, num_written: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Rows of bfloat16 into a cache."""

    kv, slots = _layer(shape, -(-num_rows // PAGE_SIZE), dtype), _slots(num_rows, num_written)
    rows = torch.zeros(num_rows, shape.heads, shape.head_dim, dtype=torch.bfloat16)

    def run() -> Cost:
        append_kv(rows, rows, kv, slots, backend="triton")
        return append_kv_cost(shape, num_rows, num_written)

    return Case("append_kv", _words(shape, f"rows {num_rows}-{num_rows - num_written}", dtype), "", run)


def rope_case(shape: CacheShape, query_heads: int, num_rows: int, num_written: int, norms: bool = True) -> Case:
    """Rows of bfloat16 with their angles into a cache of bfloat16."""
    kv, slots = _layer(shape, -(-num_rows // PAGE_SIZE), torch.bfloat16), _slots(num_rows, num_written)
    q = torch.zeros(num_rows, query_heads, shape.head_dim, dtype=torch.bfloat16)
    k, angle = q[:, : shape.heads], torch.ones(num_rows, 1, shape.head_dim, dtype=torch.bfloat16)
    weight = torch.ones(shape.head_dim, dtype=torch.bfloat16) if norms else None
    eps = 1e-6 if norms else None

    def run() -> Cost:
        rope_append_kv(
            q, k, k, kv, slots, cos=angle, sin=angle, q_norm=weight, k_norm=weight, eps=eps, backend="triton"
        )
        return rope_append_kv_cost(shape, num_rows, num_written, query_heads=query_heads, q_norm=norms, k_norm=norms)

    words = _words(shape, f"rows {num_rows}-{num_rows - num_written}, Hq {query_heads}", torch.bfloat16)
    return Case("rope_append_kv", words, "normed" if norms else "", run)


def commit_case(shape: CacheShape, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> Case:
    """Accepted paths of trees of so many rows."""
    nodes = max(1, *map(len, paths))
    path = torch.tensor([[*p, *[-1] * (nodes - len(p))] for p in paths])
    num_emitted = torch.tensor([len(p) for p in paths])
    slots = torch.arange(sum(lengths))
    rows = Rows(slots, torch.tensor([0, *lengths]).cumsum(0), torch.zeros_like(num_emitted), nodes)
    kv = _stack(shape, -(-sum(lengths) // PAGE_SIZE), torch.bfloat16)

    def run() -> Cost:
        commit_kv(kv, path, num_emitted, rows, slots, backend="triton")
        return commit_kv_cost(shape, paths)

    moved = sum(node > i for path in paths for i, node in enumerate(path))
    words = "+".join(map(str, lengths))
    return Case("commit_kv", _words(shape, f"rows {words}, L {shape.layers}", torch.bfloat16), f"moved {moved}", run)


def copy_case(shape: CacheShape, num_pages: int) -> Case:
    """Pages onto others."""
    kv = _stack(shape, 2 * num_pages, torch.bfloat16)
    source, target = torch.arange(2 * num_pages).view(2, -1)
    config = cache_config(shape.heads, shape.head_dim, shape.itemsize)

    def run() -> Cost:
        copy_pages(kv, source, target, backend="triton")
        return copy_pages_cost(shape, PAGE_SIZE, num_pages, block_n=config.block_n)

    return Case("copy_pages", _words(shape, f"pages {num_pages}, L {shape.layers}", torch.bfloat16), "", run)


def _words(shape: CacheShape, what: str, dtype: torch.dtype) -> str:
    return f"{what}, Hkv {shape.heads}, D {shape.head_dim}, {str(dtype).removeprefix('torch.')}"


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for: 8 key heads of 128, and 8 rows of one request."""
    shape = CacheShape(8, 128)
    return [
        append_case(shape, 8, 8),
        rope_case(shape, 32, 8, 8),
        commit_case(CacheShape(8, 128, layers=4), [8], [range(8)]),
        commit_case(CacheShape(8, 128, layers=4), [8], [[0, 2, 5, 7]]),
        copy_case(CacheShape(8, 128, layers=4), 1),
    ]


def cases() -> list[Case]:
    """Small calls of every kind."""
    shape, two = CacheShape(2, 24), CacheShape(3, 8, layers=2)
    return [
        append_case(shape, 5, 3),
        append_case(CacheShape(2, 24, itemsize=1, scaled=True), 5, 3, torch.float8_e4m3fn),
        rope_case(shape, 6, 4, 3),
        rope_case(CacheShape(3, 8), 3, 2, 0, norms=False),
        commit_case(two, [3, 0, 4, 2], [[0, 1], [], [0, 2, 3], [0]]),
        copy_case(two, 2),
    ]
