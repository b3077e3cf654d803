"""Verdicts of the rules in which the target draws every row, and a draft is accepted while it is what was drawn.

A program takes ``BLOCK_R`` requests, and has a lane for each of ``NODES_P2`` places of each. What it knows of them is
their *place*: ``(request, node, line, inside)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.sample.draw import drawn_tokens
from dspark.kernels.sample.rows import inverse_temperature, load_plane, load_sums, locate, merge_sums, plane


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def chain_verdict_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    stats,  # Statistics of the target's rows
    drawn,  # [lines] int64 of the tokens that the target draws, or None: the best (perturbed) scores
    verdict,  # Verdict, written
    num_requests,
    num_rows,
    NOISE: tl.constexpr,
    RAW: tl.constexpr,
    NODES: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Accept drafts while they are what the target draws, and write the verdict.

    With Gumbel noise that draft and target share this is the rule of Daliri, Musco, Suresh (arXiv 2408.07978). Grid:
    (blocks of ``BLOCK_R`` requests,).
    """
    place = places(num_requests, NODES, NODES_P2, BLOCK_R)
    request, node, line, _ = place
    row, exists, followed = rows_of(place, rows, num_requests, num_rows, NODES)
    temperature = tl.load(sampling.temperature + request, mask=exists, other=0.0)
    if drawn is not None:
        token = tl.load(drawn + line, mask=exists, other=-1)
    else:
        token = drawn_tokens(line, exists, temperature > 0.0, stats, TILES, NOISE)
    draft = tl.load(rows.tokens + row + 1, mask=followed, other=-1)
    agrees = followed & (token >= 0) & (token == draft)
    accepted = first_where(~agrees, node, NODES_P2, BLOCK_R)
    emit(place, exists, row, accepted, token, verdict, target, stats, temperature, RAW, TILES, NODES_P2, BLOCK_R)


@triton.jit
def places(num_requests, NODES: tl.constexpr, NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr):
    """The program's ``BLOCK_R * NODES_P2`` places, by request and then by node."""
    lane = tl.arange(0, BLOCK_R * NODES_P2)
    request = (tl.program_id(0) * BLOCK_R + lane // NODES_P2).to(tl.int64)
    node = lane % NODES_P2
    return request, node, request * NODES + node, (request < num_requests) & (node < NODES)


@triton.jit
def rows_of(place, rows, num_requests, num_rows, NODES: tl.constexpr):
    """``(row, whether it exists, whether a draft follows it)`` of each place."""
    _, node, line, inside = place
    num_lines = num_requests * NODES
    row, _, _, left = locate(tl.where(inside, line, num_lines), num_lines, num_rows, rows, NODES)
    exists = inside & (left > 0)
    return row, exists, exists & (left > 1) & (node + 1 < NODES)


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
def emit(
    place, exists, row, accepted, token, verdict, target, stats, temperature, RAW: tl.constexpr, TILES: tl.constexpr,
    NODES_P2: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the verdict: the tokens of the nodes up to ``accepted``, or a bad status where that node's is -1."""
    request, node, line, inside = place
    present = pick(exists.to(tl.int32), node == 0, NODES_P2, BLOCK_R)
    good = pick((token >= 0).to(tl.int32), node == accepted, NODES_P2, BLOCK_R)
    number = tl.where(present > 0, accepted + good, 0)
    emitted = inside & (node < number)
    tl.store(verdict.tokens + line, tl.where(emitted, token, -1).to(tl.int64), mask=inside)
    tl.store(verdict.path + line, tl.where(emitted, node, -1).to(tl.int64), mask=inside)

    logit = tl.load(target.logits + row * target.stride + token, mask=emitted, other=0.0).to(tl.float32)
    logprob = log_probability(logit, line, emitted, temperature, stats, RAW, TILES)
    tl.store(verdict.logprobs + line, tl.where(emitted, logprob, 0.0).to(tl.float32), mask=inside)

    once = inside & (node == 0)
    tl.store(verdict.num_emitted + request, number.to(tl.int64), mask=once)
    # Status.BAD_LOGITS is 1.
    tl.store(verdict.status + request, tl.where((present > 0) & (good == 0), 1, 0).to(tl.int64), mask=once)


@triton.jit
def log_probability(logit, line, mask, temperature, stats, RAW: tl.constexpr, TILES: tl.constexpr):
    """Of the token of each row that has this logit, float64."""
    if RAW:
        top, total = merge_sums(
            load_plane(plane(stats, "raw_max"), line, mask, float("-inf"), stats.num_tiles, TILES),
            load_plane(plane(stats, "raw_sum"), line, mask, 0.0, stats.num_tiles, TILES),
        )
        logprob = (logit - top).to(tl.float64) - tl.log(total)
    else:
        top, total = load_sums(stats, line, mask, TILES)
        logprob = (logit * inverse_temperature(temperature) - top).to(tl.float64) - tl.log(total)
        logprob = tl.where(temperature > 0.0, logprob, 0.0)
    return logprob
