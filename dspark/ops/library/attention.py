"""``verify_attention`` as ``torch.ops.dspark.verify_attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.attention.config import Split
from dspark.ops.library.define import define
from dspark.ops.types import Backend, PagedKV, QueryBatch

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor query_start, Tensor context_len, "
    "Tensor block_table, Tensor positions, Tensor? ancestors, int max_query_len, float scale, int window, "
    "float soft_cap, Tensor? sinks, str split, int? num_sms, int? chunk, Tensor(a!) out, Tensor(b!)? lse, "
    "Tensor(c!)? workspace, str backend) -> ()"
)


def verify_attention_op(
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    split: Split,
    num_sms: int | None,
    chunk: int | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    """:func:`dspark.ops.verify_attention` as ``torch.ops.dspark.verify_attention``."""
    torch.ops.dspark.verify_attention(
        q,
        *(kv.k, kv.v, kv.k_scale, kv.v_scale),
        *(batch.query_start, batch.context_len, batch.block_table, batch.positions, batch.ancestors),
        batch.max_query_len,
        scale,
        window,
        soft_cap,
        sinks,
        split,
        num_sms,
        chunk,
        out,
        lse,
        workspace,
        backend,
    )


def _verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    max_query_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    split: Split,
    num_sms: int | None,
    chunk: int | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.attention import verify_attention

    options = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "split": split,
        "num_sms": num_sms,
        "chunk": chunk,
        "out": out,
        "workspace": workspace,
        "backend": backend,
    }
    kv = PagedKV(k, v, k_scale, v_scale)
    # Slots say where append_kv writes; attention does not look at them.
    batch = QueryBatch(query_start, context_len, block_table, positions, positions, ancestors, max_query_len)
    if lse is None:
        verify_attention(q, kv, batch, **options)  # type: ignore[call-overload]
    else:
        verify_attention(q, kv, batch, return_lse=True, lse=lse, **options)  # type: ignore[call-overload]


define("verify_attention", _SCHEMA, _verify_attention)
