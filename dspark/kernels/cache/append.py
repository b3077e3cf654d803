"""Rows of keys and values into slots of a paged cache, as they are or normalised and rotated first.

What is only moved keeps its bits. A cache of float8_e4m3fn comes as its bytes, and is encoded here in integers: every
target and the interpreter round alike, also those that have no instruction for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.cache.move import offset_of

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
def as_stored(x, scale, head, mask, IS_FLOAT8: tl.constexpr):
    """Rows ``[n, D]`` of heads ``[n]`` as the cache takes them; but for float8, the store converts."""
    if IS_FLOAT8:
        x = x.to(tl.float32)
        if scale is not None:
            x = tl.div_rn(x, tl.load(scale + head, mask=mask, other=1.0)[:, None])
        x = encode_e4m3(x)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def append_kv_kernel(
    k,  # [num_rows, HEADS, HEAD_DIM]
    v,
    kv,  # PagedKV, written
    slots,  # [num_rows] int32 or int64
    row_k,  # RowStrides
    row_v,
    page_k,  # PageStrides
    page_v,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Write new keys and values to their slots; a row whose slot is -1 writes nothing.

    Grid: (tiles of ``BLOCK_N`` pairs of a row and a head,). Neighbouring threads have neighbouring numbers of one head,
    so that loads and stores are 16 bytes wide whatever the strides of rows and pages.
    """
    pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row = (pair // HEADS).to(tl.int64)
    head = (pair % HEADS).to(tl.int64)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)  # [BLOCK_N]
    mask_n = slot >= 0
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = mask_n[:, None] & (offs_d < HEAD_DIM)[None, :]  # [BLOCK_N, BLOCK_D]

    from_k = row * row_k.row + head * row_k.head
    from_v = row * row_v.row + head * row_v.head
    new_k = tl.load(k + from_k[:, None] + offs_d[None, :], mask=mask)  # [BLOCK_N, BLOCK_D]
    new_v = tl.load(v + from_v[:, None] + offs_d[None, :], mask=mask)  # [BLOCK_N, BLOCK_D]
    to_k = offset_of(slot, page_k, PAGE_SIZE) + head * page_k.head
    to_v = offset_of(slot, page_v, PAGE_SIZE) + head * page_v.head
    new_k = as_stored(new_k, kv.k_scale, head, mask_n, IS_FLOAT8)
    new_v = as_stored(new_v, kv.v_scale, head, mask_n, IS_FLOAT8)
    tl.store(kv.k + to_k[:, None] + offs_d[None, :], new_k, mask=mask)
    tl.store(kv.v + to_v[:, None] + offs_d[None, :], new_v, mask=mask)


@triton.jit
def load_halves(ptr, offs_d, mask_d, HALF: tl.constexpr):
    """Both halves of a vector of a head's size, float32 ``[1, BLOCK_HALF]`` each."""
    low = tl.load(ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    high = tl.load(ptr + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    return low[None, :], high[None, :]


@triton.jit
def load_head_halves(pointers, mask, norm_low, norm_high, eps, HAS_NORM: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the heads at ``pointers [BLOCK_H, BLOCK_HALF]``, normalised, float32."""
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
    q,  # [rows, QUERY_HEADS, 2 * HALF]
    k,  # [rows, HEADS, 2 * HALF]
    v,
    kv,  # PagedKV, written
    slots,  # [rows] int32 or int64
    cos,  # [rows, 1, 2 * HALF]
    sin,
    q_norm,  # [2 * HALF], or None
    k_norm,
    eps,
    out,  # [rows, QUERY_HEADS, 2 * HALF], written; it may be q
    row_q,  # RowStrides
    row_k,
    row_v,
    row_out,
    page_k,  # PageStrides
    page_v,
    stride_cos_row,
    stride_sin_row,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """RMSNorm and rotary embedding of queries and keys, and :func:`append_kv_kernel`, in one pass over a row.

    With halves ``(a, b)`` of a head the result is ``(a cos + b sin, b cos + a sin)``, where the first half's sine is
    negated (Su et al., arXiv 2104.09864, paired as in Llama). Grid: (rows,). A program reads a head whole before it
    writes it.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    mask_d = offs_d < HALF
    cos_low, cos_high = load_halves(cos + row * stride_cos_row, offs_d, mask_d, HALF)
    sin_low, sin_high = load_halves(sin + row * stride_sin_row, offs_d, mask_d, HALF)
    norm_low, norm_high = cos_low, cos_high  # any tile, where there is no norm
    if q_norm is not None:
        norm_low, norm_high = load_halves(q_norm, offs_d, mask_d, HALF)
    for first in tl.static_range(0, QUERY_HEADS, BLOCK_H):
        head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)  # [BLOCK_H]
        mask = (head < QUERY_HEADS)[:, None] & mask_d[None, :]  # [BLOCK_H, BLOCK_HALF]
        sources = q + (row * row_q.row + head * row_q.head)[:, None] + offs_d[None, :]
        low, high = load_head_halves(sources, mask, norm_low, norm_high, eps, q_norm is not None, HALF)
        pointers = out + (row * row_out.row + head * row_out.head)[:, None] + offs_d[None, :]
        tl.store(pointers, low * cos_low + high * sin_low, mask=mask)
        tl.store(pointers + HALF, high * cos_high + low * sin_high, mask=mask)

    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        k_slot = kv.k + offset_of(slot, page_k, PAGE_SIZE)
        v_slot = kv.v + offset_of(slot, page_v, PAGE_SIZE)
        if k_norm is not None:
            norm_low, norm_high = load_halves(k_norm, offs_d, mask_d, HALF)
        for first in tl.static_range(0, HEADS, BLOCK_H):
            head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)  # [BLOCK_H]
            mask_h = head < HEADS
            mask = mask_h[:, None] & mask_d[None, :]  # [BLOCK_H, BLOCK_HALF]
            sources = k + (row * row_k.row + head * row_k.head)[:, None] + offs_d[None, :]
            low, high = load_head_halves(sources, mask, norm_low, norm_high, eps, k_norm is not None, HALF)
            pointers = k_slot + (head * page_k.head)[:, None] + offs_d[None, :]
            k_low = as_stored(low * cos_low + high * sin_low, kv.k_scale, head, mask_h, IS_FLOAT8)
            k_high = as_stored(high * cos_high + low * sin_high, kv.k_scale, head, mask_h, IS_FLOAT8)
            tl.store(pointers, k_low, mask=mask)
            tl.store(pointers + HALF, k_high, mask=mask)

            sources = v + (row * row_v.row + head * row_v.head)[:, None] + offs_d[None, :]
            v_low = tl.load(sources, mask=mask)
            v_high = tl.load(sources + HALF, mask=mask)
            pointers = v_slot + (head * page_v.head)[:, None] + offs_d[None, :]
            tl.store(pointers, as_stored(v_low, kv.v_scale, head, mask_h, IS_FLOAT8), mask=mask)
            tl.store(pointers + HALF, as_stored(v_high, kv.v_scale, head, mask_h, IS_FLOAT8), mask=mask)
