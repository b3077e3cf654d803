"""The parts of attention that was split over the keys: how one chunk's scores count, and the merge of all chunks.

With online softmax (Milakov and Gimelshein, arXiv 1805.02867) some keys of a line are a largest score ``m``, a divisor
``l = sum exp(s_i - m)`` and weighted values ``a = sum exp(s_i - m) v_i``. Two sets of keys make one:

    m = max(m1, m2),  l = l1 exp(m1 - m) + l2 exp(m2 - m),  a = a1 exp(m1 - m) + a2 exp(m2 - m)

and the result is ``a / l``, its log-sum-exp ``m + log l``. Scores are held in units of log 2, so that ``exp`` is
``exp2``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def LOG2_E():  # noqa: N802
    return 1.4426950408889634


@triton.constexpr_function
def LN_2():  # noqa: N802
    return 0.6931471805599453


@triton.jit
def finite_base(top):
    """What exponents are taken relative to: the largest score, or 0 where there is none yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def store_result(out, lse, line, mask, acc, total, top, sink, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Finish lines ``[n]`` of weighted values ``acc [n, BLOCK_D]``, their divisor and largest score, and store them.

    A sink is one more score of each line, in natural units and without a value, or None.
    """
    if sink is not None:
        before = top
        top = tl.maximum(top, sink * LOG2_E())
        base = finite_base(top)
        share = tl.exp2(before - base)
        total = total * share + tl.exp2(sink * LOG2_E() - base)
        acc = acc * share[:, None]
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    result = acc / divisor[:, None]
    mask_d = mask[:, None] & (offs_d < HEAD_DIM)
    tl.store(out + line[:, None] * HEAD_DIM + offs_d, result.to(out.dtype.element_ty), mask=mask_d)
    if lse is not None:
        log_sum = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * LN_2())
        tl.store(lse + line, log_sum, mask=mask)


@triton.jit
def window_start(position, context, window):
    """The first cache position that a row with this position may see, of the committed tokens or its own request's."""
    return tl.maximum(tl.minimum(position - window + 1, context), 0).to(tl.int32)


@triton.jit
def rows_of(batch, request, num_rows, max_rows):
    """A request's first row, the row behind its last, how many of them count, and its committed tokens."""
    first = tl.load(batch.query_start + request).to(tl.int64)
    behind = tl.minimum(tl.load(batch.query_start + request + 1).to(tl.int64), num_rows)
    count = tl.minimum(tl.maximum(behind - first, 0), max_rows).to(tl.int32)
    context = tl.load(batch.context_len + request).to(tl.int32)
    return first, behind, count, context


@triton.jit(do_not_specialize=["num_rows", "max_rows", "num_columns", "num_chunks"])
def merge_kernel(
    batch,  # Batch
    sinks,  # [HEADS] float, or None
    parts,  # Parts
    out,  # [num_rows, HEADS, HEAD_DIM], written
    lse,  # [num_rows, HEADS] float32, written, or None
    window,  # or None
    num_rows,
    max_rows,
    num_columns,
    num_chunks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Merge the chunks of one line, in their order, if its request has several.

    Grid: (requests * max_rows, query heads). ``BLOCK_C`` chunks are added at a time, counted from the first one of the
    cache, so that the order of a sum follows from the row's position alone.
    """
    request = (tl.program_id(0) // max_rows).to(tl.int64)
    node = tl.program_id(0) % max_rows
    head = tl.program_id(1)
    first, _, count, context = rows_of(batch, request, num_rows, max_rows)
    capacity = num_columns * PAGE_SIZE
    end = tl.minimum(context + count, capacity)
    chunk_keys = CHUNK_TILES * BLOCK_N
    if (node < count) & (end > chunk_keys):
        row = first + node
        line = row * HEADS + head
        if batch.ancestors is None:
            end = tl.minimum(context + node + 1, capacity)
        first_chunk = 0
        if window is not None:
            position = tl.load(batch.positions + row).to(tl.int32)
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
            chunk_top = tl.load(parts.top + place, mask=mask_c, other=float("-inf"))
            chunk_total = tl.load(parts.total + place, mask=mask_c, other=0.0)
            mask_d = mask_c[:, None] & (offs_d < HEAD_DIM)
            part = tl.load(parts.weighted + place[:, None] * HEAD_DIM + offs_d, mask=mask_d, other=0.0)
            before = top
            top = tl.maximum(top, tl.max(chunk_top, axis=0))
            base = finite_base(top)
            share = tl.exp2(before - base)
            weights = tl.exp2(chunk_top - base)
            total = total * share + tl.sum(chunk_total * weights, axis=0)
            acc = acc * share[:, None] + tl.sum(part * weights[:, None], axis=0)[None, :]  # part: [BLOCK_C, BLOCK_D]
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32)
        lines = line + tl.arange(0, 1)
        store_result(out, lse, lines, lines >= 0, acc, total, top, sink, HEAD_DIM, BLOCK_D)
