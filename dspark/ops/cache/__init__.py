"""The paged cache: write rows to slots, move accepted tree paths into place, copy pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.cache import launch, reference
from dspark.ops.call import FLOATS, INTS, Arg, ScalarArg, TensorArg
from dspark.ops.groups import ROWS, check_scales, pages
from dspark.ops.op import Op
from dspark.ops.types import Backend, PagedKV, Rows


def _check_rows(_: dict[str, int], kv: PagedKV, **__: Any) -> None:
    check_scales(kv)


def _check_rotary(sizes: dict[str, int], q: Tensor, kv: PagedKV, **given: Any) -> None:
    check_scales(kv)
    if sizes["D"] % 2:
        raise ValueError(f'q: expected shape "T Hq D" with an even D, got {list(q.shape)}')
    eps = given["eps"]
    if (eps is None) != (given["q_norm"] is None and given["k_norm"] is None):
        raise ValueError(f"eps: expected a number with q_norm or k_norm, and None without them, got {eps}")


_ROWS: dict[str, Arg] = {
    "k": TensorArg("T Hkv D", FLOATS, layout="rows"),
    "v": TensorArg("T Hkv D", "k", layout="rows"),
    "kv": pages(written=True),
    "slots": TensorArg("T", INTS, layout="dense"),
}
_STACK = pages("P S Hkv D | L P S Hkv D", written=True)

_APPEND_KV = Op(
    "append_kv",
    _ROWS,
    reference=reference.append,
    plan=launch.plan_append,
    run=launch.run,
    also=_check_rows,
    empty="T Hkv D",
)
_ROPE_APPEND_KV = Op(
    "rope_append_kv",
    {
        "q": TensorArg("T Hq D", "k", layout="rows"),
        **_ROWS,
        "cos": TensorArg("T 1 D", FLOATS, layout="rows"),
        "sin": TensorArg("T 1 D", FLOATS, layout="rows"),
        "q_norm": TensorArg("D", FLOATS, optional=True, layout="dense"),
        "k_norm": TensorArg("D", FLOATS, optional=True, layout="dense"),
        "eps": ScalarArg("float", optional=True),
        "out": TensorArg("T Hq D", "q", optional=True, written=True, layout="rows"),
    },
    reference=reference.rope_append,
    plan=launch.plan_rope_append,
    run=launch.run,
    results=["out"],
    also=_check_rotary,
    empty="T",
)
_COMMIT_KV = Op(
    "commit_kv",
    {
        "kv": _STACK,
        "path": TensorArg("R N", (torch.int64,), layout="dense"),
        "num_emitted": TensorArg("R", (torch.int64,), layout="dense"),
        "rows": ROWS,
        "slots": TensorArg("T", INTS, layout="dense"),
    },
    reference=reference.commit,
    plan=launch.plan_commit,
    run=launch.run_commit,
    empty="R N T P S Hkv D",
)
_COPY_PAGES = Op(
    "copy_pages",
    {
        "kv": _STACK,
        "source": TensorArg("n", INTS, layout="dense"),
        "target": TensorArg("n", "source", layout="dense"),
    },
    reference=reference.copy,
    plan=launch.plan_copy,
    run=launch.run,
    empty="n P S Hkv D",
)


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
    _APPEND_KV(backend, k, v, kv, slots)


class AppendPlan:
    """:func:`append_kv` of many layers to the same slots: the backend is chosen, and what the layers share is computed,
    once.

    Args:
        slots: as in :func:`append_kv`.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: the backend is unknown or missing.
    """

    def __init__(self, slots: Tensor, *, backend: Backend = "auto") -> None:
        self._slots = slots
        self._backend: Backend = _APPEND_KV.choose(backend, slots.device)
        self._calls_op = self._backend == "triton" or slots.shape[0] == 0
        self._destinations: dict[int, reference.Destinations] = {}

    def run(self, k: Tensor, v: Tensor, kv: PagedKV) -> None:
        """``append_kv(k, v, kv, slots)`` of one layer; of the reference only the first is checked.

        Raises:
            ValueError, TypeError: as :func:`append_kv`.

        Graph-safe.
        """
        if self._calls_op:
            append_kv(k, v, kv, self._slots, backend=self._backend)
            return
        if not self._destinations:
            _APPEND_KV.call_of((k, v, kv, self._slots))
        page_size = kv.page_size
        to = self._destinations.get(page_size)
        if to is None:
            to = self._destinations[page_size] = reference.destinations(self._slots, page_size)
        reference.write(k, v, kv, to)


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
    result: Tensor = _ROPE_APPEND_KV(backend, q, k, v, kv, slots, cos, sin, q_norm, k_norm, eps, out)
    return result


def commit_kv(
    kv: PagedKV,
    path: Tensor,
    num_emitted: Tensor,
    rows: Rows,
    slots: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Move the keys and values of accepted paths into consecutive slots, in place.

    Row ``j`` of request ``r`` was written to ``slots[rows.query_start[r] + j]``, the slot of cache position
    ``context_len[r] + j``. The row ``path[r, i]`` goes to the slot of row ``i``, for ``i < num_emitted[r]``, so that
    afterwards the request's ``context_len[r] + num_emitted[r]`` tokens lie one after the other. Of a chain nothing is
    moved: every bit stays, and next to nothing is read.

    A path rises, so ``path[r, i] >= i``; an entry for which this does not hold (-1 is one), that names no row of the
    request or whose slot is -1 moves nothing. What was not accepted needs no call: it lies past the new context length,
    where the next round overwrites it.

    Args:
        kv: one layer's pages, ``[P, S, Hkv, D]`` each, or those of all layers, ``[L, P, S, Hkv, D]``, in one launch.
        path: ``[R, N]`` int64, as in :class:`~dspark.ops.Verdict`; ``N`` is ``rows.max_query_len``.
        num_emitted: ``[R]`` int64; 0 for padded requests.
        rows: of the verified batch; ``query_start`` is read.
        slots: ``[T]`` int64 or int32, where each of its rows was written.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: a shape differs, the kernel is to read a last axis that is not contiguous, or the backend is unknown
            or missing.
        TypeError: a dtype differs.

    Graph-safe.

    >>> kv = PagedKV(*(torch.tensor([10.0, 11, 12, 13]).view(1, 4, 1, 1).clone() for _ in range(2)))
    >>> one, three = torch.tensor([1]), torch.tensor([1, 2, 3])  # a request whose three rows follow one token
    >>> rows = Rows(tokens=three, query_start=torch.tensor([0, 3]), position=one, max_query_len=3)
    >>> commit_kv(kv, torch.tensor([[0, 2, -1]]), torch.tensor([2]), rows, slots=three)
    >>> kv.k.flatten().tolist()
    [10.0, 11.0, 13.0, 13.0]
    """
    _COMMIT_KV(backend, kv, path, num_emitted, rows, slots)


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
    _COPY_PAGES(backend, kv, source, target)
