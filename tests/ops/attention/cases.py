"""Calls of ``verify_attention``, small and as a server makes them: 64 requests, tables for 32,768 tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dspark.ops.types import PagedKV, QueryBatch
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets
from tests.ops.attention.paged import Heads, Kind, make_paged, make_requests
from tests.ops.case import Case

REQUESTS, CAPACITY = 64, 32_768
FLOAT8 = torch.float8_e4m3fn


class AttentionCase(Case):
    """A call, under the name that the datasheet has for it."""

    __slots__ = ()

    def __str__(self) -> str:
        return super().__str__().removeprefix("verify_")


def small(
    kind: Kind,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    return_lse: bool = False,
    chunk: int | None = None,
    num_words: int = 1,
) -> tuple[Any, ...]:
    """Two requests with committed tokens of several pages, and a padded row."""
    case = make_paged(make_requests([70, 5], [3, 2], kind, Heads(4, 2, 8)), pad_rows=1, poison=1.0, num_words=num_words)
    scale = torch.tensor([0.5, 2.0], device=device) if dtype is FLOAT8 else None
    kv = PagedKV(*(pages.to(device, dtype) for pages in case.kv[:2]), scale, scale)
    batch = QueryBatch(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in case.batch))
    given = torch.zeros(4, device=device) if sinks else None
    options = (0.25, window, soft_cap, given, return_lse, "fixed", None, chunk)
    return case.q.to(device), kv, batch, *options, None, None


def shipped(
    device: str,
    heads: tuple[int, int, int] = (32, 8, 128),
    *,
    rows: int = 8,
    page_size: int = 16,
    tree: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> tuple[Any, ...]:
    """A call on tensors whose numbers do not matter."""
    num_heads, kv_heads, head_dim = heads
    num_rows = REQUESTS * rows

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    pages = torch.empty(1024, page_size, kv_heads, head_dim, dtype=dtype, device=device)
    scale = torch.empty(kv_heads, device=device) if dtype is FLOAT8 else None
    batch = QueryBatch(
        query_start=integers(REQUESTS + 1),
        context_len=integers(REQUESTS),
        block_table=integers(REQUESTS, CAPACITY // page_size),
        positions=integers(num_rows),
        slots=integers(num_rows),
        ancestors=integers(num_rows) if tree else None,
        max_query_len=rows,
    )
    q = torch.empty(num_rows, num_heads, head_dim, dtype=torch.bfloat16, device=device)
    given = torch.empty(num_heads, dtype=torch.bfloat16, device=device) if sinks else None
    options = (None, window, soft_cap, given, False, "fixed", None, None)
    return q, PagedKV(pages, pages, scale, scale), batch, *options, None, None


def case(words: str, make: Any, *arguments: Any, **options: Any) -> Case:
    return AttentionCase("verify_attention", words, partial(make, *arguments, **options))


SMALL = [
    case("", small, "tree"),
    case("chain", small, "chain", window=4, soft_cap=2.0, sinks=True, return_lse=True, chunk=64),
    case("words", small, "tree", num_words=2, sinks=True, chunk=64),
    case("float8", small, "block", dtype=FLOAT8, return_lse=True),
]
SHIPPED = [
    case("", shipped),
    case("chain", shipped, tree=False, page_size=64),
    case("64 rows", shipped, rows=64),
    case("D 256", shipped, heads=(16, 8, 256)),
    case("D 80", shipped, heads=(32, 32, 80), page_size=128),
    case("float8", shipped, dtype=FLOAT8, page_size=64),
    case("window", shipped, heads=(64, 8, 64), window=128, sinks=True, tree=False),
    case("soft cap", shipped, heads=(8, 4, 256), soft_cap=50.0, page_size=64),
    case("prefill", shipped, rows=2048, tree=False),
]
"""Calls that between them launch the kernels in every configuration of note."""

BUDGETS = {
    "attention_kernel": budgets(Budget(255, 163_840), amd=Budget(256, 65_536)),
    "merge_kernel": budgets(Budget(64, 4096), amd=Budget(64, 4096)),
}
"""The most that one program of a kernel may use, whatever its configuration. Up to 32 lines a program, the launch
itself holds the pass over the keys to 128 registers, and it must not spill then."""

_PIPELINED = dict.fromkeys(NVIDIA_TARGETS, (r"^LDGSTS\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
CLAIMS = {"attention_kernel": _PIPELINED}
"""What a kernel is meant to compile to; keys and values come 16 bytes at a time while earlier ones are computed on."""
