"""What the kernels over rows of logits share: which row a program works on, and how tiles of a row are merged.

A *slot* is a place for a row: node ``i`` of request ``r`` has slot ``r * NODES + i``, whether it exists or not, so that
grids depend on static shapes alone. A row's vocabulary is cut into *tiles*, and those into *sub-tiles*, the grain at
which tokens are drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))

# Planes of a statistics buffer: float32 [planes, slots, num_tiles], ints stored as their bits.
MAX = tl.constexpr(0)  # of the scaled scores; +inf marks a bad tile
SUM = tl.constexpr(1)  # of exp(score - tile maximum)
ARGMAX = tl.constexpr(2)
RAW_MAX = tl.constexpr(3)  # of the logits themselves
RAW_SUM = tl.constexpr(4)
BEST = tl.constexpr(5)  # of the perturbed scores
BEST_TOKEN = tl.constexpr(6)
SUB_SUM = tl.constexpr(7)  # from here on: [slots, num_tiles * SUBS], the sums of sub-tiles

WIDEST_TILE = tl.constexpr(4096)
"""No tile holds more tokens, see ``row_config``."""


@triton.jit
def locate(slot, num_slots, num_rows, query_start_ptr, nodes):
    """``(row, request, node, rows left from this one on)`` of each slot; none are left where the slot is empty."""
    inside = slot < num_slots
    request = tl.where(inside, slot // nodes, 0).to(tl.int64)
    node = (slot % nodes).to(tl.int64)
    row = tl.load(query_start_ptr + request, mask=inside, other=0) + node
    end = tl.minimum(tl.load(query_start_ptr + request + 1, mask=inside, other=0), num_rows)
    return row, request, node, tl.maximum(end - row, 0)


@triton.jit
def depth_of(slot, node, mask, depth_ptr):
    """Depth of each node, as far behind the anchor as its row is; in a chain (``depth_ptr`` null) its number."""
    depth = node
    if depth_ptr is not None:
        depth = tl.maximum(tl.load(depth_ptr + slot, mask=mask, other=0), 0)
    return depth


@triton.jit
def inverse_temperature(temperature):
    """``1 / T``, and 1 at temperature 0 (greedy)."""
    return tl.div_rn(1.0, tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def is_truncated(request, mask, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
    """Whether a row's request asks for top-k, top-p or min-p, and samples."""
    sampled = tl.load(temperature_ptr + request, mask=mask, other=0.0) > 0.0
    top_k = tl.load(top_k_ptr + request, mask=mask, other=0)
    top_p = tl.load(top_p_ptr + request, mask=mask, other=1.0)
    min_p = tl.load(min_p_ptr + request, mask=mask, other=0.0)
    return sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def summable(x, LIMIT: tl.constexpr):
    """``x`` float64 in ``[0, LIMIT]``, rounded to a multiple of ``LIMIT * 2^-52``; ``LIMIT`` is a power of two.

    Such numbers add up without rounding while the sum stays below ``2 * LIMIT``, so in any order. The compiler orders a
    sum by the shape and the warps of the program, and those of a verdict depend on its batch; a verdict does not
    (contract C8).
    """
    return (x + LIMIT) - LIMIT


@triton.jit
def merge_sums(tile_max, tile_sum):
    """Tiles ``[rows, tiles]`` of ``sum(exp(x - tile_max))`` merged: the rows' maxima (float32) and sums (float64).

    The maximum is +inf where the row is bad, and -inf where nothing in it has any probability. The tiles are added
    without rounding, see :func:`summable`.
    """
    row_max = tl.max(tile_max, axis=1)
    finite = is_good(row_max)
    reference = tl.where(finite, row_max, 0.0)
    scale = tl.exp((tile_max - reference[:, None]).to(tl.float64))
    weighted = tl.where(tile_max > float("-inf"), tile_sum.to(tl.float64) * scale, 0.0)
    weighted = summable(tl.where(finite[:, None], weighted, 0.0), tile_max.shape[1] * WIDEST_TILE)
    return row_max, tl.sum(weighted, axis=1)


@triton.jit
def plane(stats_ptr, INDEX: tl.constexpr, stride_plane):
    """Where a plane begins."""
    return stats_ptr + tl.full([], INDEX, tl.int64) * stride_plane


@triton.jit
def best_of(tile_best, tile_token):
    """The largest of each row's tiles ``[rows, tiles]`` and its token, the leftmost where several tie."""
    best, tile = tl.max(tile_best, axis=1, return_indices=True, return_indices_tie_break_left=True)
    column = tl.arange(0, tile_best.shape[1])[None, :]
    return best, tl.sum(tl.where(column == tile[:, None], tile_token, 0), axis=1)


@triton.jit
def load_plane(plane_ptr, slot, mask, other, stride, COLUMNS: tl.constexpr, num_columns=None):
    """Values ``[rows, COLUMNS]`` of the rows at ``slot``, of which ``num_columns`` (``stride`` if None) are there."""
    column = tl.arange(0, COLUMNS)[None, :]
    if num_columns is None:
        num_columns = stride
    return tl.load(
        plane_ptr + slot.to(tl.int64)[:, None] * stride + column,
        mask=mask[:, None] & (column < num_columns),
        other=other,
    )


@triton.jit
def load_sums(stats_ptr, stride_plane, slot, mask, num_tiles, TILES: tl.constexpr):
    """Merged maximum (float32) and sum (float64) of the scaled scores of each row."""
    return merge_sums(
        load_plane(plane(stats_ptr, MAX, stride_plane), slot, mask, NEGATIVE_INFINITY, num_tiles, TILES),
        load_plane(plane(stats_ptr, SUM, stride_plane), slot, mask, 0.0, num_tiles, TILES),
    )


@triton.jit
def load_best(
    stats_ptr, stride_plane, VALUE: tl.constexpr, TOKEN: tl.constexpr, slot, mask, num_tiles, TILES: tl.constexpr
):
    """The largest value of each row in plane ``VALUE``, and its token in plane ``TOKEN``."""
    token = load_plane(plane(stats_ptr, TOKEN, stride_plane), slot, mask, 0.0, num_tiles, TILES)
    value = load_plane(plane(stats_ptr, VALUE, stride_plane), slot, mask, NEGATIVE_INFINITY, num_tiles, TILES)
    return best_of(value, token.to(tl.int32, bitcast=True))


@triton.jit
def is_good(top):
    """Whether a row's largest score is finite: something can be drawn from it."""
    return (top > float("-inf")) & (top < float("inf"))


@triton.jit
def first_beyond(weight, before, goal, offset):
    """The first entry of each row whose running sum exceeds ``goal``, else the last one of any weight; -1 if none.

    ``weight`` float64 ``[rows, n]`` is :func:`summable`, ``before`` float64 ``[rows]`` is the sum ahead of it,
    ``offset`` ``[n]`` counts from 0.
    """
    beyond = tl.cumsum(weight, axis=1) > (goal - before)[:, None]
    n: tl.constexpr = weight.shape[1]
    first = tl.min(tl.where(beyond & (weight > 0.0), offset[None, :], n), axis=1)
    last = tl.max(tl.where(weight > 0.0, offset[None, :], -1), axis=1)
    return tl.where(first < n, first, last)
