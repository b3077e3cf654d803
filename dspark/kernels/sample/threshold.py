"""Thresholds of top-k, top-p and min-p without a sort: a search over the order of floats, one program per row.

A float's *key* is the integer that orders as the float does, so a search over keys ends after a bounded number of
passes, and at a score of the row itself: ties are exact. Each pass counts (top-k) or weighs (top-p) the tokens that
reach a few pivots; a tile whose maximum lies below all pivots is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.sample.rows import inverse_temperature, is_good, is_truncated, locate, plane, summable


@triton.jit(do_not_specialize=["num_lines", "num_rows"])
def threshold_kernel(
    logits,  # [num_rows, vocab_size]
    rows,  # Rows; without query_start a line is a row
    sampling,  # Sampling
    stats,  # Statistics, from row_statistics_kernel
    threshold,  # [lines] float32, written: the least scaled score that is kept
    request,  # [lines] int64 where a line is a row, or None: it is the request
    stride_logits,
    num_lines,
    num_rows,
    vocab_size,
    NODES: tl.constexpr,  # lines of a request
    KEY_SHIFT: tl.constexpr,  # low bits in which all keys of the logits' dtype agree: 16 for bfloat16, 13 for float16
    TILES: tl.constexpr,  # tiles of a row, rounded up to a power of two
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,  # tokens read at a time, a part of a tile
):
    """The threshold ``t`` of each row: a token is kept when ``x / T >= t``; -inf where nothing is cut.

    Top-k, then top-p over what it left, then min-p, as transformers' warpers apply them, but that tokens which tie with
    the last one kept are kept too (contract C5): top-p keeps a token while the mass above it is below ``top_p``
    (Holtzman et al., arXiv 1904.09751), min-p where ``p >= min_p max(p)`` (Nguyen et al., arXiv 2407.01082).

    Grid: (lines,).
    """
    line = tl.program_id(0)
    if rows.query_start is not None:
        row, owner, _, left = locate(line, num_lines, num_rows, rows, NODES)
        exists = left > 0
    else:
        row = line.to(tl.int64)
        owner = row
        if request is not None:
            owner = tl.load(request + line)
        exists = owner >= 0
    if not exists:
        tl.store(threshold + line, float("-inf"))
        return
    row_tiles = line.to(tl.int64) * stats.num_tiles
    offs_tile = tl.arange(0, TILES)
    mask_tile = offs_tile < stats.num_tiles
    max_ptr = plane(stats, "max") + row_tiles
    tile_max = tl.load(max_ptr + offs_tile, mask=mask_tile, other=float("-inf"))
    top = tl.max(tile_max, axis=0)
    if ~is_good(top) | ~is_truncated(owner, exists, sampling):
        tl.store(threshold + line, float("-inf"))
        return
    raw_max = tl.load(plane(stats, "raw_max") + row_tiles + offs_tile, mask=mask_tile, other=float("-inf"))
    raw_top = tl.max(raw_max, axis=0)
    inverse_t = inverse_temperature(tl.load(sampling.temperature + owner))
    top_k = tl.load(sampling.top_k + owner)
    top_p = tl.load(sampling.top_p + owner)
    min_p = tl.load(sampling.min_p + owner)

    lowest: tl.constexpr = -2139095041 >> KEY_SHIFT  # key of -inf
    key = tl.full([], lowest, tl.int64)
    above = _key(raw_top, KEY_SHIFT).to(tl.int64) + 1
    tile_sum = tl.load(plane(stats, "sum") + row_tiles + offs_tile, mask=mask_tile, other=0.0)
    tile_mass = tile_sum.to(tl.float64) * tl.exp(tile_max - top).to(tl.float64)
    mass = tl.sum(summable(tile_mass, TILES * BLOCK_V), axis=0)
    source = (logits + row * stride_logits, max_ptr, inverse_t, top, vocab_size, stats.num_tiles)
    # Top-k counts tokens. Then top-p weighs what is left: a token is kept while the mass above it is below top_p.
    for weighed in range(2):
        needed = tl.where(weighed == 1, top_p.to(tl.float64) * mass, top_k.to(tl.float64))
        if tl.where(weighed == 1, top_p < 1.0, (top_k > 0) & (top_k < vocab_size)):
            key, mass = _largest_key_reached(
                needed, key, above, mass, weighed, source, raw_top, KEY_SHIFT, TILES, BLOCK_V, BLOCK_C
            )
    least = _value(key, KEY_SHIFT) * inverse_t
    least = tl.where(key == lowest, float("-inf"), least)
    # min-p compares with the largest probability, and that ratio does not depend on what was cut before.
    if min_p > 0.0:
        least = tl.minimum(tl.maximum(least, top + tl.log(min_p)), top)
    tl.store(threshold + line, least)


@triton.jit
def _largest_key_reached(
    needed, low, high, mass, weighed, source, raw_top, KEY_SHIFT: tl.constexpr, TILES: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The largest key in ``[low, high)`` that tokens of weight ``needed`` reach, and the mass of those tokens.

    ``low`` is taken to be reached, by tokens of mass ``mass``. ``source`` is the row: pointers to its logits and to its
    tiles' maxima, ``1 / T``, its largest score, and the numbers of its tokens and tiles.
    """
    _, _, inverse_t, _, _, _ = source
    which = tl.arange(0, 4)
    # The first pivots lie 2, 5, 10 and 20 nats below the largest score, for that is where thresholds are.
    nats = tl.where(which == 0, 20.0, tl.where(which == 1, 10.0, tl.where(which == 2, 5.0, 2.0)))
    pivots = _key(raw_top - nats / inverse_t, KEY_SHIFT).to(tl.int64)
    while high - low > 1:
        asked = (pivots > low) & (pivots < high)
        count, masses = _reaching(tl.where(asked, pivots, high), source, KEY_SHIFT, TILES, BLOCK_V, BLOCK_C)
        reached = asked & (tl.where(weighed == 1, masses, count.to(tl.float64)) >= needed)
        low = tl.max(tl.where(reached, pivots, low), axis=0)
        high = tl.min(tl.where(asked & ~reached, pivots, high), axis=0)
        mass = tl.min(tl.where(reached, masses, mass), axis=0)
        step = ((high - low).to(tl.float64) * 0.2).to(tl.int64) + 1
        pivots = low + step * (which + 1)
    return low, mass


@triton.jit
def _reaching(
    pivots, source, KEY_SHIFT: tl.constexpr, TILES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """How many tokens score at least as the logit of each pivot, ``[4]`` int32, and their mass relative to the top's.

    Scores are compared, as they are where tokens are kept: different logits may round to one score.
    """
    CHUNKS: tl.constexpr = BLOCK_V // BLOCK_C
    LANES: tl.constexpr = 8 if BLOCK_C >= 8 else BLOCK_C  # a thread's own are added first, which needs fewer registers
    logits, max_ptr, inverse_t, top, vocab_size, num_tiles = source
    pivot_scores = _value(pivots, KEY_SHIFT) * inverse_t
    least = tl.min(pivot_scores, axis=0)
    count = tl.zeros([4, BLOCK_C], tl.int32)
    mass = tl.zeros([4, BLOCK_C], tl.float32)  # at most num_tiles * CHUNKS terms each
    for tile in range(num_tiles):
        if tl.load(max_ptr + tile) >= least:
            for chunk in range(CHUNKS):
                offs_v = tile * BLOCK_V + chunk * BLOCK_C + tl.arange(0, BLOCK_C)
                x = tl.load(logits + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
                scores = x * inverse_t
                weight = tl.exp(scores - top)
                reaches = (scores[None, :] >= pivot_scores[:, None]) & (x > float("-inf"))[None, :]
                count += reaches.to(tl.int32)
                mass += tl.where(reaches, weight[None, :], 0.0)
    parts = summable(tl.reshape(mass, [4, BLOCK_C // LANES, LANES]).to(tl.float64), TILES * BLOCK_V)
    return tl.sum(count, axis=1), tl.sum(tl.sum(parts, axis=2), axis=1)


@triton.jit
def _key(x, KEY_SHIFT: tl.constexpr):
    """The key of a float, without the low bits."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFT


@triton.jit
def _value(key, KEY_SHIFT: tl.constexpr):
    """The float of a key; the low bits are those of a float of the logits' dtype."""
    low_bits: tl.constexpr = (1 << KEY_SHIFT) - 1
    bits = (key << KEY_SHIFT).to(tl.int32) | tl.where(key < 0, low_bits, 0)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
