"""One pass over rows of logits: everything that a rule needs of them, per tile, with no probability written."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.philox import MAX_GUMBEL, gumbel
from dspark.kernels.sample.rows import (
    ARGMAX,
    BEST,
    BEST_TOKEN,
    MAX,
    NEGATIVE_INFINITY,
    RAW_MAX,
    RAW_SUM,
    SUB_SUM,
    SUM,
    depth_of,
    inverse_temperature,
    is_good,
    is_truncated,
    locate,
    plane,
)

INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["num_slots", "num_rows", "nodes"])
def row_statistics_kernel(
    logits_ptr,  # [num_rows, vocab_size], or [requests, drafts, vocab_size] of a draft
    stride_logits_request,  # of a draft
    stride_logits_row,
    query_start_ptr,  # [requests + 1] int64, or null: a slot is a row
    request_ptr,  # [slots] int64, or null: slot // nodes
    temperature_ptr,  # [requests] float32
    seed_ptr,  # [requests] int64
    position_ptr,  # [requests] int64 of the anchors, or [slots] of the tokens to draw
    depth_ptr,  # [slots] int64 of a tree's nodes, or null
    salt_ptr,  # [slots] int64, or null: 0
    top_k_ptr,  # [requests] int64
    top_p_ptr,  # [requests] float32
    min_p_ptr,  # [requests] float32
    threshold_ptr,  # [slots] float32, the least scaled score that truncation keeps
    stats_ptr,  # planes of rows.py, written
    stride_plane,
    num_slots,
    num_rows,
    vocab_size,
    num_tiles,
    nodes,  # slots of a request
    STREAM: tl.constexpr,
    PASS: tl.constexpr,  # "only"; "first" of two; "kept": the second, over what truncation keeps where it is asked for
    DRAFT: tl.constexpr,  # the rows are a draft's scores: no temperature, and no row after the last draft
    NOISE: tl.constexpr,  # perturb the scores of sampled rows and find the best
    SUMS: tl.constexpr,
    SUB_SUMS: tl.constexpr,
    RAW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    max_ptr = plane(stats_ptr, MAX, stride_plane)
    slot = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if query_start_ptr is not None:
        row, request, node, left = locate(slot, num_slots, num_rows, query_start_ptr, nodes)
        exists = left > 0
        if DRAFT:  # the last node has no draft, whatever rows follow it
            exists = (left > 1) & (node + 1 < nodes)
    else:
        row = slot.to(tl.int64)
        exists = slot < num_slots
        request = row
        if request_ptr is not None:
            request = tl.load(request_ptr + slot, mask=exists, other=-1)
        exists &= request >= 0
    if PASS == "kept":
        exists &= is_truncated(request, exists, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
        threshold = tl.load(threshold_ptr + slot, mask=exists, other=INFINITY)
    if tl.sum(exists.to(tl.int32)) == 0:
        return

    sampled = exists
    inverse_t = tl.full([BLOCK_R], 1.0, tl.float32)
    if not DRAFT:
        temperature = tl.load(temperature_ptr + request, mask=exists, other=0.0)
        sampled &= temperature > 0.0
        inverse_t = inverse_temperature(temperature)
    if NOISE:
        if PASS == "first":  # rows to be truncated get their noise in the second pass
            sampled &= ~is_truncated(request, exists, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
        seed = tl.load(seed_ptr + request, mask=exists, other=0)
        if query_start_ptr is not None:
            depth = depth_of(slot, node, exists, depth_ptr)
            position = tl.load(position_ptr + request, mask=exists, other=0) + depth + 1
        else:
            position = tl.load(position_ptr + slot, mask=exists, other=0)
        salt = position * 0
        if salt_ptr is not None:
            salt = tl.load(salt_ptr + slot, mask=exists, other=0)
    row_offset = row * stride_logits_row
    if DRAFT:
        row_offset = request * stride_logits_request + node * stride_logits_row
    best_so_far = tl.full([BLOCK_R], NEGATIVE_INFINITY, tl.float32)

    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        at = slot.to(tl.int64) * num_tiles + tile  # [BLOCK_R], of the per-tile results
        if PASS == "kept":
            tile_max = tl.load(max_ptr + at, mask=exists, other=NEGATIVE_INFINITY)
            read = exists & (tile_max >= threshold)  # no other tile holds a kept token
        else:
            read = exists
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = read[:, None] & (offs_v < vocab_size)[None, :]  # [BLOCK_R, BLOCK_V]
        logits = tl.load(logits_ptr + row_offset[:, None] + offs_v[None, :], mask=mask, other=NEGATIVE_INFINITY)
        logits = logits.to(tl.float32)
        scores = logits * inverse_t[:, None]
        if PASS == "kept":
            scores = tl.where(scores >= threshold[:, None], scores, NEGATIVE_INFINITY)
        else:
            # A NaN fails every comparison; as +inf it wins the maximum and marks the tile.
            scores = tl.where(scores < INFINITY, scores, INFINITY)
            tile_max, argmax = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
            tl.store(max_ptr + at, tile_max, mask=exists)
            if not DRAFT:
                _store_token(plane(stats_ptr, ARGMAX, stride_plane) + at, tile * BLOCK_V + argmax, exists)
        if RAW:
            raw_max = tl.max(tl.where(scores < INFINITY, logits, NEGATIVE_INFINITY), axis=1)
            reference = tl.where(raw_max > NEGATIVE_INFINITY, raw_max, 0.0)
            raw_sum = tl.sum(tl.where(scores < INFINITY, tl.exp(logits - reference[:, None]), 0.0), axis=1)
            tl.store(plane(stats_ptr, RAW_MAX, stride_plane) + at, raw_max, mask=exists)
            tl.store(plane(stats_ptr, RAW_SUM, stride_plane) + at, raw_sum, mask=exists)
        usable = is_good(tile_max)
        if SUMS:
            weight = tl.exp(scores - tl.where(usable, tile_max, 0.0)[:, None])
            weight = tl.where(usable[:, None], weight, 0.0)
            sub_sums = tl.sum(tl.reshape(weight, [BLOCK_R, SUBS, BLOCK_S]), axis=2)  # [BLOCK_R, SUBS]
            tl.store(plane(stats_ptr, SUM, stride_plane) + at, tl.sum(sub_sums, axis=1), mask=exists)
            if SUB_SUMS:
                at_sub = at[:, None] * SUBS + tl.arange(0, SUBS)[None, :]
                tl.store(plane(stats_ptr, SUB_SUM, stride_plane) + at_sub, sub_sums, mask=exists[:, None])
        if NOISE:
            tile_best = tl.full([BLOCK_R], NEGATIVE_INFINITY, tl.float32)
            tile_token = tl.zeros([BLOCK_R], tl.int32)
            may_win = read & sampled & usable & (tile_max + MAX_GUMBEL >= best_so_far)
            if tl.sum(may_win.to(tl.int32)) > 0:
                noise = gumbel(seed, position, salt, tile * BLOCK_V, STREAM, BLOCK_V)
                tile_best, token = tl.max(
                    tl.where(may_win[:, None], scores + noise, NEGATIVE_INFINITY),
                    axis=1,
                    return_indices=True,
                    return_indices_tie_break_left=True,
                )
                tile_token = tile * BLOCK_V + token
                best_so_far = tl.maximum(best_so_far, tile_best)
            tl.store(plane(stats_ptr, BEST, stride_plane) + at, tile_best, mask=exists & sampled)
            _store_token(plane(stats_ptr, BEST_TOKEN, stride_plane) + at, tile_token, exists & sampled)


@triton.jit
def _store_token(plane_ptr, token, mask):
    tl.store(plane_ptr, token.to(tl.int32).to(tl.float32, bitcast=True), mask=mask)
