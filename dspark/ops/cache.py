"""The paged cache: write rows to slots, move accepted tree paths into place, copy pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.ops import cache_reference as reference
from dspark.ops.backend import resolve
from dspark.ops.cache_reference import FLOAT8, destinations, write
from dspark.ops.cache_triton import (
    RotaryRows,
    append_kv_triton,
    commit_kv_triton,
    copy_pages_triton,
    rope_append_kv_triton,
)
from dspark.ops.checks import FLOAT_DTYPES, INT_DTYPES, check_dtype, check_shape
from dspark.ops.library import cache as library
from dspark.ops.types import Backend, PagedKV

__all__ = ["append_kv", "commit_kv", "copy_pages", "destinations", "rope_append_kv", "write"]

CACHE_DTYPES = (*FLOAT_DTYPES, FLOAT8)


def append_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor, *, backend: Backend = "auto") -> None:
    """Write one layer's new keys and values to their slots, in place.

    A row whose slot is -1 writes nothing: the cache keeps its bits, also where every row is -1. Values are rounded to
    the cache's dtype. Into float8 goes the number over its head's scale, and what is beyond the largest float8 becomes
    that; NaN stays NaN. The cache may be any strided view (one layer, or one half, of a larger buffer).

    Args:
        k: ``[T, Hkv, D]`` float32, float16 or bfloat16, keys with rotary applied.
        v: ``[T, Hkv, D]``, same dtype, values.
        kv: the pages, ``[P, S, Hkv, D]`` each, of a float dtype or float8_e4m3fn; the scales of a float8 cache are 1
            where they are None.
        slots: ``[T]`` int64 or int32 in ``-1 .. P * S - 1``; slot ``s`` is row ``s % S`` of page ``s // S``. Slots
            other than -1 must differ from each other.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: a shape differs, only one scale is given or the cache is not float8, the kernel is to read a last
            axis that is not contiguous, or the backend is unknown or missing.
        TypeError: a dtype differs.

    Graph-safe: no host read; a padded batch runs the same launches as a full one.
    """
    if not _rows_fit(k, v, kv, slots):
        _check_rows(k, v, kv, slots)
    taken = resolve("append_kv", backend, k)
    if k.numel() == 0:
        return
    if torch.compiler.is_compiling():
        library.append_kv_op(k, v, kv, slots, taken)
    elif taken == "triton":
        append_kv_triton(k, v, kv, slots)
    else:
        write(k, v, kv, destinations(slots, kv.page_size))


def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    slots: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values to their slots, and return the queries.

    In one pass what a decoder layer does between its projections and attention: RMSNorm over each head where weights
    are given, ``x / sqrt(mean(x^2) + eps) * weight``, then ``x * cos + swap(x) * sin``, where ``swap`` exchanges the
    halves of a head (rotary embedding, Su et al., arXiv 2104.09864, paired as in Llama), then :func:`append_kv`.

    Args:
        q: ``[T, Hq, D]`` float32, float16 or bfloat16, queries as projected; ``D`` is even.
        k: ``[T, Hkv, D]``, same dtype, keys as projected.
        v: ``[T, Hkv, D]``, same dtype.
        kv, slots: as in :func:`append_kv`.
        cos, sin: ``[T, 1, D]`` of a float dtype, at each row's position, as :class:`dspark.models.rotary.Rotary` makes
            them: the sine of the first half is negated.
        q_norm, k_norm: ``[D]`` of a float dtype, weights; None is no norm.
        eps: of the norms; given if and only if there is one.
        out: ``[T, Hq, D]`` of ``q``'s dtype for the result; it may be ``q`` itself.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[T, Hq, D]`` in ``q``'s dtype, rows with slot -1 included.

    Raises:
        ValueError, TypeError: as :func:`append_kv`; ``D`` is odd, or ``eps`` is missing or useless.

    Computed in float32 and rounded once. Graph-safe.
    """
    if not (_rows_fit(k, v, kv, slots) and _rotary_fits(q, k, cos, sin, q_norm, k_norm, eps, out)):
        _check_rotary(q, cos, sin, q_norm, k_norm, eps, out, _check_rows(k, v, kv, slots), k.dtype)
    taken = resolve("rope_append_kv", backend, q)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    rotary = RotaryRows(cos, sin, q_norm, k_norm, 0.0 if eps is None else eps)
    if torch.compiler.is_compiling():
        library.rope_append_kv_op(q, k, v, kv, slots, rotary, out, taken)
    elif taken == "triton":
        rope_append_kv_triton(q, k, v, kv, slots, rotary, out)
    else:
        out.copy_(reference.normalised_and_rotated(q, q_norm, rotary.eps, cos, sin))
        # The keys reach the cache in float32, so that they are rounded once.
        rotated = reference.normalised_and_rotated(k, k_norm, rotary.eps, cos, sin)
        write(rotated, v, kv, destinations(slots, kv.page_size))
    return out


def commit_kv(
    kv: PagedKV,
    path: Tensor,
    num_emitted: Tensor,
    query_start: Tensor,
    slots: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Move the keys and values of accepted paths into consecutive slots, in place.

    Row ``j`` of request ``r`` was written to ``slots[query_start[r] + j]``, the slot of cache position
    ``context_len[r] + j``. The row ``path[r, i]`` goes to the slot of row ``i``, for ``i < num_emitted[r]``, so that
    afterwards the request's ``context_len[r] + num_emitted[r]`` tokens lie one after the other. Of a chain nothing is
    moved: every bit stays, and next to nothing is read.

    A path rises, so ``path[r, i] >= i``; an entry for which this does not hold (-1 is one), that names no row of the
    request or whose slot is -1 moves nothing. What was not accepted needs no call: it lies past the new context length,
    where the next round overwrites it.

    Args:
        kv: one layer's pages, ``[P, S, Hkv, D]`` each, or those of all layers, ``[L, P, S, Hkv, D]``, in one launch.
        path: ``[R, N]`` int64, as in :class:`~dspark.ops.Verdict`.
        num_emitted: ``[R]`` int64; 0 for padded requests.
        query_start: ``[R + 1]`` int64, first row of each request of the verified batch.
        slots: ``[T]`` int64 or int32, where each of its rows was written.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: a shape differs, the kernel is to read a last axis that is not contiguous, or the backend is unknown
            or missing.
        TypeError: a dtype differs.

    Graph-safe.

    >>> kv = PagedKV(*(torch.tensor([10.0, 11, 12, 13]).view(1, 4, 1, 1).clone() for _ in range(2)))
    >>> rows = torch.tensor([0, 3]), torch.tensor([1, 2, 3])  # one request, whose three rows follow one token
    >>> commit_kv(kv, torch.tensor([[0, 2, -1]]), torch.tensor([2]), *rows)
    >>> kv.k.flatten().tolist()
    [10.0, 11.0, 13.0, 13.0]
    """
    sizes = _check_pages(kv)
    sizes["R"] = path.shape[0] if isinstance(path, Tensor) and path.ndim else 0
    for name, tensor, pattern, dtypes in (
        ("path", path, "R N", (torch.int64,)),
        ("num_emitted", num_emitted, "R", (torch.int64,)),
        ("query_start", query_start, "R+1", (torch.int64,)),
        ("slots", slots, "T", INT_DTYPES),
    ):
        check_shape(name, tensor, pattern, sizes)
        check_dtype(name, tensor, dtypes)
    taken = resolve("commit_kv", backend, kv.k)
    if 0 in (path.numel(), slots.numel(), kv.k.numel()):
        return
    if torch.compiler.is_compiling():
        library.commit_kv_op(kv, path, num_emitted, query_start, slots, taken)
    elif taken == "triton":
        commit_kv_triton(kv, path, num_emitted, query_start, slots)
    else:
        reference.commit(kv, path, num_emitted, query_start, slots)


def copy_pages(kv: PagedKV, source: Tensor, target: Tensor, *, backend: Backend = "auto") -> None:
    """Copy whole pages onto others, in place: what copy-on-write does on the device.

    Args:
        kv: one layer's pages, ``[P, S, Hkv, D]`` each, or those of all layers, ``[L, P, S, Hkv, D]``, in one launch.
        source: ``[n]`` int64 or int32 pages to read; -1 copies nothing.
        target: ``[n]``, same dtype, pages to write; -1 copies nothing. They must differ from each other and from every
            page that is read.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: a shape differs, the kernel is to read a last axis that is not contiguous, or the backend is unknown
            or missing.
        TypeError: a dtype differs.

    Graph-safe.
    """
    sizes = _check_pages(kv)
    check_shape("source", source, "n", sizes)
    check_shape("target", target, "n", sizes)
    check_dtype("source", source, INT_DTYPES)
    check_dtype("target", target, (source.dtype,))
    taken = resolve("copy_pages", backend, kv.k)
    if source.numel() == 0 or kv.k.numel() == 0:
        return
    if torch.compiler.is_compiling():
        library.copy_pages_op(kv, source, target, taken)
    elif taken == "triton":
        copy_pages_triton(kv, source, target)
    else:
        reference.copy(kv, source, target)


def _rows_fit(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> bool:
    """Whether all is as it should be, found out in a few microseconds. If not, :func:`_check_rows` says what is wrong.

    Of a float8 cache with scales that is not found out here.
    """
    return (
        all(isinstance(x, Tensor) for x in (k, v, kv.k, kv.v, slots))
        and k.ndim == 3
        and v.shape == k.shape
        and slots.shape == k.shape[:1]
        and kv.k.ndim == 4
        and kv.k.shape[2:] == k.shape[1:]
        and kv.v.shape == kv.k.shape
        and k.dtype in FLOAT_DTYPES
        and v.dtype is k.dtype
        and kv.k.dtype in CACHE_DTYPES
        and kv.v.dtype is kv.k.dtype
        and slots.dtype in INT_DTYPES
        and kv.k_scale is kv.v_scale is None
    )


def _check_rows(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> dict[str, int]:
    sizes: dict[str, int] = {}
    check_shape("kv.k", kv.k, "P S Hkv D", sizes)
    check_shape("kv.v", kv.v, "P S Hkv D", sizes)
    check_shape("k", k, "T Hkv D", sizes)
    check_shape("v", v, "T Hkv D", sizes)
    check_shape("slots", slots, "T", sizes)
    check_dtype("k", k, FLOAT_DTYPES)
    check_dtype("v", v, (k.dtype,))
    check_dtype("kv.k", kv.k, CACHE_DTYPES)
    check_dtype("kv.v", kv.v, (kv.k.dtype,))
    check_dtype("slots", slots, INT_DTYPES)
    for name, scale, other in (("k_scale", kv.k_scale, kv.v_scale), ("v_scale", kv.v_scale, kv.k_scale)):
        if scale is None:
            if other is not None:
                raise ValueError(f'kv.{name}: expected shape "Hkv", as the other scale has, got None')
            continue
        if kv.k.dtype is not FLOAT8:
            raise ValueError(f"kv.{name}: only a float8_e4m3fn cache has scales, got pages of {kv.k.dtype}")
        check_shape(f"kv.{name}", scale, "Hkv", sizes)
        check_dtype(f"kv.{name}", scale, (torch.float32,))
    return sizes


def _rotary_fits(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float | None,
    out: Tensor | None,
) -> bool:
    """Whether :func:`_check_rotary` would pass, for keys that are as they should be."""
    num_rows, _, head_dim = k.shape
    tensors = (q, cos, sin, *(x for x in (q_norm, k_norm, out) if x is not None))
    return (
        all(isinstance(x, Tensor) for x in tensors)
        and q.ndim == 3
        and (q.shape[0], q.shape[2]) == (num_rows, head_dim)
        and q.dtype is k.dtype
        and cos.shape == sin.shape == (num_rows, 1, head_dim)
        and (out is None or (out.shape == q.shape and out.dtype is q.dtype))
        and all(x is None or (x.shape == (head_dim,) and x.dtype in FLOAT_DTYPES) for x in (q_norm, k_norm))
        and cos.dtype in FLOAT_DTYPES
        and sin.dtype in FLOAT_DTYPES
        and head_dim % 2 == 0
        and (eps is None) == (q_norm is k_norm is None)
    )


def _check_rotary(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float | None,
    out: Tensor | None,
    sizes: dict[str, int],
    dtype: torch.dtype,
) -> None:
    given: list[tuple[str, Tensor | None, str, Sequence[torch.dtype]]] = [
        ("q_norm", q_norm, "D", FLOAT_DTYPES),
        ("k_norm", k_norm, "D", FLOAT_DTYPES),
        ("out", out, "T Hq D", (dtype,)),
    ]
    check_shape("q", q, "T Hq D", sizes)
    check_dtype("q", q, (dtype,))
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_shape(name, tensor, "T 1 D", sizes)
        check_dtype(name, tensor, FLOAT_DTYPES)
    for name, optional, pattern, dtypes in given:
        if optional is not None:
            check_shape(name, optional, pattern, sizes)
            check_dtype(name, optional, dtypes)
    if sizes["D"] % 2:
        raise ValueError(f'q: expected shape "T Hq D" with an even D, got {list(q.shape)}')
    if (eps is None) != (q_norm is None and k_norm is None):
        raise ValueError(f"eps: expected a number with q_norm or k_norm, and None without them, got {eps}")


def _check_pages(kv: PagedKV) -> dict[str, int]:
    sizes: dict[str, int] = {}
    pattern = "L P S Hkv D" if isinstance(kv.k, Tensor) and kv.k.ndim == 5 else "P S Hkv D"
    check_shape("kv.k", kv.k, pattern, sizes)
    check_shape("kv.v", kv.v, pattern, sizes)
    check_dtype("kv.k", kv.k, CACHE_DTYPES)
    check_dtype("kv.v", kv.v, (kv.k.dtype,))
    return sizes
