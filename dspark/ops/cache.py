"""Writing keys and values into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

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

    write(k, v, kv, destinations(slots, kv.page_size))


@dataclass(frozen=True)
class Destinations:
    """Where a batch's rows go in every layer's pages, ``[T]`` each.

    A row that writes nothing repeats the first row that does, so that no shape depends on the data. Where none does,
    all of them rewrite slot 0 with what is already there.
    """

    row: Tensor
    page: Tensor
    offset: Tensor
    keeps_old: Tensor  # [T, 1, 1] bool


def destinations(slots: Tensor, page_size: int) -> Destinations:
    """What the layers share of :func:`append_kv` of at least one row. Graph-safe."""
    written = slots >= 0
    first = written.int().argmax()
    row = torch.where(written, torch.arange(slots.shape[0], device=slots.device), first)
    slot = slots.index_select(0, row).long()
    keeps_old = (slot < 0)[:, None, None]
    slot = slot.clamp(min=0)
    return Destinations(row, slot // page_size, slot % page_size, keeps_old)


def write(k: Tensor, v: Tensor, kv: PagedKV, to: Destinations) -> None:
    """One layer of :func:`append_kv`, without its checks."""
    for new, pages in ((k, kv.k), (v, kv.v)):
        pages[to.page, to.offset] = torch.where(to.keeps_old, pages[0, 0], new.index_select(0, to.row).to(pages.dtype))
