"""The torch reference of attention over a paged cache, in two steps: what a batch's layers share, and one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.types import PagedKV, QueryBatch

WORD_BITS = 64
"""Rows of a request that one int64 ancestor word can name."""

_NOWHERE = 2**31 - 1


@dataclass(frozen=True)
class AttentionLayout:
    """Where a batch's queries and keys stand in the padded batch that attention is computed on, and what sees what.

    Depends on the batch and the shape of a layer, not on what is in it. The padded batch has ``Q = max_query_len`` rows
    for each request and ``L = B * S`` keys; the rows of a key head's whole group of ``g`` query heads stand together,
    so that its keys are read once.

    Attributes:
        num_rows: ``T``.
        source: ``[R * Hkv * Q]`` int64, which of the ``T * Hkv`` groups of queries stands in each place; any where none
            does.
        target: where each place's result belongs; beyond ``T * Hkv`` where there is no row or it sees nothing.
        lse_target: the same of the log-sum-exp, which a row that sees nothing may have (of sinks).
        pages: ``[R, B]`` int64; page 0 stands in for a missing one.
        unseen: ``[R, 1, Q * g, L]`` bool.
    """

    num_rows: int
    source: Tensor
    target: Tensor
    lse_target: Tensor
    pages: Tensor
    unseen: Tensor


def verify(
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    scale: float | None,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    *_: object,
) -> tuple[Tensor, Tensor | None]:
    """:func:`~dspark.ops.verify_attention` of at least one row and head; how the kernels split it does not matter."""
    layout = attention_layout(batch, q.shape[0], q.shape[1], kv.k.shape[2], kv.page_size, window)
    out, scores = attend(q, kv, layout, scale=scale, soft_cap=soft_cap, sinks=sinks)
    return out, log_sum_exp(scores, layout, q.shape[1]) if return_lse else None


def attention_layout(
    batch: QueryBatch, num_rows: int, num_heads: int, kv_heads: int, page_size: int, window: int = 0
) -> AttentionLayout:
    """Lay out ``num_rows`` rows, at least one, for layers of these heads, pages and window. Graph-safe."""
    rows, exists = _rows_by_request(batch, num_rows)  # [R, Q] each
    visible = _visible(batch, rows, exists, page_size, window)  # [R, Q, L]
    head = torch.arange(kv_heads, device=rows.device)[:, None]

    def groups(row: Tensor) -> Tensor:
        return (row[:, None] * kv_heads + head).flatten()  # [R, Q] -> [R * Hkv * Q]

    return AttentionLayout(
        num_rows=num_rows,
        source=groups(rows),
        target=groups(torch.where(exists & visible.any(-1), rows, num_rows)),
        lse_target=groups(torch.where(exists, rows, num_rows)),
        pages=batch.block_table.clamp(min=0),
        unseen=~visible.repeat_interleave(num_heads // kv_heads, dim=1)[:, None],
    )


def attend(
    q: Tensor,
    kv: PagedKV,
    layout: AttentionLayout,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one layer: :func:`~dspark.ops.verify_attention` without its checks.

    Returns:
        ``[T, Hq, D]`` in ``q``'s dtype, and the scores ``[R, Hkv, Q * g, L]`` float32 of :func:`log_sum_exp`, with
        sinks one more column.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads = kv.k.shape[2]
    requests, _, grouped_rows, _ = layout.unseen.shape
    group = num_heads // kv_heads
    k, v = _gather(kv.k, layout.pages), _gather(kv.v, layout.pages)  # [R, L, Hkv, D] each
    if kv.k_scale is not None:
        k.mul_(kv.k_scale[:, None])
    if kv.v_scale is not None:
        v.mul_(kv.v_scale[:, None])
    # A weight of 0 does not silence a NaN or an infinity among the values, so they are cleared, and the scores of those
    # who see them become NaN.
    flaw = v.sum(-1).mul_(0)  # [R, L, Hkv]
    v.nan_to_num_(0.0, 0.0, 0.0)

    queries = q.reshape(num_rows * kv_heads, group * head_dim).index_select(0, layout.source).float()
    queries = queries.mul_(head_dim**-0.5 if scale is None else scale).view(requests, kv_heads, grouped_rows, head_dim)
    scores = queries @ k.permute(0, 2, 3, 1)  # [R, Hkv, Q*g, L]
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.add_(flaw.transpose(1, 2)[:, :, None]).masked_fill_(layout.unseen, -math.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(kv_heads, 1, group).expand(requests, -1, grouped_rows // group, -1).flatten(2, 3)
        scores = torch.cat([scores, sink[..., None]], dim=-1)
        weights = scores.softmax(-1)[..., :-1]
    out = (weights @ v.transpose(1, 2)).view(-1, group * head_dim)  # [R*Hkv*Q, g*D]
    return _scatter(out.to(q.dtype), layout.target, num_rows, kv_heads, 0.0).view(q.shape), scores


def log_sum_exp(scores: Tensor, layout: AttentionLayout, num_heads: int) -> Tensor:
    """``[T, Hq]`` of the scores that :func:`attend` returned."""
    kv_heads = scores.shape[1]
    lse = scores.logsumexp(-1).view(-1, num_heads // kv_heads)  # [R*Hkv*Q, g]
    return _scatter(lse, layout.lse_target, layout.num_rows, kv_heads, -math.inf)


def _scatter(groups: Tensor, target: Tensor, num_rows: int, kv_heads: int, empty: float) -> Tensor:
    """Groups ``[R * Hkv * Q, n]`` to their rows ``[T, Hkv * n]``; what belongs to no row lands in one more, cut off."""
    rows = groups.new_full(((num_rows + 1) * kv_heads, groups.shape[1]), empty).index_copy_(0, target, groups)
    return rows.view(num_rows + 1, -1)[:num_rows]


def _rows_by_request(batch: QueryBatch, num_rows: int) -> tuple[Tensor, Tensor]:
    """Global row of each request's rows, ``[R, Q]``, and which of them exist, ``[R, Q]`` bool."""
    start = batch.query_start[:, None].long()
    rows = start[:-1] + torch.arange(batch.max_query_len, device=start.device)
    return rows.clamp(max=num_rows - 1), rows < start[1:]


def _gather(pages: Tensor, taken: Tensor) -> Tensor:
    """A copy of every request's pages in order, ``[R, L, Hkv, D]`` float32."""
    requests, columns = taken.shape
    copy = pages.index_select(0, taken.flatten())  # [R*B, S, Hkv, D]
    return copy.float().view(requests, columns * pages.shape[1], *pages.shape[2:])


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
        words = batch.ancestors.reshape(len(batch.ancestors), -1)[rows]  # [R, Q, W]
        row = offset.clamp(0, WORD_BITS * words.shape[2] - 1)[:, None].expand(-1, rows.shape[1], -1)  # [R, Q, L]
        bit = (words.gather(2, row // WORD_BITS) >> row % WORD_BITS) & 1
        is_row = exists.sum(-1, keepdim=True) > offset  # [R, L], committed tokens included
        visible = ((bit > 0) | (offset < 0)[:, None]) & is_row[:, None]
    if window:
        depth = batch.positions[rows] - batch.context_len[:, None]  # [R, Q]
        key_depth = torch.where(offset < 0, offset, depth.gather(1, offset.clamp(0, rows.shape[1] - 1)))
        visible &= key_depth[:, None] > depth[..., None] - window
    return visible
