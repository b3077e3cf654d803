"""Attention of ragged query rows over a paged cache: one op for prefill, chains, trees and bidirectional blocks."""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch
from torch import Tensor

from dspark.ops.attention.config import MAX_HEAD_DIM, Split
from dspark.ops.attention.launch import Sizes, attention_triton, config_of, workspace_bytes
from dspark.ops.attention.reference import WORD_BITS, attend, attention_layout, log_sum_exp
from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, INT_DTYPES, check_dtype, check_shape, check_workspace
from dspark.ops.library import attention as library
from dspark.ops.types import Backend, PagedKV, QueryBatch

_CACHE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)
_CHUNK_STEP = 64


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
    split: Split = ...,
    num_sms: int | None = ...,
    chunk: int | None = ...,
    out: Tensor | None = ...,
    lse: None = ...,
    workspace: Tensor | None = ...,
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
    split: Split = ...,
    num_sms: int | None = ...,
    chunk: int | None = ...,
    out: Tensor | None = ...,
    lse: Tensor | None = ...,
    workspace: Tensor | None = ...,
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
    split: Split = "fixed",
    num_sms: int | None = None,
    chunk: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from every query row to its request's cached tokens and to the rows that it descends from.

    The rows' own keys and values are already in the cache: row ``j`` of request ``r`` at cache position
    ``context_len[r] + j``. Row ``i`` sees cache positions ``0 .. context_len[r] - 1``, and of its request's rows those
    in its ancestor words, or rows ``0 .. i`` where ``batch.ancestors`` is None. With a window it sees of those only the
    tokens less than ``window`` positions before its own (``batch.positions``; a committed token's position is its cache
    position). A page of -1 holds nothing that any row sees.

    What a row does not see cannot change its result, whatever numbers are there. A row that sees a NaN key, or a value
    that is not finite, gives NaN in that head. A row that sees nothing gives 0, and so does a padded row.

    Args:
        q: ``[T, Hq, D]`` float32, float16 or bfloat16, queries with rotary applied, ``D <= 256``; ``Hq`` is a multiple
            of ``Hkv``, and query head ``i`` reads key head ``i // (Hq / Hkv)``.
        kv: the layer's pages, ``[P, S, Hkv, D]`` each, of one float dtype or float8_e4m3fn with its scales (None is 1).
        batch: which rows belong to which request, and where its tokens lie. With ancestors, at most 64 rows a request
            for each word.
        scale: factor of the scores; ``D ** -0.5`` by default.
        window: tokens that a row sees, itself included; 0 is no limit.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0 is off.
        sinks: ``[Hq]`` float; one more score per head, of a token with no value (not scaled or capped).
        return_lse: also return the log of what the softmax divided by.
        split: how the kernels split a request's keys. ``"fixed"``: in chunks of a size that depends on heads, dtype and
            a step of ``max_query_len``. ``"occupancy"``: in as many as fill ``num_sms`` multiprocessors, given the
            number of requests and the width of the block table; faster for a few requests, and a row's result then
            depends on them by its rounding.
        num_sms: multiprocessors of the device; needed by, and only by, ``"occupancy"``.
        chunk: tokens of a chunk under ``"fixed"`` instead of the rule's, a multiple of 64. Larger ones take less
            scratch memory.
        out: ``[T, Hq, D]`` in ``q``'s dtype for the result.
        lse: ``[T, Hq]`` float32 for the log-sum-exp; needs ``return_lse``.
        workspace: ``[bytes]`` uint8, scratch memory of the kernels, :func:`attention_workspace` bytes or more; None
            takes some from the allocator. The reference needs none.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[T, Hq, D]`` in ``q``'s dtype; with ``return_lse`` also ``[T, Hq]`` float32, the natural logarithm of the sum
        of exponentiated scores, sinks included, -inf where there is nothing to sum and on padded rows.

    Raises:
        ValueError: a shape or a layout differs, ``Hq`` is not a multiple of ``Hkv``, ``window`` or ``soft_cap`` is
            negative, more rows than the ancestor words hold, an option that the call does not use, a workspace too
            small, or the backend is unknown or missing.
        TypeError: a dtype differs.

    Computed in float32; the kernels round the softmax's weights to the dtype of ``q`` before they weigh the values.

    Under ``"fixed"`` the kernels' result of a row is bit for bit the same alone, in any batch and order, in pages of
    any number, with other requests of any length, with any padding of the batch and the table, and for any
    ``max_query_len`` of the same step: 1..8, then powers of two to 256, then all above. What a row adds up, and in
    which order, follows from its own position, so that a row of a verified chain is also the row that decoding token by
    token computes there. Bits do differ between dtypes, page sizes below and from 64, and alignments of the tensors.
    The reference multiplies matrices over the padded batch, and keeps this up to rounding only.

    Graph-safe: no host read, and shapes come from ``T``, ``B`` and ``max_query_len`` only.
    """
    sizes = _check(q, kv, batch, window, soft_cap, sinks)
    _check_options(q, sizes, return_lse, split, num_sms, chunk, out, lse, workspace)
    taken = resolve("verify_attention", backend, q)
    scale = sizes["D"] ** -0.5 if scale is None else scale
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if return_lse and lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if torch.compiler.is_compiling():
        library.verify_attention_op(
            q, kv, batch, scale, window, soft_cap, sinks, split, num_sms, chunk, out, lse, workspace, taken
        )
    elif taken == "triton":
        attention_triton(q, kv, batch, scale, window, soft_cap, sinks, out, lse, workspace, split, num_sms, chunk)
    elif q.shape[0]:
        layout = attention_layout(batch, q.shape[0], q.shape[1], kv.k.shape[2], kv.page_size, window)
        result, scores = attend(q, kv, layout, scale=scale, soft_cap=soft_cap, sinks=sinks)
        out.copy_(result)
        if lse is not None:
            lse.copy_(log_sum_exp(scores, layout, q.shape[1]))
    return out if lse is None else (out, lse)


def attention_workspace(
    num_requests: int,
    num_rows: int,
    max_context: int,
    *,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    max_query_len: int,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    split: Split = "fixed",
    num_sms: int | None = None,
    chunk: int | None = None,
) -> int:
    """Bytes of scratch memory that the kernels of :func:`verify_attention` take; 0 where the keys are not split.

    Args:
        num_requests, num_rows: ``R`` and ``T``.
        max_context: tokens that a request's row of the block table can hold, ``B * S``.
        num_heads, kv_heads, head_dim: ``Hq``, ``Hkv``, ``D``.
        max_query_len: as in the batch.
        page_size: ``S``.
        dtype: of ``q``.
        split, num_sms, chunk: as in :func:`verify_attention`.

    >>> attention_workspace(1, 8, 8192, num_heads=32, kv_heads=8, head_dim=128, max_query_len=8)
    1464320
    """
    sizes = Sizes(
        num_requests, num_rows, num_heads, kv_heads, head_dim, max_query_len, page_size, max_context, dtype.itemsize
    )
    return workspace_bytes(sizes, config_of(sizes, split, num_sms, chunk))


def _check(
    q: Tensor, kv: PagedKV, batch: QueryBatch, window: int, soft_cap: float, sinks: Tensor | None
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    check_shape("q", q, "T Hq D", sizes)
    check_shape("kv.k", kv.k, "P S Hkv D", sizes)
    check_shape("kv.v", kv.v, "P S Hkv D", sizes)
    check_shape("batch.context_len", batch.context_len, "R", sizes)
    check_shape("batch.query_start", batch.query_start, "R+1", sizes)
    check_shape("batch.block_table", batch.block_table, "R B", sizes)
    check_shape("batch.positions", batch.positions, "T", sizes)
    check_dtype("q", q, FLOAT_DTYPES)
    check_dtype("kv.k", kv.k, _CACHE_DTYPES)
    check_dtype("kv.v", kv.v, (kv.k.dtype,))
    for name in ("context_len", "query_start", "block_table", "positions"):
        check_dtype(f"batch.{name}", getattr(batch, name), INT_DTYPES)
    for name in ("k_scale", "v_scale"):
        scale = getattr(kv, name)
        if scale is not None:
            check_shape(f"kv.{name}", scale, "Hkv", sizes)
            check_dtype(f"kv.{name}", scale, (torch.float32,))
            if kv.k.dtype is not torch.float8_e4m3fn:
                raise ValueError(f"kv.{name}: only a float8_e4m3fn cache has scales, got {kv.k.dtype}")
    if batch.ancestors is not None:
        _check_ancestors(batch.ancestors, batch.max_query_len, sizes)
    if sizes["Hkv"] == 0 or sizes["Hq"] % sizes["Hkv"]:
        raise ValueError(f"q: expected Hq to be a multiple of Hkv = {sizes['Hkv']}, got {list(q.shape)}")
    if sizes["D"] > MAX_HEAD_DIM:
        raise ValueError(f"q: expected D <= {MAX_HEAD_DIM}, got {list(q.shape)}")
    if sinks is not None:
        check_shape("sinks", sinks, "Hq", sizes)
        check_dtype("sinks", sinks, FLOAT_DTYPES)
    if window < 0:
        raise ValueError(f"window: expected a number of tokens or 0 for no limit, got {window}")
    if soft_cap < 0:
        raise ValueError(f"soft_cap: expected a positive number or 0 for off, got {soft_cap}")
    return sizes


def _check_ancestors(ancestors: Tensor, max_query_len: int, sizes: dict[str, int]) -> None:
    check_shape("batch.ancestors", ancestors, "T W" if getattr(ancestors, "ndim", 1) == 2 else "T", sizes)
    check_dtype("batch.ancestors", ancestors, (torch.int64,))
    held = WORD_BITS * (ancestors.shape[1] if ancestors.ndim == 2 else 1)
    if max_query_len > held:
        raise ValueError(
            f"batch.max_query_len: the ancestor words name at most {held} rows of a request, got {max_query_len}"
        )


def _check_options(
    q: Tensor,
    sizes: dict[str, int],
    return_lse: bool,
    split: Split,
    num_sms: int | None,
    chunk: int | None,
    out: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
) -> None:
    if split not in get_args(Split):
        raise ValueError(f"split: expected one of {', '.join(map(repr, get_args(Split)))}, got {split!r}")
    if (split == "occupancy") != (num_sms is not None) or (num_sms is not None and num_sms < 1):
        raise ValueError(f"num_sms: expected a positive number for split 'occupancy', None for others, got {num_sms}")
    if chunk is not None and (split != "fixed" or chunk < 1 or chunk % _CHUNK_STEP):
        raise ValueError(f"chunk: expected a multiple of {_CHUNK_STEP}, for split 'fixed' only, got {chunk}")
    if out is not None:
        check_shape("out", out, "T Hq D", sizes)
        check_dtype("out", out, (q.dtype,))
    if lse is not None:
        if not return_lse:
            raise ValueError("lse: the log-sum-exp is written with return_lse=True only")
        check_shape("lse", lse, "T Hq", sizes)
        check_dtype("lse", lse, (torch.float32,))
    check_workspace(workspace)
