"""The levels of drafted trees: what may follow a level's nodes, and the scores that the tree's children came from.

A level takes three launches. ``tree_level_kernel`` scores what may follow each node and keeps the largest scores of
each tile; ``tree_merge_kernel`` merges a node's tiles into its children and what they are worth; ``tree_select_kernel``
of :mod:`dspark.kernels.draft.tree_choice` keeps the best children of the level.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.draft.walk import dot_rows, load_rows
from dspark.kernels.philox import gumbel
from dspark.kernels.sample.rows import NEGATIVE_INFINITY, inverse_temperature, is_good, merge_sums

GREEDY_STEP = tl.constexpr(64.0)
"""Between the scores of a greedy node's children, see ``dspark.ops.draft.tree_reference``."""
LOG_UNITS = tl.constexpr(65536.0)
"""Units of a logarithm of a chance, see there."""


@triton.jit(do_not_specialize=["slot", "num_requests", "nodes", "first"])
def tree_level_kernel(
    base_ptr,  # [num_requests, draft_len, vocab_size]
    stride_base_request,
    stride_base_slot,
    anchor_ptr,  # [num_requests] int64, the node of slot 0
    token_ptr,  # [num_requests, entries] int32, of which the nodes of another slot are those from ``first`` on
    stride_entries,
    w1_ptr,  # [vocab_size, rank], or null: no head
    stride_w1_row,
    w2_ptr,  # [vocab_size, rank], or null
    stride_w2_row,
    temperature_ptr,  # [num_requests] float32
    seed_ptr,  # [num_requests] int64
    position_ptr,  # [num_requests] int64 of the anchors
    value_ptr,  # [num_requests * nodes, BRANCHING, num_tiles] float32, written: the largest of each tile
    column_ptr,  # the same, int32, written: their tokens
    sum_ptr,  # [num_requests * nodes, num_tiles] float32, or null, written: sum of exp(score - the tile's largest)
    slot,
    num_requests,
    nodes,  # of a request that are scored: 1 without a head, as all are scored alike
    first,
    vocab_size,
    rank,
    num_tiles,
    HEAD: tl.constexpr,
    DOT: tl.constexpr,  # see dot_rows of dspark.kernels.draft.walk
    SCALED: tl.constexpr,  # some temperature may be above 0
    NOISE: tl.constexpr,
    SALTED: tl.constexpr,
    STREAM: tl.constexpr,
    UPCAST: tl.constexpr,
    HOLD: tl.constexpr,  # a program holds its tile of W2, for all requests
    BRANCHING: tl.constexpr,
    REQUESTS: tl.constexpr,  # requests in a block of rows
    NODES: tl.constexpr,  # nodes of each; they share base logits and noise
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each tile's largest scores of what follows the nodes of a level, in order; equal ones by their tokens."""
    BLOCK_R: tl.constexpr = REQUESTS * NODES
    slot = slot.to(tl.int64)
    tile = tl.program_id(0)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < vocab_size
    parts = tl.cdiv(nodes, NODES)
    blocks = tl.cdiv(num_requests, REQUESTS) * parts
    w2 = None
    if HOLD:
        w2 = load_rows(w2_ptr, stride_w2_row, offs_v, mask_v, 0, rank, BLOCK_K)
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        owner = ((block // parts) * REQUESTS + tl.arange(0, REQUESTS)).to(tl.int64)  # [REQUESTS]
        row = tl.arange(0, BLOCK_R)
        request = ((block // parts) * REQUESTS + row // NODES).to(tl.int64)  # [BLOCK_R]
        node = (block % parts) * NODES + row % NODES
        inside = (request < num_requests) & (node < nodes)
        alive = inside
        if HEAD:
            token = _tokens_of_level(request, node, inside, slot, anchor_ptr, token_ptr, stride_entries, first)
            alive = (token >= 0) & (token < vocab_size)
        base = tl.load(
            base_ptr + (owner * stride_base_request + slot * stride_base_slot)[:, None] + offs_v[None, :],
            mask=(owner < num_requests)[:, None] & mask_v[None, :],
            other=NEGATIVE_INFINITY,
        )  # [REQUESTS, BLOCK_V]
        scores = _of_nodes(base.to(tl.float32), REQUESTS, NODES, BLOCK_V)  # [BLOCK_R, BLOCK_V]
        if HEAD:
            scores += _bias(
                w2, alive, token, offs_v, mask_v, w1_ptr, stride_w1_row, w2_ptr, stride_w2_row, rank, DOT, UPCAST, HOLD,
                BLOCK_R, BLOCK_V, BLOCK_K,
            )  # fmt: skip
        scores = tl.where(alive[:, None] & mask_v[None, :], scores, NEGATIVE_INFINITY)
        if SCALED:
            temperature = tl.load(temperature_ptr + request, mask=inside, other=0.0)
            sampled = alive & (temperature > 0.0)
            scores *= inverse_temperature(temperature)[:, None]
        # A NaN fails every comparison; as +inf it wins the maximum and marks the row.
        scores = tl.where(scores < float("inf"), scores, float("inf"))
        if NOISE:
            num_sampled = tl.sum(sampled.to(tl.int32))
            if num_sampled > 0:
                seed = tl.load(seed_ptr + owner, mask=owner < num_requests, other=0)
                anchor_at = tl.load(position_ptr + owner, mask=owner < num_requests, other=0)
                salt = anchor_at * 0
                if SALTED:
                    salt = anchor_at
                noise = gumbel(seed, anchor_at + slot + 1, salt, tile * BLOCK_V, STREAM, BLOCK_V)
                noise = _of_nodes(noise, REQUESTS, NODES, BLOCK_V)
                scores = tl.where(sampled[:, None], scores + noise, scores)
        at = request * nodes + node
        if sum_ptr is not None:
            top = tl.max(scores, axis=1)
            good = is_good(top)
            weight = tl.exp(scores - tl.where(good, top, 0.0)[:, None])
            mass = tl.sum(tl.where(good[:, None], weight, 0.0), axis=1)
            tl.store(sum_ptr + at * num_tiles + tile, mass, mask=inside)
        for place in range(BRANCHING):
            best, column = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
            out = (at * BRANCHING + place) * num_tiles + tile
            tl.store(value_ptr + out, best, mask=inside)
            tl.store(column_ptr + out, tile * BLOCK_V + column, mask=inside)
            scores = tl.where(tl.arange(0, BLOCK_V)[None, :] == column[:, None], NEGATIVE_INFINITY, scores)


@triton.jit(do_not_specialize=["slot", "num_requests", "nodes", "first", "first_row", "scored"])
def tree_merge_kernel(
    value_ptr,  # of tree_level_kernel, as are the two that follow
    column_ptr,
    sum_ptr,  # read unless STATIC
    anchor_ptr,  # as for tree_level_kernel, as are the two that follow
    token_ptr,
    stride_entries,
    worth_ptr,  # [num_requests, entries] float32; the anchor's, at slot 0, is 0 and not read
    acceptance_ptr,  # [num_requests or 1, draft_len, BRANCHING] float32, or null: the default; read if STATIC
    stride_acceptance_request,
    child_ptr,  # [num_requests, rows, BRANCHING] int32, written from ``first_row`` on: the children, -1 where none is
    stride_child_request,
    child_worth_ptr,  # [num_requests, nodes, BRANCHING] float32, written
    slot,
    num_requests,
    nodes,
    first,
    first_row,
    scored,  # nodes of a request that were scored
    vocab_size,
    num_tiles,
    STATIC: tl.constexpr,  # children are worth what the chances of their places say
    BRANCHING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILES: tl.constexpr,
):
    """The children of some nodes, and the logarithms of what they are worth."""
    place = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    inside = place < num_requests * nodes
    request = (place // nodes).to(tl.int64)
    node = place % nodes
    parent = _tokens_of_level(request, node, inside, slot, anchor_ptr, token_ptr, stride_entries, first)
    above = tl.load(
        worth_ptr + request * stride_entries + first + node, mask=inside & (place * 0 + slot > 0), other=0.0
    )
    exists = (parent >= 0) & (parent < vocab_size)
    row = request * scored + tl.minimum(node, scored - 1)
    tile = tl.arange(0, TILES)[None, :]
    mask = inside[:, None] & (tile < num_tiles)
    best = tl.load(
        value_ptr + (row * BRANCHING * num_tiles)[:, None] + tile, mask=mask, other=NEGATIVE_INFINITY
    )  # [BLOCK_R, TILES]
    top = tl.max(best, axis=1)
    good = is_good(top)
    if not STATIC:
        mass = tl.load(sum_ptr + (row * num_tiles)[:, None] + tile, mask=mask, other=0.0)
        _, total = merge_sums(best, mass)
        total = total.to(tl.float32)
        log_total = tl.log(tl.where(total > 0.0, total, 1.0))
    taken = tl.zeros([BLOCK_R, TILES], tl.int32)  # of each tile
    chance = tl.full([BLOCK_R], 1.0, tl.float32)
    for rank in range(BRANCHING):
        value, at = tl.max(best, axis=1, return_indices=True, return_indices_tie_break_left=True)
        here = tile == at[:, None]
        index = tl.sum(tl.where(here, taken, 0), axis=1)  # of the tile's scores
        of_tile = (row * BRANCHING + index) * num_tiles + at
        column = tl.load(column_ptr + of_tile, mask=inside, other=-1)
        more = inside & (index * 0 + rank + 1 < BRANCHING)
        following = tl.load(value_ptr + of_tile + num_tiles, mask=more, other=NEGATIVE_INFINITY)
        best = tl.where(here, following[:, None], best)
        taken += here.to(tl.int32)
        found = exists & good & (value > NEGATIVE_INFINITY)
        if STATIC:
            if acceptance_ptr is None:
                chance = chance * tl.where(rank == 0, 0.7, 0.3)
            else:
                stated = acceptance_ptr + request * stride_acceptance_request + slot * BRANCHING + rank
                chance = tl.minimum(chance, tl.maximum(tl.load(stated, mask=inside, other=0.0), 0.0))
            units = tl.floor(tl.log(tl.where(chance > 0.0, chance, 1.0)) * LOG_UNITS + 0.5)
            worth = tl.where(chance > 0.0, units / LOG_UNITS, NEGATIVE_INFINITY)
        else:
            score = tl.where(found, value, 0.0) - tl.where(found, top, 0.0)
            worth = tl.where(found, tl.minimum(score - log_total, 0.0), NEGATIVE_INFINITY)
        child = node * BRANCHING + rank
        out = request * stride_child_request + first_row * BRANCHING + child
        tl.store(child_ptr + out, tl.where(found, column, -1), mask=inside)
        tl.store(child_worth_ptr + request * (nodes * BRANCHING) + child, above + worth, mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def tree_scores_kernel(
    base_ptr,  # as for tree_level_kernel
    stride_base_request,
    stride_base_slot,
    w1_ptr,
    stride_w1_row,
    w2_ptr,
    stride_w2_row,
    temperature_ptr,
    tokens_ptr,  # [num_requests, places] int64 of the nodes
    depth_ptr,  # [num_requests, places] int64
    row_ptr,  # [num_requests, places] int32, of tree_build_kernel
    child_ptr,  # of tree_merge_kernel
    stride_child_request,
    out_ptr,  # [num_requests, places, vocab_size] float32, written
    stride_out_request,
    stride_out_node,
    num_slots,
    places,
    vocab_size,
    rank,
    HEAD: tl.constexpr,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
    HOLD: tl.constexpr,
    BRANCHING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The scores that each node's children were sampled from, by the operations of ``tree_level_kernel``.

    They are computed again rather than kept, as most of the nodes that were scored are not in the tree.
    """
    tile = tl.program_id(0)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < vocab_size
    w2 = None
    if HOLD:
        w2 = load_rows(w2_ptr, stride_w2_row, offs_v, mask_v, 0, rank, BLOCK_K)
    for start in range(tl.program_id(1) * BLOCK_R, num_slots, tl.num_programs(1) * BLOCK_R):
        place = start + tl.arange(0, BLOCK_R)
        inside = place < num_slots
        request = (place // places).to(tl.int64)
        row = tl.load(row_ptr + place, mask=inside, other=-1)
        alive = row >= 0
        temperature = tl.load(temperature_ptr + request, mask=alive, other=0.0)
        sampled = alive & (temperature > 0.0)
        greedy = alive & (temperature <= 0.0)
        scores = tl.full([BLOCK_R, BLOCK_V], NEGATIVE_INFINITY, tl.float32)
        if tl.sum(sampled.to(tl.int32)) > 0:
            depth = tl.load(depth_ptr + place, mask=sampled, other=0)
            logits = tl.load(
                base_ptr + (request * stride_base_request + depth * stride_base_slot)[:, None] + offs_v[None, :],
                mask=sampled[:, None] & mask_v[None, :],
                other=NEGATIVE_INFINITY,
            ).to(tl.float32)  # [BLOCK_R, BLOCK_V]
            if HEAD:
                token = tl.load(tokens_ptr + place, mask=sampled, other=-1)
                logits += _bias(
                    w2, sampled, token, offs_v, mask_v, w1_ptr, stride_w1_row, w2_ptr, stride_w2_row, rank, DOT, UPCAST,
                    HOLD, BLOCK_R, BLOCK_V, BLOCK_K,
                )  # fmt: skip
            logits *= inverse_temperature(temperature)[:, None]
            scores = tl.where(sampled[:, None], logits, scores)
        if tl.sum(greedy.to(tl.int32)) > 0:
            for rank_of_child in range(BRANCHING):
                child = tl.load(
                    child_ptr + request * stride_child_request + row * BRANCHING + rank_of_child, mask=greedy, other=-1
                )
                certain = greedy[:, None] & (child[:, None] == offs_v[None, :])
                scores = tl.where(certain, -GREEDY_STEP * rank_of_child, scores)
        out = (request * stride_out_request + (place % places).to(tl.int64) * stride_out_node)[:, None] + offs_v[
            None, :
        ]
        tl.store(out_ptr + out, scores, mask=inside[:, None] & mask_v[None, :])


@triton.jit
def _tokens_of_level(request, node, mask, slot, anchor_ptr, token_ptr, stride_entries, first):
    """The nodes' tokens, int64; -1 where there is none."""
    begins = mask & (node * 0 + slot == 0)
    anchor = tl.load(anchor_ptr + request, mask=begins, other=-1)
    later = tl.load(token_ptr + request * stride_entries + first + node, mask=mask & (node * 0 + slot > 0), other=-1)
    return tl.where(begins, anchor, later.to(tl.int64))


@triton.jit
def _bias(
    w2, alive, token, offs_v, mask_v, w1_ptr, stride_w1_row, w2_ptr, stride_w2_row, rank, DOT: tl.constexpr,
    UPCAST: tl.constexpr, HOLD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What the tokens ``[BLOCK_R]`` add to a tile of scores, ``[BLOCK_R, BLOCK_V]``; ``w2`` is its tile under HOLD."""
    if HOLD:
        x = load_rows(w1_ptr, stride_w1_row, token, alive & (token >= 0), 0, rank, BLOCK_K)
        return tl.trans(dot_rows(w2, x, DOT, UPCAST))
    else:
        bias = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
        for start in range(0, rank, BLOCK_K):
            part = load_rows(w2_ptr, stride_w2_row, offs_v, mask_v, start, rank, BLOCK_K)
            x = load_rows(w1_ptr, stride_w1_row, token, alive & (token >= 0), start, rank, BLOCK_K)
            bias += dot_rows(part, x, DOT, UPCAST)
        return tl.trans(bias)


@triton.jit
def _of_nodes(x, REQUESTS: tl.constexpr, NODES: tl.constexpr, BLOCK_V: tl.constexpr):
    """What requests have, ``[REQUESTS, BLOCK_V]``, for each of their nodes: ``[REQUESTS * NODES, BLOCK_V]``."""
    if NODES == 1:
        return x
    elif REQUESTS == 1:
        return tl.broadcast_to(x, [NODES, BLOCK_V])
    else:
        spread = tl.broadcast_to(x[:, None, :], [REQUESTS, NODES, BLOCK_V])
        return tl.reshape(spread, [REQUESTS * NODES, BLOCK_V])
