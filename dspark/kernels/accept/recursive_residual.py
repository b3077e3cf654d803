"""What rejected children leave of p and q at a node: in registers, by token, and weighed by tile.

After ``m`` rejected children, ``p`` and ``q`` of a token follow from those of the node's rows, the rejected tokens, and
for each rejection the mass of the residual and what was left of q. So no distribution is written. All this is the
``record`` (Record of :mod:`dspark.ops.accept.tree_launch`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.load import load_draft, load_target, weigh
from dspark.kernels.sample.rows import locate


@triton.constexpr_function
def field_of(name):
    """Where a field is among the numbers of a line, or of a rejection.

    Of a line, float64 ``[lines, 4]``: ``p = exp(score - p_offset) / p_total``, and q likewise; a total of 0 says that
    the row is bad or absent. Of a line, int32 ``[lines, 5]``: ``greedy``, the target's most likely token; ``rank``
    among its siblings, -1 where the node is nobody's child; ``chosen``, the child that was accepted, or -1;
    ``rejected``, how many children were; ``weighed``, the last step in which its residual was weighed. Of a rejection,
    float32 ``[lines, children, 2]``: ``scale``, what the residual is multiplied by (-1: it was degenerate, and p is the
    target's again), and ``share``, what q is multiplied by.
    """
    lines = {"p_offset": 0, "p_total": 1, "q_offset": 2, "q_total": 3}
    state = {"greedy": 0, "rank": 1, "chosen": 2, "rejected": 3, "weighed": 4}
    return {**lines, **state, "scale": 0, "share": 1}[name]


@triton.jit
def line_at(record, line, NAME: tl.constexpr):
    """Pointers to a number of lines."""
    return record.lines + line * 4 + field_of(NAME)


@triton.jit
def state_at(record, line, NAME: tl.constexpr):
    """Pointers to a number of the state of lines."""
    return record.state + line * 5 + field_of(NAME)


@triton.jit
def step_at(record, rejection, NAME: tl.constexpr):
    """Pointers to a number of rejections, ``line * children + step - 1``."""
    return record.steps + rejection * 2 + field_of(NAME)


@triton.jit
def after_rejections(p, q, token, line, mask, step, last_step, record, children):
    """``p`` and ``q`` by which child ``step`` of each node is judged, from those of its rows; float32 ``[rows, n]``.

    A rejection makes ``p`` to ``(p - q)+`` and ``q`` to itself without the rejected token, both normalised (SpecInfer,
    Miao et al., arXiv 2305.09781, algorithm 2; Sequoia, Chen et al., arXiv 2402.12374). ``token`` is ``[rows, n]``,
    ``step`` ``[rows]``, ``last_step`` the largest.
    """
    left = p
    share = tl.full(line.shape, 1.0, tl.float32)
    for i in range(last_step - 1):
        active = mask & (i + 1 < step)
        rejection = line.to(tl.int64) * children + i
        scale = tl.load(step_at(record, rejection, "scale"), mask=active, other=0.0)
        rejected = tl.load(record.rejected + rejection, mask=active, other=-1)
        excess = tl.maximum(left - q * share[:, None], 0.0) * scale[:, None]
        excess = tl.where((scale < 0.0)[:, None], p, excess)
        left = tl.where(active[:, None], excess, left)
        q = tl.where(token == rejected[:, None], 0.0, q)
        share = tl.where(active, tl.load(step_at(record, rejection, "share"), mask=active, other=1.0), share)
    return left, q * share[:, None]


@triton.jit
def left_over(place, line, mask, offs_v, step, last_step, target, sampling, q, record, children):
    """Of the tokens ``offs_v [rows, n]``: ``max(p - q, 0)`` as child ``step`` leaves it, and q without that child.

    The second is not normalised: it is what is left of the q of the node's row. ``place`` is what ``locate`` says.
    """
    row, request, node, _ = place
    inside = mask[:, None] & (offs_v < target.vocab_size)
    temperature = tl.load(sampling.temperature + request, mask=mask, other=0.0)
    scores = load_target(target, row, line, offs_v, mask, inside, temperature)
    wide = line.to(tl.int64)
    p_offset = tl.load(line_at(record, wide, "p_offset"), mask=mask, other=0.0).to(tl.float32)
    p_factor = (1.0 / tl.load(line_at(record, wide, "p_total"), mask=mask, other=1.0)).to(tl.float32)
    p = weigh(scores, p_offset, p_factor)
    q_scores = load_draft(q, request, node, offs_v, inside)
    q_offset = tl.load(line_at(record, wide, "q_offset"), mask=mask, other=0.0).to(tl.float32)
    q_factor = (1.0 / tl.load(line_at(record, wide, "q_total"), mask=mask, other=1.0)).to(tl.float32)
    rest = weigh(q_scores, q_offset, q_factor)
    left, share_of_q = after_rejections(p, rest, offs_v, line, mask, step, last_step, record, children)
    excess = tl.maximum(left - share_of_q, 0.0)
    for i in range(last_step):
        rejected = tl.load(record.rejected + wide * children + i, mask=mask & (i < step), other=-1)
        rest = tl.where(offs_v == rejected[:, None], 0.0, rest)
    return excess, rest


@triton.jit(do_not_specialize=["num_lines", "num_rows", "nodes", "children"])
def left_over_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    q,  # KernelQ, dense
    record,  # Record; mass and rest are written
    step,  # from 1 on
    num_lines,
    num_rows,
    num_tiles,
    nodes,
    children,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Weigh what child ``step`` left, by sub-tile of p and by tile of q, at the nodes that were picked.

    Grid: (blocks of ``BLOCK_R`` lines, programs per row); the programs of a row take its tiles in turn.
    """
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    line = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = line < num_lines
    wanted = inside & (tl.load(state_at(record, line, "weighed"), mask=inside, other=0) == step)
    if tl.sum(wanted.to(tl.int32)) == 0:
        return
    steps = tl.zeros([BLOCK_R], tl.int32) + step
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        offs_v = (tile * BLOCK_V + tl.arange(0, BLOCK_V))[None, :] + tl.zeros([BLOCK_R, 1], tl.int32)
        place = locate(tl.where(wanted, line, num_lines), num_lines, num_rows, rows, nodes)
        excess, rest = left_over(place, line, wanted, offs_v, steps, step, target, sampling, q, record, children)
        sums = tl.sum(tl.reshape(excess, [BLOCK_R, SUBS, BLOCK_S]), axis=2)
        at = line.to(tl.int64) * num_tiles + tile
        tl.store(record.mass + at[:, None] * SUBS + tl.arange(0, SUBS)[None, :], sums, mask=wanted[:, None])
        tl.store(record.rest + at, tl.sum(rest, axis=1), mask=wanted)
