"""Within a paged cache: accepted paths into consecutive slots, pages onto pages. Bits are kept."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offset_of(slot, page, PAGE_SIZE: tl.constexpr):
    """Where a slot begins in one layer's pages, whose strides are ``page`` (PageStrides)."""
    return slot // PAGE_SIZE * page.page + slot % PAGE_SIZE * page.slot


@triton.jit(do_not_specialize=["num_rows"])
def commit_kv_kernel(
    kv,  # PagedKV, written
    path,  # [requests, NODES] int64
    num_emitted,  # [requests] int64
    query_start,  # [requests + 1] int64
    slots,  # [num_rows] int32 or int64
    page_k,  # PageStrides
    page_v,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Move row ``path[i]`` of a request to the slot of its row ``i``.

    Grid: (requests, layers). A path rises, so no row is read after it was written: one pass, in order, is safe. A
    thread moves the same elements of every row, so that this order needs no barrier.
    """
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    count = tl.load(num_emitted + request)
    offs_n = tl.arange(0, BLOCK_NODES)  # [BLOCK_NODES]
    nodes = tl.load(path + request * NODES + offs_n, mask=(offs_n < count) & (offs_n < NODES), other=-1)
    moved = nodes > offs_n  # [BLOCK_NODES]
    end = tl.max(tl.where(moved, offs_n + 1, 0), axis=0)
    if end > 0:
        first = tl.min(tl.where(moved, offs_n, BLOCK_NODES), axis=0)
        start = tl.load(query_start + request)
        rows = tl.minimum(tl.load(query_start + request + 1), num_rows) - start
        offs_h = tl.arange(0, BLOCK_H).to(tl.int64)  # [BLOCK_H]
        offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        mask = (offs_h < HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
        k_layer = kv.k + layer * page_k.layer + (offs_h * page_k.head)[:, None] + offs_d[None, :]
        v_layer = kv.v + layer * page_v.layer + (offs_h * page_v.head)[:, None] + offs_d[None, :]
        for i in range(first, end):
            node = tl.load(path + request * NODES + i)
            inside = (node > i) & (node < rows)
            source = tl.load(slots + start + node, mask=inside, other=-1).to(tl.int64)
            target = tl.load(slots + start + i, mask=inside, other=-1).to(tl.int64)
            if (source >= 0) & (target >= 0):
                k = tl.load(k_layer + offset_of(source, page_k, PAGE_SIZE), mask=mask)
                v = tl.load(v_layer + offset_of(source, page_v, PAGE_SIZE), mask=mask)
                tl.store(k_layer + offset_of(target, page_k, PAGE_SIZE), k, mask=mask)
                tl.store(v_layer + offset_of(target, page_v, PAGE_SIZE), v, mask=mask)


@triton.jit
def copy_pages_kernel(
    kv,  # PagedKV, written
    source,  # [copies] int32 or int64
    target,
    page_k,  # PageStrides
    page_v,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Copy whole pages, but where one of the two is -1.

    Grid: (copies, layers, tiles of pairs of a token and a head).
    """
    copy = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    from_page = tl.load(source + copy).to(tl.int64)
    to_page = tl.load(target + copy).to(tl.int64)
    if (from_page >= 0) & (to_page >= 0):
        pair = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        offset = (pair // HEADS).to(tl.int64)
        head = (pair % HEADS).to(tl.int64)
        offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        mask = (offset < PAGE_SIZE)[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_N, BLOCK_D]
        in_k = layer * page_k.layer + offset * page_k.slot + head * page_k.head  # [BLOCK_N]
        in_v = layer * page_v.layer + offset * page_v.slot + head * page_v.head  # [BLOCK_N]
        k_page = kv.k + in_k[:, None] + offs_d[None, :]
        v_page = kv.v + in_v[:, None] + offs_d[None, :]
        k = tl.load(k_page + from_page * page_k.page, mask=mask)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_page + from_page * page_v.page, mask=mask)  # [BLOCK_N, BLOCK_D]
        tl.store(k_page + to_page * page_k.page, k, mask=mask)
        tl.store(v_page + to_page * page_v.page, v, mask=mask)
