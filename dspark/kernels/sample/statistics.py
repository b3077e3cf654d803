"""One pass over rows of logits: everything that a rule needs of them, per tile, with no probability written."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.philox import gumbel
from dspark.kernels.sample.rows import depth_of, inverse_temperature, is_good, is_truncated, locate, plane


@triton.jit(do_not_specialize=["num_lines", "num_rows", "nodes"])
def row_statistics_kernel(
    logits,  # [num_rows, vocab_size], or [requests, drafts, vocab_size] of a draft
    rows,  # Rows; its position is [requests] of the anchors. Without query_start a line is a row, and position is
    # [lines] of the tokens to draw
    sampling,  # Sampling; None of a draft
    tree,  # Tree, or None
    stats,  # Statistics, written
    threshold,  # [lines] float32, the least scaled score that truncation keeps; read in the pass "kept"
    request,  # [lines] int64 where a line is a row, or None: it is the request
    salt,  # [lines] int64 where a line is a row, or None: 0
    stride_logits,  # LogitsStrides
    num_lines,
    num_rows,
    vocab_size,
    nodes,  # lines of a request
    STREAM: tl.constexpr,
    PASS: tl.constexpr,  # "only"; "first" of two; "kept": the second, over what truncation keeps where it is asked for
    DRAFT: tl.constexpr,  # the rows are a draft's scores: no temperature, and no row after the last draft
    NOISE: tl.constexpr,  # perturb the scores of sampled rows and find the best
    SUMS: tl.constexpr,
    SUB_SUMS: tl.constexpr,
    RAW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """What a rule needs of each tile of a row.

    That is the maximum ``m`` of the scores ``x / T`` and where it is, ``sum(exp(x / T - m))``, the same of ``x``
    itself, and the best of ``x / T + g`` with its token, where ``g`` is Gumbel noise.

    The partial sums are those of the online softmax (Milakov and Gimelshein, arXiv 1805.02867), the best perturbed
    score is a draw from the softmax (the Gumbel-max trick: Maddison et al., arXiv 1411.0030). A NaN or +inf makes a
    tile's maximum +inf, which marks the row as bad.

    Grid: (blocks of ``BLOCK_R`` lines, programs per row); the programs of a row take its tiles in turn.
    """
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    num_tiles = stats.num_tiles
    max_ptr = plane(stats, "max")
    line = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if rows.query_start is not None:
        row, owner, node, left = locate(line, num_lines, num_rows, rows, nodes)
        exists = left > 0
        if DRAFT:  # the last node has no draft, whatever rows follow it
            exists = (left > 1) & (node + 1 < nodes)
    else:
        row = line.to(tl.int64)
        exists = line < num_lines
        owner = row
        if request is not None:
            owner = tl.load(request + line, mask=exists, other=-1)
        exists &= owner >= 0
    if PASS == "kept":
        exists &= is_truncated(owner, exists, sampling)
        least = tl.load(threshold + line, mask=exists, other=float("inf"))
    if tl.sum(exists.to(tl.int32)) == 0:
        return

    sampled = exists
    inverse_t = tl.full([BLOCK_R], 1.0, tl.float32)
    if not DRAFT:
        temperature = tl.load(sampling.temperature + owner, mask=exists, other=0.0)
        sampled &= temperature > 0.0
        inverse_t = inverse_temperature(temperature)
    if NOISE:
        if PASS == "first":  # rows to be truncated get their noise in the second pass
            sampled &= ~is_truncated(owner, exists, sampling)
        seed = tl.load(sampling.seed + owner, mask=exists, other=0)
        if rows.query_start is not None:
            depth = depth_of(line, node, exists, tree)
            position = tl.load(rows.position + owner, mask=exists, other=0) + depth + 1
        else:
            position = tl.load(rows.position + line, mask=exists, other=0)
        salts = position * 0
        if salt is not None:
            salts = tl.load(salt + line, mask=exists, other=0)
    row_offset = row * stride_logits.row
    if DRAFT:
        row_offset = owner * stride_logits.request + node * stride_logits.row
    best_so_far = tl.full([BLOCK_R], float("-inf"), tl.float32)

    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        at = line.to(tl.int64) * num_tiles + tile  # [BLOCK_R], of the per-tile results
        if PASS == "kept":
            tile_max = tl.load(max_ptr + at, mask=exists, other=float("-inf"))
            read = exists & (tile_max >= least)  # no other tile holds a kept token
        else:
            read = exists
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = read[:, None] & (offs_v < vocab_size)[None, :]  # [BLOCK_R, BLOCK_V]
        x = tl.load(logits + row_offset[:, None] + offs_v[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        scores = x * inverse_t[:, None]
        if PASS == "kept":
            scores = tl.where(scores >= least[:, None], scores, float("-inf"))
        else:
            # A NaN fails every comparison; as +inf it wins the maximum and marks the tile.
            scores = tl.where(scores < float("inf"), scores, float("inf"))
            tile_max, argmax = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
            tl.store(max_ptr + at, tile_max, mask=exists)
            if not DRAFT:
                _store_token(plane(stats, "argmax") + at, tile * BLOCK_V + argmax, exists)
        if RAW:
            raw_max = tl.max(tl.where(scores < float("inf"), x, float("-inf")), axis=1)
            reference = tl.where(raw_max > float("-inf"), raw_max, 0.0)
            raw_sum = tl.sum(tl.where(scores < float("inf"), tl.exp(x - reference[:, None]), 0.0), axis=1)
            tl.store(plane(stats, "raw_max") + at, raw_max, mask=exists)
            tl.store(plane(stats, "raw_sum") + at, raw_sum, mask=exists)
        usable = is_good(tile_max)
        if SUMS:
            weight = tl.exp(scores - tl.where(usable, tile_max, 0.0)[:, None])
            weight = tl.where(usable[:, None], weight, 0.0)
            sub_sums = tl.sum(tl.reshape(weight, [BLOCK_R, SUBS, BLOCK_S]), axis=2)  # [BLOCK_R, SUBS]
            tl.store(plane(stats, "sum") + at, tl.sum(sub_sums, axis=1), mask=exists)
            if SUB_SUMS:
                at_sub = at[:, None] * SUBS + tl.arange(0, SUBS)[None, :]
                tl.store(plane(stats, "sub_sum") + at_sub, sub_sums, mask=exists[:, None])
        if NOISE:
            tile_best = tl.full([BLOCK_R], float("-inf"), tl.float32)
            tile_token = tl.zeros([BLOCK_R], tl.int32)
            # No Gumbel value of 32 bits is larger than 22.2, so noise is spared where no token can win.
            may_win = read & sampled & usable & (tile_max + 22.2 >= best_so_far)
            if tl.sum(may_win.to(tl.int32)) > 0:
                noise = gumbel(seed, position, salts, tile * BLOCK_V, STREAM, BLOCK_V)
                tile_best, token = tl.max(
                    tl.where(may_win[:, None], scores + noise, float("-inf")),
                    axis=1,
                    return_indices=True,
                    return_indices_tie_break_left=True,
                )
                tile_token = tile * BLOCK_V + token
                best_so_far = tl.maximum(best_so_far, tile_best)
            tl.store(plane(stats, "best") + at, tile_best, mask=exists & sampled)
            _store_token(plane(stats, "best_token") + at, tile_token, exists & sampled)


@triton.jit
def _store_token(pointers, token, mask):
    """Store tokens as the bits of floats."""
    tl.store(pointers, token.to(tl.int32).to(tl.float32, bitcast=True), mask=mask)
