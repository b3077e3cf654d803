"""Which children of a level's nodes are kept, and the tree of the best of all levels: sorting by counting who is ahead.

Of a level, its best children are kept as *entries*, in order of what they are worth. One that is not among the best
``N - 1`` of its level cannot be a node: the anchor is worth more than all of them, and what is below an entry is not
worth more than it is. So no more are kept, and a request has few enough entries that each can be compared with every
other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["level", "nodes", "first", "held", "first_row", "kept", "next_nodes"])
def tree_select_kernel(
    anchor,  # [num_requests] int64
    children,  # Children, of tree_merge_kernel, from ``first_row`` on
    entries,  # Entries, written from ``first + held`` on
    stride_child_request,
    stride_entries,
    level,
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
) -> None:
    """The best children of a level, in order of what they are worth, equals as they came.

    Grid: (requests,). A child's place is how many of the level's are ahead of it.
    """
    request = tl.program_id(0).to(tl.int64)
    candidates = nodes * BRANCHING
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < candidates
    of_level = children.worth + request * candidates
    worth = tl.load(of_level + offs_c, mask=mask_c, other=float("-inf"))  # [BLOCK_C]
    rank = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, candidates, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(of_level + other, mask=other < candidates, other=float("-inf"))
        ahead = _ahead(theirs, other, worth, offs_c) & (other < candidates)[None, :]
        rank += tl.sum(ahead.to(tl.int32), axis=1)
    taken = mask_c & (rank < kept)
    chosen = children.token + request * stride_child_request + first_row * BRANCHING
    token = tl.load(chosen + offs_c, mask=taken, other=-1)
    base = request * stride_entries
    out = base + first + held + rank
    tl.store(entries.token + out, token, mask=taken)
    tl.store(entries.worth + out, worth, mask=taken)
    tl.store(entries.parent + out, first + offs_c // BRANCHING, mask=taken)
    tl.store(entries.depth + out, tl.zeros([BLOCK_C], tl.int32) + level + 1, mask=taken)
    if entries.row is not None:
        tl.store(entries.row + out, tl.where(rank < next_nodes, first_row + nodes + rank, -1), mask=taken)
    if level == 0:
        root = tl.load(anchor + request)
        root = tl.where(root < vocab_size, root, -1)
        tl.store(entries.token + base, root.to(tl.int32))
        tl.store(entries.worth + base, 0.0)
        tl.store(entries.parent + base, -1)
        tl.store(entries.depth + base, 0)
        if entries.row is not None:
            tl.store(entries.row + base, 0)


@triton.jit
def tree_build_kernel(
    entries,  # Entries, of tree_select_kernel
    budget,  # [num_requests] int64, or None
    tree,  # Tree, written
    row,  # [num_requests, places] int32, written, or None: the entries' rows, by node
    num_entries,  # of a request
    places,
    draft_len,
    WORDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The tree of a request's best entries: the places of all are found first, then those that hold no token go.

    Grid: (requests,). A node's ancestors are found by following parents, one depth at a time.
    """
    request = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < num_entries
    base = request * num_entries
    worth = tl.load(entries.worth + base + offs_e, mask=mask_e, other=float("-inf"))  # [BLOCK_E]
    token = tl.load(entries.token + base + offs_e, mask=mask_e, other=-1)
    place = tl.zeros([BLOCK_E], tl.int32)
    number = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_entries, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(entries.worth + base + other, mask=other < num_entries, other=float("-inf"))
        held = tl.load(entries.token + base + other, mask=other < num_entries, other=-1)
        ahead = _ahead(theirs, other, worth, offs_e) & (other < num_entries)[None, :]
        place += tl.sum(ahead.to(tl.int32), axis=1)
        number += tl.sum((ahead & (held >= 0)[None, :]).to(tl.int32), axis=1)
    allowed = places
    if budget is not None:
        allowed = tl.minimum(tl.maximum(tl.load(budget + request), 1), places)
    begins = token * 0 + tl.load(entries.token + base) >= 0  # by each entry: masks are blocks
    exists = mask_e & (token >= 0) & (place < allowed) & (worth > float("-inf")) & begins
    number = tl.where(exists, number, -1)
    total = tl.sum(exists.to(tl.int32), axis=0)
    parent = tl.load(entries.parent + base + offs_e, mask=exists, other=-1)
    above = tl.where(parent >= 0, tl.gather(number, tl.maximum(parent, 0), 0), -1)
    out = request * places + number
    tl.store(tree.tokens + out, token.to(tl.int64), mask=exists)
    tl.store(tree.parents + out, above.to(tl.int64), mask=exists)
    depth = tl.load(entries.depth + base + offs_e, mask=exists, other=-1)
    tl.store(tree.depth + out, depth.to(tl.int64), mask=exists)
    tl.store(tree.num_nodes + request, total.to(tl.int64))
    if row is not None:
        tl.store(row + out, tl.load(entries.row + base + offs_e, mask=exists, other=-1), mask=exists)

    node = tl.arange(0, BLOCK_N)
    at = request * places + node
    empty = (node >= total) & (node < places)
    nothing = tl.zeros([BLOCK_N], tl.int64) - 1
    tl.store(tree.tokens + at, nothing, mask=empty)
    tl.store(tree.parents + at, nothing, mask=empty)
    tl.store(tree.depth + at, nothing, mask=empty)
    if row is not None:
        tl.store(row + at, nothing.to(tl.int32), mask=empty)
    tl.debug_barrier()  # the parents are read below, by whatever thread
    parents = tl.load(tree.parents + at, mask=node < total, other=-1).to(tl.int32)  # [BLOCK_N]
    for word in tl.static_range(WORDS):
        current = tl.where(node < total, node, -1)
        bits = tl.zeros([BLOCK_N], tl.int64)
        for _ in range(draft_len + 1):
            here = (current >= 0) & (current // 64 == word)
            bits |= tl.where(here, 1, 0).to(tl.int64) << (tl.maximum(current, 0) % 64)
            current = tl.where(current >= 0, tl.gather(parents, tl.maximum(current, 0), 0), -1)
        tl.store(tree.ancestors + at * WORDS + word, bits, mask=node < places)


@triton.jit
def _ahead(theirs, other, worth, own):
    """Whether those at ``other`` ``[m]`` come before those at ``own`` ``[n]``, ``[n, m]``."""
    more = theirs[None, :] > worth[:, None]
    return more | ((theirs[None, :] == worth[:, None]) & (other[None, :] < own[:, None]))
