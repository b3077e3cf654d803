"""Which children of a level's nodes are kept, and the tree of the best of all levels: sorting by counting who is ahead.

Of a level, its best children are kept as *entries*, in order of what they are worth. One that is not among the best
``N - 1`` of its level cannot be a node: the anchor is worth more than all of them, and what is below an entry is not
worth more than it is. So no more are kept, and a request has few enough entries that each can be compared with every
other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.sample.rows import NEGATIVE_INFINITY


@triton.jit(do_not_specialize=["slot", "nodes", "first", "held", "first_row", "kept", "next_nodes"])
def tree_select_kernel(
    anchor_ptr,  # [num_requests] int64
    child_ptr,  # of tree_merge_kernel, from ``first_row`` on
    stride_child_request,
    child_worth_ptr,
    token_ptr,  # [num_requests, entries] int32, written from ``first + held`` on, as are those below
    worth_ptr,  # float32
    parent_ptr,  # int32, an entry
    depth_ptr,  # int32
    row_ptr,  # int32, where the entry's children are in child_ptr, -1: it has none. Or null
    stride_entries,
    slot,
    nodes,
    first,
    held,  # entries of the level of the parents
    first_row,
    kept,  # entries of this level
    next_nodes,  # of which get children
    vocab_size,
    BRANCHING: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best children of a level, in order of what they are worth, equals as they came."""
    request = tl.program_id(0).to(tl.int64)
    candidates = nodes * BRANCHING
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < candidates
    of_level = child_worth_ptr + request * candidates
    worth = tl.load(of_level + offs_c, mask=mask_c, other=NEGATIVE_INFINITY)  # [BLOCK_C]
    rank = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, candidates, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(of_level + other, mask=other < candidates, other=NEGATIVE_INFINITY)
        ahead = _ahead(theirs, other, worth, offs_c) & (other < candidates)[None, :]
        rank += tl.sum(ahead.to(tl.int32), axis=1)
    taken = mask_c & (rank < kept)
    children = child_ptr + request * stride_child_request + first_row * BRANCHING
    token = tl.load(children + offs_c, mask=taken, other=-1)
    base = request * stride_entries
    out = base + first + held + rank
    tl.store(token_ptr + out, token, mask=taken)
    tl.store(worth_ptr + out, worth, mask=taken)
    tl.store(parent_ptr + out, first + offs_c // BRANCHING, mask=taken)
    tl.store(depth_ptr + out, tl.zeros([BLOCK_C], tl.int32) + slot + 1, mask=taken)
    if row_ptr is not None:
        tl.store(row_ptr + out, tl.where(rank < next_nodes, first_row + nodes + rank, -1), mask=taken)
    if slot == 0:
        anchor = tl.load(anchor_ptr + request)
        anchor = tl.where(anchor < vocab_size, anchor, -1)
        tl.store(token_ptr + base, anchor.to(tl.int32))
        tl.store(worth_ptr + base, 0.0)
        tl.store(parent_ptr + base, -1)
        tl.store(depth_ptr + base, 0)
        if row_ptr is not None:
            tl.store(row_ptr + base, 0)


@triton.jit
def tree_build_kernel(
    token_ptr,  # of tree_select_kernel, as are the four that follow
    worth_ptr,
    parent_ptr,
    depth_ptr,
    row_ptr,
    budget_ptr,  # [num_requests] int64, or null
    out_tokens_ptr,  # [num_requests, places] int64, written, as are those below
    out_parents_ptr,  # [num_requests, places] int64
    out_ancestors_ptr,  # [num_requests, places, WORDS] int64
    out_depth_ptr,  # [num_requests, places] int64
    out_num_ptr,  # [num_requests] int64
    out_row_ptr,  # [num_requests, places] int32, or null: the nodes' row_ptr
    entries,
    places,
    draft_len,
    WORDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The tree of a request's best entries: the places of all are found first, then those that hold no token go."""
    request = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < entries
    base = request * entries
    worth = tl.load(worth_ptr + base + offs_e, mask=mask_e, other=NEGATIVE_INFINITY)  # [BLOCK_E]
    token = tl.load(token_ptr + base + offs_e, mask=mask_e, other=-1)
    place = tl.zeros([BLOCK_E], tl.int32)
    number = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, entries, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(worth_ptr + base + other, mask=other < entries, other=NEGATIVE_INFINITY)
        held = tl.load(token_ptr + base + other, mask=other < entries, other=-1)
        ahead = _ahead(theirs, other, worth, offs_e) & (other < entries)[None, :]
        place += tl.sum(ahead.to(tl.int32), axis=1)
        number += tl.sum((ahead & (held >= 0)[None, :]).to(tl.int32), axis=1)
    allowed = places
    if budget_ptr is not None:
        allowed = tl.minimum(tl.maximum(tl.load(budget_ptr + request), 1), places)
    begins = token * 0 + tl.load(token_ptr + base) >= 0  # by each entry: masks are blocks
    exists = mask_e & (token >= 0) & (place < allowed) & (worth > NEGATIVE_INFINITY) & begins
    number = tl.where(exists, number, -1)
    total = tl.sum(exists.to(tl.int32), axis=0)
    parent = tl.load(parent_ptr + base + offs_e, mask=exists, other=-1)
    above = tl.where(parent >= 0, tl.gather(number, tl.maximum(parent, 0), 0), -1)
    out = request * places + number
    tl.store(out_tokens_ptr + out, token.to(tl.int64), mask=exists)
    tl.store(out_parents_ptr + out, above.to(tl.int64), mask=exists)
    depth = tl.load(depth_ptr + base + offs_e, mask=exists, other=-1)
    tl.store(out_depth_ptr + out, depth.to(tl.int64), mask=exists)
    tl.store(out_num_ptr + request, total.to(tl.int64))
    if out_row_ptr is not None:
        tl.store(out_row_ptr + out, tl.load(row_ptr + base + offs_e, mask=exists, other=-1), mask=exists)

    node = tl.arange(0, BLOCK_N)
    at = request * places + node
    empty = (node >= total) & (node < places)
    nothing = tl.zeros([BLOCK_N], tl.int64) - 1
    tl.store(out_tokens_ptr + at, nothing, mask=empty)
    tl.store(out_parents_ptr + at, nothing, mask=empty)
    tl.store(out_depth_ptr + at, nothing, mask=empty)
    if out_row_ptr is not None:
        tl.store(out_row_ptr + at, nothing.to(tl.int32), mask=empty)
    tl.debug_barrier()  # the parents are read below, by whatever thread
    parents = tl.load(out_parents_ptr + at, mask=node < total, other=-1).to(tl.int32)  # [BLOCK_N]
    for word in tl.static_range(WORDS):
        current = tl.where(node < total, node, -1)
        bits = tl.zeros([BLOCK_N], tl.int64)
        for _ in range(draft_len + 1):
            here = (current >= 0) & (current // 64 == word)
            bits |= tl.where(here, 1, 0).to(tl.int64) << (tl.maximum(current, 0) % 64)
            current = tl.where(current >= 0, tl.gather(parents, tl.maximum(current, 0), 0), -1)
        tl.store(out_ancestors_ptr + at * WORDS + word, bits, mask=node < places)


@triton.jit
def _ahead(theirs, other, worth, own):
    """Whether those at ``other`` ``[m]`` come before those at ``own`` ``[n]``, ``[n, m]``."""
    more = theirs[None, :] > worth[:, None]
    return more | ((theirs[None, :] == worth[:, None]) & (other[None, :] < own[:, None]))
