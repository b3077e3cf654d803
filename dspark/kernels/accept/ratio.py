"""Verdicts of the rules that divide by the draft distribution: ``ratio`` and ``block``.

Three kernels follow the statistics of target and draft rows: what each draft's probabilities allow, the mass of the
residual by sub-tile (of one row under ``ratio``, of every drafted row under ``block``), and the draw with the verdict.
What the residual's passes need is a *record* of each request (``ratio``) or of each line (``block``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.chain import emit, first_where, places, rows_of, spread
from dspark.kernels.accept.load import load_draft, load_target, weigh
from dspark.kernels.philox import stream, uniform
from dspark.kernels.sample.draw import draw_from_target, token_of
from dspark.kernels.sample.rows import (
    first_beyond,
    inverse_temperature,
    is_good,
    load_best,
    load_plane,
    load_sums,
    locate,
    summable,
)


@triton.constexpr_function
def field_of(name):
    """Where a record of five numbers, ``[records, 5]`` float32, has a field.

    ``w p = exp(score - p_offset) * p_factor``, where a factor of 0 means that there is no residual, and ``q = exp(score
    - q_offset) * q_factor``. Under ``ratio``, how many drafts are accepted; under ``block``, ``w`` of the node.
    """
    return {"p_offset": 0, "p_factor": 1, "q_offset": 2, "q_factor": 3, "accepted": 4, "weight": 4}[name]


@triton.jit
def at(records, record, NAME: tl.constexpr):
    """Pointers to a field of records."""
    return records + record * 5 + field_of(NAME)


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def ratio_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    q,  # KernelQ, or None: a point mass
    stats,  # Statistics of the target's rows
    draft_stats,  # Statistics of a dense q's rows, else None
    records,  # [records, 5] float32, written
    num_requests,
    num_rows,
    RULE: tl.constexpr,
    NODES: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
    Q_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of a sparse q: its width, rounded up to a power of two
    BLOCK_R: tl.constexpr,
):
    """How far the drafts of a request are accepted (``ratio``), or the weight of each of its nodes (``block``).

    Draft ``x`` is accepted with probability ``min(1, p(x) / q(x))`` (Leviathan et al., arXiv 2211.17192; Chen et al.,
    arXiv 2302.01318). Grid: (blocks of ``BLOCK_R`` requests,).
    """
    place = places(num_requests, NODES, NODES_P2, BLOCK_R)
    request, node, line, inside = place
    row, exists, followed = rows_of(place, rows, num_requests, num_rows, NODES)
    temperature = tl.load(sampling.temperature + request, mask=exists, other=0.0)
    sampled = temperature > 0.0
    draft = tl.load(rows.tokens + row + 1, mask=followed, other=-1)
    drafted = (draft >= 0) & (draft < target.vocab_size)

    top, total = load_sums(stats, line, exists, TILES)
    good = exists & is_good(top)
    _, greedy = load_best(stats, "max", "argmax", line, exists, TILES)
    score = load_target(target, row, line, draft, exists, drafted, temperature)
    p = tl.exp((score - tl.where(good, top, 0.0)).to(tl.float64)) / tl.where(good, total, 1.0)
    p = tl.where(sampled, p, tl.where(draft == greedy, 1.0, 0.0).to(tl.float64))

    q_top = tl.zeros(line.shape, tl.float32)
    q_total = tl.full(line.shape, 1.0, tl.float64)
    q_draft = tl.full(line.shape, 1.0, tl.float64)
    if q is not None:
        if q.tokens is not None:
            q_draft, good_row = _sparse_q(q, request, node, draft, drafted, target.vocab_size, BLOCK_K)
            drafted &= good_row
        else:
            q_top, q_total = load_sums(draft_stats, line, drafted, Q_TILES)
            drafted &= is_good(q_top)
            q_score = load_draft(q, request, node.to(tl.int64), draft, drafted)
            q_top = tl.where(drafted, q_top, 0.0)
            q_total = tl.where(drafted, q_total, 1.0)
            q_draft = tl.exp((q_score - q_top).to(tl.float64)) / q_total
    ratio = tl.where(drafted & good & (q_draft > 0.0), p / tl.where(q_draft > 0.0, q_draft, 1.0), 0.0)

    seed = tl.load(sampling.seed + request, mask=exists, other=0)
    position = tl.load(rows.position + request, mask=exists, other=0)
    has_residual = drafted & good & sampled
    if RULE == "ratio":
        u = uniform(seed, position + node + 1, position * 0, stream("accept"))
        accepted = first_where(u >= ratio, node, NODES_P2, BLOCK_R)
        record = request
        written = inside & (node == accepted)
        weight = tl.full(line.shape, 1.0, tl.float64)
        tl.store(at(records, record, "accepted"), accepted.to(tl.float32), mask=written)
    else:
        weight = _running_weights(ratio, node, NODES, NODES_P2, BLOCK_R)
        record = line
        written = inside
        tl.store(at(records, record, "weight"), weight.to(tl.float32), mask=written)
    factor = tl.where(has_residual, weight / tl.where(good, total, 1.0), 0.0)
    tl.store(at(records, record, "p_offset"), tl.where(good, top, 0.0), mask=written)
    tl.store(at(records, record, "p_factor"), factor.to(tl.float32), mask=written)
    tl.store(at(records, record, "q_offset"), q_top, mask=written)
    tl.store(at(records, record, "q_factor"), (1.0 / q_total).to(tl.float32), mask=written)


@triton.jit
def _sparse_q(q, request, node, draft, drafted, vocab_size, BLOCK_K: tl.constexpr):
    """Of a sparse q the probability float64 of the draft, and whether its row is good: no NaN and no +inf."""
    offs_k = tl.arange(0, BLOCK_K)
    mask = drafted[:, None] & (offs_k < q.width)[None, :]
    first = request * q.stride_request + node.to(tl.int64) * q.stride_row
    token_first = request * q.token_request + node.to(tl.int64) * q.token_row
    token = tl.load(q.tokens + token_first[:, None] + offs_k[None, :], mask=mask, other=-1)
    logprob = tl.load(q.scores + first[:, None] + offs_k[None, :], mask=mask, other=float("-inf"))
    logprob = tl.where((token >= 0) & (token < vocab_size), logprob, float("-inf"))
    good = tl.sum(tl.where(logprob < float("inf"), 0, 1), axis=1) == 0  # NaN and +inf fail the comparison
    return tl.sum(tl.where(token == draft[:, None], tl.exp(logprob.to(tl.float64)), 0.0), axis=1), good


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


@triton.jit(do_not_specialize=["num_records", "num_lines", "num_rows", "nodes"])
def residual_mass_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    q,  # KernelQ, or None: a point mass
    records,  # [records, 5] float32, from ratio_kernel
    mass,  # [records, num_tiles * SUBS] float32, written
    num_records,
    num_lines,
    num_rows,
    num_tiles,
    nodes,  # lines of a request
    RULE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """``sum(max(w p - q, 0))`` of each sub-tile, of the records (requests or lines) that have a residual.

    Grid: (blocks of ``BLOCK_R`` records, tiles).
    """
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    tile = tl.program_id(1)
    record = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = record < num_records
    wanted = inside & (tl.load(at(records, record, "p_factor"), mask=inside, other=0.0) > 0.0)
    if tl.sum(wanted.to(tl.int32)) == 0:
        return
    line = record.to(tl.int64)
    if RULE == "ratio":
        line = line * nodes + tl.load(at(records, record, "accepted"), mask=wanted, other=0.0).to(tl.int64)
    place = locate(tl.where(wanted, line, num_lines), num_lines, num_rows, rows, nodes)
    offs_v = (tile * BLOCK_V + tl.arange(0, BLOCK_V))[None, :] + tl.zeros([BLOCK_R, 1], tl.int32)
    excess = residual(place, line, record, wanted, offs_v, target, rows, sampling, q, records)
    sums = tl.sum(tl.reshape(excess, [BLOCK_R, SUBS, BLOCK_S]), axis=2)
    pointers = mass + (record.to(tl.int64) * num_tiles + tile)[:, None] * SUBS + tl.arange(0, SUBS)[None, :]
    tl.store(pointers, sums, mask=wanted[:, None])


@triton.jit
def residual(place, line, record, mask, offs_v, target, rows, sampling, q, records):
    """``max(w p - q, 0)`` float32 of the tokens ``offs_v`` of each row, both int32 ``[rows, n]``.

    ``place`` is what ``locate`` says of the lines.
    """
    row, request, node, _ = place
    inside = mask[:, None] & (offs_v < target.vocab_size)
    temperature = tl.load(sampling.temperature + request, mask=mask, other=0.0)
    scores = load_target(target, row, line, offs_v, mask, inside, temperature)
    p_offset = tl.load(at(records, record, "p_offset"), mask=mask, other=0.0)
    p_factor = tl.load(at(records, record, "p_factor"), mask=mask, other=0.0)
    p = weigh(scores, p_offset, p_factor)
    if q is None:
        draft = tl.load(rows.tokens + row + 1, mask=mask, other=-1)
        q_tokens = tl.where(offs_v == draft[:, None], 1.0, 0.0)
    elif q.tokens is not None:
        q_tokens = tl.zeros(offs_v.shape, tl.float32)
        first = request * q.stride_request + node * q.stride_row
        token_first = request * q.token_request + node * q.token_row
        for k in range(q.width):
            token = tl.load(q.tokens + token_first + k, mask=mask, other=-1)
            logprob = tl.load(q.scores + first + k, mask=mask, other=0.0)
            q_tokens += tl.where(offs_v == token[:, None], tl.exp(logprob)[:, None], 0.0)
    else:
        q_scores = load_draft(q, request, node, offs_v, inside)
        q_offset = tl.load(at(records, record, "q_offset"), mask=mask, other=0.0)
        q_factor = tl.load(at(records, record, "q_factor"), mask=mask, other=0.0)
        q_tokens = weigh(q_scores, q_offset, q_factor)
    return tl.maximum(p - q_tokens, 0.0)


@triton.jit
def find_residual(mass, line, has_residual, u, num_subtiles, SUBTILES: tl.constexpr):
    """Where in a residual the number ``u`` falls: ``(whether there is one, goal, sub-tile, sum before it)``.

    ``mass [lines, num_subtiles]`` has its sums by sub-tile. Where a residual is lighter than 1e-12 there is none, and
    the draw is from p, as in ``dspark.ops.accept.reference``.
    """
    offs_sub = tl.arange(0, SUBTILES)
    weight = load_plane(mass, line, has_residual, 0.0, num_subtiles, SUBTILES)
    weight = summable_residual(weight)
    total = tl.sum(weight, axis=1)
    has_residual &= total > 1e-12
    goal = u * total
    sub = first_beyond(weight, goal * 0.0, goal, offs_sub)
    return has_residual, goal, sub, tl.sum(tl.where(offs_sub[None, :] < sub[:, None], weight, 0.0), axis=1)


@triton.jit
def summable_residual(x):
    """Parts of a residual as float64 that add up exactly: it is part of p, whose mass is 1 but for rounding."""
    return summable(x.to(tl.float64), 2)


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def ratio_verdict_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    q,  # KernelQ, or None: a point mass
    stats,  # Statistics of the target's rows
    records,  # [records, 5] float32, from ratio_kernel
    mass,  # [records, num_tiles * SUBS] float32, from residual_mass_kernel
    verdict,  # Verdict, written
    num_requests,
    num_rows,
    RULE: tl.constexpr,
    SAMPLED: tl.constexpr,  # some request samples; else every draw is a largest logit
    RAW: tl.constexpr,
    NODES: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Draw the token after the accepted drafts from the residual ``(w p - q)+``, and write the verdict.

    Where no draft follows, or nothing is left, the draw is from p. Grid: (blocks of ``BLOCK_R`` requests,).
    """
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    num_lines = num_requests * NODES
    num_subtiles = stats.num_tiles * SUBS
    place = places(num_requests, NODES, NODES_P2, BLOCK_R)
    request, node, _, inside = place
    row, exists, followed = rows_of(place, rows, num_requests, num_rows, NODES)
    temperature = tl.load(sampling.temperature + request, mask=exists, other=0.0)
    draft = tl.load(rows.tokens + row + 1, mask=followed, other=-1)
    if RULE == "ratio":
        accepted = tl.load(at(records, request, "accepted"), mask=inside, other=0.0).to(tl.int32)
    else:
        accepted = _block_accepted(
            place, exists, rows, sampling, records, mass, num_subtiles, TILES, SUBS, NODES_P2, BLOCK_R
        )  # fmt: skip

    # One draw per request, at the node where its drafts end.
    drawer = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    end = tl.max(tl.reshape(accepted, [BLOCK_R, NODES_P2]), axis=1)
    last_line = drawer * NODES + end
    last_row, _, _, last_left = locate(last_line, num_lines, num_rows, rows, NODES)
    mask = (drawer < num_requests) & (last_left > 0)
    top, last = load_best(stats, "max", "argmax", last_line, mask, TILES)
    mask &= is_good(top)
    if SAMPLED:
        last_temperature = tl.load(sampling.temperature + drawer, mask=mask, other=0.0)
        samples = mask & (last_temperature > 0.0)
        seed = tl.load(sampling.seed + drawer, mask=mask, other=0)
        drawn_at = tl.load(rows.position + drawer, mask=mask, other=0) + end + 1
        u = uniform(seed, drawn_at, drawn_at * 0, stream("residual"))
        record = drawer if RULE == "ratio" else last_line
        has_residual = samples & (tl.load(at(records, record, "p_factor"), mask=samples, other=0.0) > 0.0)
        has_residual, goal, sub, before = find_residual(mass, record, has_residual, u, num_subtiles, TILES * SUBS)
        offs_s = tl.arange(0, BLOCK_S)
        last_place = locate(tl.where(has_residual, last_line, num_lines), num_lines, num_rows, rows, NODES)
        excess = residual(
            last_place, last_line, record, has_residual, sub[:, None] * BLOCK_S + offs_s[None, :], target, rows,
            sampling, q, records,
        )  # fmt: skip
        from_residual = token_of(sub, first_beyond(summable_residual(excess), before, goal, offs_s), BLOCK_S)
        from_target = draw_from_target(
            last_line, samples & ~has_residual, u, target.logits + last_row * target.stride,
            inverse_temperature(last_temperature), target.threshold, stats, target.vocab_size, TILES, BLOCK_V, BLOCK_S,
        )  # fmt: skip
        drawn = tl.where(has_residual, from_residual, from_target)
        last = tl.where(samples & (drawn >= 0), drawn, last)
    last = spread(tl.where(mask, last, -1), NODES_P2, BLOCK_R)
    token = tl.where(node < accepted, draft, last)
    emit(place, exists, row, accepted, token, verdict, target, stats, temperature, RAW, TILES, NODES_P2, BLOCK_R)


@triton.jit
def _block_accepted(
    place, exists, rows, sampling, records, mass, num_subtiles, TILES: tl.constexpr, SUBS: tl.constexpr,
    NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The last node whose uniform is below ``S / (S + 1 - w)``, ``S`` the mass of its residual (algorithm 2).

    The uniforms of all nodes are looked at, so they carry the anchor's position: a later round reads others.
    """
    request, node, line, _ = place
    weight = tl.load(at(records, line, "weight"), mask=exists, other=0.0).to(tl.float64)
    has_residual = exists & (tl.load(at(records, line, "p_factor"), mask=exists, other=0.0) > 0.0)
    seen = tl.zeros(line.shape, tl.float64)
    for start in range(0, TILES * SUBS, TILES):  # a part at a time, for the registers
        part = load_plane(mass + start, line, has_residual, 0.0, num_subtiles, TILES, num_subtiles - start)
        seen += tl.sum(summable_residual(part), axis=1)
    seen = tl.where(has_residual, seen, weight)  # nothing is subtracted where no draft follows
    rest = 1.0 - weight
    keep = tl.where(rest > 0.0, seen / tl.where(rest > 0.0, seen + rest, 1.0), 1.0)
    seed = tl.load(sampling.seed + request, mask=exists, other=0)
    position = tl.load(rows.position + request, mask=exists, other=0)
    u = uniform(seed, position + node, position, stream("accept"))
    kept = exists & ((node == 0) | (u < keep))
    last = tl.max(tl.reshape(tl.where(kept, node, 0), [BLOCK_R, NODES_P2]), axis=1)
    return spread(last, NODES_P2, BLOCK_R)
