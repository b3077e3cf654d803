"""The paged key-value cache: its storage, and batches of rows over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.models.config import ModelConfig
from dspark.models.pool import PagePool as PagePool
from dspark.models.pool import pages_for as pages_for
from dspark.models.transformer import Attend
from dspark.ops.attention import AttentionPlan
from dspark.ops.cache import AppendPlan
from dspark.ops.call import check_shape
from dspark.ops.types import Backend, PagedKV, QueryBatch


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of every layer, in pages that requests share by block table.

    Attributes:
        stacked: those of all layers, ``[L, P, S, Hkv, D]`` each.
        layers: views of each layer's. A float8 cache's have scales, 1 until they are filled with others.
    """

    stacked: PagedKV
    layers: list[PagedKV]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> PagedCache:
        """A zeroed cache of ``num_pages`` pages of ``page_size`` tokens for ``config``'s layers.

        Raises:
            ValueError: ``num_pages`` or ``page_size`` is not positive.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be positive, got {num_pages} and {page_size}")
        shape = (config.num_hidden_layers, 2, num_pages, page_size, config.num_key_value_heads, config.head_dim)
        storage = torch.zeros(shape, dtype=dtype, device=device)
        scales = None
        if dtype is torch.float8_e4m3fn:
            scales = torch.ones(shape[0], 2, shape[4], dtype=torch.float32, device=device).unbind()
        layers = [
            PagedKV(layer[0], layer[1], *(() if scales is None else scales[i])) for i, layer in enumerate(storage)
        ]
        return cls(PagedKV(storage[:, 0], storage[:, 1]), layers)

    @property
    def num_pages(self) -> int:
        return self.layers[0].k.shape[0]

    @property
    def page_size(self) -> int:
        return self.layers[0].page_size


def query_batch(
    block_table: Tensor,
    context_len: Tensor,
    lengths: Sequence[int],
    page_size: int,
    *,
    bidirectional: bool = False,
) -> QueryBatch:
    """Rows that follow each request's committed tokens: a causal chain, or a block whose rows all see each other.

    Row ``i`` of request ``r`` is at position ``context_len[r] + i`` and its keys and values go to that token's slot.
    A row whose token has no page (-1, or past the table's last column) gets slot -1. Reads nothing from the device:
    what changes per step besides ``lengths`` is in tensors.

    Args:
        block_table: ``[R, B]`` int64 pages, -1 where there is none.
        context_len: ``[R]`` int64 committed tokens.
        lengths: rows of each of the ``R`` requests; 0 is legal.
        page_size: tokens in a page.
        bidirectional: False for a chain (verification, prefill), True for a drafter's block (at most 63 rows).

    Raises:
        ValueError: shapes do not fit, a length is negative, or a bidirectional block is too long.
    """
    sizes = {"R": len(lengths)}
    check_shape("context_len", context_len, "R", sizes)
    check_shape("block_table", block_table, "R B", sizes)
    longest, shortest = max(lengths, default=0), min(lengths, default=0)
    if shortest < 0:
        raise ValueError(f"lengths must be >= 0, got {list(lengths)}")
    if bidirectional and longest > 63:
        raise ValueError(f"lengths of a bidirectional block must be <= 63, got {longest}")

    device = context_len.device
    num_requests, num_rows = len(lengths), sum(lengths)
    if longest == shortest:
        query_start = torch.arange(num_requests + 1, device=device) * longest
        positions = (context_len[:, None] + torch.arange(longest, device=device)).flatten()  # [R, n] -> [T]
        request = torch.arange(num_rows, device=device) // max(longest, 1)
        ancestors = torch.full((num_rows,), (1 << longest) - 1, device=device) if bidirectional else None
    else:
        length = torch.tensor(lengths, device=device)
        query_start = torch.nn.functional.pad(length.cumsum(0), (1, 0))
        request = torch.arange(num_requests, device=device).repeat_interleave(length, output_size=num_rows)
        positions = torch.arange(num_rows, device=device) + (context_len - query_start[:-1])[request]
        ancestors = ((1 << length) - 1)[request] if bidirectional else None

    column = positions // page_size
    page = block_table[request, column.clamp(max=block_table.shape[1] - 1)]
    has_page = (page >= 0) & (column < block_table.shape[1])
    slots = torch.where(has_page, page * page_size + positions % page_size, -1)
    return QueryBatch(query_start, context_len, block_table, positions, slots, ancestors, longest)


def append_layers(
    cache: PagedCache, keys_values: Sequence[tuple[Tensor, Tensor]], slots: Tensor, *, backend: Backend = "auto"
) -> None:
    """Write keys and values ``[T, Hkv, D]`` of every layer to their slots ``[T]``, as ``append_kv`` does."""
    append = AppendPlan(slots, backend=backend)
    for kv, (k, v) in zip(cache.layers, keys_values, strict=True):
        append.run(k, v, kv)


def paged_attend(cache: PagedCache, batch: QueryBatch, windows: Sequence[int], *, backend: Backend = "auto") -> Attend:
    """Attention of ``batch``'s rows over ``cache``: store their keys and values, then attend to all they see.

    Each layer is ``append_kv`` and ``verify_attention``; what depends on the batch alone is computed once.

    Args:
        cache: written in place.
        batch: the rows that the network runs on.
        windows: sliding window of each layer, 0 for full attention.
        backend: of both ops.

    Raises:
        ValueError: the backend is unknown or missing.
    """
    append, attend = AppendPlan(batch.slots, backend=backend), AttentionPlan(batch, backend=backend)

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = cache.layers[layer]
        append.run(k, v, kv)
        return attend.run(q, kv, window=windows[layer])

    return attend_layer
