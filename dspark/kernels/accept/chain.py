"""Verdicts of the rules in which the target draws every row, and a draft is accepted while it is what was drawn."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.rows import (
    ARGMAX,
    BEST,
    BEST_TOKEN,
    MAX,
    NEGATIVE_INFINITY,
    RAW_MAX,
    RAW_SUM,
    SUB_SUM,
    first_beyond,
    inverse_temperature,
    is_good,
    load_best,
    load_plane,
    load_sums,
    locate,
    merge_sums,
    plane,
    summable,
)

BAD_LOGITS = tl.constexpr(1)
"""``Status.BAD_LOGITS``."""
RESIDUAL = tl.constexpr(3)
"""``Stream.RESIDUAL``."""


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def chain_verdict_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [num_requests + 1] int64
    temperature_ptr,  # [num_requests] float32
    stats_ptr,  # planes of rows.py, from row_statistics_kernel
    stride_plane,
    drawn_ptr,  # [slots] int64 of the tokens that the target draws, or null: the best (perturbed) scores
    out_tokens_ptr,  # [num_requests, NODES] int64, written, as are those below
    out_path_ptr,  # [num_requests, NODES] int64
    out_logprobs_ptr,  # [num_requests, NODES] float32
    out_num_ptr,  # [num_requests] int64
    out_status_ptr,  # [num_requests] int64
    num_requests,
    num_rows,
    num_tiles,
    NOISE: tl.constexpr,
    RAW: tl.constexpr,
    NODES: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Accept drafts while they are what the target draws, and write the verdict."""
    request, node, slot, inside = nodes_of_program(num_requests, NODES, NODES_P2, BLOCK_R)
    num_slots = num_requests * NODES
    row, _, _, left = locate(tl.where(inside, slot, num_slots), num_slots, num_rows, query_start_ptr, NODES)
    exists = inside & (left > 0)
    temperature = tl.load(temperature_ptr + request, mask=exists, other=0.0)
    if drawn_ptr is not None:
        token = tl.load(drawn_ptr + slot, mask=exists, other=-1)
    else:
        token = drawn_tokens(slot, exists, temperature > 0.0, stats_ptr, stride_plane, num_tiles, TILES, NOISE)
    followed = exists & (left > 1) & (node + 1 < NODES)
    draft = tl.load(tokens_ptr + row + 1, mask=followed, other=-1)
    agrees = followed & (token >= 0) & (token == draft)
    accepted = first_where(~agrees, node, NODES_P2, BLOCK_R)
    emit(
        request, node, slot, inside, exists, row * stride_logits_row, temperature, accepted, token, token, logits_ptr,
        stats_ptr, stride_plane, out_tokens_ptr, out_path_ptr, out_logprobs_ptr, out_num_ptr, out_status_ptr,
        num_tiles, RAW, NODES_P2, TILES, BLOCK_R,
    )  # fmt: skip


@triton.jit
def nodes_of_program(num_requests, NODES: tl.constexpr, NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr):
    """``(request, node, slot, inside)`` of a program's ``BLOCK_R * NODES_P2`` places, by request and then by node."""
    place = tl.arange(0, BLOCK_R * NODES_P2)
    request = (tl.program_id(0) * BLOCK_R + place // NODES_P2).to(tl.int64)
    node = place % NODES_P2
    return request, node, request * NODES + node, (request < num_requests) & (node < NODES)


@triton.jit
def first_where(holds, node, NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first node of each request where ``holds``, for each of its places."""
    candidates = tl.reshape(tl.where(holds, node, NODES_P2), [BLOCK_R, NODES_P2])
    return spread(tl.min(candidates, axis=1), NODES_P2, BLOCK_R)


@triton.jit
def pick(value, here, NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr):
    """The value at the one node of each request where ``here`` holds (0 if there is none), for each of its places."""
    return spread(tl.sum(tl.reshape(tl.where(here, value, 0), [BLOCK_R, NODES_P2]), axis=1), NODES_P2, BLOCK_R)


@triton.jit
def spread(value, NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr):
    """``[BLOCK_R]`` values of requests -> ``[BLOCK_R * NODES_P2]``, one for each place."""
    return tl.reshape(tl.broadcast_to(value[:, None], [BLOCK_R, NODES_P2]), [BLOCK_R * NODES_P2])


@triton.jit
def drawn_tokens(
    slot, exists, sampled, stats_ptr, stride_plane, num_tiles, TILES: tl.constexpr, NOISE: tl.constexpr
):  # fmt: skip
    """The best token of each row, perturbed where it is sampled; -1 where the row is bad or absent."""
    top, token = load_best(stats_ptr, stride_plane, MAX, ARGMAX, slot, exists, num_tiles, TILES)
    good = exists & is_good(top)
    if NOISE:
        perturbed = good & sampled
        _, best = load_best(stats_ptr, stride_plane, BEST, BEST_TOKEN, slot, perturbed, num_tiles, TILES)
        token = tl.where(perturbed, best, token)
    return tl.where(good, token, -1)


@triton.jit
def draw_from_target(
    slot, mask, u, row_offset, inverse_t, threshold_ptr, logits_ptr, stats_ptr, stride_plane, vocab_size, num_tiles,
    TILES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Inverse CDF: the sub-tile is found in the sums of the statistics pass, and its scores are read again.

    -1 where nothing has any weight, be it by rounding.
    """
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    offs_sub = tl.arange(0, TILES * SUBS)
    sub_sum = load_plane(plane(stats_ptr, SUB_SUM, stride_plane), slot, mask, 0.0, num_tiles * SUBS, TILES * SUBS)
    tile_max = load_plane(plane(stats_ptr, MAX, stride_plane), slot, mask, NEGATIVE_INFINITY, num_tiles, TILES)
    tile_of_sub = tl.broadcast_to(tile_max[:, :, None], [tile_max.shape[0], TILES, SUBS])
    tile_of_sub = tl.reshape(tile_of_sub, [tile_max.shape[0], TILES * SUBS])
    top = tl.max(tile_max, axis=1)
    top = tl.where(mask & (top > NEGATIVE_INFINITY), top, 0.0)
    weight = sub_sum.to(tl.float64) * tl.exp(tile_of_sub - top[:, None]).to(tl.float64)
    weight = summable(weight, TILES * BLOCK_V)
    goal = u * tl.sum(weight, axis=1)
    sub = first_beyond(weight, goal * 0.0, goal, offs_sub)
    before = tl.sum(tl.where(offs_sub[None, :] < sub[:, None], weight, 0.0), axis=1)
    offs_s = tl.arange(0, BLOCK_S)
    token = sub[:, None] * BLOCK_S + offs_s[None, :]  # [rows, BLOCK_S]
    logits = tl.load(
        logits_ptr + row_offset[:, None] + token,
        mask=(mask & (sub >= 0))[:, None] & (token < vocab_size),
        other=NEGATIVE_INFINITY,
    )
    scores = logits.to(tl.float32) * inverse_t[:, None]
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + slot, mask=mask, other=NEGATIVE_INFINITY)
        scores = tl.where(scores >= threshold[:, None], scores, NEGATIVE_INFINITY)
    weight = summable(tl.exp(scores - top[:, None]).to(tl.float64), BLOCK_S)
    return token_of(sub, first_beyond(weight, before, goal, offs_s), BLOCK_S)


@triton.jit
def token_of(sub, offset, BLOCK_S: tl.constexpr):
    """The token at a place in a sub-tile, or -1 where either was not found."""
    return tl.where((sub >= 0) & (offset >= 0), sub * BLOCK_S + offset, -1)


@triton.jit
def emit(
    request, node, slot, inside, exists, row_offset, temperature, accepted, draft, last, logits_ptr, stats_ptr,
    stride_plane, out_tokens_ptr, out_path_ptr, out_logprobs_ptr, out_num_ptr, out_status_ptr, num_tiles,
    RAW: tl.constexpr, NODES_P2: tl.constexpr, TILES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the verdict: ``accepted`` drafts, then ``last`` of that node, or a bad status where it is -1."""
    token = tl.where(node < accepted, draft, last)
    present = pick(exists.to(tl.int32), node == 0, NODES_P2, BLOCK_R)
    good = pick((token >= 0).to(tl.int32), node == accepted, NODES_P2, BLOCK_R)
    number = tl.where(present > 0, accepted + good, 0)
    emitted = inside & (node < number)
    tl.store(out_tokens_ptr + slot, tl.where(emitted, token, -1).to(tl.int64), mask=inside)
    tl.store(out_path_ptr + slot, tl.where(emitted, node, -1).to(tl.int64), mask=inside)

    logit = tl.load(logits_ptr + row_offset + token, mask=emitted, other=0.0).to(tl.float32)
    logprob = log_probability(logit, slot, emitted, temperature, stats_ptr, stride_plane, num_tiles, RAW, TILES)
    tl.store(out_logprobs_ptr + slot, tl.where(emitted, logprob, 0.0).to(tl.float32), mask=inside)

    once = inside & (node == 0)
    tl.store(out_num_ptr + request, number.to(tl.int64), mask=once)
    tl.store(out_status_ptr + request, tl.where((present > 0) & (good == 0), BAD_LOGITS, 0).to(tl.int64), mask=once)


@triton.jit
def log_probability(
    logit, slot, mask, temperature, stats_ptr, stride_plane, num_tiles, RAW: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Of the token of each row that has this logit, float64."""
    if RAW:
        top, total = merge_sums(
            load_plane(plane(stats_ptr, RAW_MAX, stride_plane), slot, mask, NEGATIVE_INFINITY, num_tiles, TILES),
            load_plane(plane(stats_ptr, RAW_SUM, stride_plane), slot, mask, 0.0, num_tiles, TILES),
        )
        logprob = (logit - top).to(tl.float64) - tl.log(total)
    else:
        top, total = load_sums(stats_ptr, stride_plane, slot, mask, num_tiles, TILES)
        logprob = (logit * inverse_temperature(temperature) - top).to(tl.float64) - tl.log(total)
        logprob = tl.where(temperature > 0.0, logprob, 0.0)
    return logprob
