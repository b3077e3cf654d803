"""One step of the sequential walk: what a token adds to the next step's logits, and the draw from the sum.

What the steps of a block share is the *key* of each, one int64 that holds its best perturbed score and that token, so
ordered that the larger key is the larger score and, of equal scores, the earlier token. Programs raise it with an
atomic maximum, which has one outcome in any order, and the next step reads its previous token from there. A step whose
best score is not finite is *bad*; nothing is drawn after it, and its successors keep the key that they began with.

The groups of arguments are the NamedTuples of :mod:`dspark.ops.draft.walk_launch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.philox import gumbel, gumbel_of, stream
from dspark.kernels.sample.rows import inverse_temperature, is_good, plane_at


@triton.constexpr_function
def no_key():
    """Key of a step that nothing was drawn in: its score is -inf."""
    return -0x7F80000100000000


@triton.jit(do_not_specialize=["step", "num_requests"])
def walk_step_kernel(
    base,  # [num_requests, draft_len, vocab_size]
    head,  # StepHead, or None: no bias
    drawing,  # Drawing; its block's keys, scores and stats are written
    step,
    num_requests,
    shape,  # StepShape
    DOT: tl.constexpr,  # see dot_rows
    RAW: tl.constexpr,  # write the logits as the scores and draw nothing: walk_draw_kernel does, once they are cut
    STREAM: tl.constexpr,
    UPCAST: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # all requests fit into one block of rows
    HOLD: tl.constexpr,  # a tile of W2 is read once for all requests; else in parts, for each block of rows
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of the rank; all of it under HOLD
) -> None:
    """Draw one step of all requests: ``argmax(transform(U_k + B(x_{k-1})) + noise)`` (eq. 4 with B of eq. 5 or 6).

    Grid: (programs, blocks of rows or 1). A program takes tiles of the vocabulary in turn, and multiplies each tile of
    W2 by the inputs of up to ``BLOCK_R`` requests at once, so that W2 is read once for a batch.
    """
    step = step.to(tl.int64)
    if drawing.resume is not None:
        left = _any_left(drawing.resume, step, num_requests, BLOCK_R)
        if ~left:
            return
    if ONE_BLOCK:
        request = tl.arange(0, BLOCK_R).to(tl.int64)
        previous = previous_row(drawing.block, request, step, num_requests, shape)
        x = None
        if HOLD:
            x = head_input(head, previous, request, step, 0, shape, BLOCK_K)
    for tile in range(tl.program_id(0), shape.num_tiles, tl.num_programs(0)):
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        w2 = None
        if HOLD:
            w2 = load_rows(head.w2, shape.w2_row, offs_v, offs_v < shape.vocab_size, 0, shape.rank, BLOCK_K)
        if ONE_BLOCK:
            bias = _head_bias(head, w2, x, previous, request, step, offs_v, shape, DOT, UPCAST, BLOCK_K)
            _add_and_draw(bias, base, previous, drawing, request, step, tile, num_requests, shape, RAW, STREAM, BLOCK_V)
        else:
            for first in range(tl.program_id(1) * BLOCK_R, num_requests, tl.num_programs(1) * BLOCK_R):
                request = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
                previous = previous_row(drawing.block, request, step, num_requests, shape)
                x = None
                if HOLD:
                    x = head_input(head, previous, request, step, 0, shape, BLOCK_K)
                bias = _head_bias(head, w2, x, previous, request, step, offs_v, shape, DOT, UPCAST, BLOCK_K)
                _add_and_draw(
                    bias, base, previous, drawing, request, step, tile, num_requests, shape, RAW, STREAM, BLOCK_V
                )


@triton.jit(do_not_specialize=["step", "num_requests"])
def walk_draw_kernel(
    logits,  # [num_requests, vocab_size] float32, of walk_step_kernel under RAW
    threshold,  # [num_requests] float32, the least scaled score that is kept
    drawing,  # Drawing; its block's keys, scores and stats are written
    step,
    num_requests,
    shape,  # StepShape, whose base_request is the stride of the logits' rows
    STREAM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """The draw of a step whose rows are truncated; grid: (tiles, blocks of rows)."""
    tile = tl.program_id(0)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    request = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    inside = request < num_requests
    row = tl.load(
        logits + (request * shape.base_request)[:, None] + offs_v[None, :],
        mask=inside[:, None] & (offs_v < shape.vocab_size)[None, :],
        other=float("-inf"),
    )  # [BLOCK_R, BLOCK_V]
    draw(row, threshold, drawing, request, inside, step.to(tl.int64), tile, num_requests, shape, STREAM, BLOCK_V)


@triton.jit
def _any_left(resume, step, num_requests, BLOCK_R: tl.constexpr):
    """Whether any request's step is yet to be drawn."""
    left = 0
    for first in range(0, num_requests, BLOCK_R):
        request = first + tl.arange(0, BLOCK_R)
        begins = tl.load(resume + request, mask=request < num_requests, other=0x7FFFFFFF)
        left += tl.sum((begins <= step).to(tl.int32))
    return left > 0


@triton.jit
def previous_row(block, request, step, num_requests, shape):
    """``(alive, row)``: whether there is a previous token, and its row of W1 (-1: it has none)."""
    inside = request < num_requests
    at = request * 0 + step
    starts = inside & (at == 0)
    anchor = tl.load(block.anchor + request, mask=starts, other=-1)
    key = tl.load(block.keys + request * shape.draft_len + step - 1, mask=inside & (at > 0), other=no_key())
    best, token = unpacked(key)
    drawn = is_good(best)
    begins = starts & (anchor >= 0) & (anchor < shape.num_anchors)
    row = token
    first = anchor
    if block.vocabulary is not None:
        if block.vocabulary.draft_ids is None:
            row = tl.load(block.vocabulary.target_ids + token, mask=drawn, other=-1)
        else:
            first = tl.load(block.vocabulary.draft_ids + anchor, mask=begins, other=-1).to(tl.int64)
    return begins | drawn, tl.where(begins, first, row)


@triton.jit
def load_rows(weight, stride_row, row, mask_row, start, columns, BLOCK_K: tl.constexpr):
    """Rows ``[n]`` of a weight from column ``start`` on, ``[n, BLOCK_K]``; 0 where there are none."""
    offs_k = start + tl.arange(0, BLOCK_K)
    return tl.load(
        weight + row.to(tl.int64)[:, None] * stride_row + offs_k[None, :],
        mask=mask_row[:, None] & (offs_k < columns)[None, :],
        other=0.0,
    )


@triton.jit
def head_input(head, previous, request, step, start, shape, BLOCK_K: tl.constexpr):
    """What W2 is applied to, ``[BLOCK_R, BLOCK_K]``: in W1's dtype of a Markov head, else float32."""
    alive, row = previous
    if head.given is not None:
        return load_rows(head.given, shape.rank, request, alive, start, shape.rank, BLOCK_K)
    else:
        known = alive & (row >= 0)
        x = load_rows(head.w1, shape.w1_row, row, known, start, shape.rank, BLOCK_K)
        if head.gate is not None:
            at = request * shape.draft_len + step
            gate = load_rows(head.gate, shape.rank, at, known, start, shape.rank, BLOCK_K)
            gate += load_rows(head.gate_table, shape.rank, row, known, start, shape.rank, BLOCK_K)
            x = x.to(tl.float32) * sigmoid(gate)
        return x


@triton.jit
def _head_bias(
    head, w2, x, previous, request, step, offs_v, shape, DOT: tl.constexpr, UPCAST: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The bias ``[BLOCK_V, BLOCK_R]`` of a tile: ``w2`` times ``x``, or where they are not held (None) of parts."""
    if x is not None:
        return dot_rows(w2, x, DOT, UPCAST)
    else:
        bias = tl.zeros([offs_v.shape[0], request.shape[0]], tl.float32)
        if head is not None:
            for start in range(0, shape.rank, BLOCK_K):
                part = load_rows(head.w2, shape.w2_row, offs_v, offs_v < shape.vocab_size, start, shape.rank, BLOCK_K)
                rows = head_input(head, previous, request, step, start, shape, BLOCK_K)
                bias += dot_rows(part, rows, DOT, UPCAST)
        return bias


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
    # No token has a bit that 0x7FFFFFFF lacks, so that the difference from it is an exclusive or.
    return (order.to(tl.int64) << 32) | (token ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def unpacked(key):
    """Score (float32) and token (int64) of a key."""
    order = (key >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), (key & 0x7FFFFFFF) ^ 0x7FFFFFFF


@triton.jit
def _add_and_draw(
    bias, base, previous, drawing, request, step, tile, num_requests, shape, RAW: tl.constexpr,
    STREAM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add the bias ``[BLOCK_V, BLOCK_R]`` to a tile of base logits, and draw; under RAW, write the sum instead."""
    alive, _ = previous
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = alive[:, None] & (offs_v < shape.vocab_size)[None, :]
    at = (request * shape.base_request + step * shape.base_step)[:, None] + offs_v[None, :]
    logits = tl.load(base + at, mask=valid, other=float("-inf"))  # [BLOCK_R, BLOCK_V]
    logits = tl.where(valid, logits.to(tl.float32) + tl.trans(bias), float("-inf"))
    if RAW:
        at = (request * shape.scores_request + step * shape.scores_step)[:, None] + offs_v[None, :]
        inside = (request < num_requests)[:, None] & (offs_v < shape.vocab_size)[None, :]
        tl.store(drawing.scores + at, logits, mask=inside)
    else:
        draw(logits, None, drawing, request, alive, step, tile, num_requests, shape, STREAM, BLOCK_V)


@triton.jit
def draw(
    logits, threshold, drawing, request, alive, step, tile, num_requests, shape, STREAM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Draw from one tile of logits ``[BLOCK_R, BLOCK_V]``: write its scores and statistics, and raise the keys.

    The logits are -inf where there are none. ``threshold`` is None where nothing is truncated.
    """
    inside = request < num_requests
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < shape.vocab_size
    temperature = tl.load(drawing.temperature + request, mask=inside, other=0.0)
    sampled = alive & (temperature > 0.0)
    scores = logits * inverse_temperature(temperature)[:, None]
    if threshold is not None:
        least = tl.load(threshold + request, mask=inside, other=float("-inf"))
        # A NaN is not below any threshold: it must not be cut.
        scores = tl.where(scores < least[:, None], float("-inf"), scores)
    if drawing.scores is not None:
        at = (request * shape.scores_request + step * shape.scores_step)[:, None] + offs_v[None, :]
        stored = tl.where(sampled[:, None], scores, float("-inf")).to(drawing.scores.dtype.element_ty)
        tl.store(drawing.scores + at, stored, mask=inside[:, None] & mask_v[None, :])
        scores = tl.where(sampled[:, None], stored.to(tl.float32), scores)
    # A NaN fails every comparison; as +inf it wins the maximum and marks the step.
    scores = tl.where(scores < float("inf"), scores, float("inf"))
    at = (request * shape.draft_len + step) * shape.num_tiles + tile
    if drawing.stats.margin is not None:
        logits = tl.where(logits < float("inf"), logits, float("inf"))
        first, column = tl.max(logits, axis=1, return_indices=True, return_indices_tie_break_left=True)
        others = tl.where(tl.arange(0, BLOCK_V)[None, :] == column[:, None], float("-inf"), logits)
        tl.store(plane_at(drawing.stats.margin, 0, shape.plane) + at, first, mask=inside)
        tl.store(plane_at(drawing.stats.margin, 1, shape.plane) + at, tl.max(others, axis=1), mask=inside)
        tl.store(plane_at(drawing.stats.margin, 2, shape.plane) + at, _sum_of_exp(logits, first), mask=inside)
    if drawing.stats.lse is not None:
        first = tl.max(scores, axis=1)
        tl.store(plane_at(drawing.stats.lse, 0, shape.plane) + at, first, mask=inside)
        tl.store(plane_at(drawing.stats.lse, 1, shape.plane) + at, _sum_of_exp(scores, first), mask=inside)
    if drawing.noise is not None:
        may_win = sampled & (tl.max(scores, axis=1) > float("-inf"))
        if tl.sum(may_win.to(tl.int32)) > 0:
            seed = tl.load(drawing.noise.seed + request, mask=inside, other=0)
            anchor_at = tl.load(drawing.noise.position + request, mask=inside, other=0)
            salt = anchor_at * 0
            if stream("draft") == STREAM:  # its noise also carries the anchor's position
                salt = anchor_at
            if drawing.block.vocabulary is None:
                noise = gumbel(seed, anchor_at + step + 1, salt, tile * BLOCK_V, STREAM, BLOCK_V)
            else:
                target = tl.load(drawing.block.vocabulary.target_ids + offs_v, mask=mask_v, other=0)
                noise = gumbel_of(seed, anchor_at + step + 1, salt, target[None, :], STREAM)
            scores = tl.where(sampled[:, None], scores + noise, scores)
    best, column = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
    if drawing.resume is not None:
        alive = alive & (tl.load(drawing.resume + request, mask=inside, other=0) <= step)
    key = packed(best, tile * BLOCK_V + column)
    tl.atomic_max(drawing.block.keys + request * shape.draft_len + step, key, mask=inside & alive, sem="relaxed")


@triton.jit
def _sum_of_exp(x, top):
    """Sum of ``exp(x - top)`` of each row, 0 where ``top`` is not finite."""
    good = is_good(top)
    return tl.sum(tl.where(good[:, None], tl.exp(x - tl.where(good, top, 0.0)[:, None]), 0.0), axis=1)
