"""Attention of ragged query rows over a paged cache, split over the keys.

The rows of one key head are packed: line ``m`` of a request is its row ``m // GROUP`` at the head's query head
``m % GROUP``. A program takes ``BLOCK_M`` lines and the tiles of ``BLOCK_N`` keys of one chunk. Tiles and chunks are
cut at fixed cache positions, so that what a row adds up, and in which order, follows from its own position alone. Three
ranges of tiles follow one another: those that a window cuts, those that every line sees whole, and those around the end
of the committed tokens, where each line has its own mask.

Scores are held in units of log 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.attention.merge import LOG2_E, finite_base, rows_of, store_result, window_start


@triton.constexpr_function
def FLOAT8_SCALE():  # noqa: N802
    """What the numbers of :func:`operand` lack where they are of float8."""
    return 256.0


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """``a @ b + acc`` with float32 sums. ``UPCAST``: Triton's interpreter has no product of bfloat16 that is right."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def load_rows(base, offsets, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``[n, BLOCK_D]`` of which ``HEAD_DIM`` columns are there; 0 elsewhere."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = mask[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (offs_d < HEAD_DIM)
    return tl.load(base + offsets[:, None] + offs_d, mask=mask, other=0)


@triton.jit
def operand(x, like, IS_FLOAT8: tl.constexpr):
    """Loaded keys or values in the dtype of the queries; bytes of float8_e4m3fn as 1 / FLOAT8_SCALE of what they mean.

    The seven low bits of such a byte are exponent and mantissa of a float16 whose exponent is 8 too small, subnormal
    numbers included, on any hardware.
    """
    if IS_FLOAT8:
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(tl.float32)
    return x.to(like.dtype)


@triton.jit
def ancestor_bits(ancestors, node, count, offset, WORDS: tl.constexpr):
    """The next 64 keys from ``offset`` (counted from the end of the committed tokens) that each line sees, as bits."""
    word = offset >> 6
    shift = (offset & 63).to(tl.int64)
    low = load_words(ancestors, node, count, word, WORDS)  # [BLOCK_M]
    high = load_words(ancestors, node, count, word + 1, WORDS)
    kept = (tl.full([], 2, tl.int64) << (63 - shift)) - 1  # >> copies the sign
    return ((low >> shift) & kept) | ((high << 1) << (63 - shift))


@triton.jit
def load_words(ancestors, node, count, word, WORDS: tl.constexpr):
    """One word of each line; all bits of the committed tokens before the first one, none after the last."""
    inside = (word >= 0) & (word < WORDS)
    words = tl.load(ancestors + node * WORDS + word, mask=node < tl.where(inside, count, 0), other=0)
    return words | tl.where(word < 0, -1, 0)


@triton.jit(do_not_specialize=["stride_table_row", "num_rows", "num_requests", "max_rows", "num_columns", "num_chunks"])
def attention_kernel(
    q,  # [num_rows, KV_HEADS * GROUP, HEAD_DIM]
    kv,  # PagedKV; keys and values have the same strides
    batch,  # Batch
    sinks,  # [KV_HEADS * GROUP] float, or None
    parts,  # Parts, written; None where all keys are one chunk
    out,  # [num_rows, KV_HEADS * GROUP, HEAD_DIM], written
    lse,  # [num_rows, KV_HEADS * GROUP] float32, written, or None
    row_q,  # RowStrides
    page_kv,  # PageStrides
    stride_table_row,
    score_scale,
    cap_scale,  # or None
    window,  # or None
    num_rows,
    num_requests,
    max_rows,
    num_columns,
    num_chunks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    UPCAST: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Attention of ``BLOCK_M`` lines of one request and key head over the keys of one chunk, by online softmax.

    ``softmax(cap(scale q . k)) v`` over the keys that a line sees, ``cap(s) = c tanh(s / c)``, in one pass over tiles
    of keys that keeps of each line what ``merge.py`` describes (FlashAttention: Dao et al., arXiv 2205.14135; split
    over the keys as Flash-Decoding does). Grid: (requests * key heads * chunks * blocks of lines). ``WORDS`` is 0 for a
    causal chain.

    A request of one chunk is finished here; of another, each chunk leaves a part. The first program of a request and
    key head also clears the rows that follow the request's and belong to nobody.
    """
    num_blocks = tl.maximum(tl.cdiv(max_rows * GROUP, BLOCK_M), 1)
    index = tl.program_id(0)
    block = index % num_blocks
    index = index // num_blocks
    chunk = index % num_chunks
    index = index // num_chunks
    head = (index % KV_HEADS).to(tl.int64)
    request = (index // KV_HEADS).to(tl.int64)

    first, behind, count, context = rows_of(batch, request, num_rows, max_rows)
    capacity = num_columns * PAGE_SIZE
    end = tl.minimum(context + count, capacity)

    # What differs between lines is counted from the block's first one, so that it takes 32 bits.
    offs_n = tl.arange(0, BLOCK_N)
    line = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M], of the request and key head
    first_node = block * BLOCK_M // GROUP
    node = line // GROUP - first_node
    member = line % GROUP
    mask_m = first_node + node < count
    first_row = first + first_node
    first_line = first_row * (KV_HEADS * GROUP) + head * GROUP  # of the batch's rows and query heads
    line = node * (KV_HEADS * GROUP) + member

    # The keys that some line of the block may see, and before which of them every line sees all.
    whole_until = tl.minimum(context, capacity)
    seen_until = end
    if WORDS == 0:
        last_node = (block * BLOCK_M + BLOCK_M - 1) // GROUP
        seen_until = tl.minimum(context + tl.minimum(last_node + 1, count), capacity)
        if window is None:
            whole_until = tl.minimum(context + tl.minimum(first_node + 1, count), capacity)
    first_tile = chunk * CHUNK_TILES
    end_tile = tl.cdiv(seen_until, BLOCK_N)
    if CHUNK_TILES != 0:
        end_tile = tl.minimum(first_tile + CHUNK_TILES, end_tile)
    mask_from = tl.maximum(first_tile, whole_until // BLOCK_N)
    position = context + first_node + node  # replaced where there is a window
    if window is not None:
        position = tl.load(batch.positions + first_row + node, mask=mask_m, other=0).to(tl.int32)
        earliest = tl.min(tl.where(mask_m, position, 2147483647), axis=0)
        latest = tl.max(tl.where(mask_m, position, 0), axis=0)
        first_tile = tl.maximum(first_tile, window_start(earliest, context, window) // BLOCK_N)
        whole_from = tl.cdiv(window_start(latest, context, window), BLOCK_N)

    # Where nothing is split, the first chunk finishes the request, whether or not there is a key to see.
    wanted = chunk == 0
    if CHUNK_TILES != 0:
        wanted = (first_tile < end_tile) | (wanted & (end <= CHUNK_TILES * BLOCK_N))
    if (block * BLOCK_M < count * GROUP) & wanted:
        q_block = q + first_row * row_q.row + head * GROUP * row_q.head
        q_offsets = node.to(tl.int64) * row_q.row + member.to(tl.int64) * row_q.head
        queries = load_rows(q_block, q_offsets, mask_m, HEAD_DIM, BLOCK_D)
        if UPCAST:
            queries = queries.to(tl.float32)  # [BLOCK_M, BLOCK_D]
        value_scale = 1.0
        if IS_FLOAT8:
            score_scale *= FLOAT8_SCALE()
            value_scale *= FLOAT8_SCALE()
        if kv.k_scale is not None:
            score_scale *= tl.load(kv.k_scale + head)
        if kv.v_scale is not None:
            value_scale *= tl.load(kv.v_scale + head)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M], largest score so far
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        table_row = batch.block_table + request * stride_table_row
        k_head = kv.k + head * page_kv.head
        v_head = kv.v + head * page_kv.head

        # Ranges of tiles: 0 is cut by a window, 1 seen whole, 2 masked by line.
        for RANGE in tl.static_range(0 if window is not None else 1, 3):
            if RANGE == 2:
                low = tl.maximum(first_tile, mask_from)
                high = end_tile
            elif RANGE == 1:
                low = first_tile
                if window is not None:
                    low = tl.maximum(first_tile, whole_from)
                high = tl.minimum(mask_from, end_tile)
            else:
                low = first_tile
                high = tl.minimum(tl.minimum(mask_from, whole_from), end_tile)
            for tile in range(low, high):
                start = tile * BLOCK_N
                offs_key = start + offs_n  # [BLOCK_N], cache positions
                if PAGE_SIZE % BLOCK_N == 0:
                    page = tl.load(table_row + start // PAGE_SIZE).to(tl.int64)
                    slot = (start % PAGE_SIZE + offs_n).to(tl.int64)
                    present = offs_key < tl.where(page >= 0, end, 0)
                else:
                    mask_n = offs_key < end
                    page = tl.load(table_row + offs_key // PAGE_SIZE, mask=mask_n, other=-1).to(tl.int64)
                    slot = (offs_key % PAGE_SIZE).to(tl.int64)
                    present = page >= 0  # [BLOCK_N]
                offsets = page * page_kv.page + slot * page_kv.slot
                # [BLOCK_N, BLOCK_D] each
                k = operand(load_rows(k_head, offsets, present, HEAD_DIM, BLOCK_D), queries, IS_FLOAT8)
                v = operand(load_rows(v_head, offsets, present, HEAD_DIM, BLOCK_D), queries, IS_FLOAT8)
                scores = dot(queries, tl.trans(k), None, UPCAST) * score_scale  # [BLOCK_M, BLOCK_N]
                if cap_scale is not None:
                    power = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E()))
                    bounded = (1.0 - power) / (1.0 + power) * cap_scale
                    scores = tl.where(scores < 0.0, -bounded, bounded)
                seen = present[None, :]
                if RANGE != 1:
                    # A weight of 0 does not silence what is not finite: it is cleared, and those who see it get NaN.
                    flawed = tl.max(tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0, 1), axis=1) > 0  # [BLOCK_N]
                    v = tl.where(flawed[:, None], 0.0, v)
                    scores = tl.where(flawed[None, :], float("nan"), scores)
                    key_position = offs_key
                    if RANGE == 2:
                        if WORDS == 0:
                            seen = seen & (offs_key[None, :] <= (context + first_node + node)[:, None])
                        else:
                            bits = ancestor_bits(
                                batch.ancestors + first_row * WORDS, node, count - first_node, start - context, WORDS
                            )
                            if BLOCK_N <= 32:
                                bits = bits.to(tl.int32)
                            seen = seen & (((bits[:, None] >> offs_n.to(bits.dtype)[None, :]) & 1) != 0)
                        if window is not None:
                            own = (offs_key >= context) & (offs_key < end)
                            given = tl.load(batch.positions + first + (offs_key - context), mask=own, other=0)
                            key_position = tl.where(own, given.to(tl.int32), offs_key)
                    if window is not None:
                        seen = seen & (key_position[None, :] > (position - window)[:, None])
                scores = tl.where(seen, scores, float("-inf"))
                before = top
                top = tl.maximum(top, tl.max(scores, axis=1))
                base = finite_base(top)
                weights = tl.exp2(scores - base[:, None])
                share = tl.exp2(before - base)
                total = total * share + tl.sum(weights, axis=1)
                acc = dot(weights.to(v.dtype), v, acc * share[:, None], UPCAST)

        unsound = tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), axis=1)  # [BLOCK_M]
        total = tl.where(unsound > 0, float("nan"), total)
        acc *= value_scale
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + head * GROUP + member, mask=mask_m, other=0.0).to(tl.float32)
        out_block = out + first_line * HEAD_DIM
        lse_block = lse
        if lse is not None:
            lse_block = lse + first_line
        if CHUNK_TILES == 0 or end <= CHUNK_TILES * BLOCK_N:
            store_result(out_block, lse_block, line, mask_m, acc, total, top, sink, HEAD_DIM, BLOCK_D)
        else:
            place = line.to(tl.int64) * num_chunks
            first_place = first_line * num_chunks + chunk
            tl.store(parts.top + first_place + place, top, mask=mask_m)
            tl.store(parts.total + first_place + place, total, mask=mask_m)
            offs_d = tl.arange(0, BLOCK_D)[None, :]
            mask_d = mask_m[:, None] & (offs_d < HEAD_DIM)
            tl.store(parts.weighted + first_place * HEAD_DIM + place[:, None] * HEAD_DIM + offs_d, acc, mask=mask_d)

    if (block == 0) & (chunk == 0):
        follower = tl.where(request == num_requests - 1, num_rows, behind)
        offs_g = tl.arange(0, BLOCK_M)
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        for free in range(first + count, follower):
            for g in range(0, GROUP, BLOCK_M):
                heads = free * (KV_HEADS * GROUP) + head * GROUP + g + offs_g  # [BLOCK_M]
                mask_g = g + offs_g < GROUP
                empty = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
                mask_d = mask_g[:, None] & (offs_d < HEAD_DIM)
                tl.store(out + heads[:, None] * HEAD_DIM + offs_d, empty, mask=mask_d)
                if lse is not None:
                    tl.store(lse + heads, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=mask_g)
