"""Attention of ragged query rows over a paged cache: one op for prefill, chains, trees and bidirectional blocks."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from dspark.ops.attention_reference import MAX_ANCESTOR_ROWS, attend, attention_layout, log_sum_exp
from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, INT_DTYPES, check_dtype, check_shape
from dspark.ops.types import Backend, PagedKV, QueryBatch


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
    num_rows, num_heads, _ = q.shape
    if num_rows == 0:
        return (q.clone(), q.new_zeros(0, num_heads, dtype=torch.float32)) if return_lse else q.clone()
    layout = attention_layout(batch, num_rows, num_heads, kv.k.shape[2], kv.page_size, window)
    out, scores = attend(q, kv, layout, scale=scale, soft_cap=soft_cap, sinks=sinks)
    return (out, log_sum_exp(scores, layout, num_heads)) if return_lse else out


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
