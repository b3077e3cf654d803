"""Writing keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, INT_DTYPES, check_dtype, check_shape
from dspark.ops.types import Backend, PagedKV


def append_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor, *, backend: Backend = "auto") -> None:
    """Write one layer's new keys and values to their slots, in place.

    A row whose slot is -1 writes nothing: the cache keeps its bits, also where every row is -1. Values are rounded to
    the cache's dtype. The cache may be any strided view (one layer, or one half, of a larger buffer).

    Args:
        k: ``[T, Hkv, D]`` float32, float16 or bfloat16, keys with rotary applied.
        v: ``[T, Hkv, D]``, same dtype, values.
        kv: the pages, ``[P, S, Hkv, D]`` each.
        slots: ``[T]`` int64 or int32 in ``-1 .. P * S - 1``; slot ``s`` is row ``s % S`` of page ``s // S``. Slots
            other than -1 must differ from each other.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: a shape differs, or the backend is unknown or missing.
        TypeError: a dtype differs.

    Graph-safe: no host read; a padded batch runs the same launches as a full one.
    """
    sizes: dict[str, int] = {}
    check_shape("kv.k", kv.k, "P S Hkv D", sizes)
    check_shape("kv.v", kv.v, "P S Hkv D", sizes)
    check_shape("k", k, "T Hkv D", sizes)
    check_shape("v", v, "T Hkv D", sizes)
    check_shape("slots", slots, "T", sizes)
    check_dtype("k", k, FLOAT_DTYPES)
    check_dtype("v", v, (k.dtype,))
    check_dtype("kv.k", kv.k, FLOAT_DTYPES)
    check_dtype("kv.v", kv.v, (kv.k.dtype,))
    check_dtype("slots", slots, INT_DTYPES)
    resolve("append_kv", backend, k)
    if k.shape[0] == 0:
        return

    written = slots >= 0
    # A row that writes nothing repeats the first row that does, so that no shape depends on the data. Where none
    # does, all of them rewrite slot 0 with what is already there.
    first = written.int().argmax()
    row = torch.where(written, torch.arange(k.shape[0], device=k.device), first)
    slot = slots.index_select(0, row)
    keeps_old = (slot < 0)[:, None, None]
    slot = slot.clamp(min=0).long()
    page, offset = slot // kv.page_size, slot % kv.page_size
    for new, pages in ((k, kv.k), (v, kv.v)):
        pages[page, offset] = torch.where(keeps_old, pages[0, 0], new.index_select(0, row).to(pages.dtype))
