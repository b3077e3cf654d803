"""The levels of drafted trees: what may follow a level's nodes, and the scores that the tree's children came from.

A level takes three launches. ``tree_level_kernel`` scores what may follow each node and keeps the largest scores of
each tile; ``tree_merge_kernel`` merges a node's tiles into its children and what they are worth; ``tree_select_kernel``
of :mod:`dspark.kernels.draft.tree_choice` keeps the best children of the level.

After a node of depth ``d`` with token ``x`` come scores ``U_{d+1} + W2 . W1[x]`` (the paper's eq. 4 and 5), over the
temperature where it is above 0. Its children are the largest of them, under ``coupled`` and ``recursive`` with noise
added (Gumbel-top-k; Kool et al., arXiv 1903.06059).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.draft.walk import dot_rows, load_rows
from dspark.kernels.philox import gumbel
from dspark.kernels.sample.rows import inverse_temperature, is_good, merge_sums


@triton.constexpr_function
def greedy_step():
    """Between the scores of a greedy node's children, see ``dspark.ops.draft.tree_reference``."""
    return 64.0


@triton.constexpr_function
def log_units():
    """Units of a logarithm of a chance, see there."""
    return 65536.0


@triton.jit(do_not_specialize=["level", "num_requests", "nodes", "first"])
def tree_level_kernel(
    base,  # [num_requests, draft_len, vocab_size]
    anchor,  # [num_requests] int64, the nodes of level 0
    head,  # MarkovHead, or None
    sampling,  # NodeSampling
    entries,  # Entries, of which the nodes of another level are those from ``first`` on
    tiles,  # Tiles, written
    stride_base_request,
    stride_base_depth,
    stride_entries,
    stride_head,  # HeadStrides, or None
    level,
    num_requests,
    nodes,  # of a request that are scored: 1 without a head, as all are scored alike
    first,
    vocab_size,
    rank,
    num_tiles,
    RECURSIVE: tl.constexpr,
    STREAM: tl.constexpr,
    DOT: tl.constexpr,  # see dot_rows of dspark.kernels.draft.walk
    UPCAST: tl.constexpr,
    HOLD: tl.constexpr,  # a program holds its tile of W2, for all requests
    BRANCHING: tl.constexpr,
    REQUESTS: tl.constexpr,  # requests in a block of rows
    NODES: tl.constexpr,  # nodes of each; they share base logits and noise
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Each tile's largest scores of what follows the nodes of a level, in order; equal ones by their tokens.

    Grid: (tiles, blocks of rows, or 1 with a head: W2 is then read once per level). A row is a node that is scored.
    """
    BLOCK_R: tl.constexpr = REQUESTS * NODES
    level = level.to(tl.int64)
    tile = tl.program_id(0)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < vocab_size
    parts = tl.cdiv(nodes, NODES)
    blocks = tl.cdiv(num_requests, REQUESTS) * parts
    w2 = None
    if HOLD:
        w2 = load_rows(head.w2, stride_head.w2, offs_v, mask_v, 0, rank, BLOCK_K)
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        owner = ((block // parts) * REQUESTS + tl.arange(0, REQUESTS)).to(tl.int64)  # [REQUESTS]
        row = tl.arange(0, BLOCK_R)
        request = ((block // parts) * REQUESTS + row // NODES).to(tl.int64)  # [BLOCK_R]
        node = (block % parts) * NODES + row % NODES
        inside = (request < num_requests) & (node < nodes)
        alive = inside
        if head is not None:
            token = _tokens_of_level(request, node, inside, level, first, anchor, entries, stride_entries)
            alive = (token >= 0) & (token < vocab_size)
        scores = tl.load(
            base + (owner * stride_base_request + level * stride_base_depth)[:, None] + offs_v[None, :],
            mask=(owner < num_requests)[:, None] & mask_v[None, :],
            other=float("-inf"),
        )  # [REQUESTS, BLOCK_V]
        scores = _of_nodes(scores.to(tl.float32), REQUESTS, NODES, BLOCK_V)  # [BLOCK_R, BLOCK_V]
        if head is not None:
            scores += _bias(w2, alive, token, offs_v, mask_v, head, stride_head, rank, DOT, UPCAST, BLOCK_K)
        scores = tl.where(alive[:, None] & mask_v[None, :], scores, float("-inf"))
        if sampling.temperature is not None:
            temperature = tl.load(sampling.temperature + request, mask=inside, other=0.0)
            sampled = alive & (temperature > 0.0)
            scores *= inverse_temperature(temperature)[:, None]
        # A NaN fails every comparison; as +inf it wins the maximum and marks the row.
        scores = tl.where(scores < float("inf"), scores, float("inf"))
        if sampling.seed is not None:
            num_sampled = tl.sum(sampled.to(tl.int32))
            if num_sampled > 0:
                seed = tl.load(sampling.seed + owner, mask=owner < num_requests, other=0)
                anchor_at = tl.load(sampling.position + owner, mask=owner < num_requests, other=0)
                salt = anchor_at * 0
                if RECURSIVE:
                    salt = anchor_at
                noise = gumbel(seed, anchor_at + level + 1, salt, tile * BLOCK_V, STREAM, BLOCK_V)
                noise = _of_nodes(noise, REQUESTS, NODES, BLOCK_V)
                scores = tl.where(sampled[:, None], scores + noise, scores)
        at = request * nodes + node
        if not RECURSIVE:
            top = tl.max(scores, axis=1)
            good = is_good(top)
            weight = tl.exp(scores - tl.where(good, top, 0.0)[:, None])
            mass = tl.sum(tl.where(good[:, None], weight, 0.0), axis=1)
            tl.store(tiles.sums + at * num_tiles + tile, mass, mask=inside)
        for place in range(BRANCHING):
            best, column = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
            out = (at * BRANCHING + place) * num_tiles + tile
            tl.store(tiles.top + out, best, mask=inside)
            tl.store(tiles.columns + out, tile * BLOCK_V + column, mask=inside)
            scores = tl.where(tl.arange(0, BLOCK_V)[None, :] == column[:, None], float("-inf"), scores)


@triton.jit(do_not_specialize=["level", "first", "num_requests", "nodes", "first_row", "scored"])
def tree_merge_kernel(
    anchor,  # as for tree_level_kernel
    entries,  # Entries; what the anchors are worth is 0 and not read
    tiles,  # Tiles, of tree_level_kernel
    acceptance,  # [num_requests or 1, draft_len, BRANCHING] float32, or None: the default; read if RECURSIVE
    children,  # Children, written from ``first_row`` on
    stride_entries,
    stride_acceptance_request,
    stride_child_request,
    level,
    first,
    num_requests,
    nodes,
    first_row,
    scored,  # nodes of a request that were scored
    vocab_size,
    num_tiles,
    RECURSIVE: tl.constexpr,  # children are worth what the chances of their places say
    BRANCHING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """The children of some nodes, and the logarithms of what they are worth.

    Grid: (blocks of ``BLOCK_R`` nodes of a level,). A child's worth is its parent's times the softmax of its score over
    all that may follow, or under ``recursive`` (Sequoia, arXiv 2402.12374, section 3.1) the chance of its place.
    """
    place = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    inside = place < num_requests * nodes
    request = (place // nodes).to(tl.int64)
    node = place % nodes
    parent = _tokens_of_level(request, node, inside, level, first, anchor, entries, stride_entries)
    above = tl.load(
        entries.worth + request * stride_entries + first + node, mask=inside & (place * 0 + level > 0), other=0.0
    )
    exists = (parent >= 0) & (parent < vocab_size)
    row = request * scored + tl.minimum(node, scored - 1)
    tile = tl.arange(0, TILES)[None, :]
    mask = inside[:, None] & (tile < num_tiles)
    best = tl.load(
        tiles.top + (row * BRANCHING * num_tiles)[:, None] + tile, mask=mask, other=float("-inf")
    )  # [BLOCK_R, TILES]
    top = tl.max(best, axis=1)
    good = is_good(top)
    if not RECURSIVE:
        mass = tl.load(tiles.sums + (row * num_tiles)[:, None] + tile, mask=mask, other=0.0)
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
        column = tl.load(tiles.columns + of_tile, mask=inside, other=-1)
        more = inside & (index * 0 + rank + 1 < BRANCHING)
        following = tl.load(tiles.top + of_tile + num_tiles, mask=more, other=float("-inf"))
        best = tl.where(here, following[:, None], best)
        taken += here.to(tl.int32)
        found = exists & good & (value > float("-inf"))
        if RECURSIVE:
            if acceptance is None:
                chance = chance * tl.where(rank == 0, 0.7, 0.3)
            else:
                stated = acceptance + request * stride_acceptance_request + level * BRANCHING + rank
                chance = tl.minimum(chance, tl.maximum(tl.load(stated, mask=inside, other=0.0), 0.0))
            units = tl.floor(tl.log(tl.where(chance > 0.0, chance, 1.0)) * log_units() + 0.5)
            worth = tl.where(chance > 0.0, units / log_units(), float("-inf"))
        else:
            score = tl.where(found, value, 0.0) - tl.where(found, top, 0.0)
            worth = tl.where(found, tl.minimum(score - log_total, 0.0), float("-inf"))
        child = node * BRANCHING + rank
        out = request * stride_child_request + first_row * BRANCHING + child
        tl.store(children.token + out, tl.where(found, column, -1), mask=inside)
        tl.store(children.worth + request * (nodes * BRANCHING) + child, above + worth, mask=inside)


@triton.jit(do_not_specialize=["num_places"])
def tree_scores_kernel(
    base,  # as for tree_level_kernel
    head,  # MarkovHead, or None
    sampling,  # NodeSampling, of which the temperature is read
    tree,  # Tree, of tree_build_kernel
    row,  # [num_requests, places] int32, of the same
    child,  # Children.token, of tree_merge_kernel
    out,  # [num_requests, places, vocab_size] float32, written
    stride_base_request,
    stride_base_depth,
    stride_head,  # HeadStrides, or None
    stride_child_request,
    stride_out_request,
    stride_out_node,
    num_places,  # of all requests
    places,
    vocab_size,
    rank,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
    HOLD: tl.constexpr,
    BRANCHING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """The scores that each node's children were sampled from, by the operations of ``tree_level_kernel``.

    They are computed again rather than kept, as most of the nodes that were scored are not in the tree. Grid: (tiles,
    blocks of ``BLOCK_R`` places, or 1 with a head).
    """
    tile = tl.program_id(0)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < vocab_size
    w2 = None
    if HOLD:
        w2 = load_rows(head.w2, stride_head.w2, offs_v, mask_v, 0, rank, BLOCK_K)
    for start in range(tl.program_id(1) * BLOCK_R, num_places, tl.num_programs(1) * BLOCK_R):
        place = start + tl.arange(0, BLOCK_R)
        inside = place < num_places
        request = (place // places).to(tl.int64)
        row_of = tl.load(row + place, mask=inside, other=-1)
        alive = row_of >= 0
        temperature = tl.load(sampling.temperature + request, mask=alive, other=0.0)
        sampled = alive & (temperature > 0.0)
        greedy = alive & (temperature <= 0.0)
        scores = tl.full([BLOCK_R, BLOCK_V], float("-inf"), tl.float32)
        if tl.sum(sampled.to(tl.int32)) > 0:
            depth = tl.load(tree.depth + place, mask=sampled, other=0)
            logits = tl.load(
                base + (request * stride_base_request + depth * stride_base_depth)[:, None] + offs_v[None, :],
                mask=sampled[:, None] & mask_v[None, :],
                other=float("-inf"),
            ).to(tl.float32)  # [BLOCK_R, BLOCK_V]
            if head is not None:
                token = tl.load(tree.tokens + place, mask=sampled, other=-1)
                logits += _bias(w2, sampled, token, offs_v, mask_v, head, stride_head, rank, DOT, UPCAST, BLOCK_K)
            logits *= inverse_temperature(temperature)[:, None]
            scores = tl.where(sampled[:, None], logits, scores)
        if tl.sum(greedy.to(tl.int32)) > 0:
            for rank_of_child in range(BRANCHING):
                chosen = tl.load(
                    child + request * stride_child_request + row_of * BRANCHING + rank_of_child, mask=greedy, other=-1
                )
                certain = greedy[:, None] & (chosen[:, None] == offs_v[None, :])
                scores = tl.where(certain, -greedy_step() * rank_of_child, scores)
        at = request * stride_out_request + (place % places).to(tl.int64) * stride_out_node
        tl.store(out + at[:, None] + offs_v[None, :], scores, mask=inside[:, None] & mask_v[None, :])


@triton.jit
def _tokens_of_level(request, node, mask, level, first, anchor, entries, stride_entries):
    """The nodes' tokens, int64; -1 where there is none."""
    begins = mask & (node * 0 + level == 0)
    root = tl.load(anchor + request, mask=begins, other=-1)
    later = tl.load(
        entries.token + request * stride_entries + first + node, mask=mask & (node * 0 + level > 0), other=-1
    )
    return tl.where(begins, root, later.to(tl.int64))


@triton.jit
def _bias(
    w2, alive, token, offs_v, mask_v, head, stride_head, rank, DOT: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What the tokens add to a tile of scores, ``W2 . W1[token]`` ``[tokens, tile]``; ``w2`` is its tile if held."""
    there = alive & (token >= 0)
    if w2 is not None:
        x = load_rows(head.w1, stride_head.w1, token, there, 0, rank, BLOCK_K)
        return tl.trans(dot_rows(w2, x, DOT, UPCAST))
    else:
        bias = tl.zeros([offs_v.shape[0], token.shape[0]], tl.float32)
        for start in range(0, rank, BLOCK_K):
            part = load_rows(head.w2, stride_head.w2, offs_v, mask_v, start, rank, BLOCK_K)
            x = load_rows(head.w1, stride_head.w1, token, there, start, rank, BLOCK_K)
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
