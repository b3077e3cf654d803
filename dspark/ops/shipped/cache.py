"""Calls of the ops on the paged cache, as a server makes them: 32 query and 8 key heads of 128, pages of 16 tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.cache import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.registry import NVIDIA_TARGETS, Budget, budgets, meta
from dspark.ops.types import PagedKV

QUERY_HEADS, HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 32, 8, 128, 16, 36
REQUESTS, NODES, PAGES = 64, 8, 1024
ROWS = REQUESTS * NODES

BUDGETS = {
    "append_kv_kernel": budgets(Budget(64, 1_024), amd=Budget(64, 1_024)),
    "rope_append_kv_kernel": budgets(Budget(112, 1_024), amd=Budget(96, 1_024)),
    "commit_kv_kernel": budgets(Budget(64, 1_024), amd=Budget(64, 1_024)),
    "copy_pages_kernel": budgets(Budget(64, 1_024), amd=Budget(64, 1_024)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_WIDE = dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E(\.\w+)*\.128$", r"^STG\.E(\.\w+)*\.128$"))
CLAIMS = {
    "append_kv_kernel": _WIDE | {"gfx942": (r"load_dwordx4$",)},
    "rope_append_kv_kernel": _WIDE,
    "commit_kv_kernel": _WIDE,
    "copy_pages_kernel": _WIDE | {"gfx942": (r"load_dwordx4$", r"store_dwordx4$")},
}
"""What a kernel is meant to compile to: rows are read and written 16 bytes at a time. Of a single token (and of float8)
a thread of AMD's wider waves has 8."""


def _layer(dtype: torch.dtype = torch.bfloat16) -> PagedKV:
    k, v = (meta(PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    return PagedKV(k, v)


def _stack() -> PagedKV:
    storage = meta(LAYERS, 2, PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    return PagedKV(storage[:, 0], storage[:, 1])


def _append(kv: PagedKV) -> None:
    row = meta(ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    append_kv(row, row, kv, meta(ROWS), backend="triton")


def _append_float8() -> None:
    scale, kv = meta(HEADS, dtype=torch.float32), _layer(torch.float8_e4m3fn)
    _append(PagedKV(kv.k, kv.v, scale, scale))


def _rope_append() -> None:
    joint = meta(ROWS, QUERY_HEADS + 2 * HEADS, HEAD_DIM, dtype=torch.bfloat16)
    q, k, v = joint[:, :QUERY_HEADS], joint[:, QUERY_HEADS:-HEADS], joint[:, -HEADS:]
    angle, weight = meta(ROWS, 1, HEAD_DIM, dtype=torch.bfloat16), meta(HEAD_DIM, dtype=torch.bfloat16)
    norms = {"q_norm": weight, "k_norm": weight}
    rope_append_kv(q, k, v, _layer(), meta(ROWS), cos=angle, sin=angle, **norms, eps=1e-6, backend="triton")


def _commit() -> None:
    commit_kv(_stack(), meta(REQUESTS, NODES), meta(REQUESTS), meta(REQUESTS + 1), meta(ROWS), backend="triton")


CALLS: dict[str, Callable[[], None]] = {
    "append_kv": lambda: _append(_layer()),
    "append_kv, float8": _append_float8,
    "rope_append_kv": _rope_append,
    "commit_kv": _commit,
    "copy_pages": lambda: copy_pages(_stack(), meta(REQUESTS), meta(REQUESTS), backend="triton"),
}
"""Calls that between them launch every kernel in every configuration of note."""
