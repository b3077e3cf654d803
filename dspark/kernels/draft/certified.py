"""The certified walk: a few candidates per slot, a bound on every other token, and a proof or none for each step."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.draft.walk import INFINITY, NO_KEY, packed, sigmoid
from dspark.kernels.philox import gumbel_of, gumbel_of_fours
from dspark.kernels.sample.rows import NEGATIVE_INFINITY, inverse_temperature, is_good

LOWEST = tl.constexpr(-2147483648)
"""Below the order of every float."""


@triton.jit(do_not_specialize=["num_rows"])
def walk_candidates_kernel(
    base_ptr,  # [requests, draft_len, vocab_size]
    stride_base_request,
    stride_base_slot,
    temperature_ptr,  # [requests] float32
    seed_ptr,  # [requests] int64
    position_ptr,  # [requests] int64 of the anchors
    value_ptr,  # [num_rows, num_tiles, PER_TILE] float32, written: the best perturbed base scores of each tile
    token_ptr,  # [num_rows, num_tiles, PER_TILE] int32, written
    bound_ptr,  # [num_rows, num_tiles] float32, written: the best of the others
    num_rows,
    draft_len,
    vocab_size,
    num_tiles,
    NOISE: tl.constexpr,
    SALTED: tl.constexpr,
    STREAM: tl.constexpr,
    PER_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Tiles take groups of neighbouring tokens in turn: a vocabulary's likely tokens are next to each other."""
    tile = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    request = place // draft_len
    slot = place % draft_len
    temperature = tl.load(temperature_ptr + request)
    inside = tl.arange(0, BLOCK_V)
    offs_v = (tile + num_tiles * (inside // GROUP).to(tl.int64)) * GROUP + inside % GROUP  # [BLOCK_V]
    base = tl.load(
        base_ptr + request * stride_base_request + slot * stride_base_slot + offs_v,
        mask=offs_v < vocab_size,
        other=NEGATIVE_INFINITY,
    )
    scores = (base.to(tl.float32) * inverse_temperature(temperature))[None, :]  # [1, BLOCK_V]
    scores = tl.where(scores < INFINITY, scores, INFINITY)  # NaN too
    if NOISE:  # noqa: SIM102  (the other condition is a tensor)
        if temperature > 0.0:
            anchor_at = tl.zeros([1], tl.int64) + tl.load(position_ptr + request)
            seed = tl.zeros([1], tl.int64) + tl.load(seed_ptr + request)
            salt = anchor_at * 0
            if SALTED:
                salt = anchor_at
            four = tl.arange(0, BLOCK_V // 4)
            block = (tile + num_tiles * (four // (GROUP // 4))) * (GROUP // 4) + four % (GROUP // 4)
            scores += gumbel_of_fours(seed, anchor_at + slot + 1, salt, block[None, :], STREAM)
    out = (place * num_tiles + tile) * PER_TILE + tl.zeros([1], tl.int64)
    for i in tl.static_range(PER_TILE):
        best, column = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
        token = (tile + num_tiles * (column // GROUP)) * GROUP + column % GROUP
        tl.store(value_ptr + out + i, best)
        tl.store(token_ptr + out + i, tl.where(best > NEGATIVE_INFINITY, token, -1).to(tl.int32))
        scores = tl.where(inside[None, :] == column[:, None], NEGATIVE_INFINITY, scores)
    tl.store(bound_ptr + place * num_tiles + tile + tl.zeros([1], tl.int64), tl.max(scores, axis=1))


@triton.jit
def walk_select_kernel(
    value_ptr,  # [rows, num_candidates] float32, of walk_candidates_kernel
    token_ptr,  # [rows, num_candidates] int32
    tile_bound_ptr,  # [rows, num_tiles] float32
    hidden_ptr,  # [requests, draft_len, hidden_size] of the confidence
    stride_hidden_request,
    stride_hidden_slot,
    weight_ptr,  # [hidden_size + ...] of the confidence, or null: there is none
    bias_ptr,  # [1]
    out_value_ptr,  # [rows, top_k] float32, written
    out_token_ptr,  # [rows, top_k] int32, written; -1 where there are fewer
    out_bound_ptr,  # [rows] float32, written: no token that is left out has a larger value
    out_confidence_ptr,  # [rows] float32, written: the hidden state's part of the confidence
    draft_len,
    hidden_size,
    num_candidates,
    num_tiles,
    top_k,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The best ``top_k`` of a slot's candidates, found by halving an interval in the order of floats."""
    place = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    value = tl.load(value_ptr + place * num_candidates + offs_c, mask=offs_c < num_candidates, other=NEGATIVE_INFINITY)
    token = tl.load(token_ptr + place * num_candidates + offs_c, mask=offs_c < num_candidates, other=-1)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(token >= 0, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST).to(tl.int64)  # [BLOCK_C]
    low = tl.full([], LOWEST, tl.int64)
    high = tl.max(order, axis=0) + 1
    for _ in range(32):  # the largest order that top_k candidates reach
        middle = low + (high - low + 1) // 2
        reached = tl.sum((order >= middle).to(tl.int32), axis=0) >= top_k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    ties = (order == low) & (token >= 0)
    above = (order > low) & (token >= 0)
    left = top_k - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (ties & (tl.cumsum(ties.to(tl.int32), axis=0) <= left))
    at = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    offs_k = tl.arange(0, TOP_K)
    count = tl.sum(chosen.to(tl.int32), axis=0)
    tl.store(
        out_token_ptr + place * top_k + offs_k,
        tl.full([TOP_K], -1, tl.int32),
        mask=(offs_k >= count) & (offs_k < top_k),
    )
    tl.store(
        out_value_ptr + place * top_k + offs_k,
        tl.full([TOP_K], NEGATIVE_INFINITY, tl.float32),
        mask=(offs_k >= count) & (offs_k < top_k),
    )
    tl.store(out_value_ptr + place * top_k + at, value, mask=chosen)
    tl.store(out_token_ptr + place * top_k + at, token, mask=chosen)
    offs_t = tl.arange(0, TILES)
    tile_bound = tl.load(tile_bound_ptr + place * num_tiles + offs_t, mask=offs_t < num_tiles, other=NEGATIVE_INFINITY)
    rest = tl.max(tl.where(chosen, NEGATIVE_INFINITY, value), axis=0)
    tl.store(out_bound_ptr + place, tl.maximum(rest, tl.max(tile_bound, axis=0)))
    if weight_ptr is not None:
        total = tl.zeros([BLOCK_H], tl.float32)
        hidden = hidden_ptr + place // draft_len * stride_hidden_request + place % draft_len * stride_hidden_slot
        for start in range(0, hidden_size, BLOCK_H):
            offs_h = start + tl.arange(0, BLOCK_H)
            x = tl.load(hidden + offs_h, mask=offs_h < hidden_size, other=0.0).to(tl.float32)
            total += x * tl.load(weight_ptr + offs_h, mask=offs_h < hidden_size, other=0.0).to(tl.float32)
        tl.store(out_confidence_ptr + place, tl.sum(total) + tl.load(bias_ptr).to(tl.float32))


@triton.jit
def walk_certify_kernel(
    value_ptr,  # [requests * draft_len, top_k] float32, of walk_select_kernel
    token_ptr,  # [requests * draft_len, top_k] int32
    bound_ptr,  # [requests * draft_len] float32
    confidence_ptr,  # [requests * draft_len] float32
    base_ptr,  # [requests, draft_len, vocab_size]
    stride_base_request,
    stride_base_slot,
    w1_ptr,  # [vocab_size, rank]
    stride_w1_row,
    w2_ptr,  # [vocab_size, rank]
    stride_w2_row,
    table_token_ptr,  # [vocab_size, top_m] int32
    table_bias_ptr,  # [vocab_size, top_m] float32
    table_bound_ptr,  # [vocab_size] float32
    table_norm_ptr,  # [vocab_size] float32
    anchor_ptr,  # [requests] int64
    temperature_ptr,
    seed_ptr,
    position_ptr,
    weight_ptr,  # [hidden_size + confidence_rank] of the confidence, or null
    confidence_w1_ptr,  # [vocab_size, confidence_rank], or null
    stride_confidence_w1_row,
    out_certified_ptr,  # [requests] int64, written: leading slots that are proven
    key_ptr,  # [requests, draft_len] int64, written, or null: the outputs are
    out_tokens_ptr,  # [requests, draft_len] int64
    out_confidence_logits_ptr,  # [requests, draft_len] float32, or null
    out_confidence_ptr,
    draft_len,
    vocab_size,
    rank,
    hidden_size,
    confidence_rank,
    top_k,
    top_m,
    slack,  # times the norm: what sums in another order may differ by
    NOISE: tl.constexpr,
    SALTED: tl.constexpr,
    STREAM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # confidence_rank, rounded up
):
    """Walk one request over its candidates while each step is proven; see ``dspark.ops.draft.certified``."""
    request = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, TOP_K)
    offs_m = tl.arange(0, TOP_M)
    row = tl.load(anchor_ptr + request)
    proven = (row >= 0) & (row < vocab_size)
    temperature = tl.load(temperature_ptr + request)
    inverse_t = inverse_temperature(temperature)
    one = tl.zeros([1], tl.int64)
    seed = one + tl.load(seed_ptr + request)
    anchor_at = one + tl.load(position_ptr + request)
    count = one * 0
    for i in range(draft_len):
        slot = request * 0 + i
        place = request * draft_len + slot
        key = tl.full([], NO_KEY, tl.int64)
        token = tl.full([], -1, tl.int64)
        confidence = tl.full([], NEGATIVE_INFINITY, tl.float32)
        if proven:
            # Candidates of the slot: their bias is a dot product each.
            mask_c = offs_c < top_k
            first_token = tl.load(token_ptr + place * top_k + offs_c, mask=mask_c, other=-1).to(tl.int64)
            held = first_token >= 0
            bias = tl.zeros([TOP_K], tl.float32)
            for start in range(0, rank, BLOCK_K):
                offs_k = start + tl.arange(0, BLOCK_K)
                mask_k = offs_k < rank
                x = tl.load(w1_ptr + row * stride_w1_row + offs_k, mask=mask_k, other=0.0).to(tl.float32)
                w = tl.load(
                    w2_ptr + (first_token * stride_w2_row)[:, None] + offs_k[None, :],
                    mask=held[:, None] & mask_k[None, :],
                    other=0.0,
                )  # [TOP_K, BLOCK_K]
                bias += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
            first = tl.load(value_ptr + place * top_k + offs_c, mask=mask_c, other=NEGATIVE_INFINITY)
            first = _usable(first + bias * inverse_t, held)
            # Candidates of the previous token: their base scores and noise are looked up.
            mask_m = offs_m < top_m
            second_token = tl.load(table_token_ptr + row * top_m + offs_m, mask=mask_m, other=-1).to(tl.int64)
            listed = second_token >= 0
            bias = tl.load(table_bias_ptr + row * top_m + offs_m, mask=mask_m, other=0.0)
            base = tl.load(
                base_ptr + request * stride_base_request + slot * stride_base_slot + second_token,
                mask=listed,
                other=NEGATIVE_INFINITY,
            )
            second = (base.to(tl.float32) + bias) * inverse_t
            if NOISE:  # noqa: SIM102  (the other condition is a tensor)
                if temperature > 0.0:
                    salt = anchor_at * 0
                    if SALTED:
                        salt = anchor_at
                    noise = gumbel_of(seed, anchor_at + slot + 1, salt, second_token[None, :], STREAM)
                    second += tl.sum(noise, axis=0)  # of one row
            second = _usable(second, listed)

            first_best, first_at = tl.max(first, axis=0, return_indices=True, return_indices_tie_break_left=True)
            second_best, second_at = tl.max(second, axis=0, return_indices=True, return_indices_tie_break_left=True)
            best = tl.maximum(first_best, second_best)
            from_first = tl.sum(tl.where(offs_c == first_at, first_token, 0), axis=0)
            from_second = tl.sum(tl.where(offs_m == second_at, second_token, 0), axis=0)
            winner = tl.where(first_best >= second_best, from_first, from_second)
            rival = tl.maximum(
                tl.max(tl.where(first_token == winner, NEGATIVE_INFINITY, first), axis=0),
                tl.max(tl.where(second_token == winner, NEGATIVE_INFINITY, second), axis=0),
            )
            outside = tl.load(bound_ptr + place) + tl.load(table_bound_ptr + row) * inverse_t
            size = tl.abs(best) + tl.where(outside > NEGATIVE_INFINITY, tl.abs(outside), 0.0) + 32.0
            margin = slack * inverse_t * tl.load(table_norm_ptr + row) + size * 9.5367431640625e-07  # 2^-20
            if confidence_ptr is not None:
                confidence = tl.load(confidence_ptr + place)
                if confidence_w1_ptr is not None:
                    offs_e = tl.arange(0, BLOCK_E)
                    mask_e = offs_e < confidence_rank
                    x = tl.load(confidence_w1_ptr + row * stride_confidence_w1_row + offs_e, mask=mask_e, other=0.0).to(
                        tl.float32
                    )
                    w = tl.load(weight_ptr + hidden_size + offs_e, mask=mask_e, other=0.0).to(tl.float32)
                    confidence += tl.sum(x * w)
            proven = is_good(best) & (best - margin > outside) & (best - margin > rival)
            if proven:
                key = packed(best, winner)
                token = winner
                row = winner
                count += 1
        if key_ptr is not None:
            tl.store(key_ptr + place, key)
        else:
            tl.store(out_tokens_ptr + place, token)
            if out_confidence_ptr is not None:
                confidence = tl.where((token >= 0) & (confidence == confidence), confidence, NEGATIVE_INFINITY)
                tl.store(out_confidence_logits_ptr + place, confidence)
                tl.store(out_confidence_ptr + place, sigmoid(confidence))
    tl.store(out_certified_ptr + request + one, count)


@triton.jit
def _usable(score, there):
    """Scores, -inf where there is none, and +inf in place of a NaN: nothing is proven of such a slot."""
    score = tl.where(score < INFINITY, score, INFINITY)
    return tl.where(there, score, NEGATIVE_INFINITY)
