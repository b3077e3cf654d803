"""What happens once per block of a walk, before its first step and after its last, and the state between steps.

The groups of arguments are the NamedTuples of :mod:`dspark.ops.draft.walk_launch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.draft.walk import dot_rows, load_rows, no_key, previous_row, sigmoid, unpacked
from dspark.kernels.sample.rows import is_good, load_plane, plane_at


@triton.jit(do_not_specialize=["num_rows"])
def walk_begin_kernel(
    hidden,  # [requests, draft_len, hidden_size]
    weight,  # [num_outputs, hidden_size], the columns of a projection that read the hidden state; None: there is none
    bias,  # [num_outputs]
    projected,  # [num_rows, num_outputs] float32, written
    keys,  # [num_rows] int64, written
    num_rows,  # requests * draft_len
    shape,  # BeginShape
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Give every step the key of nothing drawn, and project the hidden states of all steps where there is a weight.

    The projection is the hidden state's part of a gate, or of the three of a recurrent head (eq. 6). Grid: (blocks of
    rows, blocks of outputs).
    """
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    inside = row < num_rows
    if tl.program_id(1) == 0:
        tl.store(keys + row, tl.full([BLOCK_R], no_key(), tl.int64), mask=inside)
    if weight is not None:
        offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < shape.num_outputs
        of_row = row // shape.draft_len * shape.hidden_request + row % shape.draft_len * shape.hidden_step
        acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for start in range(0, shape.hidden_size, BLOCK_K):
            w = load_rows(weight, shape.weight_row, offs_n, mask_n, start, shape.hidden_size, BLOCK_K)
            x = load_rows(hidden, 1, of_row, inside, start, shape.hidden_size, BLOCK_K)
            acc += dot_rows(w, x, DOT, UPCAST)
        acc += tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        tl.store(
            projected + (row * shape.num_outputs)[:, None] + offs_n[None, :],
            tl.trans(acc),
            mask=inside[:, None] & mask_n[None, :],
        )


@triton.jit(do_not_specialize=["step", "num_requests"])
def walk_state_kernel(
    block,  # Block
    w1,  # [tokens, rank]
    weight,  # [GATES * rank, columns]: a recurrent head's columns of the state, then those of the embedding
    projected,  # [requests * draft_len, GATES * rank] float32, of walk_begin_kernel
    table,  # [tokens, GATES * rank] float32, the previous token's part, or None
    before,  # [requests, rank] float32, the state of the step before; None of a gated head, as is the next
    after,  # [requests, rank] float32, written
    given,  # [requests, rank] float32, written: what W2 is applied to
    step,
    num_requests,
    shape,  # StateShape
    RECURRENT: tl.constexpr,
    DOT_TOKEN: tl.constexpr,  # see dot_rows: of the embedding, and of the state
    DOT_STATE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """A gated or recurrent head up to the product with W2, for one step.

    With ``g, c, o`` the three parts of a recurrent head's ``W [s; W1[x]; h] + b``, the state becomes
    ``σ(g) s + (1 - σ(g)) tanh(c)`` and W2 is applied to ``tanh(o)`` (eq. 6); of a gated head W2 is applied to
    ``σ(g) W1[x]``. Grid: (blocks of requests, blocks of units of the state).
    """
    GATES: tl.constexpr = 3 if RECURRENT else 1
    step = step.to(tl.int64)
    rank = shape.rank
    request = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    alive, row = previous_row(block, request, step, num_requests, shape)
    known = alive & (row >= 0)
    has_state = alive & ((request * 0 + step) > 0)
    gate = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    candidate = gate
    output = gate
    mask_n = offs_n < rank
    for start in range(0, rank, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_w = mask_n[:, None] & (offs_k < rank)[None, :]
        weights = weight + offs_n.to(tl.int64)[:, None] * shape.weight_row + offs_k[None, :]  # [BLOCK_N, BLOCK_K]
        stride_gate = tl.full([], 1, tl.int64) * rank * shape.weight_row
        if RECURRENT:
            state = load_rows(before, rank, request, has_state, start, rank, BLOCK_K)  # [BLOCK_R, BLOCK_K]
            gate += dot_rows(tl.load(weights, mask=mask_w, other=0.0), state, DOT_STATE, UPCAST)
            w = tl.load(weights + stride_gate, mask=mask_w, other=0.0)
            candidate += dot_rows(w, state, DOT_STATE, UPCAST)
            w = tl.load(weights + 2 * stride_gate, mask=mask_w, other=0.0)
            output += dot_rows(w, state, DOT_STATE, UPCAST)
            weights += rank
        if table is None:
            x = load_rows(w1, shape.w1_row, row, known, start, rank, BLOCK_K)  # [BLOCK_R, BLOCK_K]
            gate += dot_rows(tl.load(weights, mask=mask_w, other=0.0), x, DOT_TOKEN, UPCAST)
            if RECURRENT:
                w = tl.load(weights + stride_gate, mask=mask_w, other=0.0)
                candidate += dot_rows(w, x, DOT_TOKEN, UPCAST)
                w = tl.load(weights + 2 * stride_gate, mask=mask_w, other=0.0)
                output += dot_rows(w, x, DOT_TOKEN, UPCAST)
    unit = mask_n[None, :]  # [1, BLOCK_N]
    of_hidden = ((request * shape.draft_len + step) * GATES * rank)[:, None] + offs_n[None, :]  # [BLOCK_R, BLOCK_N]
    of_token = (row * GATES * rank)[:, None] + offs_n[None, :]
    gate = tl.trans(gate) + _rest(projected + of_hidden, table, of_token, alive, known, unit)
    gate = sigmoid(gate)
    if RECURRENT:
        of_hidden += rank
        of_token += rank
        candidate = tl.trans(candidate) + _rest(projected + of_hidden, table, of_token, alive, known, unit)
        of_hidden += rank
        of_token += rank
        output = tl.trans(output) + _rest(projected + of_hidden, table, of_token, alive, known, unit)
    own = (request * rank)[:, None] + offs_n[None, :]
    written = (request < num_requests)[:, None] & unit
    if RECURRENT:
        state = tl.load(before + own, mask=has_state[:, None] & unit, other=0.0)
        tl.store(after + own, gate * state + (1.0 - gate) * tanh(candidate), mask=written)
        tl.store(given + own, tanh(output), mask=written)
    else:
        x = tl.load(w1 + (row * shape.w1_row)[:, None] + offs_n[None, :], mask=known[:, None] & unit, other=0.0)
        tl.store(given + own, gate * x.to(tl.float32), mask=written)


@triton.jit
def _rest(projected, table, of_token, alive, known, unit):
    """The parts ``[BLOCK_R, BLOCK_N]`` of a gate that are not computed in the step: the hidden state's, the table's."""
    value = tl.load(projected, mask=alive[:, None] & unit, other=0.0)
    if table is not None:
        value += tl.load(table + of_token, mask=known[:, None] & unit, other=0.0)
    return value


@triton.jit
def tanh(x):
    """From an exponential that cannot overflow; a NaN stays one."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def walk_finish_kernel(
    block,  # Block
    draft,  # Draft, written; of its logits what the steps could not know
    confidence,  # Confidence, or None: there is none
    temperature,  # [requests] float32
    stats,  # Stats
    shape,  # FinishShape
    TILES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Write a step's token, confidence (eq. 7), margin and log-sum-exp, and what its scores lack.

    Grid: (requests * draft_len,). A program sees from the keys before its own whether the block got so far.
    """
    request = tl.program_id(0).to(tl.int64) // shape.draft_len
    step = tl.program_id(0) % shape.draft_len
    place = tl.program_id(0)
    offs_g = tl.arange(0, BLOCK_G)
    key = tl.load(block.keys + request * shape.draft_len + offs_g, mask=offs_g <= step, other=no_key())
    best, token = unpacked(key)
    anchor = tl.load(block.anchor + request)
    begins = (anchor >= 0) & (anchor < shape.num_anchors)
    good = tl.sum(((offs_g < step) & is_good(best)).to(tl.int32))
    before = begins & (good == step)
    alive = before & (tl.sum(((offs_g == step) & is_good(best)).to(tl.int32)) > 0)
    own = tl.sum(tl.where(offs_g == step, token, 0))  # in the draft's vocabulary
    target = own
    if block.vocabulary is not None:
        target = tl.load(block.vocabulary.target_ids + own, mask=alive, other=-1)
    tl.store(draft.tokens + place, tl.where(alive, target, -1))

    if confidence is not None:
        logit = tl.load(confidence.bias).to(tl.float32)
        logit += dot_hidden(confidence, request, step, shape, BLOCK_H)
        row = _row_before(block.vocabulary, step, anchor, begins, before, offs_g, token)
        if confidence.table is not None:
            logit += tl.load(confidence.table + row, mask=row >= 0, other=0.0)
        elif confidence.w1 is not None:
            offs_k = tl.arange(0, BLOCK_K)
            mask_k = offs_k < shape.rank
            x = tl.load(confidence.w1 + row * shape.w1_row + offs_k, mask=mask_k & (offs_k * 0 + row >= 0), other=0.0)
            w = tl.load(confidence.weight + shape.hidden_size + offs_k, mask=mask_k, other=0.0).to(tl.float32)
            logit += tl.sum(x.to(tl.float32) * w)
        logit = tl.where(alive & (logit == logit), logit, float("-inf"))
        tl.store(draft.confidence_logits + place, logit)
        tl.store(draft.confidence + place, sigmoid(logit))

    greedy = tl.load(temperature + request) <= 0.0
    at = tl.zeros([1], tl.int64) + place
    here = at >= 0
    if stats.margin is not None:
        first = load_plane(plane_at(stats.margin, 0, shape.plane), at, here, float("-inf"), shape.num_tiles, TILES)
        second = load_plane(plane_at(stats.margin, 1, shape.plane), at, here, float("-inf"), shape.num_tiles, TILES)
        total = load_plane(plane_at(stats.margin, 2, shape.plane), at, here, 0.0, shape.num_tiles, TILES)
        top, column = tl.max(first, axis=1, return_indices=True, return_indices_tie_break_left=True)
        others = tl.where(tl.arange(0, TILES)[None, :] == column[:, None], second, first)
        reference = tl.where(is_good(top), top, 0.0)
        gap = 1.0 - tl.exp(tl.max(others, axis=1) - reference)
        mass = _merged(first, total, reference)
        tl.store(draft.margin + at, tl.where(alive, gap / tl.where(mass > 0.0, mass, 1.0), 0.0))
    if stats.lse is not None:
        first = load_plane(plane_at(stats.lse, 0, shape.plane), at, here, float("-inf"), shape.num_tiles, TILES)
        total = load_plane(plane_at(stats.lse, 1, shape.plane), at, here, 0.0, shape.num_tiles, TILES)
        top = tl.max(first, axis=1)
        reference = tl.where(is_good(top), top, 0.0)
        mass = _merged(first, total, reference)
        lse = tl.where(greedy, 0.0, reference + tl.log(tl.where(mass > 0.0, mass, 1.0)))
        tl.store(draft.lse + at, tl.where(alive, lse, float("-inf")))

    if draft.logits is not None:
        scores = draft.logits + request * shape.scores_request + step.to(tl.int64) * shape.scores_step
        if alive & greedy:
            tl.store(scores + own, tl.zeros([], tl.float32).to(draft.logits.dtype.element_ty))
        if before & ~alive:  # tiles without the number that spoilt the row hold scores
            for start in range(0, shape.vocab_size, BLOCK_V):
                offs_v = start + tl.arange(0, BLOCK_V)
                nothing = tl.full([BLOCK_V], float("-inf"), tl.float32).to(draft.logits.dtype.element_ty)
                tl.store(scores + offs_v, nothing, mask=offs_v < shape.vocab_size)


@triton.jit
def dot_hidden(confidence, request, step, shape, BLOCK_H: tl.constexpr):
    """The hidden state's part of a step's confidence, but for the bias."""
    total = tl.zeros([BLOCK_H], tl.float32)
    hidden = confidence.hidden + request * shape.hidden_request + step.to(tl.int64) * shape.hidden_step
    for start in range(0, shape.hidden_size, BLOCK_H):
        offs_h = start + tl.arange(0, BLOCK_H)
        mask_h = offs_h < shape.hidden_size
        x = tl.load(hidden + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        total += x * tl.load(confidence.weight + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    return tl.sum(total)


@triton.jit
def _merged(tile_max, tile_sum, reference):
    """Sums of tiles ``[rows, tiles]``, relative to ``reference`` ``[rows]`` instead of each tile's maximum."""
    weight = tile_sum * tl.exp(tile_max - reference[:, None])
    return tl.sum(tl.where(tile_sum > 0.0, weight, 0.0), axis=1)


@triton.jit
def _row_before(vocabulary, step, anchor, begins, before, offs_g, token):
    """The row of W1 of the token before a step, -1 where there is none."""
    row = tl.sum(tl.where(offs_g + 1 == step, token, 0))
    first = anchor
    if vocabulary is not None:
        if vocabulary.draft_ids is None:
            row = tl.load(vocabulary.target_ids + row, mask=before & (step > 0), other=-1)
        else:
            first = tl.load(vocabulary.draft_ids + anchor, mask=begins, other=-1).to(tl.int64)
    return tl.where(before, tl.where(step == 0, first, row), -1)
