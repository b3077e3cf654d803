"""Attention of ragged query rows over a paged cache: one op for prefill, chains, trees and bidirectional blocks."""

from __future__ import annotations

from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor

from dspark.ops.attention import launch, reference
from dspark.ops.attention.launch import Split
from dspark.ops.call import FLOATS, ScalarArg, TensorArg
from dspark.ops.groups import QUERY_BATCH, check_scales, pages
from dspark.ops.op import Op
from dspark.ops.types import Backend, PagedKV, QueryBatch

MAX_HEAD_DIM = 256
_CHUNK_STEP = 64


def _check(
    sizes: dict[str, int],
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    split: Split,
    num_sms: int | None,
    chunk: int | None,
    **_: Any,
) -> None:
    check_scales(kv)
    if sizes["Hkv"] == 0 or sizes["Hq"] % sizes["Hkv"]:
        raise ValueError(f"q: expected Hq to be a multiple of Hkv = {sizes['Hkv']}, got {list(q.shape)}")
    if sizes["D"] > MAX_HEAD_DIM:
        raise ValueError(f"q: expected D <= {MAX_HEAD_DIM}, got {list(q.shape)}")
    held = reference.WORD_BITS * sizes.get("W", 1)
    if batch.ancestors is not None and sizes["Q"] > held:
        raise ValueError(
            f"batch.max_query_len: the ancestor words name at most {held} rows of a request, got {sizes['Q']}"
        )
    if (split == "occupancy") != (num_sms is not None):
        raise ValueError(f"num_sms: expected a positive number for split 'occupancy', None for others, got {num_sms}")
    if chunk is not None and (split != "fixed" or chunk % _CHUNK_STEP):
        raise ValueError(f"chunk: expected a multiple of {_CHUNK_STEP}, for split 'fixed' only, got {chunk}")


_VERIFY_ATTENTION = Op(
    "verify_attention",
    {
        "q": TensorArg("T Hq D", FLOATS, layout="rows"),
        "kv": pages(),
        "batch": QUERY_BATCH,
        "scale": ScalarArg("float", optional=True),
        "window": ScalarArg("SymInt", least=0),
        "soft_cap": ScalarArg("float", least=0),
        "sinks": TensorArg("Hq", FLOATS, optional=True, layout="dense"),
        "return_lse": ScalarArg("bool"),
        "split": ScalarArg("str", choices=get_args(Split)),
        "num_sms": ScalarArg("SymInt", least=1, optional=True),
        "chunk": ScalarArg("SymInt", least=_CHUNK_STEP, optional=True),
        "out": TensorArg("T Hq D", "q", optional=True, written=True, layout="contiguous"),
        "lse": TensorArg("T Hq", (torch.float32,), optional=True, written=True, layout="contiguous", when="return_lse"),
    },
    reference=reference.verify,
    plan=launch.plan,
    run=launch.run,
    results=["out", "lse"],
    also=_check,
    empty="T Hq",
    workspace=True,
)


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
        ValueError: a shape or a layout differs, only one scale is given or the cache is not float8, ``Hq`` is not a
            multiple of ``Hkv``, ``window`` or ``soft_cap`` is negative, more rows than the ancestor words hold, an
            option that the call does not use, a workspace too small, or the backend is unknown or missing.
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
    values = (q, kv, batch, scale, window, soft_cap, sinks, return_lse, split, num_sms, chunk, out, lse)
    result: tuple[Tensor, Tensor] = _VERIFY_ATTENTION(backend, *values, workspace=workspace)
    return result if return_lse else result[0]


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
    sizes = {
        "R": num_requests,
        "T": num_rows,
        "Hq": num_heads,
        "Hkv": kv_heads,
        "D": head_dim,
        "Q": max_query_len,
        "S": page_size,
        "B": -(-max_context // page_size),
    }
    config = launch.config_of(sizes, dtype.itemsize, num_sms if split == "occupancy" else None, chunk)
    return 4 * sum(launch.part_sizes(sizes, config))


class AttentionPlan:
    """:func:`verify_attention` of many layers over one batch: the backend is chosen, and what the layers share is
    computed, once.

    Args:
        batch: as in :func:`verify_attention`.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: the backend is unknown or missing.
    """

    def __init__(self, batch: QueryBatch, *, backend: Backend = "auto") -> None:
        self._batch = batch
        self._backend: Backend = _VERIFY_ATTENTION.choose(backend, batch.positions.device)
        self._calls_op = self._backend == "triton" or batch.positions.shape[0] == 0
        self._layouts: dict[tuple[int, ...], reference.AttentionLayout] = {}

    def run(self, q: Tensor, kv: PagedKV, *, window: int = 0) -> Tensor:
        """``verify_attention(q, kv, batch, window=window)`` of one layer; of the reference only the first is checked.

        Raises:
            ValueError, TypeError: as :func:`verify_attention`.

        Graph-safe.
        """
        if self._calls_op:
            return verify_attention(q, kv, self._batch, window=window, backend=self._backend)
        if not self._layouts:
            options = (None, window, 0.0, None, False, "fixed", None, None)
            _VERIFY_ATTENTION.call_of((q, kv, self._batch, *options, None, None))
        (num_rows, num_heads, _), (_, page_size, kv_heads, _) = q.shape, kv.k.shape
        key = (num_heads, kv_heads, page_size, window)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = reference.attention_layout(self._batch, num_rows, *key)
        return reference.attend(q, kv, layout)[0]
