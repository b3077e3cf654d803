"""Calls of the ops on the paged cache, small and as a server makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.types import PagedKV, Rows
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets
from tests.ops.case import Case

FLOAT8 = torch.float8_e4m3fn


class Cache:
    """Sizes of a cache and of the batch that goes into it; calls of every op on it."""

    def __init__(
        self, heads: int, head_dim: int, page_size: int, num_pages: int, layers: int, query_heads: int, requests: int,
        nodes: int,
    ) -> None:  # fmt: skip
        self.heads, self.head_dim, self.page_size, self.num_pages = heads, head_dim, page_size, num_pages
        self.layers, self.query_heads, self.requests, self.nodes = layers, query_heads, requests, nodes
        self.rows = requests * nodes

    def layer(self, device: str, dtype: torch.dtype, scaled: bool = False) -> PagedKV:
        shape = (self.num_pages, self.page_size, self.heads, self.head_dim)
        scale = torch.ones(self.heads, device=device) if scaled else None
        return PagedKV(*(torch.zeros(shape, device=device).to(dtype) for _ in range(2)), scale, scale)

    def stack(self, device: str) -> PagedKV:
        shape = (self.layers, 2, self.num_pages, self.page_size, self.heads, self.head_dim)
        storage = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return PagedKV(storage[:, 0], storage[:, 1])

    def projected(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a joint projection."""
        total = self.query_heads + 2 * self.heads
        joint = torch.ones(self.rows, total, self.head_dim, dtype=torch.bfloat16, device=device)
        q, k, v = joint.split([self.query_heads, self.heads, self.heads], dim=1)
        return q, k, v

    def slots(self, device: str) -> Tensor:
        return torch.arange(-1, self.rows - 1, device=device)

    def append(self, device: str) -> tuple[Any, ...]:
        row = torch.ones(self.rows, self.heads, self.head_dim, dtype=torch.bfloat16, device=device)
        return row, row, self.layer(device, torch.bfloat16), self.slots(device)

    def append_float8(self, device: str) -> tuple[Any, ...]:
        k, v, _, slots = self.append(device)
        return k, v, self.layer(device, FLOAT8, scaled=True), slots

    def rope_append(self, device: str) -> tuple[Any, ...]:
        q, k, v = self.projected(device)
        angle = torch.ones(self.rows, 1, self.head_dim, dtype=torch.bfloat16, device=device)
        weight = torch.ones(self.head_dim, dtype=torch.bfloat16, device=device)
        kv = self.layer(device, torch.bfloat16)
        return q, k, v, kv, self.slots(device), angle, angle, weight, weight, 1e-6, None

    def commit(self, device: str) -> tuple[Any, ...]:
        """Every other node of each request's tree is accepted."""
        path = torch.arange(0, 2 * self.nodes, 2, device=device).expand(self.requests, -1).contiguous()
        emitted = torch.full((self.requests,), -(-self.nodes // 2), device=device)
        start = torch.arange(0, self.rows + 1, self.nodes, device=device)
        tokens = torch.zeros(self.rows, dtype=torch.int64, device=device)
        rows = Rows(tokens, start, torch.zeros_like(emitted), self.nodes)
        return self.stack(device), path, emitted, rows, self.slots(device)

    def copy(self, device: str) -> tuple[Any, ...]:
        source = torch.arange(self.requests, device=device)
        return self.stack(device), source, source + self.requests


def cases_of(cache: Cache) -> list[Case]:
    return [
        Case("append_kv", "", cache.append),
        Case("append_kv", "float8", cache.append_float8),
        Case("rope_append_kv", "", cache.rope_append),
        Case("commit_kv", "", cache.commit),
        Case("copy_pages", "", cache.copy),
    ]


SMALL = cases_of(Cache(heads=2, head_dim=8, page_size=4, num_pages=5, layers=2, query_heads=4, requests=2, nodes=3))
SHIPPED = cases_of(
    Cache(heads=8, head_dim=128, page_size=16, num_pages=1024, layers=36, query_heads=32, requests=64, nodes=8)
)
"""Calls that between them launch every kernel in every configuration of note."""

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
