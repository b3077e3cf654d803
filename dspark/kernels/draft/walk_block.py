"""What happens once per block of a walk, before its first step and after its last, and the state between steps."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.draft.walk import (
    MAX,
    NO_KEY,
    RAW_MAX,
    RAW_SECOND,
    RAW_SUM,
    SUM,
    dot_rows,
    previous_row,
    sigmoid,
    unpacked,
)
from dspark.kernels.sample.rows import NEGATIVE_INFINITY, is_good, load_plane
from dspark.kernels.sample.rows import plane_at as plane


@triton.jit(do_not_specialize=["num_rows"])
def walk_begin_kernel(
    hidden_ptr,  # [requests, draft_len, hidden_size]
    stride_hidden_request,
    stride_hidden_slot,
    weight_ptr,  # [num_outputs, hidden_size], the columns of a projection that read the hidden state
    stride_weight_row,
    bias_ptr,  # [num_outputs]
    out_ptr,  # [num_rows, num_outputs] float32, written
    key_ptr,  # [num_rows] int64, written
    num_rows,  # requests * draft_len
    draft_len,
    hidden_size,
    num_outputs,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Give every slot the key of nothing drawn, and project the hidden states of all slots where there is a weight."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    inside = row < num_rows
    if tl.program_id(1) == 0:
        tl.store(key_ptr + row, tl.full([BLOCK_R], NO_KEY, tl.int64), mask=inside)
    if weight_ptr is not None:
        offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_outputs
        hidden = row // draft_len * stride_hidden_request + row % draft_len * stride_hidden_slot
        acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for start in range(0, hidden_size, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = offs_k < hidden_size
            w = tl.load(
                weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight_row + offs_k[None, :],
                mask=mask_n[:, None] & mask_k[None, :],
                other=0.0,
            )  # [BLOCK_N, BLOCK_K]
            x = tl.load(
                hidden_ptr + hidden[:, None] + offs_k[None, :], mask=inside[:, None] & mask_k[None, :], other=0.0
            )  # [BLOCK_R, BLOCK_K]
            acc += dot_rows(w, x, DOT, UPCAST)
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out_ptr + (row * num_outputs)[:, None] + offs_n[None, :],
            tl.trans(acc),
            mask=inside[:, None] & mask_n[None, :],
        )


@triton.jit(do_not_specialize=["slot", "num_requests"])
def walk_state_kernel(
    projected_ptr,  # [requests * draft_len, GATES * rank] float32, of walk_begin_kernel
    table_ptr,  # [tokens, GATES * rank] float32, the previous token's part, or null
    weight_ptr,  # [GATES * rank, columns]: a recurrent head's columns of the state, then those of the embedding
    stride_weight_row,
    w1_ptr,  # [tokens, rank]
    stride_w1_row,
    state_ptr,  # [requests, rank] float32 of the slot before, recurrent heads
    anchor_ptr,
    key_ptr,
    to_target_ptr,
    from_target_ptr,
    num_anchors,
    out_state_ptr,  # [requests, rank] float32, written
    out_input_ptr,  # [requests, rank] float32, written: what W2 is applied to
    slot,
    num_requests,
    draft_len,
    rank,
    RECURRENT: tl.constexpr,
    DOT_TOKEN: tl.constexpr,  # see dot_rows: of the embedding, and of the state
    DOT_STATE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A gated or recurrent head up to the product with W2, for one slot."""
    GATES: tl.constexpr = 3 if RECURRENT else 1
    slot = slot.to(tl.int64)
    request = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    alive, row = previous_row(
        request, slot, num_requests, draft_len, num_anchors, anchor_ptr, key_ptr, to_target_ptr, from_target_ptr
    )
    known = alive & (row >= 0)
    has_state = alive & ((request * 0 + slot) > 0)
    gate = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    candidate = gate
    output = gate
    mask_n = offs_n < rank
    for start in range(0, rank, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < rank
        mask_w = mask_n[:, None] & mask_k[None, :]
        weights = weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight_row + offs_k[None, :]  # [BLOCK_N, BLOCK_K]
        stride_gate = tl.full([], 1, tl.int64) * rank * stride_weight_row
        if RECURRENT:
            state = tl.load(
                state_ptr + (request * rank)[:, None] + offs_k[None, :],
                mask=has_state[:, None] & mask_k[None, :],
                other=0.0,
            )  # [BLOCK_R, BLOCK_K]
            gate += dot_rows(tl.load(weights, mask=mask_w, other=0.0), state, DOT_STATE, UPCAST)
            w = tl.load(weights + stride_gate, mask=mask_w, other=0.0)
            candidate += dot_rows(w, state, DOT_STATE, UPCAST)
            w = tl.load(weights + 2 * stride_gate, mask=mask_w, other=0.0)
            output += dot_rows(w, state, DOT_STATE, UPCAST)
            weights += rank
        if table_ptr is None:
            x = tl.load(
                w1_ptr + (row * stride_w1_row)[:, None] + offs_k[None, :],
                mask=known[:, None] & mask_k[None, :],
                other=0.0,
            )  # [BLOCK_R, BLOCK_K]
            gate += dot_rows(tl.load(weights, mask=mask_w, other=0.0), x, DOT_TOKEN, UPCAST)
            if RECURRENT:
                w = tl.load(weights + stride_gate, mask=mask_w, other=0.0)
                candidate += dot_rows(w, x, DOT_TOKEN, UPCAST)
                w = tl.load(weights + 2 * stride_gate, mask=mask_w, other=0.0)
                output += dot_rows(w, x, DOT_TOKEN, UPCAST)
    unit = mask_n[None, :]  # [1, BLOCK_N]
    of_hidden = ((request * draft_len + slot) * GATES * rank)[:, None] + offs_n[None, :]  # [BLOCK_R, BLOCK_N]
    of_token = (row * GATES * rank)[:, None] + offs_n[None, :]
    gate = tl.trans(gate) + _rest(projected_ptr + of_hidden, table_ptr, of_token, alive, known, unit)
    gate = sigmoid(gate)
    if RECURRENT:
        of_hidden += rank
        of_token += rank
        candidate = tl.trans(candidate) + _rest(projected_ptr + of_hidden, table_ptr, of_token, alive, known, unit)
        of_hidden += rank
        of_token += rank
        output = tl.trans(output) + _rest(projected_ptr + of_hidden, table_ptr, of_token, alive, known, unit)
    own = (request * rank)[:, None] + offs_n[None, :]
    written = (request < num_requests)[:, None] & unit
    if RECURRENT:
        before = tl.load(state_ptr + own, mask=has_state[:, None] & unit, other=0.0)
        tl.store(out_state_ptr + own, gate * before + (1.0 - gate) * tanh(candidate), mask=written)
        tl.store(out_input_ptr + own, tanh(output), mask=written)
    else:
        x = tl.load(w1_ptr + (row * stride_w1_row)[:, None] + offs_n[None, :], mask=known[:, None] & unit, other=0.0)
        tl.store(out_input_ptr + own, gate * x.to(tl.float32), mask=written)


@triton.jit
def _rest(projected, table_ptr, of_token, alive, known, unit):
    """The parts ``[BLOCK_R, BLOCK_N]`` of a gate that are not computed in the step: the hidden state's, the table's."""
    value = tl.load(projected, mask=alive[:, None] & unit, other=0.0)
    if table_ptr is not None:
        value += tl.load(table_ptr + of_token, mask=known[:, None] & unit, other=0.0)
    return value


@triton.jit
def tanh(x):
    """From an exponential that cannot overflow; a NaN stays one."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit(do_not_specialize=["num_requests"])
def walk_finish_kernel(
    key_ptr,  # [num_requests, draft_len] int64
    anchor_ptr,  # [num_requests] int64
    to_target_ptr,
    from_target_ptr,
    num_anchors,
    temperature_ptr,  # [num_requests] float32
    hidden_ptr,  # [num_requests, draft_len, hidden_size] of the confidence
    stride_hidden_request,
    stride_hidden_slot,
    weight_ptr,  # [hidden_size + rank] of the confidence, or null: there is none
    bias_ptr,  # [1]
    w1_ptr,  # [tokens, rank] of the confidence, or null: it does not read the previous token
    stride_w1_row,
    table_ptr,  # [tokens] float32, the previous token's part of the confidence, or null
    stats_ptr,  # planes of dspark.kernels.draft.walk, or null
    stride_plane,
    out_tokens_ptr,  # [num_requests, draft_len] int64, written, as are those below unless null
    out_confidence_logits_ptr,  # [num_requests, draft_len] float32
    out_confidence_ptr,
    out_margin_ptr,
    out_lse_ptr,
    scores_ptr,  # [num_requests, draft_len, vocab_size], or null
    stride_scores_request,
    stride_scores_slot,
    num_requests,
    draft_len,
    vocab_size,
    hidden_size,
    rank,
    num_tiles,
    MARGIN: tl.constexpr,
    LSE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write a slot's token, confidence, margin and log-sum-exp, and what its scores lack. One program per slot."""
    request = tl.program_id(0).to(tl.int64) // draft_len
    slot = tl.program_id(0) % draft_len
    place = tl.program_id(0)
    offs_g = tl.arange(0, BLOCK_G)
    key = tl.load(key_ptr + request * draft_len + offs_g, mask=offs_g <= slot, other=NO_KEY)
    best, token = unpacked(key)
    anchor = tl.load(anchor_ptr + request)
    begins = (anchor >= 0) & (anchor < num_anchors)
    good = tl.sum(((offs_g < slot) & is_good(best)).to(tl.int32))
    before = begins & (good == slot)
    alive = before & (tl.sum(((offs_g == slot) & is_good(best)).to(tl.int32)) > 0)
    own = tl.sum(tl.where(offs_g == slot, token, 0))  # in the draft's vocabulary
    target = own
    if to_target_ptr is not None:
        target = tl.load(to_target_ptr + own, mask=alive, other=-1)
    tl.store(out_tokens_ptr + place, tl.where(alive, target, -1))

    if weight_ptr is not None:
        logit = tl.load(bias_ptr).to(tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        hidden = hidden_ptr + request * stride_hidden_request + slot.to(tl.int64) * stride_hidden_slot
        for start in range(0, hidden_size, BLOCK_H):
            offs_h = start + tl.arange(0, BLOCK_H)
            mask_h = offs_h < hidden_size
            x = tl.load(hidden + offs_h, mask=mask_h, other=0.0).to(tl.float32)
            total += x * tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        logit += tl.sum(total)
        row = _row_before(slot, anchor, begins, before, offs_g, token, to_target_ptr, from_target_ptr)
        if table_ptr is not None:
            logit += tl.load(table_ptr + row, mask=row >= 0, other=0.0)
        elif w1_ptr is not None:
            offs_k = tl.arange(0, BLOCK_K)
            mask_k = offs_k < rank
            x = tl.load(w1_ptr + row * stride_w1_row + offs_k, mask=mask_k & (offs_k * 0 + row >= 0), other=0.0)
            w = tl.load(weight_ptr + hidden_size + offs_k, mask=mask_k, other=0.0).to(tl.float32)
            logit += tl.sum(x.to(tl.float32) * w)
        logit = tl.where(alive & (logit == logit), logit, NEGATIVE_INFINITY)
        tl.store(out_confidence_logits_ptr + place, logit)
        tl.store(out_confidence_ptr + place, sigmoid(logit))

    greedy = tl.load(temperature_ptr + request) <= 0.0
    at = tl.zeros([1], tl.int64) + place
    here = at >= 0
    if MARGIN:
        first = load_plane(plane(stats_ptr, RAW_MAX, stride_plane), at, here, NEGATIVE_INFINITY, num_tiles, TILES)
        second = load_plane(plane(stats_ptr, RAW_SECOND, stride_plane), at, here, NEGATIVE_INFINITY, num_tiles, TILES)
        total = load_plane(plane(stats_ptr, RAW_SUM, stride_plane), at, here, 0.0, num_tiles, TILES)
        top, column = tl.max(first, axis=1, return_indices=True, return_indices_tie_break_left=True)
        others = tl.where(tl.arange(0, TILES)[None, :] == column[:, None], second, first)
        reference = tl.where(is_good(top), top, 0.0)
        gap = 1.0 - tl.exp(tl.max(others, axis=1) - reference)
        mass = _merged(first, total, reference)
        tl.store(out_margin_ptr + at, tl.where(alive, gap / tl.where(mass > 0.0, mass, 1.0), 0.0))
    if LSE:
        first = load_plane(plane(stats_ptr, MAX, stride_plane), at, here, NEGATIVE_INFINITY, num_tiles, TILES)
        total = load_plane(plane(stats_ptr, SUM, stride_plane), at, here, 0.0, num_tiles, TILES)
        top = tl.max(first, axis=1)
        reference = tl.where(is_good(top), top, 0.0)
        mass = _merged(first, total, reference)
        lse = tl.where(greedy, 0.0, reference + tl.log(tl.where(mass > 0.0, mass, 1.0)))
        tl.store(out_lse_ptr + at, tl.where(alive, lse, NEGATIVE_INFINITY))

    if scores_ptr is not None:
        scores = scores_ptr + request * stride_scores_request + slot.to(tl.int64) * stride_scores_slot
        if alive & greedy:
            tl.store(scores + own, tl.zeros([], tl.float32).to(scores_ptr.dtype.element_ty))
        if before & ~alive:  # tiles without the number that spoilt the row hold scores
            for start in range(0, vocab_size, BLOCK_V):
                offs_v = start + tl.arange(0, BLOCK_V)
                nothing = tl.full([BLOCK_V], NEGATIVE_INFINITY, tl.float32).to(scores_ptr.dtype.element_ty)
                tl.store(scores + offs_v, nothing, mask=offs_v < vocab_size)


@triton.jit
def _merged(tile_max, tile_sum, reference):
    """Sums of tiles ``[rows, tiles]``, relative to ``reference`` ``[rows]`` instead of each tile's maximum."""
    weight = tile_sum * tl.exp(tile_max - reference[:, None])
    return tl.sum(tl.where(tile_sum > 0.0, weight, 0.0), axis=1)


@triton.jit
def _row_before(slot, anchor, begins, before, offs_g, token, to_target_ptr, from_target_ptr):
    """The row of W1 of the token before a slot, -1 where there is none."""
    row = tl.sum(tl.where(offs_g + 1 == slot, token, 0))
    if to_target_ptr is not None and from_target_ptr is None:
        row = tl.load(to_target_ptr + row, mask=before & (slot > 0), other=-1)
    first = anchor
    if from_target_ptr is not None:
        first = tl.load(from_target_ptr + anchor, mask=begins, other=-1).to(tl.int64)
    return tl.where(before, tl.where(slot == 0, first, row), -1)
