"""The torch references of the ops on the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.call import FLOAT8
from dspark.ops.types import PagedKV, Rows

FLOAT8_MAX = 448.0


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
    """What the layers share of :func:`~dspark.ops.append_kv` of at least one row. Graph-safe."""
    written = slots >= 0
    first = written.int().argmax()
    row = torch.where(written, torch.arange(slots.shape[0], device=slots.device), first)
    slot = slots.index_select(0, row).long()
    keeps_old = (slot < 0)[:, None, None]
    slot = slot.clamp(min=0)
    return Destinations(row, slot // page_size, slot % page_size, keeps_old)


def append(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> None:
    """:func:`~dspark.ops.append_kv` of at least one row."""
    write(k, v, kv, destinations(slots, kv.page_size))


def rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float | None,
) -> Tensor:
    """:func:`~dspark.ops.rope_append_kv` of at least one row."""
    out = normalised_and_rotated(q, q_norm, eps, cos, sin).to(q.dtype)
    # The keys reach the cache in float32, so that they are rounded once.
    write(normalised_and_rotated(k, k_norm, eps, cos, sin), v, kv, destinations(slots, kv.page_size))
    return out


def write(k: Tensor, v: Tensor, kv: PagedKV, to: Destinations) -> None:
    """One layer of :func:`~dspark.ops.append_kv`, without its checks."""
    for new, pages, scale in ((k, kv.k, kv.k_scale), (v, kv.v, kv.v_scale)):
        stored = as_stored(new.index_select(0, to.row), pages.dtype, scale)
        pages[to.page, to.offset] = torch.where(to.keeps_old, pages[0, 0], stored)


def as_stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """``x [..., Hkv, D]`` as a cache of this dtype holds it; float8 saturates, and stores ``x / scale``."""
    if dtype is not FLOAT8:
        return x.to(dtype)
    x = x.float()
    if scale is not None:
        x = x / scale[:, None]
    return x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(dtype)


def normalised_and_rotated(x: Tensor, weight: Tensor | None, eps: float | None, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [T, H, D]`` under RMSNorm (none where ``weight`` is None) and rotary embedding, in float32."""
    x = x.float()
    if weight is not None and eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    return x * cos.float() + x.roll(x.shape[-1] // 2, dims=-1) * sin.float()


def commit(kv: PagedKV, path: Tensor, num_emitted: Tensor, rows: Rows, slots: Tensor) -> None:
    """:func:`~dspark.ops.commit_kv` of at least one row and request, without its checks."""
    node = torch.arange(path.shape[1], device=path.device)
    start, end = rows.query_start[:-1, None], rows.query_start[1:, None].clamp(max=slots.shape[0])
    moved = (node < num_emitted[:, None]) & (path > node) & (start + path < end)  # [R, N]
    last = slots.shape[0] - 1
    source = slots[(start + path).clamp(0, last)]
    target = slots[(start + node).clamp(0, last)]
    move(kv, torch.where(moved, source, -1).flatten(), torch.where(moved, target, -1).flatten())


def move(kv: PagedKV, source: Tensor, target: Tensor) -> None:
    """Copy slots, all read before any is written; a pair with a -1 copies nothing. Graph-safe."""
    to = destinations(torch.where(source >= 0, target, -1), kv.page_size)
    slot = source.index_select(0, to.row).clamp(min=0)
    page, offset = slot // kv.page_size, slot % kv.page_size
    for pages in layers_of(kv):
        pages[to.page, to.offset] = torch.where(to.keeps_old, pages[0, 0], pages[page, offset])


def copy(kv: PagedKV, source: Tensor, target: Tensor) -> None:
    """:func:`~dspark.ops.copy_pages` of at least one page, without its checks."""
    to = destinations(torch.where(source >= 0, target, -1), 1)
    page = source.index_select(0, to.row).clamp(min=0)
    for pages in layers_of(kv):
        pages[to.page] = torch.where(to.keeps_old[..., None], pages[0], pages[page])


def layers_of(kv: PagedKV) -> Iterator[Tensor]:
    """Keys and values ``[P, S, Hkv, D]`` of one layer, or of every layer of a stack."""
    for pages in (kv.k, kv.v):
        yield from (pages if pages.ndim == 5 else pages[None])
