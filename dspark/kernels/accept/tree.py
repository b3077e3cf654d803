"""Verdict over a tree by bit arithmetic: which nodes lie on the accepted path, and what they emit.

A node is kept if its token is what was decided at its parent; it is accepted if it and all its ancestors are kept, that
is if ``ancestors & ~kept == 0``; the deepest accepted node is where the path ends. A program takes one request; what it
knows of its nodes is their *place*: ``(request, node, line, first row, exists)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.chain import log_probability


@triton.jit(do_not_specialize=["num_rows", "nodes"])
def tree_verdict_kernel(
    target,  # KernelTarget
    rows,  # KernelRows
    sampling,  # KernelSampling
    tree,  # KernelTree
    stats,  # Statistics of the target's rows
    drawn,  # [requests, nodes] int64, the token that the target draws at each node, -1 where the row is bad
    verdict,  # Verdict, written
    num_rows,
    nodes,
    RAW: tl.constexpr,
    WORDS: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
):
    """Accept nodes whose token is what the target draws at their parent. Grid: (requests,)."""
    place = nodes_of_tree(rows, num_rows, nodes, NODES_P2)
    request, node, line, first, exists = place
    token = tl.load(rows.tokens + first + node, mask=exists, other=-1)
    own = tl.load(drawn + line, mask=exists, other=-1)
    parent = tl.load(tree.parents + line, mask=exists, other=-1)
    is_child = exists & (parent >= 0) & (parent < node)
    wanted = tl.load(drawn + request * nodes + parent, mask=is_child, other=-1)
    kept = is_child & (token >= 0) & (token == wanted)
    end, on_path = follow(place, kept, tree, nodes, WORDS, NODES_P2)
    emit_path(place, end, on_path, own, verdict, target, sampling, stats, nodes, RAW, TILES)


@triton.jit
def nodes_of_tree(rows, num_rows, nodes, NODES_P2: tl.constexpr):
    """The place of the program's nodes; nodes and lines are ``[NODES_P2]``."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES_P2)
    first = tl.load(rows.query_start + request)
    length = tl.minimum(tl.load(rows.query_start + request + 1), num_rows) - first
    return request, node, request * nodes + node, first, (node < nodes) & (node < length)


@triton.jit
def union(holds, node, WORD: tl.constexpr):
    """Word ``WORD`` of the set of nodes ``[NODES_P2]`` where ``holds``."""
    bit = tl.where(holds & (node // 64 == WORD), 1, 0).to(tl.int64) << (node % 64)
    return tl.sum(bit, axis=0)  # of different bits


@triton.jit
def follow(place, kept, tree, nodes, WORDS: tl.constexpr, NODES_P2: tl.constexpr):
    """The node where the accepted path ends (0 if no child is kept), and which nodes lie on it."""
    request, node, line, _, exists = place
    kept = kept | (exists & (node == 0))
    accepted = kept
    for word in tl.static_range(WORDS):
        above = tl.load(tree.ancestors + line * WORDS + word, mask=exists, other=0)
        accepted &= (above & ~union(kept, node, word)) == 0
    depth = tl.maximum(tl.load(tree.depth + line, mask=exists, other=0), 0)
    best = tl.max(tl.where(accepted, depth * NODES_P2 + (NODES_P2 - 1 - node), -1), axis=0)
    end = tl.where(best >= 0, NODES_P2 - 1 - best % NODES_P2, 0)
    above_end = tl.load(tree.ancestors + (request * nodes + end) * WORDS + node // 64, mask=exists, other=0)
    return end, exists & ((((above_end >> (node % 64)) & 1) == 1) | (node == 0))


@triton.jit
def emit_path(
    place, end, on_path, token, verdict, target, sampling, stats, nodes, RAW: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Write the verdict: the tokens that the nodes of the path give, or a bad status where the last one's is -1."""
    request, node, _, first, exists = place
    present = tl.max(exists.to(tl.int32), axis=0)
    good = tl.sum(tl.where((node == end) & exists & (token >= 0), 1, 0), axis=0)
    rank = tl.cumsum(on_path.to(tl.int32), axis=0) - 1
    number = tl.where(present > 0, tl.sum(on_path.to(tl.int32), axis=0) - 1 + good, 0)
    emitted = on_path & (rank < number)
    # The others fill the places behind, in order.
    behind = number + node - tl.cumsum(emitted.to(tl.int32), axis=0)
    mask = node < nodes
    out = request * nodes + tl.where(emitted, rank, behind)
    tl.store(verdict.tokens + out, tl.where(emitted, token, -1).to(tl.int64), mask=mask)
    tl.store(verdict.path + out, tl.where(emitted, node, -1).to(tl.int64), mask=mask)
    tl.store(verdict.logprobs + out, tl.zeros(node.shape, tl.float32), mask=mask & ~emitted)
    tl.store(verdict.num_emitted + request, number.to(tl.int64))
    tl.store(verdict.status + request, tl.where(good < present, 1, 0).to(tl.int64))  # 1 is Status.BAD_LOGITS

    one = tl.arange(0, 1)
    temperature = tl.load(sampling.temperature + request + one)
    for i in range(number):
        here = emitted & (rank == i)
        at = tl.sum(tl.where(here, node, 0), axis=0)
        chosen = tl.sum(tl.where(here, token, 0), axis=0)
        logit = tl.load(target.logits + (first + at) * target.stride + chosen + one).to(tl.float32)  # [1]
        line = request * nodes + at + one
        logprob = log_probability(logit, line, one == 0, temperature, stats, RAW, TILES)
        tl.store(verdict.logprobs + request * nodes + i + one, logprob.to(tl.float32))
