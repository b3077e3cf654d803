"""Paged batches whose every unused number is poison, beside dense copies of what each request holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.types import PagedKV, QueryBatch

Kind = Literal["chain", "tree", "block"]
NAN = float("nan")


@dataclass(frozen=True)
class Heads:
    """Head counts and size of an attention layer."""

    queries: int = 4
    keys: int = 2
    dim: int = 16


@dataclass(frozen=True)
class Request:
    """One request of a case: its dense keys and values, and which of them its rows see.

    Attributes:
        k, v: ``[context + n, Hkv, D]`` of the committed tokens and then the ``n`` rows.
        q: ``[n, Hq, D]``.
        parents: of each row, -1 for the first.
        kind: what a row sees of the request's other rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    parents: list[int]
    kind: Kind

    @property
    def context(self) -> int:
        return len(self.k) - len(self.parents)

    def ancestors(self, row: int) -> list[int]:
        """Rows that ``row`` sees, by definition."""
        if self.kind == "block":
            return list(range(len(self.parents)))
        seen = [row]
        while self.parents[seen[-1]] >= 0:
            seen.append(self.parents[seen[-1]])
        return seen

    def depth(self, row: int) -> int:
        """Place of a row after the context: of a block's rows their index, else the number of true ancestors."""
        return row if self.kind == "block" else len(self.ancestors(row)) - 1

    def visible(self, window: int = 0) -> Tensor:
        """``[n, context + n]`` bool, built row by row."""
        seen = torch.zeros(len(self.parents), len(self.k), dtype=torch.bool)
        for i in range(len(self.parents)):
            keys = [*range(self.context), *(self.context + j for j in self.ancestors(i))]
            for key in keys:
                place = key - self.context
                if not window or self.depth(i) - (place if place < 0 else self.depth(place)) < window:
                    seen[i, key] = True
        return seen


def make_requests(
    contexts: Sequence[int], lengths: Sequence[int], kind: Kind = "chain", heads: Heads | None = None, seed: int = 0
) -> list[Request]:
    """Random requests; a tree's parents are drawn too."""
    heads = heads or Heads()
    g = torch.Generator().manual_seed(seed)
    requests = []
    for context, n in zip(contexts, lengths, strict=True):
        parents = [i - 1 for i in range(n)]
        if kind == "tree":
            parents = [-1 if i == 0 else int(torch.randint(i, (), generator=g)) for i in range(n)]
        q = torch.randn(n, heads.queries, heads.dim, generator=g)
        k, v = torch.randn(2, context + n, heads.keys, heads.dim, generator=g)
        requests.append(Request(q, k, v, parents, kind))
    return requests


@dataclass(frozen=True)
class Paged:
    """The same requests as :func:`verify_attention` takes them."""

    q: Tensor
    kv: PagedKV
    batch: QueryBatch


def make_paged(
    requests: Sequence[Request],
    page_size: int = 16,
    *,
    pad_rows: int = 0,
    pad_columns: int = 0,
    spare_pages: int = 2,
    poison: float = NAN,
    seed: int = 0,
    num_words: int = 1,
) -> Paged:
    """Lay requests out in pages of a random order.

    Every slot that holds no token of a request, every padded query and every padded ancestor word is ``poison``.
    With ``num_words`` above 1 the ancestors are ``[T, num_words]``.
    """
    kind = requests[0].kind
    page_counts = [math.ceil(len(r.k) / page_size) for r in requests]
    num_pages = sum(page_counts) + spare_pages
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(requests), max(page_counts) + pad_columns), -1)
    pages = torch.full((2, num_pages * page_size, *requests[0].k.shape[1:]), poison)
    slots, positions, words = [], [], []
    for r, (request, count) in enumerate(zip(requests, page_counts, strict=True)):
        table[r, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        for token in range(len(request.k)):
            slot = int(table[r, token // page_size]) * page_size + token % page_size
            pages[0, slot], pages[1, slot] = request.k[token], request.v[token]
            if token >= request.context:
                row = token - request.context
                slots.append(slot)
                positions.append(request.context + request.depth(row))
                # All bits of a block's words, so that bits of rows that do not exist are set too.
                bits = 2 ** (64 * num_words) - 1 if kind == "block" else sum(1 << j for j in request.ancestors(row))
                words.append([_int64(bits >> 64 * word) for word in range(num_words)])
    lengths = [len(r.parents) for r in requests]
    pages = pages.view(2, num_pages, page_size, *pages.shape[2:])
    ancestors = torch.tensor([*words, *[[-1] * num_words] * pad_rows], dtype=torch.int64).view(-1, num_words)
    batch = QueryBatch(
        query_start=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)),
        context_len=torch.tensor([r.context for r in requests]),
        block_table=table,
        positions=torch.tensor([*positions, *[0] * pad_rows], dtype=torch.int64),
        slots=torch.tensor([*slots, *[-1] * pad_rows], dtype=torch.int64),
        ancestors=None if kind == "chain" else ancestors.squeeze(1),
        max_query_len=max(lengths),
    )
    q = torch.cat([*(r.q for r in requests), torch.full((pad_rows, *requests[0].q.shape[1:]), poison)])
    return Paged(q, PagedKV(pages[0], pages[1]), batch)


def _int64(word: int) -> int:
    """The number whose 64 bits are the low ones of ``word``."""
    word %= 2**64
    return word - 2**64 if word >> 63 else word


def dense_attention(
    request: Request,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``[n, Hq, D]`` and the log-sum-exp ``[n, Hq]`` by torch's attention in float64.

    A soft cap or sinks, which torch's attention has not, are put into its additive mask, with queries of zero.
    """
    group = request.q.shape[1] // request.k.shape[1]
    q = request.q.double().transpose(0, 1)  # [Hq, n, D]
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (request.k, request.v))
    visible = request.visible(window) if visible is None else visible
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.transpose(1, 2) * scale  # [Hq, n, L]
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores, v = torch.cat([scores, column], dim=-1), F.pad(v, (0, 0, 0, 1))
    if soft_cap or sinks is not None:
        out = F.scaled_dot_product_attention(torch.zeros_like(q), torch.zeros_like(v), v, scores)
    else:
        out = F.scaled_dot_product_attention(q, k, v, visible, scale=scale)
    return out.transpose(0, 1), scores.logsumexp(-1).T
