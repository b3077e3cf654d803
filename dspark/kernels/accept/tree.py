"""Verdict over a tree by bit arithmetic: which nodes lie on the accepted path, and what they emit.

A node is kept if its token is what was decided at its parent; it is accepted if it and all its ancestors are kept, that
is if ``ancestors & ~kept == 0``; the deepest accepted node is where the path ends. One program per request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.accept.chain import BAD_LOGITS, log_probability


@triton.jit(do_not_specialize=["num_rows", "nodes"])
def tree_verdict_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    tokens_ptr,  # [num_rows] int64
    query_start_ptr,  # [requests + 1] int64
    temperature_ptr,  # [requests] float32
    parents_ptr,  # [requests, nodes] int64
    ancestors_ptr,  # [requests, nodes, WORDS] int64
    depth_ptr,  # [requests, nodes] int64
    stats_ptr,  # planes of rows.py, from row_statistics_kernel
    stride_plane,
    drawn_ptr,  # [requests, nodes] int64, the token that the target draws at each node, -1 where the row is bad
    out_tokens_ptr,  # [requests, nodes] int64, written, as are those below
    out_path_ptr,  # [requests, nodes] int64
    out_logprobs_ptr,  # [requests, nodes] float32
    out_num_ptr,  # [requests] int64
    out_status_ptr,  # [requests] int64
    num_rows,
    num_tiles,
    nodes,
    RAW: tl.constexpr,
    WORDS: tl.constexpr,
    NODES_P2: tl.constexpr,
    TILES: tl.constexpr,
):
    """Accept nodes whose token is what the target draws at their parent."""
    request, node, slot, first, exists = nodes_of_tree(query_start_ptr, num_rows, nodes, NODES_P2)
    token = tl.load(tokens_ptr + first + node, mask=exists, other=-1)
    drawn = tl.load(drawn_ptr + slot, mask=exists, other=-1)
    parent = tl.load(parents_ptr + slot, mask=exists, other=-1)
    is_child = exists & (parent >= 0) & (parent < node)
    wanted = tl.load(drawn_ptr + request * nodes + parent, mask=is_child, other=-1)
    kept = is_child & (token >= 0) & (token == wanted)
    end, on_path = follow(
        kept | (exists & (node == 0)), request, node, slot, exists, ancestors_ptr, depth_ptr, nodes, WORDS, NODES_P2
    )  # fmt: skip
    emit_path(
        request, node, first, exists, end, on_path, drawn, logits_ptr, stride_logits_row, temperature_ptr, stats_ptr,
        stride_plane, out_tokens_ptr, out_path_ptr, out_logprobs_ptr, out_num_ptr, out_status_ptr, num_tiles, nodes,
        RAW, TILES,
    )  # fmt: skip


@triton.jit
def nodes_of_tree(query_start_ptr, num_rows, nodes, NODES_P2: tl.constexpr):
    """``(request, node, slot, first row, exists)`` of the program's request; nodes and slots are ``[NODES_P2]``."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES_P2)
    first = tl.load(query_start_ptr + request)
    length = tl.minimum(tl.load(query_start_ptr + request + 1), num_rows) - first
    return request, node, request * nodes + node, first, (node < nodes) & (node < length)


@triton.jit
def union(holds, node, WORD: tl.constexpr):
    """Word ``WORD`` of the set of nodes ``[NODES_P2]`` where ``holds``."""
    bit = tl.where(holds & (node // 64 == WORD), 1, 0).to(tl.int64) << (node % 64)
    return tl.sum(bit, axis=0)  # of different bits


@triton.jit
def follow(
    kept, request, node, slot, exists, ancestors_ptr, depth_ptr, nodes, WORDS: tl.constexpr, NODES_P2: tl.constexpr
):  # fmt: skip
    """The node where the accepted path ends (0 if nothing is kept), and which nodes lie on it."""
    accepted = kept
    for word in tl.static_range(WORDS):
        above = tl.load(ancestors_ptr + slot * WORDS + word, mask=exists, other=0)
        accepted &= (above & ~union(kept, node, word)) == 0
    depth = tl.maximum(tl.load(depth_ptr + slot, mask=exists, other=0), 0)
    best = tl.max(tl.where(accepted, depth * NODES_P2 + (NODES_P2 - 1 - node), -1), axis=0)
    end = tl.where(best >= 0, NODES_P2 - 1 - best % NODES_P2, 0)
    word = tl.load(ancestors_ptr + (request * nodes + end) * WORDS + node // 64, mask=exists, other=0)
    return end, exists & ((((word >> (node % 64)) & 1) == 1) | (node == 0))


@triton.jit
def emit_path(
    request, node, first, exists, end, on_path, token, logits_ptr, stride_logits_row, temperature_ptr, stats_ptr,
    stride_plane, out_tokens_ptr, out_path_ptr, out_logprobs_ptr, out_num_ptr, out_status_ptr, num_tiles, nodes,
    RAW: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the verdict: the tokens that the nodes of the path give, or a bad status where the last one's is -1."""
    present = tl.max(exists.to(tl.int32), axis=0)
    good = tl.sum(tl.where((node == end) & exists & (token >= 0), 1, 0), axis=0)
    rank = tl.cumsum(on_path.to(tl.int32), axis=0) - 1
    number = tl.where(present > 0, tl.sum(on_path.to(tl.int32), axis=0) - 1 + good, 0)
    emitted = on_path & (rank < number)
    # The others fill the places behind, in order.
    place = tl.where(emitted, rank, number + node - tl.cumsum(emitted.to(tl.int32), axis=0))
    mask = node < nodes
    out = request * nodes + place
    tl.store(out_tokens_ptr + out, tl.where(emitted, token, -1).to(tl.int64), mask=mask)
    tl.store(out_path_ptr + out, tl.where(emitted, node, -1).to(tl.int64), mask=mask)
    tl.store(out_logprobs_ptr + out, tl.zeros(node.shape, tl.float32), mask=mask & ~emitted)
    tl.store(out_num_ptr + request, number.to(tl.int64))
    tl.store(out_status_ptr + request, tl.where(good < present, BAD_LOGITS, 0).to(tl.int64))

    one = tl.arange(0, 1)
    temperature = tl.load(temperature_ptr + request + one)
    for i in range(number):
        here = emitted & (rank == i)
        at = tl.sum(tl.where(here, node, 0), axis=0)
        chosen = tl.sum(tl.where(here, token, 0), axis=0)
        logit = tl.load(logits_ptr + (first + at) * stride_logits_row + chosen + one).to(tl.float32)  # [1]
        logprob = log_probability(
            logit, request * nodes + at + one, one == 0, temperature, stats_ptr, stride_plane, num_tiles, RAW, TILES
        )  # fmt: skip
        tl.store(out_logprobs_ptr + request * nodes + i + one, logprob.to(tl.float32))
