"""Verdicts of the rules that divide by the draft distribution: ``ratio`` and ``block``.

Three kernels follow the statistics of target and draft rows: what each draft's probabilities allow, the mass of the
residual by sub-tile (of one row under ``ratio``, of every drafted row under ``block``), and the draw with the verdict.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.chain import (
    RESIDUAL,
    draw_from_target,
    emit,
    first_where,
    nodes_of_program,
    spread,
    token_of,
)
from dspark.kernels.accept.rows import (
    ARGMAX,
    MAX,
    NEGATIVE_INFINITY,
    first_beyond,
    inverse_temperature,
    is_good,
    load_best,
    load_plane,
    load_sums,
    locate,
    summable,
)
from dspark.kernels.philox import uniform

ACCEPT = tl.constexpr(2)
"""``Stream.ACCEPT``."""
# A line of what the residual's passes need, of a request ("ratio") or of a slot ("block"):
P_OFFSET = tl.constexpr(0)  # w p = exp(score - P_OFFSET) * P_FACTOR
P_FACTOR = tl.constexpr(1)  # 0: there is no residual
Q_OFFSET = tl.constexpr(2)
Q_FACTOR = tl.constexpr(3)
ACCEPTED = tl.constexpr(4)  # "ratio": number of accepted drafts; the one rule has this, the other the next
WEIGHT = tl.constexpr(4)  # "block": w of the node
RECORD = tl.constexpr(5)
DEGENERATE_MASS = tl.constexpr(1e-12)
"""Where a residual is lighter than this, the draw is from p; as in ``dspark.ops.accept.reference``."""
HEAVIEST_RESIDUAL = tl.constexpr(2)
"""No residual is as heavy as this, see ``summable``: it is part of p, whose mass is 1 but for rounding."""


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def ratio_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [num_requests + 1] int64
    temperature_ptr,  # [num_requests] float32
    seed_ptr,  # [num_requests] int64
    position_ptr,  # [num_requests] int64
    threshold_ptr,  # [slots] float32, or null: nothing is truncated
    stats_ptr,  # planes of rows.py, of the target's rows
    stride_plane,
    q_ptr,  # dense: scores, sparse: log-probabilities; [requests, drafts, q_width]
    q_token_ptr,  # sparse: [requests, drafts, q_width] int64; dense: [vocab_size] int32 columns of q, or null
    stride_q_request,
    stride_q_row,
    stride_q_token_request,
    stride_q_token_row,
    q_stats_ptr,  # dense: planes of rows.py, of the draft's rows
    stride_q_plane,
    line_ptr,  # [lines, RECORD] float32, written
    num_requests,
    num_rows,
    vocab_size,
    num_tiles,
    q_width,
    q_tiles,
    RULE: tl.constexpr,
    Q: tl.constexpr,  # "dense", "sparse" or "point"
    NODES: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
    Q_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,  # sparse: q_width, rounded up to a power of two
    BLOCK_R: tl.constexpr,
):
    """How far the drafts of a request are accepted (``ratio``), or the weight of each of its nodes (``block``)."""
    request, node, slot, inside = nodes_of_program(num_requests, NODES, NODES_P2, BLOCK_R)
    num_slots = num_requests * NODES
    row, _, _, left = locate(tl.where(inside, slot, num_slots), num_slots, num_rows, query_start_ptr, NODES)
    exists = inside & (left > 0)
    temperature = tl.load(temperature_ptr + request, mask=exists, other=0.0)
    sampled = temperature > 0.0
    draft = tl.load(tokens_ptr + row + 1, mask=exists & (left > 1) & (node + 1 < NODES), other=-1)
    drafted = (draft >= 0) & (draft < vocab_size)

    top, total = load_sums(stats_ptr, stride_plane, slot, exists, num_tiles, TILES)
    good = exists & is_good(top)
    _, greedy = load_best(stats_ptr, stride_plane, MAX, ARGMAX, slot, exists, num_tiles, TILES)
    logit = tl.load(logits_ptr + row * stride_logits_row + draft, mask=drafted, other=NEGATIVE_INFINITY).to(tl.float32)
    score = logit * inverse_temperature(temperature)
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + slot, mask=exists, other=NEGATIVE_INFINITY)
        score = tl.where(score >= threshold, score, NEGATIVE_INFINITY)
    p = tl.exp((score - tl.where(good, top, 0.0)).to(tl.float64)) / tl.where(good, total, 1.0)
    p = tl.where(sampled, p, tl.where(draft == greedy, 1.0, 0.0).to(tl.float64))

    q_first = request * stride_q_request + node.to(tl.int64) * stride_q_row
    q_top = tl.zeros(slot.shape, tl.float32)
    q_total = tl.full(slot.shape, 1.0, tl.float64)
    if Q == "dense":
        q_top, q_total = load_sums(q_stats_ptr, stride_q_plane, slot, drafted, q_tiles, Q_TILES)
        drafted &= is_good(q_top)
        column = draft
        if q_token_ptr is not None:
            column = tl.load(q_token_ptr + draft, mask=drafted, other=-1).to(tl.int64)
        known = drafted & (column >= 0) & (column < q_width)
        q_score = tl.load(q_ptr + q_first + column, mask=known, other=NEGATIVE_INFINITY)
        q_top = tl.where(drafted, q_top, 0.0)
        q_total = tl.where(drafted, q_total, 1.0)
        q = tl.exp((q_score.to(tl.float32) - q_top).to(tl.float64)) / q_total
    elif Q == "sparse":
        offs_k = tl.arange(0, BLOCK_K)
        mask = drafted[:, None] & (offs_k < q_width)[None, :]
        q_token_first = request * stride_q_token_request + node.to(tl.int64) * stride_q_token_row
        token = tl.load(q_token_ptr + q_token_first[:, None] + offs_k[None, :], mask=mask, other=-1)
        logprob = tl.load(q_ptr + q_first[:, None] + offs_k[None, :], mask=mask, other=NEGATIVE_INFINITY)
        logprob = tl.where((token >= 0) & (token < vocab_size), logprob, NEGATIVE_INFINITY)
        drafted &= tl.sum(tl.where(logprob < float("inf"), 0, 1), axis=1) == 0  # NaN and +inf fail the comparison
        chosen = token == draft[:, None]
        q = tl.sum(tl.where(chosen, tl.exp(logprob.to(tl.float64)), 0.0), axis=1)
    else:
        q = tl.full(slot.shape, 1.0, tl.float64)
    ratio = tl.where(drafted & good & (q > 0.0), p / tl.where(q > 0.0, q, 1.0), 0.0)

    seed = tl.load(seed_ptr + request, mask=exists, other=0)
    position = tl.load(position_ptr + request, mask=exists, other=0)
    has_residual = drafted & good & sampled
    if RULE == "ratio":
        u = uniform(seed, position + node + 1, position * 0, ACCEPT)
        accepted = first_where(u >= ratio, node, NODES_P2, BLOCK_R)
        line_ptr += request * RECORD
        written = inside & (node == accepted)
        weight = tl.full(slot.shape, 1.0, tl.float64)
        tl.store(line_ptr + ACCEPTED, accepted.to(tl.float32), mask=written)
    else:
        weight = _running_weights(ratio, node, NODES, NODES_P2, BLOCK_R)
        line_ptr += slot * RECORD
        written = inside
        tl.store(line_ptr + WEIGHT, weight.to(tl.float32), mask=written)
    factor = tl.where(has_residual, weight / tl.where(good, total, 1.0), 0.0)
    tl.store(line_ptr + P_OFFSET, tl.where(good, top, 0.0), mask=written)
    tl.store(line_ptr + P_FACTOR, factor.to(tl.float32), mask=written)
    tl.store(line_ptr + Q_OFFSET, q_top, mask=written)
    tl.store(line_ptr + Q_FACTOR, (1.0 / q_total).to(tl.float32), mask=written)


@triton.jit
def _running_weights(ratio, node, NODES: tl.constexpr, NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr):
    """``w_0 = 1``, ``w_i = min(w_(i-1) ratio_(i-1), 1)`` (Sun et al., arXiv 2403.10444, algorithm 2)."""
    ratio = tl.reshape(ratio, [BLOCK_R, NODES_P2])
    node = tl.reshape(node, [BLOCK_R, NODES_P2])
    weights = tl.full([BLOCK_R, NODES_P2], 1.0, tl.float64)
    weight = tl.full([BLOCK_R], 1.0, tl.float64)
    for i in range(1, NODES):
        step = tl.sum(tl.where(node == i - 1, ratio, 0.0), axis=1)
        weight = tl.minimum(weight * step, 1.0)
        weights = tl.where(node == i, weight[:, None], weights)
    return tl.reshape(weights, [BLOCK_R * NODES_P2])


@triton.jit(do_not_specialize=["num_lines", "num_slots", "num_rows", "nodes"])
def residual_mass_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [num_requests + 1] int64
    temperature_ptr,  # [num_requests] float32
    threshold_ptr,  # [slots] float32, or null: nothing is truncated
    q_ptr,
    q_token_ptr,
    stride_q_request,
    stride_q_row,
    stride_q_token_request,
    stride_q_token_row,
    line_ptr,  # [lines, RECORD] float32, from ratio_kernel
    mass_ptr,  # [lines, num_tiles * SUBS] float32, written
    num_lines,
    num_slots,
    num_rows,
    vocab_size,
    num_tiles,
    q_width,
    nodes,  # slots of a request
    RULE: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """``sum(max(w p - q, 0))`` of each sub-tile, for the lines (requests or slots) that have a residual."""
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    tile = tl.program_id(1)
    line = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = line < num_lines
    wanted = inside & (tl.load(line_ptr + line * RECORD + P_FACTOR, mask=inside, other=0.0) > 0.0)
    if tl.sum(wanted.to(tl.int32)) == 0:
        return
    slot = line.to(tl.int64)
    if RULE == "ratio":
        slot = slot * nodes + tl.load(line_ptr + line * RECORD + ACCEPTED, mask=wanted, other=0.0).to(tl.int64)
    offs_v = (tile * BLOCK_V + tl.arange(0, BLOCK_V))[None, :] + tl.zeros([BLOCK_R, 1], tl.int32)
    excess = residual(
        slot, line, wanted, offs_v, logits_ptr, stride_logits_row, tokens_ptr, query_start_ptr, temperature_ptr,
        threshold_ptr, q_ptr, q_token_ptr, stride_q_request, stride_q_row, stride_q_token_request, stride_q_token_row,
        line_ptr, num_slots, num_rows, vocab_size, q_width, nodes, Q,
    )  # fmt: skip
    sums = tl.sum(tl.reshape(excess, [BLOCK_R, SUBS, BLOCK_S]), axis=2)
    at = (line.to(tl.int64) * num_tiles + tile)[:, None] * SUBS + tl.arange(0, SUBS)[None, :]
    tl.store(mass_ptr + at, sums, mask=wanted[:, None])


@triton.jit
def residual(
    slot, line, mask, offs_v, logits_ptr, stride_logits_row, tokens_ptr, query_start_ptr, temperature_ptr,
    threshold_ptr, q_ptr, q_token_ptr, stride_q_request, stride_q_row, stride_q_token_request, stride_q_token_row,
    line_ptr, num_slots, num_rows, vocab_size, q_width, nodes, Q: tl.constexpr,
):  # fmt: skip
    """``max(w p - q, 0)`` float32 of the tokens ``offs_v`` of each row, both int32 ``[rows, n]``."""
    row, request, node, _ = locate(tl.where(mask, slot, num_slots), num_slots, num_rows, query_start_ptr, nodes)
    inside = mask[:, None] & (offs_v < vocab_size)
    logits = tl.load(logits_ptr + (row * stride_logits_row)[:, None] + offs_v, mask=inside, other=NEGATIVE_INFINITY)
    temperature = tl.load(temperature_ptr + request, mask=mask, other=0.0)
    scores = logits.to(tl.float32) * inverse_temperature(temperature)[:, None]
    line_ptr += line * RECORD
    p_offset = tl.load(line_ptr + P_OFFSET, mask=mask, other=0.0)
    p_factor = tl.load(line_ptr + P_FACTOR, mask=mask, other=0.0)
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + slot, mask=mask, other=NEGATIVE_INFINITY)
        scores = tl.where(scores >= threshold[:, None], scores, NEGATIVE_INFINITY)
    p = tl.exp(scores - p_offset[:, None]) * p_factor[:, None]
    q_first = (request * stride_q_request + node * stride_q_row)[:, None]
    if Q == "dense":
        column = offs_v.to(tl.int64)
        if q_token_ptr is not None:
            column = tl.load(q_token_ptr + offs_v, mask=inside, other=-1).to(tl.int64)
        known = inside & (column >= 0) & (column < q_width)
        q_score = tl.load(q_ptr + q_first + column, mask=known, other=NEGATIVE_INFINITY)
        q_offset = tl.load(line_ptr + Q_OFFSET, mask=mask, other=0.0)
        q_factor = tl.load(line_ptr + Q_FACTOR, mask=mask, other=0.0)
        q = tl.exp(q_score.to(tl.float32) - q_offset[:, None]) * q_factor[:, None]
    elif Q == "sparse":
        q = tl.zeros(offs_v.shape, tl.float32)
        q_token_first = request * stride_q_token_request + node * stride_q_token_row
        for k in range(q_width):
            token = tl.load(q_token_ptr + q_token_first + k, mask=mask, other=-1)
            logprob = tl.load(q_ptr + request * stride_q_request + node * stride_q_row + k, mask=mask, other=0.0)
            q += tl.where(offs_v == token[:, None], tl.exp(logprob)[:, None], 0.0)
    else:
        draft = tl.load(tokens_ptr + row + 1, mask=mask, other=-1)
        q = tl.where(offs_v == draft[:, None], 1.0, 0.0)
    return tl.maximum(p - q, 0.0)


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def ratio_verdict_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [num_requests + 1] int64
    temperature_ptr,  # [num_requests] float32
    seed_ptr,  # [num_requests] int64
    position_ptr,  # [num_requests] int64
    threshold_ptr,  # [slots] float32, or null: nothing is truncated
    stats_ptr,  # planes of rows.py, of the target's rows
    stride_plane,
    q_ptr,
    q_token_ptr,
    stride_q_request,
    stride_q_row,
    stride_q_token_request,
    stride_q_token_row,
    line_ptr,  # [lines, RECORD] float32, from ratio_kernel
    mass_ptr,  # [lines, num_tiles * SUBS] float32, from residual_mass_kernel
    out_tokens_ptr,  # [num_requests, NODES] int64, written, as are those below
    out_path_ptr,  # [num_requests, NODES] int64
    out_logprobs_ptr,  # [num_requests, NODES] float32
    out_num_ptr,  # [num_requests] int64
    out_status_ptr,  # [num_requests] int64
    num_requests,
    num_rows,
    vocab_size,
    num_tiles,
    q_width,
    RULE: tl.constexpr,
    Q: tl.constexpr,
    SAMPLED: tl.constexpr,  # some request samples; else every draw is a largest logit
    RAW: tl.constexpr,
    NODES: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Draw the token after the accepted drafts, and write the verdict."""
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    SUBTILES: tl.constexpr = TILES * SUBS
    num_slots = num_requests * NODES
    request, node, slot, inside = nodes_of_program(num_requests, NODES, NODES_P2, BLOCK_R)
    row, _, _, left = locate(tl.where(inside, slot, num_slots), num_slots, num_rows, query_start_ptr, NODES)
    exists = inside & (left > 0)
    temperature = tl.load(temperature_ptr + request, mask=exists, other=0.0)
    draft = tl.load(tokens_ptr + row + 1, mask=exists & (left > 1) & (node + 1 < NODES), other=-1)
    if RULE == "ratio":
        accepted = tl.load(line_ptr + request * RECORD + ACCEPTED, mask=inside, other=0.0).to(tl.int32)
    else:
        accepted = _block_accepted(
            slot, request, node, exists, seed_ptr, position_ptr, line_ptr, mass_ptr, num_tiles * SUBS, SUBTILES, TILES,
            NODES_P2, BLOCK_R,
        )  # fmt: skip

    # One draw per request, at the node where its drafts end.
    drawer = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    end = tl.max(tl.reshape(accepted, [BLOCK_R, NODES_P2]), axis=1)
    last_slot = drawer * NODES + end
    last_row, _, _, last_left = locate(last_slot, num_slots, num_rows, query_start_ptr, NODES)
    mask = (drawer < num_requests) & (last_left > 0)
    top, last = load_best(stats_ptr, stride_plane, MAX, ARGMAX, last_slot, mask, num_tiles, TILES)
    mask &= is_good(top)
    if SAMPLED:
        last_temperature = tl.load(temperature_ptr + drawer, mask=mask, other=0.0)
        samples = mask & (last_temperature > 0.0)
        seed = tl.load(seed_ptr + drawer, mask=mask, other=0)
        at = tl.load(position_ptr + drawer, mask=mask, other=0) + end + 1
        u = uniform(seed, at, at * 0, RESIDUAL)
        line = drawer if RULE == "ratio" else last_slot
        offs_sub = tl.arange(0, SUBTILES)
        has_residual = samples & (tl.load(line_ptr + line * RECORD + P_FACTOR, mask=samples, other=0.0) > 0.0)
        mass = load_plane(mass_ptr, line, has_residual, 0.0, num_tiles * SUBS, SUBTILES).to(tl.float64)
        mass = summable(mass, HEAVIEST_RESIDUAL)
        total = tl.sum(mass, axis=1)
        has_residual &= total > DEGENERATE_MASS
        goal = u * total
        sub = first_beyond(mass, goal * 0.0, goal, offs_sub)
        before = tl.sum(tl.where(offs_sub[None, :] < sub[:, None], mass, 0.0), axis=1)
        offs_s = tl.arange(0, BLOCK_S)
        excess = residual(
            last_slot, line, has_residual, sub[:, None] * BLOCK_S + offs_s[None, :], logits_ptr, stride_logits_row,
            tokens_ptr, query_start_ptr, temperature_ptr, threshold_ptr, q_ptr, q_token_ptr, stride_q_request,
            stride_q_row, stride_q_token_request, stride_q_token_row, line_ptr, num_slots, num_rows, vocab_size,
            q_width, NODES, Q,
        )  # fmt: skip
        excess = summable(excess.to(tl.float64), HEAVIEST_RESIDUAL)
        from_residual = token_of(sub, first_beyond(excess, before, goal, offs_s), BLOCK_S)
        from_target = draw_from_target(
            last_slot, samples & ~has_residual, u, last_row * stride_logits_row,
            inverse_temperature(last_temperature), threshold_ptr, logits_ptr, stats_ptr, stride_plane, vocab_size,
            num_tiles, TILES, BLOCK_V, BLOCK_S,
        )  # fmt: skip
        drawn = tl.where(has_residual, from_residual, from_target)
        last = tl.where(samples & (drawn >= 0), drawn, last)
    last = spread(tl.where(mask, last, -1), NODES_P2, BLOCK_R)
    emit(
        request, node, slot, inside, exists, row * stride_logits_row, temperature, accepted, draft, last, logits_ptr,
        stats_ptr, stride_plane, out_tokens_ptr, out_path_ptr, out_logprobs_ptr, out_num_ptr, out_status_ptr,
        num_tiles, RAW, NODES_P2, TILES, BLOCK_R,
    )  # fmt: skip


@triton.jit
def _block_accepted(
    slot, request, node, exists, seed_ptr, position_ptr, line_ptr, mass_ptr, num_subtiles,
    SUBTILES: tl.constexpr, TILES: tl.constexpr, NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The last node whose uniform is below ``S / (S + 1 - w)``, ``S`` the mass of its residual (algorithm 2).

    The uniforms of all nodes are looked at, so they carry the anchor's position: a later round reads others.
    """
    weight = tl.load(line_ptr + slot * RECORD + WEIGHT, mask=exists, other=0.0).to(tl.float64)
    has_residual = exists & (tl.load(line_ptr + slot * RECORD + P_FACTOR, mask=exists, other=0.0) > 0.0)
    mass = tl.zeros(slot.shape, tl.float64)
    for start in range(0, SUBTILES, TILES):  # a part at a time, for the registers
        part = load_plane(mass_ptr + start, slot, has_residual, 0.0, num_subtiles, TILES, num_subtiles - start)
        mass += tl.sum(summable(part.to(tl.float64), HEAVIEST_RESIDUAL), axis=1)
    mass = tl.where(has_residual, mass, weight)  # nothing is subtracted where no draft follows
    rest = 1.0 - weight
    keep = tl.where(rest > 0.0, mass / tl.where(rest > 0.0, mass + rest, 1.0), 1.0)
    seed = tl.load(seed_ptr + request, mask=exists, other=0)
    position = tl.load(position_ptr + request, mask=exists, other=0)
    u = uniform(seed, position + node, position, ACCEPT)
    kept = exists & ((node == 0) | (u < keep))
    last = tl.max(tl.reshape(tl.where(kept, node, 0), [BLOCK_R, NODES_P2]), axis=1)
    return spread(last, NODES_P2, BLOCK_R)
