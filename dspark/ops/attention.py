"""Attention of ragged query rows over a paged cache: one op for prefill, chains, trees and bidirectional blocks."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from einops import rearrange
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, INT_DTYPES, check_dtype, check_shape
from dspark.ops.types import Backend, PagedKV, QueryBatch

MAX_ANCESTOR_ROWS = 64
"""Rows of a request that one int64 ancestor word can name."""

_NOWHERE = 2**31 - 1


@overload
def verify_attention(
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    *,
    scale: float | None = ...,
    window: int = ...,
    soft_cap: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: Backend = ...,
) -> Tensor: ...


@overload
def verify_attention(
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    *,
    scale: float | None = ...,
    window: int = ...,
    soft_cap: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...


def verify_attention(
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from every query row to its request's cached tokens and to the rows that it descends from.

    The rows' own keys and values are already in the cache: row ``j`` of request ``r`` at cache position
    ``context_len[r] + j``. Row ``i`` sees cache positions ``0 .. context_len[r] - 1``, and of its request's rows those
    in its ancestor word, or rows ``0 .. i`` where ``batch.ancestors`` is None. With a window it sees of those only the
    tokens less than ``window`` positions before its own (``batch.positions``; a committed token's position is its cache
    position). A page of -1 holds nothing that any row sees.

    What a row does not see cannot change its result, whatever numbers are there. A row that sees a NaN key, or a value
    that is not finite, gives NaN in that head. A row that sees nothing gives 0, and so does a padded row.

    Args:
        q: ``[T, Hq, D]`` float32, float16 or bfloat16, queries with rotary applied; ``Hq`` is a multiple of ``Hkv``,
            and query head ``i`` reads key head ``i // (Hq / Hkv)``.
        kv: the layer's pages, ``[P, S, Hkv, D]`` each; any float dtype.
        batch: which rows belong to which request, and where its tokens lie. At most 64 rows a request with ancestors.
        scale: factor of the scores; ``D ** -0.5`` by default.
        window: tokens that a row sees, itself included; 0 is no limit.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0 is off.
        sinks: ``[Hq]`` float; one more score per head, of a token with no value (not scaled or capped).
        return_lse: also return the log of what the softmax divided by.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[T, Hq, D]`` in ``q``'s dtype; with ``return_lse`` also ``[T, Hq]`` float32, the natural logarithm of the sum
        of exponentiated scores, sinks included, -inf where there is nothing to sum and on padded rows.

    Raises:
        ValueError: a shape differs, ``Hq`` is not a multiple of ``Hkv``, ``window`` or ``soft_cap`` is negative, more
            rows than an ancestor word holds, or the backend is unknown or missing.
        TypeError: a dtype differs.

    Computed in float32, by matrix products over the padded batch: a row's result is the same in any batch up to
    rounding, not bit for bit. Graph-safe: no host read, and shapes come from ``T``, ``B`` and ``max_query_len`` only.
    """
    _check(q, kv, batch, window, soft_cap, sinks)
    resolve("verify_attention", backend, q)
    num_rows, num_heads, head_dim = q.shape
    if num_rows == 0:
        return (q.clone(), q.new_zeros(0, num_heads, dtype=torch.float32)) if return_lse else q.clone()
    requests, max_rows = batch.context_len.shape[0], batch.max_query_len
    kv_heads = kv.k.shape[2]
    group = num_heads // kv_heads

    rows, exists = _rows_by_request(batch, num_rows)  # [R, Q] each
    visible = _visible(batch, rows, exists, kv.page_size, window)  # [R, Q, L]
    k, v = _gather(kv.k, batch.block_table), _gather(kv.v, batch.block_table)  # [R, L, Hkv, D]
    # A weight of 0 does not silence a NaN or an infinity among the values, so they are cleared, and the scores of those
    # who see them become NaN.
    flaw = v.sum(-1).mul_(0)  # [R, L, Hkv]
    v.nan_to_num_(0.0, 0.0, 0.0)

    # The rows of a key head's whole group stand together, so that its keys are read once.
    scaled = q.index_select(0, rows.flatten()).float() * (head_dim**-0.5 if scale is None else scale)
    grouped = rearrange(scaled, "(R Q) (Hkv g) D -> R Hkv (Q g) D", R=requests, Q=max_rows, g=group)
    scores = grouped @ k.permute(0, 2, 3, 1)  # [R, Hkv, Q*g, L]
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.add_(flaw.transpose(1, 2)[:, :, None])
    scores.view(requests, kv_heads, max_rows, group, visible.shape[-1]).masked_fill_(
        ~visible[:, None, :, None], -math.inf
    )
    if sinks is None:
        weights = scores.softmax(-1)
        exists = exists & visible.any(-1)
    else:
        sink = sinks.float().view(kv_heads, 1, group).expand(requests, -1, max_rows, -1).flatten(2, 3)  # [R, Hkv, Q*g]
        scores = torch.cat([scores, sink[..., None]], dim=-1)
        weights = scores.softmax(-1)[..., :-1]
    out = rearrange(weights @ v.transpose(1, 2), "R Hkv (Q g) D -> (R Q) (Hkv g) D", g=group)

    # Back to ragged rows; what belongs to no row lands in one more row that is cut off.
    row = torch.where(exists, rows, num_rows).flatten()  # [R*Q]
    result = q.new_zeros(num_rows + 1, num_heads, head_dim)
    result.index_copy_(0, row, out.to(q.dtype))
    if not return_lse:
        return result[:num_rows]
    lse = rearrange(scores.logsumexp(-1), "R Hkv (Q g) -> (R Q) (Hkv g)", g=group)
    padded = q.new_full((num_rows + 1, num_heads), -math.inf, dtype=torch.float32)
    return result[:num_rows], padded.index_copy_(0, row, lse)[:num_rows]


def _rows_by_request(batch: QueryBatch, num_rows: int) -> tuple[Tensor, Tensor]:
    """Global row of each request's rows, ``[R, Q]``, and which of them exist, ``[R, Q]`` bool."""
    start = batch.query_start[:, None].long()
    rows = start[:-1] + torch.arange(batch.max_query_len, device=start.device)
    return rows.clamp(max=num_rows - 1), rows < start[1:]


def _gather(pages: Tensor, block_table: Tensor) -> Tensor:
    """A copy of every request's pages in order, ``[R, L, Hkv, D]`` float32; page 0 stands in for a missing one."""
    requests, columns = block_table.shape
    taken = pages.index_select(0, block_table.clamp(min=0).flatten())  # [R*B, S, Hkv, D]
    return taken.float().view(requests, columns * pages.shape[1], *pages.shape[2:])


def _visible(batch: QueryBatch, rows: Tensor, exists: Tensor, page_size: int, window: int) -> Tensor:
    """Which cache positions each row sees, ``[R, Q, L]`` bool.

    A cache position is counted from the end of the committed tokens: offset ``j >= 0`` is the request's row ``j``.
    """
    columns = batch.block_table.shape[1]
    offset = torch.arange(columns * page_size, device=rows.device) - batch.context_len[:, None]  # [R, L]
    # No row has an offset so large: what a missing page would hold is like a row that does not exist.
    missing = (batch.block_table < 0)[..., None]
    offset = offset.view(-1, columns, page_size).masked_fill(missing, _NOWHERE).flatten(1)
    if batch.ancestors is None:
        visible = offset[:, None] <= torch.arange(rows.shape[1], device=rows.device)[:, None]
    else:
        word = batch.ancestors[rows][..., None]  # [R, Q, 1]
        bit = (word >> offset.clamp(0, MAX_ANCESTOR_ROWS - 1)[:, None]) & 1
        is_row = exists.sum(-1, keepdim=True) > offset  # [R, L], committed tokens included
        visible = ((bit > 0) | (offset < 0)[:, None]) & is_row[:, None]
    if window:
        depth = batch.positions[rows] - batch.context_len[:, None]  # [R, Q]
        key_depth = torch.where(offset < 0, offset, depth.gather(1, offset.clamp(0, rows.shape[1] - 1)))
        visible &= key_depth[:, None] > depth[..., None] - window
    return visible


def _check(q: Tensor, kv: PagedKV, batch: QueryBatch, window: int, soft_cap: float, sinks: Tensor | None) -> None:
    sizes: dict[str, int] = {}
    check_shape("q", q, "T Hq D", sizes)
    check_shape("kv.k", kv.k, "P S Hkv D", sizes)
    check_shape("kv.v", kv.v, "P S Hkv D", sizes)
    check_shape("batch.context_len", batch.context_len, "R", sizes)
    check_shape("batch.query_start", batch.query_start, "R+1", sizes)
    check_shape("batch.block_table", batch.block_table, "R B", sizes)
    check_shape("batch.positions", batch.positions, "T", sizes)
    check_dtype("q", q, FLOAT_DTYPES)
    check_dtype("kv.k", kv.k, FLOAT_DTYPES)
    check_dtype("kv.v", kv.v, FLOAT_DTYPES)
    for name in ("context_len", "query_start", "block_table", "positions"):
        check_dtype(f"batch.{name}", getattr(batch, name), INT_DTYPES)
    if batch.ancestors is not None:
        check_shape("batch.ancestors", batch.ancestors, "T", sizes)
        check_dtype("batch.ancestors", batch.ancestors, (torch.int64,))
        if batch.max_query_len > MAX_ANCESTOR_ROWS:
            raise ValueError(
                f"batch.max_query_len: an ancestor word names at most {MAX_ANCESTOR_ROWS} rows of a request, "
                f"got {batch.max_query_len}"
            )
    if sizes["Hkv"] == 0 or sizes["Hq"] % sizes["Hkv"]:
        raise ValueError(f"q: expected Hq to be a multiple of Hkv = {sizes['Hkv']}, got {list(q.shape)}")
    if sinks is not None:
        check_shape("sinks", sinks, "Hq", sizes)
        check_dtype("sinks", sinks, FLOAT_DTYPES)
    if window < 0:
        raise ValueError(f"window: expected a number of tokens or 0 for no limit, got {window}")
    if soft_cap < 0:
        raise ValueError(f"soft_cap: expected a positive number or 0 for off, got {soft_cap}")
