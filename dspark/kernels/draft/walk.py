"""One step of the sequential walk: what a token adds to the next slot's logits, and the draw from the sum.

What the steps share is the *key* of each slot, one int64 that holds its best perturbed score and that token, so ordered
that the larger key is the larger score and, of equal scores, the earlier token. Programs raise it with an atomic
maximum, which has one outcome in any order, and the next step reads its previous token from there. A slot whose best
score is not finite is *bad*; nothing is drawn after it, and its successors keep the key that they began with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.philox import gumbel, gumbel_of
from dspark.kernels.sample.rows import NEGATIVE_INFINITY, inverse_temperature, is_good
from dspark.kernels.sample.rows import plane_at as plane

INFINITY = tl.constexpr(float("inf"))
LAST_TOKEN = tl.constexpr(0x7FFFFFFF)
"""What a token is subtracted from: no token has a bit that this lacks, so that the difference is an exclusive or."""
NO_KEY = tl.constexpr(-0x7F80000100000000)
"""Key of a slot that nothing was drawn in: its score is -inf."""

# Planes of the walk's statistics: float32 [planes, R * G, num_tiles].
RAW_MAX = tl.constexpr(0)  # of the logits before temperature and truncation
RAW_SECOND = tl.constexpr(1)
RAW_SUM = tl.constexpr(2)  # of exp(logit - RAW_MAX)
MAX = tl.constexpr(3)  # of the scores that are sampled from
SUM = tl.constexpr(4)  # of exp(score - MAX)


@triton.jit(do_not_specialize=["slot", "num_requests"])
def walk_step_kernel(
    base_ptr,  # [num_requests, draft_len, vocab_size]
    stride_base_request,
    stride_base_slot,
    w1_ptr,  # [tokens, rank]
    stride_w1_row,
    w2_ptr,  # [vocab_size, rank]
    stride_w2_row,
    gate_ptr,  # [num_requests * draft_len, rank] float32 under "gated": the hidden state's part of the gate
    gate_table_ptr,  # [tokens, rank] float32 under "gated": the previous token's part
    input_ptr,  # [num_requests, rank] float32 under "given": what W2 is applied to
    anchor_ptr,  # [num_requests] int64
    to_target_ptr,  # [vocab_size] int64, or null: draft ids are target ids
    from_target_ptr,  # [tokens] int32 where W1 has rows of draft ids, or null
    num_anchors,  # ids that an anchor may have
    temperature_ptr,  # [num_requests] float32
    seed_ptr,  # [num_requests] int64
    position_ptr,  # [num_requests] int64 of the anchors
    resume_ptr,  # [num_requests] int64, the first slot that is to be drawn, or null: all are
    key_ptr,  # [num_requests, draft_len] int64, written
    scores_ptr,  # [num_requests, draft_len, vocab_size], or null; written
    stride_scores_request,
    stride_scores_slot,
    stats_ptr,  # planes, or null; written
    stride_plane,
    slot,
    num_requests,
    draft_len,
    vocab_size,
    rank,
    num_tiles,
    INPUT: tl.constexpr,  # what W2 is applied to: "none", "markov", "gated", "given"
    DOT: tl.constexpr,  # see dot_rows
    RAW: tl.constexpr,  # write the logits to scores_ptr and draw nothing: walk_draw_kernel does, once they are cut
    NOISE: tl.constexpr,
    SALTED: tl.constexpr,  # the noise also carries the anchor's position
    STREAM: tl.constexpr,
    MARGIN: tl.constexpr,
    LSE: tl.constexpr,
    UPCAST: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # all requests fit into one block of rows
    HOLD: tl.constexpr,  # a tile of W2 is read once for all requests; else in parts, for each block of rows
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of the rank; all of it under HOLD
):
    slot = slot.to(tl.int64)
    if resume_ptr is not None:
        left = _any_left(resume_ptr, slot, num_requests, BLOCK_R)
        if ~left:
            return
    if ONE_BLOCK:
        request = tl.arange(0, BLOCK_R).to(tl.int64)
        alive, row = previous_row(
            request, slot, num_requests, draft_len, num_anchors, anchor_ptr, key_ptr, to_target_ptr, from_target_ptr,
        )  # fmt: skip
        if HOLD:
            x = head_input(
                request, alive, row, slot, draft_len, rank, 0, w1_ptr, stride_w1_row, gate_ptr, gate_table_ptr,
                input_ptr, INPUT, BLOCK_K,
            )  # fmt: skip
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab_size
        if HOLD:
            w2 = load_w2(w2_ptr, stride_w2_row, offs_v, mask_v, 0, rank, BLOCK_K)
        if ONE_BLOCK:
            bias = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
            if HOLD:
                bias = dot_rows(w2, x, DOT, UPCAST)
            elif INPUT != "none":
                for start in range(0, rank, BLOCK_K):
                    w2 = load_w2(w2_ptr, stride_w2_row, offs_v, mask_v, start, rank, BLOCK_K)
                    x = head_input(
                        request, alive, row, slot, draft_len, rank, start, w1_ptr, stride_w1_row, gate_ptr,
                        gate_table_ptr, input_ptr, INPUT, BLOCK_K,
                    )  # fmt: skip
                    bias += dot_rows(w2, x, DOT, UPCAST)
            step(
                bias, request, alive, slot, tile, offs_v, mask_v, base_ptr, stride_base_request, stride_base_slot,
                temperature_ptr, seed_ptr, position_ptr, resume_ptr, to_target_ptr, key_ptr, scores_ptr,
                stride_scores_request, stride_scores_slot, stats_ptr, stride_plane, num_requests, draft_len, num_tiles,
                RAW, NOISE, SALTED, STREAM, MARGIN, LSE, BLOCK_R, BLOCK_V,
            )  # fmt: skip
        else:
            for first in range(tl.program_id(1) * BLOCK_R, num_requests, tl.num_programs(1) * BLOCK_R):
                request = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
                alive, row = previous_row(
                    request, slot, num_requests, draft_len, num_anchors, anchor_ptr, key_ptr, to_target_ptr,
                    from_target_ptr,
                )  # fmt: skip
                bias = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
                if HOLD:
                    x = head_input(
                        request, alive, row, slot, draft_len, rank, 0, w1_ptr, stride_w1_row, gate_ptr,
                        gate_table_ptr, input_ptr, INPUT, BLOCK_K,
                    )  # fmt: skip
                    bias = dot_rows(w2, x, DOT, UPCAST)
                elif INPUT != "none":
                    for start in range(0, rank, BLOCK_K):
                        w2 = load_w2(w2_ptr, stride_w2_row, offs_v, mask_v, start, rank, BLOCK_K)
                        x = head_input(
                            request, alive, row, slot, draft_len, rank, start, w1_ptr, stride_w1_row, gate_ptr,
                            gate_table_ptr, input_ptr, INPUT, BLOCK_K,
                        )  # fmt: skip
                        bias += dot_rows(w2, x, DOT, UPCAST)
                step(
                    bias, request, alive, slot, tile, offs_v, mask_v, base_ptr, stride_base_request, stride_base_slot,
                    temperature_ptr, seed_ptr, position_ptr, resume_ptr, to_target_ptr, key_ptr, scores_ptr,
                    stride_scores_request, stride_scores_slot, stats_ptr, stride_plane, num_requests, draft_len,
                    num_tiles, RAW, NOISE, SALTED, STREAM, MARGIN, LSE, BLOCK_R, BLOCK_V,
                )  # fmt: skip


@triton.jit(do_not_specialize=["slot", "num_requests"])
def walk_draw_kernel(
    logits_ptr,  # [num_requests, vocab_size] float32, of walk_step_kernel under RAW
    stride_logits_row,
    threshold_ptr,  # [num_requests] float32, the least scaled score that is kept
    to_target_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    key_ptr,  # written
    scores_ptr,  # or null; written
    stride_scores_request,
    stride_scores_slot,
    stats_ptr,  # or null; written
    stride_plane,
    slot,
    num_requests,
    draft_len,
    vocab_size,
    num_tiles,
    NOISE: tl.constexpr,
    SALTED: tl.constexpr,
    STREAM: tl.constexpr,
    MARGIN: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The draw of a step whose rows are truncated; arguments as in :func:`walk_step_kernel`."""
    slot = slot.to(tl.int64)
    tile = tl.program_id(0)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < vocab_size
    request = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    inside = request < num_requests
    logits = tl.load(
        logits_ptr + (request * stride_logits_row)[:, None] + offs_v[None, :],
        mask=inside[:, None] & mask_v[None, :],
        other=NEGATIVE_INFINITY,
    )  # [BLOCK_R, BLOCK_V]
    draw(
        logits, request, inside, slot, tile, offs_v, mask_v, threshold_ptr, temperature_ptr, seed_ptr, position_ptr,
        None, to_target_ptr, key_ptr, scores_ptr, stride_scores_request, stride_scores_slot, stats_ptr, stride_plane,
        num_requests, draft_len, num_tiles, False, NOISE, SALTED, STREAM, MARGIN, LSE, BLOCK_R, BLOCK_V,
    )  # fmt: skip


@triton.jit
def _any_left(resume_ptr, slot, num_requests, BLOCK_R: tl.constexpr):
    """Whether any request's slot is yet to be drawn."""
    left = 0
    for first in range(0, num_requests, BLOCK_R):
        request = first + tl.arange(0, BLOCK_R)
        resume = tl.load(resume_ptr + request, mask=request < num_requests, other=0x7FFFFFFF)
        left += tl.sum((resume <= slot).to(tl.int32))
    return left > 0


@triton.jit
def previous_row(
    request, slot, num_requests, draft_len, num_anchors, anchor_ptr, key_ptr, to_target_ptr, from_target_ptr
):  # fmt: skip
    """``(alive, row)``: whether there is a previous token, and its row of W1 (-1: it has none)."""
    inside = request < num_requests
    at = request * 0 + slot
    starts = inside & (at == 0)
    anchor = tl.load(anchor_ptr + request, mask=starts, other=-1)
    key = tl.load(key_ptr + request * draft_len + slot - 1, mask=inside & (at > 0), other=NO_KEY)
    best, token = unpacked(key)
    drawn = is_good(best)
    row = token
    if to_target_ptr is not None and from_target_ptr is None:
        row = tl.load(to_target_ptr + token, mask=drawn, other=-1)
    begins = starts & (anchor >= 0) & (anchor < num_anchors)
    first = anchor
    if from_target_ptr is not None:
        first = tl.load(from_target_ptr + anchor, mask=begins, other=-1).to(tl.int64)
    return begins | drawn, tl.where(begins, first, row)


@triton.jit
def load_w2(w2_ptr, stride_w2_row, offs_v, mask_v, start, rank, BLOCK_K: tl.constexpr):
    """Part of a tile of W2, ``[BLOCK_V, BLOCK_K]``."""
    offs_k = start + tl.arange(0, BLOCK_K)
    return tl.load(
        w2_ptr + offs_v.to(tl.int64)[:, None] * stride_w2_row + offs_k[None, :],
        mask=mask_v[:, None] & (offs_k < rank)[None, :],
        other=0.0,
    )


@triton.jit
def head_input(
    request, alive, row, slot, draft_len, rank, start, w1_ptr, stride_w1_row, gate_ptr, gate_table_ptr, input_ptr,
    INPUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What W2 is applied to, ``[BLOCK_R, BLOCK_K]``: in W1's dtype under "markov", else float32."""
    offs_k = start + tl.arange(0, BLOCK_K)
    mask_k = (offs_k < rank)[None, :]
    mask = (alive & (row >= 0))[:, None] & mask_k
    if INPUT == "given":
        return tl.load(input_ptr + (request * rank)[:, None] + offs_k[None, :], mask=alive[:, None] & mask_k, other=0.0)
    else:
        x = tl.load(w1_ptr + (row * stride_w1_row)[:, None] + offs_k[None, :], mask=mask, other=0.0)
        if INPUT == "gated":
            at = ((request * draft_len + slot) * rank)[:, None] + offs_k[None, :]
            gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
            gate += tl.load(gate_table_ptr + (row * rank)[:, None] + offs_k[None, :], mask=mask, other=0.0)
            x = x.to(tl.float32) * sigmoid(gate)
        return x


@triton.jit
def dot_rows(w, x, DOT: tl.constexpr, UPCAST: tl.constexpr):
    """``[N, K]`` weights times ``[R, K]`` rows, ``[N, R]`` float32.

    Args:
        DOT: "half" where both are of one half-precision dtype; "split" for bfloat16 weights and float32 rows, which are
            the sum of three bfloat16 numbers each; "float32" for all else.
        UPCAST: compute in float32, as Triton's interpreter must: its bfloat16 products are wrong.
    """
    if DOT == "float32":
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    elif DOT == "half":
        return _dot(w, x, UPCAST)
    else:
        x = x.to(tl.float32)
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return _dot(w, low, UPCAST) + _dot(w, middle, UPCAST) + _dot(w, high, UPCAST)


@triton.jit
def _dot(w, x, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(w, tl.trans(x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def packed(best, token):
    """The key of a score (float32, no NaN) and its token."""
    bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)  # -0 is not less than 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (token ^ LAST_TOKEN).to(tl.int64)


@triton.jit
def unpacked(key):
    """Score (float32) and token (int64) of a key."""
    order = (key >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), (key & LAST_TOKEN) ^ LAST_TOKEN


@triton.jit
def step(
    bias, request, alive, slot, tile, offs_v, mask_v, base_ptr, stride_base_request, stride_base_slot, temperature_ptr,
    seed_ptr, position_ptr, resume_ptr, to_target_ptr, key_ptr, scores_ptr, stride_scores_request, stride_scores_slot,
    stats_ptr, stride_plane, num_requests, draft_len, num_tiles, RAW: tl.constexpr, NOISE: tl.constexpr,
    SALTED: tl.constexpr, STREAM: tl.constexpr, MARGIN: tl.constexpr, LSE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add the bias ``[BLOCK_V, BLOCK_R]`` to a tile of base logits, and draw."""
    base = tl.load(
        base_ptr + (request * stride_base_request + slot * stride_base_slot)[:, None] + offs_v[None, :],
        mask=alive[:, None] & mask_v[None, :],
        other=NEGATIVE_INFINITY,
    )  # [BLOCK_R, BLOCK_V]
    draw(
        base.to(tl.float32) + tl.trans(bias), request, alive, slot, tile, offs_v, mask_v, None, temperature_ptr,
        seed_ptr, position_ptr, resume_ptr, to_target_ptr, key_ptr, scores_ptr, stride_scores_request,
        stride_scores_slot, stats_ptr, stride_plane, num_requests, draft_len, num_tiles, RAW, NOISE, SALTED, STREAM,
        MARGIN, LSE, BLOCK_R, BLOCK_V,
    )  # fmt: skip


@triton.jit
def draw(
    logits, request, alive, slot, tile, offs_v, mask_v, threshold_ptr, temperature_ptr, seed_ptr, position_ptr,
    resume_ptr, to_target_ptr, key_ptr, scores_ptr, stride_scores_request, stride_scores_slot, stats_ptr, stride_plane,
    num_requests, draft_len, num_tiles, RAW: tl.constexpr, NOISE: tl.constexpr, SALTED: tl.constexpr,
    STREAM: tl.constexpr, MARGIN: tl.constexpr, LSE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Draw from one tile of logits ``[BLOCK_R, BLOCK_V]``: write its scores and statistics, and raise the keys."""
    inside = request < num_requests
    valid = alive[:, None] & mask_v[None, :]
    logits = tl.where(valid, logits, NEGATIVE_INFINITY)
    if scores_ptr is not None:
        at = (request * stride_scores_request + slot * stride_scores_slot)[:, None] + offs_v[None, :]
    if RAW:
        tl.store(scores_ptr + at, logits, mask=inside[:, None] & mask_v[None, :])
    else:
        temperature = tl.load(temperature_ptr + request, mask=inside, other=0.0)
        sampled = alive & (temperature > 0.0)
        scores = logits * inverse_temperature(temperature)[:, None]
        if threshold_ptr is not None:
            threshold = tl.load(threshold_ptr + request, mask=inside, other=NEGATIVE_INFINITY)
            # A NaN is not below any threshold: it must not be cut.
            scores = tl.where(scores < threshold[:, None], NEGATIVE_INFINITY, scores)
        if scores_ptr is not None:
            stored = tl.where(sampled[:, None], scores, NEGATIVE_INFINITY).to(scores_ptr.dtype.element_ty)
            tl.store(scores_ptr + at, stored, mask=inside[:, None] & mask_v[None, :])
            scores = tl.where(sampled[:, None], stored.to(tl.float32), scores)
        # A NaN fails every comparison; as +inf it wins the maximum and marks the slot.
        scores = tl.where(scores < INFINITY, scores, INFINITY)
        if MARGIN:
            at = (request * draft_len + slot) * num_tiles + tile
            logits = tl.where(logits < INFINITY, logits, INFINITY)
            first, column = tl.max(logits, axis=1, return_indices=True, return_indices_tie_break_left=True)
            others = tl.where(tl.arange(0, BLOCK_V)[None, :] == column[:, None], NEGATIVE_INFINITY, logits)
            tl.store(plane(stats_ptr, RAW_MAX, stride_plane) + at, first, mask=inside)
            tl.store(plane(stats_ptr, RAW_SECOND, stride_plane) + at, tl.max(others, axis=1), mask=inside)
            tl.store(plane(stats_ptr, RAW_SUM, stride_plane) + at, _sum_of_exp(logits, first), mask=inside)
        if LSE:
            at = (request * draft_len + slot) * num_tiles + tile
            first = tl.max(scores, axis=1)
            tl.store(plane(stats_ptr, MAX, stride_plane) + at, first, mask=inside)
            tl.store(plane(stats_ptr, SUM, stride_plane) + at, _sum_of_exp(scores, first), mask=inside)
        if NOISE:
            may_win = sampled & (tl.max(scores, axis=1) > NEGATIVE_INFINITY)
            if tl.sum(may_win.to(tl.int32)) > 0:
                seed = tl.load(seed_ptr + request, mask=inside, other=0)
                anchor_at = tl.load(position_ptr + request, mask=inside, other=0)
                salt = anchor_at * 0
                if SALTED:
                    salt = anchor_at
                if to_target_ptr is None:
                    noise = gumbel(seed, anchor_at + slot + 1, salt, tile * BLOCK_V, STREAM, BLOCK_V)
                else:
                    target = tl.load(to_target_ptr + offs_v, mask=mask_v, other=0)
                    noise = gumbel_of(seed, anchor_at + slot + 1, salt, target[None, :], STREAM)
                scores = tl.where(sampled[:, None], scores + noise, scores)
        best, column = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
        if resume_ptr is not None:
            alive = alive & (tl.load(resume_ptr + request, mask=inside, other=0) <= slot)
        tl.atomic_max(
            key_ptr + request * draft_len + slot, packed(best, tile * BLOCK_V + column), mask=inside & alive,
            sem="relaxed",
        )  # fmt: skip


@triton.jit
def _sum_of_exp(x, top):
    """Sum of ``exp(x - top)`` of each row, 0 where ``top`` is not finite."""
    good = is_good(top)
    return tl.sum(tl.where(good[:, None], tl.exp(x - tl.where(good, top, 0.0)[:, None]), 0.0), axis=1)
