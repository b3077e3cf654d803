"""Verdict of ``recursive`` over a tree: the children of a node are judged in turn, by what is left of p and q.

In step ``k``, ``judge_kernel`` judges the ``k``-th child of every node that the walk can still reach, and
``left_over_kernel`` weighs what is left at the nodes that rejected it. A last kernel follows the path and draws from
what is left at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.load import load_draft, load_target
from dspark.kernels.accept.ratio import find_residual, summable_residual
from dspark.kernels.accept.recursive_residual import after_rejections, left_over, line_at, state_at, step_at
from dspark.kernels.accept.tree import emit_path, follow, nodes_of_tree, union
from dspark.kernels.philox import stream, uniform
from dspark.kernels.sample.draw import draw_from_target, token_of
from dspark.kernels.sample.rows import (
    depth_of,
    first_beyond,
    inverse_temperature,
    is_good,
    load_best,
    load_plane,
    load_sums,
    locate,
)


@triton.jit(do_not_specialize=["num_lines", "num_rows", "nodes"])
def node_lines_kernel(
    rows,  # KernelRows
    tree,  # KernelTree
    stats,  # Statistics of the target's rows
    draft_stats,  # Statistics of the draft's rows, or None: there are none
    record,  # Record; lines and state are written
    num_lines,
    num_rows,
    vocab_size,
    nodes,
    TILES: tl.constexpr,
    Q_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """What the steps need of each node, and its rank among its siblings. Grid: (blocks of ``BLOCK_R`` lines,)."""
    line = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = line < num_lines
    row, request, node, left = locate(line, num_lines, num_rows, rows, nodes)
    exists = inside & (left > 0)
    top, total = load_sums(stats, line, exists, TILES)
    _, greedy = load_best(stats, "max", "argmax", line, exists, TILES)
    good = exists & is_good(top)
    q_top, q_total, q_good = top * 0.0, total * 0.0, exists & False
    if draft_stats is not None:
        drafted = exists & (left > 1) & (node + 1 < nodes)
        q_top, q_total = load_sums(draft_stats, line, drafted, Q_TILES)
        q_good = drafted & is_good(q_top)
    tl.store(line_at(record, line, "p_offset"), tl.where(good, top, 0.0).to(tl.float64), mask=inside)
    tl.store(line_at(record, line, "p_total"), tl.where(good, total, 0.0), mask=inside)
    tl.store(line_at(record, line, "q_offset"), tl.where(q_good, q_top, 0.0).to(tl.float64), mask=inside)
    tl.store(line_at(record, line, "q_total"), tl.where(q_good, q_total, 0.0), mask=inside)

    parent = tl.load(tree.parents + line, mask=exists, other=-1)
    token = tl.load(rows.tokens + row, mask=exists, other=-1)
    is_child = exists & (parent >= 0) & (parent < node) & (token >= 0) & (token < vocab_size)
    rank = tl.zeros([BLOCK_R], tl.int32)
    for i in range(1, nodes):
        before = is_child & (i < node)
        sibling = tl.load(tree.parents + request * nodes + i, mask=before, other=-1)
        guess = tl.load(rows.tokens + row - node + i, mask=before & (sibling == parent), other=-1)
        rank += tl.where((guess >= 0) & (guess < vocab_size), 1, 0)
    tl.store(state_at(record, line, "greedy"), greedy, mask=inside)
    tl.store(state_at(record, line, "rank"), tl.where(is_child, rank, -1), mask=inside)
    tl.store(state_at(record, line, "chosen"), -1, mask=inside)
    tl.store(state_at(record, line, "rejected"), 0, mask=inside)
    tl.store(state_at(record, line, "weighed"), 0, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "nodes", "children"])
def judge_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    tree,  # KernelTree
    q,  # KernelQ, dense
    record,  # Record; state, steps and rejected are written, mass and rest are those of the step before
    step,  # from 1 on
    num_rows,
    num_tiles,
    nodes,
    children,
    WORDS: tl.constexpr,
    NODES_P2: tl.constexpr,
    SUBS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tiles that are added up at a time
):
    """Judge the ``step``-th child of each node, and say where what is left must be weighed.

    It is accepted with probability ``min(1, p(x) / q(x))`` of what is left of p and q (SpecInfer, Miao et al., arXiv
    2305.09781, algorithm 2). Grid: (requests,). A lane is a node in its role as a child.
    """
    place = nodes_of_tree(rows, num_rows, nodes, NODES_P2)
    request, node, line, first, exists = place
    temperature = tl.load(sampling.temperature + request)
    rank = tl.load(state_at(record, line, "rank"), mask=exists, other=-1)
    is_child = rank >= 0
    parent = tl.load(tree.parents + line, mask=is_child, other=0)
    above = request * nodes + parent  # lines of the parents
    p_total = tl.load(line_at(record, above, "p_total"), mask=is_child, other=0.0)
    q_total = tl.load(line_at(record, above, "q_total"), mask=is_child, other=0.0)
    judged = is_child & (rank == step - 1) & (p_total > 0.0) & (q_total > 0.0)
    judged &= tl.load(state_at(record, above, "chosen"), mask=judged, other=0) < 0
    if step > 1:  # noqa: SIM102 (known in advance in the first step)
        if temperature > 0.0:
            judged &= tl.load(state_at(record, above, "weighed"), mask=judged, other=0) == step - 1
            mass, rest = _row_sums(record, above, judged, num_tiles, SUBS, BLOCK_T)
            before = above * children + step - 2
            # A residual lighter than 1e-12 is rounding, see find_residual. Where less than 1e-30 is left of q, no
            # further child is accepted: the factor that makes it 1 would leave float32.
            scale = tl.where(mass > 1e-12, 1.0 / tl.where(mass > 0.0, mass, 1.0), -1.0)
            share = tl.where(rest > 1e-30, 1.0 / tl.where(rest > 1e-30, rest, 1.0), 0.0)
            tl.store(step_at(record, before, "scale"), scale.to(tl.float32), mask=judged)
            tl.store(step_at(record, before, "share"), share.to(tl.float32), mask=judged)
            tl.debug_barrier()  # the stores are read below, by whatever thread

    token = tl.load(rows.tokens + first + node, mask=judged, other=0)
    p_offset = tl.load(line_at(record, above, "p_offset"), mask=judged, other=0.0).to(tl.float32)
    q_offset = tl.load(line_at(record, above, "q_offset"), mask=judged, other=0.0).to(tl.float32)
    p_total = tl.where(judged, p_total, 1.0)
    q_total = tl.where(judged, q_total, 1.0)
    score = load_target(target, first + parent, above, token, judged, judged, temperature)
    q_score = load_draft(q, request, parent, token, judged)
    p = tl.exp((score - p_offset).to(tl.float64)) / p_total
    q_token = tl.exp((q_score - q_offset).to(tl.float64)) / q_total
    if step > 1:  # noqa: SIM102
        if temperature > 0.0:
            left, share_of_q = after_rejections(
                p.to(tl.float32)[:, None], q_token.to(tl.float32)[:, None], token[:, None], above, judged,
                tl.zeros([NODES_P2], tl.int32) + step, step, record, children,
            )  # fmt: skip
            p, q_token = tl.sum(left, axis=1).to(tl.float64), tl.sum(share_of_q, axis=1).to(tl.float64)
    ratio = tl.where(q_token > 0.0, p / tl.where(q_token > 0.0, q_token, 1.0), 0.0)
    depth = depth_of(above, parent, judged, tree)
    at = tl.load(rows.position + request) + depth + 1
    u = uniform(tl.load(sampling.seed + request) + at * 0, at, at * 0, stream("accept"), step - 1)
    accepted = u < ratio
    if temperature <= 0.0:
        greedy = tl.load(state_at(record, above, "greedy"), mask=judged, other=-1)
        accepted = (token == greedy) & (q_score > float("-inf"))
    tl.store(state_at(record, above, "chosen"), node, mask=judged & accepted)
    rejected = judged & ~accepted
    tl.store(state_at(record, above, "rejected"), step, mask=rejected)
    tl.store(record.rejected + above * children + step - 1, token.to(tl.int32), mask=rejected)
    tl.debug_barrier()

    # Out of reach: below a child that was rejected, or whose sibling was accepted.
    chosen = tl.load(state_at(record, above, "chosen"), mask=is_child, other=-1)
    passed = tl.load(state_at(record, above, "rejected"), mask=is_child, other=0)
    blocked = is_child & (((chosen >= 0) & (chosen != node)) | (rank < passed) | (rank >= children))
    blocked |= exists & (node > 0) & ~is_child
    count = tl.load(state_at(record, line, "rejected"), mask=exists, other=0)
    wanted = exists & (count == tl.where(temperature > 0.0, step, -1))
    for word in tl.static_range(WORDS):
        ancestors = tl.load(tree.ancestors + line * WORDS + word, mask=exists, other=0)
        wanted &= (ancestors & union(blocked, node, word)) == 0
    tl.store(state_at(record, line, "weighed"), step, mask=wanted)


@triton.jit
def _row_sums(record, line, mask, num_tiles, SUBS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Of each line what is left of p and of q, ``[num_tiles * SUBS]`` and ``[num_tiles]``, float64, added in an order
    of their own.

    What is left of q may be far below the grain of ``summable``: it is added up in turn.
    """
    BLOCK: tl.constexpr = SUBS * BLOCK_T
    mass = tl.zeros(line.shape, tl.float64)
    rest = tl.zeros(line.shape, tl.float64)
    for start in range(0, num_tiles * SUBS, BLOCK):
        part = load_plane(record.mass + start, line, mask, 0.0, num_tiles * SUBS, BLOCK, num_tiles * SUBS - start)
        mass += tl.sum(summable_residual(part), axis=1)
    for tile in range(num_tiles):
        rest += tl.load(record.rest + line * num_tiles + tile, mask=mask, other=0.0).to(tl.float64)
    return mass, rest


@triton.jit(do_not_specialize=["num_lines", "num_rows", "nodes", "children"])
def recursive_verdict_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    tree,  # KernelTree
    q,  # KernelQ, dense; or None: nothing was drafted
    stats,  # Statistics of the target's rows
    record,  # Record
    verdict,  # Verdict, written
    num_lines,
    num_rows,
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
    """Follow the accepted children, and draw from what is left at the last one. Grid: (requests,)."""
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    place = nodes_of_tree(rows, num_rows, nodes, NODES_P2)
    request, node, line, first, exists = place
    is_child = tl.load(state_at(record, line, "rank"), mask=exists, other=-1) >= 0
    parent = tl.load(tree.parents + line, mask=is_child, other=0)
    above = request * nodes + parent
    kept = is_child & (tl.load(state_at(record, above, "chosen"), mask=is_child, other=-1) == node)
    end, on_path = follow(place, kept, tree, nodes, WORDS, NODES_P2)
    chosen = tl.load(state_at(record, line, "chosen"), mask=on_path, other=-1)
    token = tl.load(rows.tokens + first + chosen, mask=on_path & (chosen >= 0), other=-1)

    last_line = request * nodes + end + tl.arange(0, 1)  # [1]
    mask = last_line * 0 + tl.max(exists.to(tl.int32), axis=0) > 0
    mask &= tl.load(line_at(record, last_line, "p_total"), mask=mask, other=0.0) > 0.0
    last = tl.load(state_at(record, last_line, "greedy"), mask=mask, other=-1)
    if SAMPLED:
        temperature = tl.load(sampling.temperature + request + tl.arange(0, 1))
        samples = mask & (temperature > 0.0)
        at = tl.load(rows.position + request) + depth_of(last_line, last_line, mask, tree) + 1
        u = uniform(tl.load(sampling.seed + request) + at * 0, at, at * 0, stream("residual"))
        has_residual, from_residual = samples & False, last
        if q is not None:
            step = tl.load(state_at(record, last_line, "rejected"), mask=samples, other=0)
            has_residual, goal, sub, before = find_residual(
                record.mass, last_line, samples & (step > 0), u, stats.num_tiles * SUBS, TILES * SUBS
            )
            offs_s = tl.arange(0, BLOCK_S)
            last_place = locate(tl.where(has_residual, last_line, num_lines), num_lines, num_rows, rows, nodes)
            excess, _ = left_over(
                last_place, last_line, has_residual, sub[:, None] * BLOCK_S + offs_s[None, :], step, children, target,
                sampling, q, record, children,
            )  # fmt: skip
            from_residual = token_of(sub, first_beyond(summable_residual(excess), before, goal, offs_s), BLOCK_S)
        from_target = draw_from_target(
            last_line, samples & ~has_residual, u, target.logits + (first + end) * target.stride + last_line * 0,
            inverse_temperature(temperature), target.threshold, stats, target.vocab_size, TILES, BLOCK_V, BLOCK_S,
        )  # fmt: skip
        drawn = tl.where(has_residual, from_residual, from_target)
        last = tl.where(samples & (drawn >= 0), drawn, last)
    last = tl.sum(tl.where(mask, last, -1), axis=0)
    emit_path(
        place, end, on_path, tl.where(node == end, last, token), verdict, target, sampling, stats, nodes, RAW, TILES
    )
