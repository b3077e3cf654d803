"""What the kernels over rows of logits share: which row a program works on, and how tiles of a row are merged.

A *line* is a place for a row: node ``i`` of request ``r`` has line ``r * nodes + i``, whether it exists or not, so that
grids depend on static shapes alone. Where rows belong to no tree or chain, a line is a row. A row's vocabulary is cut
into *tiles*, and those into *sub-tiles*, the grain at which tokens are drawn.

Kernels take what belongs together as one group: ``rows`` (:class:`~dspark.ops.Rows`), ``sampling``
(:class:`~dspark.ops.Sampling`), ``tree`` (:class:`~dspark.ops.Tree`, or None: chains) and ``stats``
(:class:`~dspark.ops.sample.statistics_launch.Statistics`: the planes of :func:`number_of`, their stride, and the number
of tiles of a row).
"""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.constexpr_function
def number_of(name):
    """Which plane of a statistics buffer it is: float32 ``[planes, lines, num_tiles]``, ints stored as their bits.

    ``max``: of the scaled scores; +inf marks a bad tile. ``sum``: of ``exp(score - max)``. ``raw_max``, ``raw_sum``: of
    the logits themselves. ``best``: of the perturbed scores. The sums of sub-tiles, last, are ``[lines, num_tiles *
    SUBS]``.
    """
    return {
        "max": 0,
        "sum": 1,
        "argmax": 2,
        "raw_max": 3,
        "raw_sum": 4,
        "best": 5,
        "best_token": 6,
        "sub_sum": 7,
    }[name]


@triton.jit
def plane(stats, NAME: tl.constexpr):
    """Where a plane begins."""
    return stats.planes + tl.full([], number_of(NAME), tl.int64) * stats.stride


@triton.jit
def plane_at(stats_ptr, INDEX: tl.constexpr, stride_plane):
    """Where the plane of that number begins."""
    return stats_ptr + tl.full([], INDEX, tl.int64) * stride_plane


@triton.jit
def locate(line, num_lines, num_rows, rows, nodes):
    """``(row, request, node, rows left from this one on)`` of each line; none are left where the line is empty."""
    inside = line < num_lines
    request = tl.where(inside, line // nodes, 0).to(tl.int64)
    node = (line % nodes).to(tl.int64)
    row = tl.load(rows.query_start + request, mask=inside, other=0) + node
    end = tl.minimum(tl.load(rows.query_start + request + 1, mask=inside, other=0), num_rows)
    return row, request, node, tl.maximum(end - row, 0)


@triton.jit
def depth_of(line, node, mask, tree):
    """Depth of each node, as far behind the anchor as its row is; in a chain (``tree`` None) its number."""
    depth = node
    if tree is not None:
        depth = tl.maximum(tl.load(tree.depth + line, mask=mask, other=0), 0)
    return depth


@triton.jit
def inverse_temperature(temperature):
    """``1 / T``, and 1 at temperature 0 (greedy)."""
    return tl.div_rn(1.0, tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def is_truncated(request, mask, sampling):
    """Whether a row's request asks for top-k, top-p or min-p, and samples."""
    sampled = tl.load(sampling.temperature + request, mask=mask, other=0.0) > 0.0
    top_k = tl.load(sampling.top_k + request, mask=mask, other=0)
    top_p = tl.load(sampling.top_p + request, mask=mask, other=1.0)
    min_p = tl.load(sampling.min_p + request, mask=mask, other=0.0)
    return sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def is_good(top):
    """Whether a row's largest score is finite: something can be drawn from it."""
    return (top > float("-inf")) & (top < float("inf"))


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
    without rounding, see :func:`summable`: none holds more than 4,096 tokens (``row_config``) of weight 1 at most.
    """
    row_max = tl.max(tile_max, axis=1)
    finite = is_good(row_max)
    reference = tl.where(finite, row_max, 0.0)
    scale = tl.exp((tile_max - reference[:, None]).to(tl.float64))
    weighted = tl.where(tile_max > float("-inf"), tile_sum.to(tl.float64) * scale, 0.0)
    weighted = summable(tl.where(finite[:, None], weighted, 0.0), tile_max.shape[1] * 4096)
    return row_max, tl.sum(weighted, axis=1)


@triton.jit
def best_of(tile_best, tile_token):
    """The largest of each row's tiles ``[rows, tiles]`` and its token, the leftmost where several tie."""
    best, tile = tl.max(tile_best, axis=1, return_indices=True, return_indices_tie_break_left=True)
    column = tl.arange(0, tile_best.shape[1])[None, :]
    return best, tl.sum(tl.where(column == tile[:, None], tile_token, 0), axis=1)


@triton.jit
def load_plane(plane_ptr, line, mask, other, stride, COLUMNS: tl.constexpr, num_columns=None):
    """Values ``[rows, COLUMNS]`` of the rows at ``line``, of which ``num_columns`` (``stride`` if None) are there."""
    column = tl.arange(0, COLUMNS)[None, :]
    if num_columns is None:
        num_columns = stride
    return tl.load(
        plane_ptr + line.to(tl.int64)[:, None] * stride + column,
        mask=mask[:, None] & (column < num_columns),
        other=other,
    )


@triton.jit
def load_sums(stats, line, mask, TILES: tl.constexpr):
    """Merged maximum (float32) and sum (float64) of the scaled scores of each row."""
    return merge_sums(
        load_plane(plane(stats, "max"), line, mask, float("-inf"), stats.num_tiles, TILES),
        load_plane(plane(stats, "sum"), line, mask, 0.0, stats.num_tiles, TILES),
    )


@triton.jit
def load_best(stats, VALUE: tl.constexpr, TOKEN: tl.constexpr, line, mask, TILES: tl.constexpr):
    """The largest value of each row in plane ``VALUE``, and its token in plane ``TOKEN``."""
    token = load_plane(plane(stats, TOKEN), line, mask, 0.0, stats.num_tiles, TILES)
    value = load_plane(plane(stats, VALUE), line, mask, float("-inf"), stats.num_tiles, TILES)
    return best_of(value, token.to(tl.int32, bitcast=True))


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
