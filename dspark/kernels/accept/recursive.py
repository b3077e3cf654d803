"""Verdict of ``recursive`` over a tree: the children of a node are judged in turn, by what is left of p and q.

In step ``k``, ``judge_kernel`` judges the ``k``-th child of every node that the walk can still reach, and
``left_over_kernel`` weighs what is left at the nodes that rejected it. A last kernel follows the path and draws from
what is left at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.chain import RESIDUAL, draw_from_target, token_of
from dspark.kernels.accept.ratio import ACCEPT, DEGENERATE_MASS, HEAVIEST_RESIDUAL
from dspark.kernels.accept.recursive_residual import (
    CHOSEN,
    GREEDY,
    LEAST_REST,
    LINE,
    P_OFFSET,
    P_TOTAL,
    Q_OFFSET,
    Q_TOTAL,
    RANK,
    REJECTED,
    SCALE,
    SHARE,
    STATE,
    STEP,
    WEIGHED,
    after_rejections,
    left_over,
)
from dspark.kernels.accept.rows import (
    ARGMAX,
    MAX,
    NEGATIVE_INFINITY,
    depth_of,
    first_beyond,
    inverse_temperature,
    is_good,
    load_best,
    load_plane,
    load_sums,
    locate,
    summable,
)
from dspark.kernels.accept.tree import emit_path, follow, nodes_of_tree, union
from dspark.kernels.philox import uniform


@triton.jit(do_not_specialize=["num_slots", "num_rows", "nodes"])
def node_lines_kernel(
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [requests + 1] int64
    parents_ptr,  # [slots] int64
    stats_ptr,  # planes of rows.py, of the target's rows
    stride_plane,
    q_stats_ptr,  # planes of rows.py, of the draft's rows
    stride_q_plane,
    line_ptr,  # [slots, LINE] float64, written
    state_ptr,  # [slots, STATE] int32, written
    num_slots,
    num_rows,
    vocab_size,
    num_tiles,
    q_tiles,
    nodes,
    TILES: tl.constexpr,
    Q_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """What the steps need of each node, and its rank among its siblings."""
    slot = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = slot < num_slots
    row, request, node, left = locate(slot, num_slots, num_rows, query_start_ptr, nodes)
    exists = inside & (left > 0)
    top, total = load_sums(stats_ptr, stride_plane, slot, exists, num_tiles, TILES)
    _, greedy = load_best(stats_ptr, stride_plane, MAX, ARGMAX, slot, exists, num_tiles, TILES)
    good = exists & is_good(top)
    drafted = exists & (left > 1) & (node + 1 < nodes)
    q_top, q_total = load_sums(q_stats_ptr, stride_q_plane, slot, drafted, q_tiles, Q_TILES)
    q_good = drafted & is_good(q_top)
    line_ptr += slot * LINE
    tl.store(line_ptr + P_OFFSET, tl.where(good, top, 0.0).to(tl.float64), mask=inside)
    tl.store(line_ptr + P_TOTAL, tl.where(good, total, 0.0), mask=inside)
    tl.store(line_ptr + Q_OFFSET, tl.where(q_good, q_top, 0.0).to(tl.float64), mask=inside)
    tl.store(line_ptr + Q_TOTAL, tl.where(q_good, q_total, 0.0), mask=inside)

    parent = tl.load(parents_ptr + slot, mask=exists, other=-1)
    token = tl.load(tokens_ptr + row, mask=exists, other=-1)
    is_child = exists & (parent >= 0) & (parent < node) & (token >= 0) & (token < vocab_size)
    rank = tl.zeros([BLOCK_R], tl.int32)
    for i in range(1, nodes):
        before = is_child & (i < node)
        sibling = tl.load(parents_ptr + request * nodes + i, mask=before, other=-1)
        guess = tl.load(tokens_ptr + row - node + i, mask=before & (sibling == parent), other=-1)
        rank += tl.where((guess >= 0) & (guess < vocab_size), 1, 0)
    state_ptr += slot * STATE
    tl.store(state_ptr + GREEDY, greedy, mask=inside)
    tl.store(state_ptr + RANK, tl.where(is_child, rank, -1), mask=inside)
    tl.store(state_ptr + CHOSEN, -1, mask=inside)
    tl.store(state_ptr + REJECTED, 0, mask=inside)
    tl.store(state_ptr + WEIGHED, 0, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "nodes", "children"])
def judge_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [requests + 1] int64
    temperature_ptr,  # [requests] float32
    seed_ptr,  # [requests] int64
    position_ptr,  # [requests] int64
    threshold_ptr,  # [slots] float32, or null: nothing is truncated
    parents_ptr,  # [requests, nodes] int64
    ancestors_ptr,  # [requests, nodes, WORDS] int64
    depth_ptr,  # [requests, nodes] int64
    q_ptr,  # [requests, drafts, q_width]
    q_token_ptr,  # [vocab_size] int32 columns of q, or null
    stride_q_request,
    stride_q_row,
    line_ptr,  # [slots, LINE] float64
    state_ptr,  # [slots, STATE] int32, read and written
    steps_ptr,  # [slots, children, STEP] float32, read and written
    rejected_ptr,  # [slots, children] int32, read and written
    mass_ptr,  # [slots, num_tiles * SUBS] float32, from left_over_kernel in the step before
    rest_ptr,  # [slots, num_tiles] float32, too
    num_rows,
    num_tiles,
    q_width,
    nodes,
    children,
    step,  # from 1 on
    WORDS: tl.constexpr,
    NODES_P2: tl.constexpr,
    SUBS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tiles that are added up at a time
):
    """Judge the ``step``-th child of each node, and say where what is left must be weighed. One program per request.

    A lane is a node in its role as a child.
    """
    request, node, slot, first, exists = nodes_of_tree(query_start_ptr, num_rows, nodes, NODES_P2)
    temperature = tl.load(temperature_ptr + request)
    rank = tl.load(state_ptr + slot * STATE + RANK, mask=exists, other=-1)
    is_child = rank >= 0
    parent = tl.load(parents_ptr + slot, mask=is_child, other=0)
    above = request * nodes + parent  # slots of the parents
    p_total = tl.load(line_ptr + above * LINE + P_TOTAL, mask=is_child, other=0.0)
    q_total = tl.load(line_ptr + above * LINE + Q_TOTAL, mask=is_child, other=0.0)
    judged = is_child & (rank == step - 1) & (p_total > 0.0) & (q_total > 0.0)
    judged &= tl.load(state_ptr + above * STATE + CHOSEN, mask=judged, other=0) < 0
    if step > 1:  # noqa: SIM102 (known in advance in the first step)
        if temperature > 0.0:
            judged &= tl.load(state_ptr + above * STATE + WEIGHED, mask=judged, other=0) == step - 1
            mass, rest = _row_sums(mass_ptr, rest_ptr, above, judged, num_tiles, SUBS, BLOCK_T)
            at = (above * children + step - 2) * STEP
            scale = tl.where(mass > DEGENERATE_MASS, 1.0 / tl.where(mass > 0.0, mass, 1.0), -1.0)
            share = tl.where(rest > LEAST_REST, 1.0 / tl.where(rest > LEAST_REST, rest, 1.0), 0.0)
            tl.store(steps_ptr + at + SCALE, scale.to(tl.float32), mask=judged)
            tl.store(steps_ptr + at + SHARE, share.to(tl.float32), mask=judged)
            tl.debug_barrier()  # the stores are read below, by whatever thread

    token = tl.load(tokens_ptr + first + node, mask=judged, other=0)
    p_offset = tl.load(line_ptr + above * LINE + P_OFFSET, mask=judged, other=0.0).to(tl.float32)
    q_offset = tl.load(line_ptr + above * LINE + Q_OFFSET, mask=judged, other=0.0).to(tl.float32)
    p_total = tl.where(judged, p_total, 1.0)
    q_total = tl.where(judged, q_total, 1.0)
    row = first + parent
    score = tl.load(logits_ptr + row * stride_logits_row + token, mask=judged, other=NEGATIVE_INFINITY)
    score = score.to(tl.float32) * inverse_temperature(temperature)
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + above, mask=judged, other=NEGATIVE_INFINITY)
        score = tl.where(score >= threshold, score, NEGATIVE_INFINITY)
    column = token
    if q_token_ptr is not None:
        column = tl.load(q_token_ptr + token, mask=judged, other=-1).to(tl.int64)
    known = judged & (column >= 0) & (column < q_width)
    q_first = request * stride_q_request + parent * stride_q_row
    q_score = tl.load(q_ptr + q_first + column, mask=known, other=NEGATIVE_INFINITY).to(tl.float32)
    p = tl.exp((score - p_offset).to(tl.float64)) / p_total
    q = tl.exp((q_score - q_offset).to(tl.float64)) / q_total
    if step > 1:  # noqa: SIM102
        if temperature > 0.0:
            left, share_of_q = after_rejections(
                p.to(tl.float32)[:, None], q.to(tl.float32)[:, None], token[:, None], above, judged,
                tl.zeros([NODES_P2], tl.int32) + step, step, steps_ptr, rejected_ptr, children,
            )  # fmt: skip
            p, q = tl.sum(left, axis=1).to(tl.float64), tl.sum(share_of_q, axis=1).to(tl.float64)
    ratio = tl.where(q > 0.0, p / tl.where(q > 0.0, q, 1.0), 0.0)
    depth = depth_of(above, parent, judged, depth_ptr)
    at = tl.load(position_ptr + request) + depth + 1
    u = uniform(tl.load(seed_ptr + request) + at * 0, at, at * 0, ACCEPT, step - 1)
    accepted = u < ratio
    if temperature <= 0.0:
        greedy = tl.load(state_ptr + above * STATE + GREEDY, mask=judged, other=-1)
        accepted = (token == greedy) & (q_score > NEGATIVE_INFINITY)
    tl.store(state_ptr + above * STATE + CHOSEN, node, mask=judged & accepted)
    rejected = judged & ~accepted
    tl.store(state_ptr + above * STATE + REJECTED, step, mask=rejected)
    tl.store(rejected_ptr + above * children + step - 1, token.to(tl.int32), mask=rejected)
    tl.debug_barrier()

    # Out of reach: below a child that was rejected, or whose sibling was accepted.
    chosen = tl.load(state_ptr + above * STATE + CHOSEN, mask=is_child, other=-1)
    passed = tl.load(state_ptr + above * STATE + REJECTED, mask=is_child, other=0)
    blocked = is_child & (((chosen >= 0) & (chosen != node)) | (rank < passed) | (rank >= children))
    blocked |= exists & (node > 0) & ~is_child
    count = tl.load(state_ptr + slot * STATE + REJECTED, mask=exists, other=0)
    wanted = exists & (count == tl.where(temperature > 0.0, step, -1))
    for word in tl.static_range(WORDS):
        ancestors = tl.load(ancestors_ptr + slot * WORDS + word, mask=exists, other=0)
        wanted &= (ancestors & union(blocked, node, word)) == 0
    tl.store(state_ptr + slot * STATE + WEIGHED, step, mask=wanted)


@triton.jit
def _row_sums(mass_ptr, rest_ptr, slot, mask, num_tiles, SUBS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Sums of the rows ``[slots, num_tiles * SUBS]`` and ``[slots, num_tiles]``, float64, in an order of their own.

    What is left of q may be far below the grain of ``summable``: it is added up in turn.
    """
    BLOCK: tl.constexpr = SUBS * BLOCK_T
    mass = tl.zeros(slot.shape, tl.float64)
    rest = tl.zeros(slot.shape, tl.float64)
    for start in range(0, num_tiles * SUBS, BLOCK):
        part = load_plane(mass_ptr + start, slot, mask, 0.0, num_tiles * SUBS, BLOCK, num_tiles * SUBS - start)
        mass += tl.sum(summable(part.to(tl.float64), HEAVIEST_RESIDUAL), axis=1)
    for tile in range(num_tiles):
        rest += tl.load(rest_ptr + slot * num_tiles + tile, mask=mask, other=0.0).to(tl.float64)
    return mass, rest


@triton.jit(do_not_specialize=["num_slots", "num_rows", "nodes", "children"])
def recursive_verdict_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [requests + 1] int64
    temperature_ptr,  # [requests] float32
    seed_ptr,  # [requests] int64
    position_ptr,  # [requests] int64
    threshold_ptr,  # [slots] float32, or null: nothing is truncated
    parents_ptr,  # [requests, nodes] int64
    ancestors_ptr,  # [requests, nodes, WORDS] int64
    depth_ptr,  # [requests, nodes] int64
    stats_ptr,  # planes of rows.py, of the target's rows
    stride_plane,
    q_ptr,
    q_token_ptr,
    stride_q_request,
    stride_q_row,
    line_ptr,  # [slots, LINE] float64
    state_ptr,  # [slots, STATE] int32
    steps_ptr,  # [slots, children, STEP] float32
    rejected_ptr,  # [slots, children] int32
    mass_ptr,  # [slots, num_tiles * SUBS] float32
    out_tokens_ptr,  # [requests, nodes] int64, written, as are those below
    out_path_ptr,  # [requests, nodes] int64
    out_logprobs_ptr,  # [requests, nodes] float32
    out_num_ptr,  # [requests] int64
    out_status_ptr,  # [requests] int64
    num_slots,
    num_rows,
    vocab_size,
    num_tiles,
    q_width,
    nodes,
    children,
    SAMPLED: tl.constexpr,  # some request samples; else every draw is a largest logit
    RAW: tl.constexpr,
    WORDS: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Follow the accepted children, and draw from what is left at the last one. One program per request."""
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    request, node, slot, first, exists = nodes_of_tree(query_start_ptr, num_rows, nodes, NODES_P2)
    is_child = tl.load(state_ptr + slot * STATE + RANK, mask=exists, other=-1) >= 0
    parent = tl.load(parents_ptr + slot, mask=is_child, other=0)
    above = request * nodes + parent
    kept = is_child & (tl.load(state_ptr + above * STATE + CHOSEN, mask=is_child, other=-1) == node)
    end, on_path = follow(
        kept | (exists & (node == 0)), request, node, slot, exists, ancestors_ptr, depth_ptr, nodes, WORDS, NODES_P2
    )  # fmt: skip
    chosen = tl.load(state_ptr + slot * STATE + CHOSEN, mask=on_path, other=-1)
    token = tl.load(tokens_ptr + first + chosen, mask=on_path & (chosen >= 0), other=-1)

    last_slot = request * nodes + end + tl.arange(0, 1)  # [1]
    mask = last_slot * 0 + tl.max(exists.to(tl.int32), axis=0) > 0
    mask &= tl.load(line_ptr + last_slot * LINE + P_TOTAL, mask=mask, other=0.0) > 0.0
    last = tl.load(state_ptr + last_slot * STATE + GREEDY, mask=mask, other=-1)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + request + tl.arange(0, 1))
        samples = mask & (temperature > 0.0)
        at = tl.load(position_ptr + request) + depth_of(last_slot, last_slot, mask, depth_ptr) + 1
        u = uniform(tl.load(seed_ptr + request) + at * 0, at, at * 0, RESIDUAL)
        step = tl.load(state_ptr + last_slot * STATE + REJECTED, mask=samples, other=0)
        offs_sub = tl.arange(0, TILES * SUBS)
        mass = load_plane(mass_ptr, last_slot, samples & (step > 0), 0.0, num_tiles * SUBS, TILES * SUBS)
        mass = summable(mass.to(tl.float64), HEAVIEST_RESIDUAL)
        total = tl.sum(mass, axis=1)
        has_residual = samples & (step > 0) & (total > DEGENERATE_MASS)
        goal = u * total
        sub = first_beyond(mass, goal * 0.0, goal, offs_sub)
        before = tl.sum(tl.where(offs_sub[None, :] < sub[:, None], mass, 0.0), axis=1)
        offs_s = tl.arange(0, BLOCK_S)
        excess, _ = left_over(
            last_slot, has_residual, sub[:, None] * BLOCK_S + offs_s[None, :], step, children, logits_ptr,
            stride_logits_row, query_start_ptr, temperature_ptr, threshold_ptr, q_ptr, q_token_ptr, stride_q_request,
            stride_q_row, line_ptr, steps_ptr, rejected_ptr, num_slots, num_rows, vocab_size, q_width, nodes, children,
        )  # fmt: skip
        excess = summable(excess.to(tl.float64), HEAVIEST_RESIDUAL)
        from_residual = token_of(sub, first_beyond(excess, before, goal, offs_s), BLOCK_S)
        from_target = draw_from_target(
            last_slot, samples & ~has_residual, u, (first + end) * stride_logits_row + last_slot * 0,
            inverse_temperature(temperature), threshold_ptr, logits_ptr, stats_ptr, stride_plane, vocab_size, num_tiles,
            TILES, BLOCK_V, BLOCK_S,
        )  # fmt: skip
        drawn = tl.where(has_residual, from_residual, from_target)
        last = tl.where(samples & (drawn >= 0), drawn, last)
    last = tl.sum(tl.where(mask, last, -1), axis=0)
    token = tl.where(node == end, last, token)
    emit_path(
        request, node, first, exists, end, on_path, token, logits_ptr, stride_logits_row, temperature_ptr, stats_ptr,
        stride_plane, out_tokens_ptr, out_path_ptr, out_logprobs_ptr, out_num_ptr, out_status_ptr, num_tiles, nodes,
        RAW, TILES,
    )  # fmt: skip
