"""The certified walk: a few candidates per step, a bound on every other token, and a proof or none for each step.

The groups of arguments are the NamedTuples of :mod:`dspark.ops.draft.certified_launch` and of the walk's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.draft.walk import no_key, packed, sigmoid
from dspark.kernels.draft.walk_block import dot_hidden
from dspark.kernels.philox import gumbel_of, gumbel_of_fours, stream
from dspark.kernels.sample.rows import inverse_temperature, is_good


@triton.jit
def walk_candidates_kernel(
    base,  # [requests, draft_len, vocab_size]
    temperature,  # [requests] float32
    noise,  # Noise, or None: all are greedy
    tiles,  # Candidates, written: the PER_TILE best of each tile, of steps [requests * draft_len, num_tiles]
    shape,  # CandidateShape
    STREAM: tl.constexpr,
    PER_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """The largest perturbed base scores ``U_k(v) / T + g_k(v)`` of a tile, and the largest of the others as its bound.

    Grid: (tiles, requests * draft_len). Tiles take groups of neighbouring tokens in turn: a vocabulary's likely tokens
    are next to each other.
    """
    tile = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    request = place // shape.draft_len
    step = place % shape.draft_len
    own_temperature = tl.load(temperature + request)
    inside = tl.arange(0, BLOCK_V)
    offs_v = (tile + shape.num_tiles * (inside // GROUP).to(tl.int64)) * GROUP + inside % GROUP  # [BLOCK_V]
    logits = tl.load(
        base + request * shape.base_request + step * shape.base_step + offs_v,
        mask=offs_v < shape.vocab_size,
        other=float("-inf"),
    )
    scores = (logits.to(tl.float32) * inverse_temperature(own_temperature))[None, :]  # [1, BLOCK_V]
    scores = tl.where(scores < float("inf"), scores, float("inf"))  # NaN too
    if noise is not None:  # noqa: SIM102  (the other condition is a tensor)
        if own_temperature > 0.0:
            anchor_at = tl.zeros([1], tl.int64) + tl.load(noise.position + request)
            seed = tl.zeros([1], tl.int64) + tl.load(noise.seed + request)
            salt = anchor_at * 0
            if stream("draft") == STREAM:  # its noise also carries the anchor's position
                salt = anchor_at
            four = tl.arange(0, BLOCK_V // 4)
            block = (tile + shape.num_tiles * (four // (GROUP // 4))) * (GROUP // 4) + four % (GROUP // 4)
            scores += gumbel_of_fours(seed, anchor_at + step + 1, salt, block[None, :], STREAM)
    out = (place * shape.num_tiles + tile) * PER_TILE + tl.zeros([1], tl.int64)
    for i in tl.static_range(PER_TILE):
        best, column = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
        token = (tile + shape.num_tiles * (column // GROUP)) * GROUP + column % GROUP
        tl.store(tiles.value + out + i, best)
        tl.store(tiles.token + out + i, tl.where(best > float("-inf"), token, -1).to(tl.int32))
        scores = tl.where(inside[None, :] == column[:, None], float("-inf"), scores)
    tl.store(tiles.bound + place * shape.num_tiles + tile + tl.zeros([1], tl.int64), tl.max(scores, axis=1))


@triton.jit
def walk_select_kernel(
    tiles,  # Candidates of walk_candidates_kernel
    kept,  # Candidates, written: the top_k best of each step, token -1 where there are fewer
    confidence,  # Confidence, or None
    part,  # [requests * draft_len] float32, written: the hidden state's part of the confidence; or None
    shape,  # SelectShape
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """The best ``top_k`` of a step's candidates, and a bound that no token left out exceeds.

    They are found by halving an interval in the order of floats. Grid: (requests * draft_len,).
    """
    place = tl.program_id(0).to(tl.int64)
    top_k = shape.top_k
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < shape.num_candidates
    value = tl.load(tiles.value + place * shape.num_candidates + offs_c, mask=mask_c, other=float("-inf"))
    token = tl.load(tiles.token + place * shape.num_candidates + offs_c, mask=mask_c, other=-1)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    LOWEST: tl.constexpr = -2147483648  # below the order of every float
    order = tl.where(token >= 0, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST).to(tl.int64)  # [BLOCK_C]
    low = tl.full([], LOWEST, tl.int64)
    high = tl.max(order, axis=0) + 1
    for _ in range(32):  # the largest order that top_k candidates reach
        middle = low + (high - low + 1) // 2
        reached = tl.sum((order >= middle).to(tl.int32), axis=0) >= top_k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    ties = (order == low) & (token >= 0)
    above = (order > low) & (token >= 0)
    left = top_k - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (ties & (tl.cumsum(ties.to(tl.int32), axis=0) <= left))
    at = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    offs_k = tl.arange(0, TOP_K)
    count = tl.sum(chosen.to(tl.int32), axis=0)
    empty = (offs_k >= count) & (offs_k < top_k)
    tl.store(kept.token + place * top_k + offs_k, tl.full([TOP_K], -1, tl.int32), mask=empty)
    tl.store(kept.value + place * top_k + offs_k, tl.full([TOP_K], float("-inf"), tl.float32), mask=empty)
    tl.store(kept.value + place * top_k + at, value, mask=chosen)
    tl.store(kept.token + place * top_k + at, token, mask=chosen)
    offs_t = tl.arange(0, TILES)
    mask_t = offs_t < shape.num_tiles
    bound = tl.load(tiles.bound + place * shape.num_tiles + offs_t, mask=mask_t, other=float("-inf"))
    rest = tl.max(tl.where(chosen, float("-inf"), value), axis=0)
    tl.store(kept.bound + place, tl.maximum(rest, tl.max(bound, axis=0)))
    if confidence is not None:
        total = dot_hidden(confidence, place // shape.draft_len, place % shape.draft_len, shape, BLOCK_H)
        tl.store(part + place, total + tl.load(confidence.bias).to(tl.float32))


@triton.jit
def walk_certify_kernel(
    base,  # [requests, draft_len, vocab_size]
    anchor,  # [requests] int64
    head,  # MarkovHead
    table,  # BiasTable
    kept,  # Candidates of walk_select_kernel
    temperature,  # [requests] float32
    noise,  # Noise, or None: all are greedy
    confidence,  # Confidence, or None
    part,  # [requests * draft_len] float32 of walk_select_kernel, or None
    certified,  # [requests] int64, written: leading steps that are proven
    keys,  # [requests, draft_len] int64, written, or None: the draft is
    draft,  # Draft, or None
    shape,  # CertifyShape
    slack,  # times the norm: what sums in another order may differ by
    STREAM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # rank of the confidence, rounded up
) -> None:
    """Walk one request over its candidates while each step is proven; see :mod:`dspark.ops.draft.certified`.

    Grid: (requests,).
    """
    request = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, TOP_K)
    offs_m = tl.arange(0, TOP_M)
    row = tl.load(anchor + request)
    proven = (row >= 0) & (row < shape.vocab_size)
    own_temperature = tl.load(temperature + request)
    inverse_t = inverse_temperature(own_temperature)
    one = tl.zeros([1], tl.int64)
    if noise is not None:
        seed = one + tl.load(noise.seed + request)
        anchor_at = one + tl.load(noise.position + request)
    count = one * 0
    for i in range(shape.draft_len):
        step = request * 0 + i
        place = request * shape.draft_len + step
        key = tl.full([], no_key(), tl.int64)
        token = tl.full([], -1, tl.int64)
        logit = tl.full([], float("-inf"), tl.float32)
        if proven:
            # Candidates of the step: their bias is a dot product each.
            mask_c = offs_c < shape.top_k
            first_token = tl.load(kept.token + place * shape.top_k + offs_c, mask=mask_c, other=-1).to(tl.int64)
            held = first_token >= 0
            bias = tl.zeros([TOP_K], tl.float32)
            for start in range(0, shape.rank, BLOCK_K):
                offs_k = start + tl.arange(0, BLOCK_K)
                mask_k = offs_k < shape.rank
                x = tl.load(head.w1 + row * shape.w1_row + offs_k, mask=mask_k, other=0.0).to(tl.float32)
                w = tl.load(
                    head.w2 + (first_token * shape.w2_row)[:, None] + offs_k[None, :],
                    mask=held[:, None] & mask_k[None, :],
                    other=0.0,
                )  # [TOP_K, BLOCK_K]
                bias += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
            first = tl.load(kept.value + place * shape.top_k + offs_c, mask=mask_c, other=float("-inf"))
            first = _usable(first + bias * inverse_t, held)
            # Candidates of the previous token: their base scores and noise are looked up.
            mask_m = offs_m < shape.top_m
            second_token = tl.load(table.tokens + row * shape.top_m + offs_m, mask=mask_m, other=-1).to(tl.int64)
            listed = second_token >= 0
            bias = tl.load(table.biases + row * shape.top_m + offs_m, mask=mask_m, other=0.0)
            logits = tl.load(
                base + request * shape.base_request + step * shape.base_step + second_token,
                mask=listed,
                other=float("-inf"),
            )
            second = (logits.to(tl.float32) + bias) * inverse_t
            if noise is not None:  # noqa: SIM102  (the other condition is a tensor)
                if own_temperature > 0.0:
                    salt = anchor_at * 0
                    if stream("draft") == STREAM:  # its noise also carries the anchor's position
                        salt = anchor_at
                    gumbel = gumbel_of(seed, anchor_at + step + 1, salt, second_token[None, :], STREAM)
                    second += tl.sum(gumbel, axis=0)  # of one row
            second = _usable(second, listed)

            first_best, first_at = tl.max(first, axis=0, return_indices=True, return_indices_tie_break_left=True)
            second_best, second_at = tl.max(second, axis=0, return_indices=True, return_indices_tie_break_left=True)
            best = tl.maximum(first_best, second_best)
            from_first = tl.sum(tl.where(offs_c == first_at, first_token, 0), axis=0)
            from_second = tl.sum(tl.where(offs_m == second_at, second_token, 0), axis=0)
            winner = tl.where(first_best >= second_best, from_first, from_second)
            rival = tl.maximum(
                tl.max(tl.where(first_token == winner, float("-inf"), first), axis=0),
                tl.max(tl.where(second_token == winner, float("-inf"), second), axis=0),
            )
            outside = tl.load(kept.bound + place) + tl.load(table.bound + row) * inverse_t
            size = tl.abs(best) + tl.where(outside > float("-inf"), tl.abs(outside), 0.0) + 32.0
            margin = slack * inverse_t * tl.load(table.norm + row) + size * 9.5367431640625e-07  # 2^-20
            if confidence is not None:
                logit = tl.load(part + place)
                if confidence.w1 is not None:
                    offs_e = tl.arange(0, BLOCK_E)
                    mask_e = offs_e < shape.confidence_rank
                    x = tl.load(confidence.w1 + row * shape.confidence_w1_row + offs_e, mask=mask_e, other=0.0)
                    w = tl.load(confidence.weight + shape.hidden_size + offs_e, mask=mask_e, other=0.0).to(tl.float32)
                    logit += tl.sum(x.to(tl.float32) * w)
            proven = is_good(best) & (best - margin > outside) & (best - margin > rival)
            if proven:
                key = packed(best, winner)
                token = winner
                row = winner
                count += 1
        if keys is not None:
            tl.store(keys + place, key)
        else:
            tl.store(draft.tokens + place, token)
            if confidence is not None:
                logit = tl.where((token >= 0) & (logit == logit), logit, float("-inf"))
                tl.store(draft.confidence_logits + place, logit)
                tl.store(draft.confidence + place, sigmoid(logit))
    tl.store(certified + request + one, count)


@triton.jit
def _usable(score, there):
    """Scores, -inf where there is none, and +inf in place of a NaN: nothing is proven of such a step."""
    score = tl.where(score < float("inf"), score, float("inf"))
    return tl.where(there, score, float("-inf"))
