"""One token per row, from the statistics of its tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.philox import stream, uniform
from dspark.kernels.sample.rows import (
    depth_of,
    first_beyond,
    inverse_temperature,
    is_good,
    load_best,
    load_plane,
    locate,
    plane,
    summable,
)


@triton.jit(do_not_specialize=["num_lines", "num_rows", "nodes"])
def sample_kernel(
    logits,  # [num_rows, vocab_size]; read under "inverse_cdf" alone, as are tree and threshold
    rows,  # Rows; without query_start a line is a row
    sampling,  # Sampling
    tree,  # Tree, or None
    stats,  # Statistics, from row_statistics_kernel
    threshold,  # [lines] float32, or None: nothing is truncated
    request,  # [lines] int64 where a line is a row, or None: it is the request
    token,  # [lines] int64, written
    stride_logits,
    num_lines,
    num_rows,
    vocab_size,
    nodes,  # lines of a request
    METHOD: tl.constexpr,  # "greedy"; sampled rows by "gumbel" (the best perturbed score) or by "inverse_cdf"
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The token that each row draws, a greedy row's first largest logit; -1 where the row is bad or absent.

    Grid: (blocks of ``BLOCK_R`` lines,).
    """
    line = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = line < num_lines
    if rows.query_start is not None:
        row, owner, node, left = locate(line, num_lines, num_rows, rows, nodes)
        exists = left > 0
    else:
        owner = line.to(tl.int64)
        if request is not None:
            owner = tl.load(request + line, mask=inside, other=-1)
        exists = inside & (owner >= 0)
    temperature = tl.load(sampling.temperature + owner, mask=exists, other=0.0)
    found = drawn_tokens(line, exists, temperature > 0.0, stats, TILES, METHOD == "gumbel")
    if METHOD == "inverse_cdf":
        mask = (found >= 0) & (temperature > 0.0)
        at = tl.load(rows.position + owner, mask=mask, other=0) + depth_of(line, node, mask, tree) + 1
        u = uniform(tl.load(sampling.seed + owner, mask=mask, other=0), at, at * 0, stream("residual"))
        drawn = draw_from_target(
            line, mask, u, logits + row * stride_logits, inverse_temperature(temperature), threshold, stats,
            vocab_size, TILES, BLOCK_V, BLOCK_S,
        )  # fmt: skip
        found = tl.where(mask & (drawn >= 0), drawn, found)
    tl.store(token + line, found.to(tl.int64), mask=inside)


@triton.jit
def drawn_tokens(line, exists, sampled, stats, TILES: tl.constexpr, NOISE: tl.constexpr):
    """The best token of each row, perturbed where it is sampled; -1 where the row is bad or absent."""
    top, token = load_best(stats, "max", "argmax", line, exists, TILES)
    good = exists & is_good(top)
    if NOISE:
        perturbed = good & sampled
        _, best = load_best(stats, "best", "best_token", line, perturbed, TILES)
        token = tl.where(perturbed, best, token)
    return tl.where(good, token, -1)


@triton.jit
def draw_from_target(
    line, mask, u, logits_row, inverse_t, threshold, stats, vocab_size, TILES: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Inverse CDF: the sub-tile is found in the sums of the statistics pass, and its scores are read again.

    ``logits_row`` points to each row. -1 where nothing has any weight, be it by rounding.
    """
    SUBS: tl.constexpr = BLOCK_V // BLOCK_S
    offs_sub = tl.arange(0, TILES * SUBS)
    sub_sum = load_plane(plane(stats, "sub_sum"), line, mask, 0.0, stats.num_tiles * SUBS, TILES * SUBS)
    tile_max = load_plane(plane(stats, "max"), line, mask, float("-inf"), stats.num_tiles, TILES)
    tile_of_sub = tl.broadcast_to(tile_max[:, :, None], [tile_max.shape[0], TILES, SUBS])
    tile_of_sub = tl.reshape(tile_of_sub, [tile_max.shape[0], TILES * SUBS])
    top = tl.max(tile_max, axis=1)
    top = tl.where(mask & (top > float("-inf")), top, 0.0)
    weight = sub_sum.to(tl.float64) * tl.exp(tile_of_sub - top[:, None]).to(tl.float64)
    weight = summable(weight, TILES * BLOCK_V)
    goal = u * tl.sum(weight, axis=1)
    sub = first_beyond(weight, goal * 0.0, goal, offs_sub)
    before = tl.sum(tl.where(offs_sub[None, :] < sub[:, None], weight, 0.0), axis=1)
    offs_s = tl.arange(0, BLOCK_S)
    token = sub[:, None] * BLOCK_S + offs_s[None, :]  # [rows, BLOCK_S]
    inside = (mask & (sub >= 0))[:, None] & (token < vocab_size)
    scores = tl.load(logits_row[:, None] + token, mask=inside, other=float("-inf")).to(tl.float32) * inverse_t[:, None]
    if threshold is not None:
        least = tl.load(threshold + line, mask=mask, other=float("-inf"))
        scores = tl.where(scores >= least[:, None], scores, float("-inf"))
    weight = summable(tl.exp(scores - top[:, None]).to(tl.float64), BLOCK_S)
    return token_of(sub, first_beyond(weight, before, goal, offs_s), BLOCK_S)


@triton.jit
def token_of(sub, offset, BLOCK_S: tl.constexpr):
    """The token at a place in a sub-tile, or -1 where either was not found."""
    return tl.where((sub >= 0) & (offset >= 0), sub * BLOCK_S + offset, -1)
