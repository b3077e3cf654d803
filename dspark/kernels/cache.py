"""The paged cache: rows into slots, accepted paths into consecutive slots, pages onto pages.

What is only moved keeps its bits. A cache of float8_e4m3fn comes as its bytes, and is encoded here in integers: every
target and the interpreter round alike, also those that have no instruction for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def encode_e4m3(x):
    """float32 -> the byte of the nearest float8_e4m3fn, ties to even, saturating; NaN stays NaN."""
    x = tl.where(x > FLOAT8_MAX, FLOAT8_MAX, tl.where(x < -FLOAT8_MAX, -FLOAT8_MAX, x))
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: round at the third bit of the mantissa, then move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the grid is 2^-9, which is the last bit of numbers around 2^14: the addition rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    code = tl.where(magnitude < 0x3C800000, shifted.to(tl.int32, bitcast=True) - 0x46800000, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def as_stored(x, scale_ptr, head, mask, IS_FLOAT8: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Rows ``[n, D]`` of heads ``[n]`` as the cache takes them; but for float8, the store converts."""
    if IS_FLOAT8:
        x = x.to(tl.float32)
        if HAS_SCALE:
            x = tl.div_rn(x, tl.load(scale_ptr + head, mask=mask, other=1.0)[:, None])
        x = encode_e4m3(x)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def append_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_k_cache_page,
    stride_k_cache_offset,
    stride_k_cache_head,
    stride_v_cache_page,
    stride_v_cache_offset,
    stride_v_cache_head,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid: (tiles of pairs of a row and a head,)."""
    pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row = (pair // HEADS).to(tl.int64)
    head = (pair % HEADS).to(tl.int64)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)  # [BLOCK_N]
    mask_n = slot >= 0
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = mask_n[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_N, BLOCK_D]

    from_k = row * stride_k_row + head * stride_k_head
    from_v = row * stride_v_row + head * stride_v_head
    k = tl.load(k_ptr + from_k[:, None] + offs_d[None, :], mask=mask)  # [BLOCK_N, BLOCK_D]
    v = tl.load(v_ptr + from_v[:, None] + offs_d[None, :], mask=mask)  # [BLOCK_N, BLOCK_D]
    to_k = page * stride_k_cache_page + offset * stride_k_cache_offset + head * stride_k_cache_head
    to_v = page * stride_v_cache_page + offset * stride_v_cache_offset + head * stride_v_cache_head
    k = as_stored(k, k_scale_ptr, head, mask_n, IS_FLOAT8, HAS_SCALE)
    v = as_stored(v, v_scale_ptr, head, mask_n, IS_FLOAT8, HAS_SCALE)
    tl.store(k_cache_ptr + to_k[:, None] + offs_d[None, :], k, mask=mask)
    tl.store(v_cache_ptr + to_v[:, None] + offs_d[None, :], v, mask=mask)


@triton.jit
def load_halves(ptr, offs_d, mask_d, HALF: tl.constexpr):
    """Both halves of a vector of a head's size, float32 ``[1, BLOCK_HALF]`` each."""
    low = tl.load(ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    high = tl.load(ptr + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    return low[None, :], high[None, :]


@triton.jit
def load_head_halves(x_ptr, offs_x, offs_d, mask, norm_low, norm_high, eps, HAS_NORM: tl.constexpr, HALF: tl.constexpr):
    """Both halves of heads at ``offs_x [BLOCK_H]``, normalised, float32 ``[BLOCK_H, BLOCK_HALF]`` each."""
    pointers = x_ptr + offs_x[:, None] + offs_d[None, :]
    low = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)  # [BLOCK_H]
        factor = tl.rsqrt(tl.div_rn(squares, 2.0 * HALF) + eps)[:, None]
        low = low * factor * norm_low
        high = high * factor * norm_high
    return low, high


@triton.jit
def rope_append_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_cos_row,
    stride_sin_row,
    stride_out_row,
    stride_out_head,
    stride_k_cache_page,
    stride_k_cache_offset,
    stride_k_cache_head,
    stride_v_cache_page,
    stride_v_cache_offset,
    stride_v_cache_head,
    eps,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Grid: (rows,). ``out`` may be ``q``: a program reads a head whole before it writes it."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    mask_d = offs_d < HALF
    cos_low, cos_high = load_halves(cos_ptr + row * stride_cos_row, offs_d, mask_d, HALF)
    sin_low, sin_high = load_halves(sin_ptr + row * stride_sin_row, offs_d, mask_d, HALF)
    norm_low, norm_high = cos_low, cos_high  # any tile, where there is no norm
    if HAS_Q_NORM:
        norm_low, norm_high = load_halves(q_norm_ptr, offs_d, mask_d, HALF)
    for first in tl.static_range(0, QUERY_HEADS, BLOCK_H):
        head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)  # [BLOCK_H]
        mask = (head < QUERY_HEADS)[:, None] & mask_d[None, :]  # [BLOCK_H, BLOCK_HALF]
        offs_q = row * stride_q_row + head * stride_q_head
        low, high = load_head_halves(q_ptr, offs_q, offs_d, mask, norm_low, norm_high, eps, HAS_Q_NORM, HALF)
        pointers = out_ptr + (row * stride_out_row + head * stride_out_head)[:, None] + offs_d[None, :]
        tl.store(pointers, low * cos_low + high * sin_low, mask=mask)
        tl.store(pointers + HALF, high * cos_high + low * sin_high, mask=mask)

    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        k_slot = k_cache_ptr + page * stride_k_cache_page + offset * stride_k_cache_offset
        v_slot = v_cache_ptr + page * stride_v_cache_page + offset * stride_v_cache_offset
        if HAS_K_NORM:
            norm_low, norm_high = load_halves(k_norm_ptr, offs_d, mask_d, HALF)
        for first in tl.static_range(0, HEADS, BLOCK_H):
            head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)  # [BLOCK_H]
            mask_h = head < HEADS
            mask = mask_h[:, None] & mask_d[None, :]  # [BLOCK_H, BLOCK_HALF]
            offs_k = row * stride_k_row + head * stride_k_head
            low, high = load_head_halves(k_ptr, offs_k, offs_d, mask, norm_low, norm_high, eps, HAS_K_NORM, HALF)
            pointers = k_slot + (head * stride_k_cache_head)[:, None] + offs_d[None, :]
            k_low = as_stored(low * cos_low + high * sin_low, k_scale_ptr, head, mask_h, IS_FLOAT8, HAS_SCALE)
            k_high = as_stored(high * cos_high + low * sin_high, k_scale_ptr, head, mask_h, IS_FLOAT8, HAS_SCALE)
            tl.store(pointers, k_low, mask=mask)
            tl.store(pointers + HALF, k_high, mask=mask)

            sources = v_ptr + (row * stride_v_row + head * stride_v_head)[:, None] + offs_d[None, :]
            v_low = tl.load(sources, mask=mask)
            v_high = tl.load(sources + HALF, mask=mask)
            pointers = v_slot + (head * stride_v_cache_head)[:, None] + offs_d[None, :]
            tl.store(pointers, as_stored(v_low, v_scale_ptr, head, mask_h, IS_FLOAT8, HAS_SCALE), mask=mask)
            tl.store(pointers + HALF, as_stored(v_high, v_scale_ptr, head, mask_h, IS_FLOAT8, HAS_SCALE), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def commit_kv_kernel(
    k_cache_ptr,
    v_cache_ptr,
    path_ptr,
    num_emitted_ptr,
    query_start_ptr,
    slots_ptr,
    stride_k_cache_layer,
    stride_k_cache_page,
    stride_k_cache_offset,
    stride_k_cache_head,
    stride_v_cache_layer,
    stride_v_cache_page,
    stride_v_cache_offset,
    stride_v_cache_head,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid: (requests, layers). A path rises, so no row is read after it was written: one pass, in order, is safe.

    A thread moves the same elements of every row, so that this order needs no barrier.
    """
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    count = tl.load(num_emitted_ptr + request)
    offs_n = tl.arange(0, BLOCK_NODES)  # [BLOCK_NODES]
    path = tl.load(path_ptr + request * NODES + offs_n, mask=(offs_n < count) & (offs_n < NODES), other=-1)
    moved = path > offs_n  # [BLOCK_NODES]
    end = tl.max(tl.where(moved, offs_n + 1, 0), axis=0)
    if end > 0:
        first = tl.min(tl.where(moved, offs_n, BLOCK_NODES), axis=0)
        start = tl.load(query_start_ptr + request)
        rows = tl.minimum(tl.load(query_start_ptr + request + 1), num_rows) - start
        offs_h = tl.arange(0, BLOCK_H).to(tl.int64)  # [BLOCK_H]
        offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        mask = (offs_h < HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
        k_layer = k_cache_ptr + layer * stride_k_cache_layer + (offs_h * stride_k_cache_head)[:, None] + offs_d[None, :]
        v_layer = v_cache_ptr + layer * stride_v_cache_layer + (offs_h * stride_v_cache_head)[:, None] + offs_d[None, :]
        for i in range(first, end):
            node = tl.load(path_ptr + request * NODES + i)
            inside = (node > i) & (node < rows)
            source = tl.load(slots_ptr + start + node, mask=inside, other=-1).to(tl.int64)
            target = tl.load(slots_ptr + start + i, mask=inside, other=-1).to(tl.int64)
            if (source >= 0) & (target >= 0):
                page = source // PAGE_SIZE
                offset = source % PAGE_SIZE
                k = tl.load(k_layer + page * stride_k_cache_page + offset * stride_k_cache_offset, mask=mask)
                v = tl.load(v_layer + page * stride_v_cache_page + offset * stride_v_cache_offset, mask=mask)
                page = target // PAGE_SIZE
                offset = target % PAGE_SIZE
                tl.store(k_layer + page * stride_k_cache_page + offset * stride_k_cache_offset, k, mask=mask)
                tl.store(v_layer + page * stride_v_cache_page + offset * stride_v_cache_offset, v, mask=mask)


@triton.jit
def copy_pages_kernel(
    k_cache_ptr,
    v_cache_ptr,
    source_ptr,
    target_ptr,
    stride_k_cache_layer,
    stride_k_cache_page,
    stride_k_cache_offset,
    stride_k_cache_head,
    stride_v_cache_layer,
    stride_v_cache_page,
    stride_v_cache_offset,
    stride_v_cache_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid: (pages to copy, layers, tiles of pairs of a token and a head)."""
    copy = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(source_ptr + copy).to(tl.int64)
    target = tl.load(target_ptr + copy).to(tl.int64)
    if (source >= 0) & (target >= 0):
        pair = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        offset = (pair // HEADS).to(tl.int64)
        head = (pair % HEADS).to(tl.int64)
        offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        mask = (offset < PAGE_SIZE)[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_N, BLOCK_D]
        in_k = layer * stride_k_cache_layer + offset * stride_k_cache_offset + head * stride_k_cache_head  # [BLOCK_N]
        in_v = layer * stride_v_cache_layer + offset * stride_v_cache_offset + head * stride_v_cache_head  # [BLOCK_N]
        k_page = k_cache_ptr + in_k[:, None] + offs_d[None, :]
        v_page = v_cache_ptr + in_v[:, None] + offs_d[None, :]
        k = tl.load(k_page + source * stride_k_cache_page, mask=mask)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_page + source * stride_v_cache_page, mask=mask)  # [BLOCK_N, BLOCK_D]
        tl.store(k_page + target * stride_k_cache_page, k, mask=mask)
        tl.store(v_page + target * stride_v_cache_page, v, mask=mask)
