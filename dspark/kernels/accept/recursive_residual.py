"""What rejected children leave of p and q at a node: in registers, by token, and weighed by tile.

After ``m`` rejected children, ``p`` and ``q`` of a token follow from those of the node's rows, the rejected tokens, and
for each rejection the mass of the residual and what was left of q. So no distribution is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.rows import NEGATIVE_INFINITY, inverse_temperature, locate

# Of a node, float64 [slots, LINE]:
P_OFFSET = tl.constexpr(0)  # p = exp(score - P_OFFSET) / P_TOTAL
P_TOTAL = tl.constexpr(1)  # 0: the target's row is bad or absent
Q_OFFSET = tl.constexpr(2)
Q_TOTAL = tl.constexpr(3)  # 0: the draft's row is bad or absent
LINE = tl.constexpr(4)
# And int32 [slots, STATE]:
GREEDY = tl.constexpr(0)  # the target's most likely token
RANK = tl.constexpr(1)  # among its siblings; -1 where it is nobody's child
CHOSEN = tl.constexpr(2)  # the child that was accepted, or -1
REJECTED = tl.constexpr(3)  # how many children were rejected
WEIGHED = tl.constexpr(4)  # the last step in which its residual was weighed
STATE = tl.constexpr(5)
# Of each rejection of a node: float32 [slots, children, STEP], and int32 [slots, children] of the rejected tokens.
SCALE = tl.constexpr(0)  # what the residual is multiplied by; -1: it was degenerate, and p is the target's again
SHARE = tl.constexpr(1)  # what q is multiplied by
STEP = tl.constexpr(2)
LEAST_REST = tl.constexpr(1e-30)
"""Where less is left of q, no further child is accepted: the factor that makes it 1 would leave float32."""


@triton.jit
def after_rejections(p, q, token, slot, mask, step, last_step, steps_ptr, rejected_ptr, children):
    """``p`` and ``q`` by which child ``step`` of each node is judged, from those of its rows; float32 ``[rows, n]``.

    ``token`` is ``[rows, n]``, ``step`` ``[rows]``, ``last_step`` the largest.
    """
    left = p
    share = tl.full(slot.shape, 1.0, tl.float32)
    for i in range(last_step - 1):
        active = mask & (i + 1 < step)
        at = (slot.to(tl.int64) * children + i) * STEP
        scale = tl.load(steps_ptr + at + SCALE, mask=active, other=0.0)
        rejected = tl.load(rejected_ptr + slot.to(tl.int64) * children + i, mask=active, other=-1)
        excess = tl.maximum(left - q * share[:, None], 0.0) * scale[:, None]
        excess = tl.where((scale < 0.0)[:, None], p, excess)
        left = tl.where(active[:, None], excess, left)
        q = tl.where(token == rejected[:, None], 0.0, q)
        share = tl.where(active, tl.load(steps_ptr + at + SHARE, mask=active, other=1.0), share)
    return left, q * share[:, None]


@triton.jit
def left_over(
    slot, mask, offs_v, step, last_step, logits_ptr, stride_logits_row, query_start_ptr, temperature_ptr, threshold_ptr,
    q_ptr, q_token_ptr, stride_q_request, stride_q_row, line_ptr, steps_ptr, rejected_ptr, num_slots, num_rows,
    vocab_size, q_width, nodes, children,
):  # fmt: skip
    """Of the tokens ``offs_v [rows, n]``: ``max(p - q, 0)`` as child ``step`` leaves it, and q without that child.

    The second is not normalised: it is what is left of the q of the node's row.
    """
    row, request, node, _ = locate(tl.where(mask, slot, num_slots), num_slots, num_rows, query_start_ptr, nodes)
    inside = mask[:, None] & (offs_v < vocab_size)
    logits = tl.load(logits_ptr + (row * stride_logits_row)[:, None] + offs_v, mask=inside, other=NEGATIVE_INFINITY)
    temperature = tl.load(temperature_ptr + request, mask=mask, other=0.0)
    scores = logits.to(tl.float32) * inverse_temperature(temperature)[:, None]
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + slot, mask=mask, other=NEGATIVE_INFINITY)
        scores = tl.where(scores >= threshold[:, None], scores, NEGATIVE_INFINITY)
    line_ptr += slot.to(tl.int64) * LINE
    p_offset = tl.load(line_ptr + P_OFFSET, mask=mask, other=0.0).to(tl.float32)
    p_factor = (1.0 / tl.load(line_ptr + P_TOTAL, mask=mask, other=1.0)).to(tl.float32)
    p = tl.exp(scores - p_offset[:, None]) * p_factor[:, None]
    column = offs_v.to(tl.int64)
    if q_token_ptr is not None:
        column = tl.load(q_token_ptr + offs_v, mask=inside, other=-1).to(tl.int64)
    known = inside & (column >= 0) & (column < q_width)
    q_first = (request * stride_q_request + node * stride_q_row)[:, None]
    q_score = tl.load(q_ptr + q_first + column, mask=known, other=NEGATIVE_INFINITY)
    q_offset = tl.load(line_ptr + Q_OFFSET, mask=mask, other=0.0).to(tl.float32)
    q_factor = (1.0 / tl.load(line_ptr + Q_TOTAL, mask=mask, other=1.0)).to(tl.float32)
    q = tl.exp(q_score.to(tl.float32) - q_offset[:, None]) * q_factor[:, None]
    left, share_of_q = after_rejections(
        p, q, offs_v, slot, mask, step, last_step, steps_ptr, rejected_ptr, children
    )  # fmt: skip
    excess = tl.maximum(left - share_of_q, 0.0)
    for i in range(last_step):
        at = slot.to(tl.int64) * children + i
        rejected = tl.load(rejected_ptr + at, mask=mask & (i < step), other=-1)
        q = tl.where(offs_v == rejected[:, None], 0.0, q)
    return excess, q


@triton.jit(do_not_specialize=["num_slots", "num_rows", "nodes", "children"])
def left_over_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    query_start_ptr,  # [requests + 1] int64
    temperature_ptr,  # [requests] float32
    threshold_ptr,  # [slots] float32, or null: nothing is truncated
    q_ptr,
    q_token_ptr,
    stride_q_request,
    stride_q_row,
    line_ptr,  # [slots, LINE] float64
    state_ptr,  # [slots, STATE] int32
    steps_ptr,  # [slots, children, STEP] float32
    rejected_ptr,  # [slots, children] int32
    mass_ptr,  # [slots, num_tiles * SUBS] float32, written
    rest_ptr,  # [slots, num_tiles] float32, written
    num_slots,
    num_rows,
    vocab_size,
    num_tiles,
    q_width,
    nodes,
    children,
    step,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Weigh what child ``step`` left, by sub-tile of p and by tile of q, at the nodes that were picked."""
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    slot = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = slot < num_slots
    wanted = inside & (tl.load(state_ptr + slot * STATE + WEIGHED, mask=inside, other=0) == step)
    if tl.sum(wanted.to(tl.int32)) == 0:
        return
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        offs_v = (tile * BLOCK_V + tl.arange(0, BLOCK_V))[None, :] + tl.zeros([BLOCK_R, 1], tl.int32)
        excess, rest = left_over(
            slot, wanted, offs_v, tl.zeros([BLOCK_R], tl.int32) + step, step, logits_ptr, stride_logits_row,
            query_start_ptr, temperature_ptr, threshold_ptr, q_ptr, q_token_ptr, stride_q_request, stride_q_row,
            line_ptr, steps_ptr, rejected_ptr, num_slots, num_rows, vocab_size, q_width, nodes, children,
        )  # fmt: skip
        sums = tl.sum(tl.reshape(excess, [BLOCK_R, SUBS, BLOCK_S]), axis=2)
        at = slot.to(tl.int64) * num_tiles + tile
        tl.store(mass_ptr + at[:, None] * SUBS + tl.arange(0, SUBS)[None, :], sums, mask=wanted[:, None])
        tl.store(rest_ptr + at, tl.sum(rest, axis=1), mask=wanted)
