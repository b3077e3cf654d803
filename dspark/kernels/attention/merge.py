"""The parts of attention that was split over the keys: how one chunk's scores count, and the merge of all chunks.

Scores are held in units of log 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_base(top):
    """What exponents are taken relative to: the largest score, or 0 where there is none yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def store_result(
    out_ptr, lse_ptr, line, mask, acc, total, top, sink,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Finish lines ``[n]`` of weighted values ``acc [n, BLOCK_D]``, their divisor and largest score, and store them."""
    if HAS_SINKS:
        before = top
        top = tl.maximum(top, sink * LOG2_E)
        base = finite_base(top)
        share = tl.exp2(before - base)
        total = total * share + tl.exp2(sink * LOG2_E - base)
        acc = acc * share[:, None]
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    out = acc / divisor[:, None]
    mask_d = mask[:, None] & (offs_d < HEAD_DIM)
    tl.store(out_ptr + line[:, None] * HEAD_DIM + offs_d, out.to(out_ptr.dtype.element_ty), mask=mask_d)
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * LN_2)
        tl.store(lse_ptr + line, lse, mask=mask)


@triton.jit
def window_start(position, context, window):
    """The first cache position that a row with this position may see, of the committed tokens or its own request's."""
    return tl.maximum(tl.minimum(position - window + 1, context), 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "max_rows", "num_columns", "num_chunks"])
def merge_kernel(
    query_start_ptr,
    context_len_ptr,
    positions_ptr,
    sinks_ptr,
    part_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    lse_ptr,
    window,
    num_rows,
    max_rows,
    num_columns,
    num_chunks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid: (requests * rows, query heads): the chunks of one line of a request that was split, in their order."""
    request = (tl.program_id(0) // max_rows).to(tl.int64)
    node = tl.program_id(0) % max_rows
    head = tl.program_id(1)
    first = tl.load(query_start_ptr + request).to(tl.int64)
    behind = tl.minimum(tl.load(query_start_ptr + request + 1).to(tl.int64), num_rows)
    count = tl.minimum(tl.maximum(behind - first, 0), max_rows).to(tl.int32)
    context = tl.load(context_len_ptr + request).to(tl.int32)
    capacity = num_columns * PAGE_SIZE
    end = tl.minimum(context + count, capacity)
    chunk_keys = CHUNK_TILES * BLOCK_N
    if (node < count) & (end > chunk_keys):
        row = first + node
        line = row * HEADS + head
        if CAUSAL:
            end = tl.minimum(context + node + 1, capacity)
        first_chunk = 0
        if HAS_WINDOW:
            position = tl.load(positions_ptr + row).to(tl.int32)
            first_chunk = window_start(position, context, window) // chunk_keys
        end_chunk = tl.cdiv(end, chunk_keys)
        offs_c = tl.arange(0, BLOCK_C)
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        for start in range(first_chunk // BLOCK_C * BLOCK_C, end_chunk, BLOCK_C):
            chunk = start + offs_c
            mask_c = (chunk >= first_chunk) & (chunk < end_chunk)
            place = line * num_chunks + chunk  # [BLOCK_C]
            chunk_top = tl.load(top_ptr + place, mask=mask_c, other=float("-inf"))
            chunk_total = tl.load(total_ptr + place, mask=mask_c, other=0.0)
            mask_d = mask_c[:, None] & (offs_d < HEAD_DIM)
            part = tl.load(part_ptr + place[:, None] * HEAD_DIM + offs_d, mask=mask_d, other=0.0)  # [BLOCK_C, BLOCK_D]
            before = top
            top = tl.maximum(top, tl.max(chunk_top, axis=0))
            base = finite_base(top)
            share = tl.exp2(before - base)
            weights = tl.exp2(chunk_top - base)
            total = total * share + tl.sum(chunk_total * weights, axis=0)
            acc = acc * share[:, None] + tl.sum(part * weights[:, None], axis=0)[None, :]
        sink = top
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head + tl.arange(0, 1)).to(tl.float32)
        lines = line + tl.arange(0, 1)
        mask = lines >= 0
        store_result(out_ptr, lse_ptr, lines, mask, acc, total, top, sink, HEAD_DIM, BLOCK_D, HAS_SINKS)
