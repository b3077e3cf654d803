"""Which drafts to verify (the paper's Algorithm 1), over all requests: ranks among integer keys, and integer sums.

Draft ``k`` of request ``r`` is worth ``u[r, k] = floor(2^30 * w[r] * a[r, k])`` units, where ``a[r, k]`` is the product
of the request's confidences up to it. After the ``n`` drafts worth most, throughput is ``Theta_n = tau_n * SPS(B_n)``
with ``tau_n`` the units of all that is verified and ``B_n`` its rows; the search ends where Theta does not rise, or at
its maximum, or at a budget. Integers add up alike in any order, so every way to count comes to one decision.

Every draft has a key of its own: the first in ascending order is the draft worth most, and equals are in order of
request and draft. Its high bits are what the draft is worth, its low ones its place. One program sorts a small pool. Of
a large one, every program sorts a chunk, and a draft's rank is the sum of its places in all the chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def token_units():
    """What a token is worth at most."""
    return 1 << 30


@triton.constexpr_function
def place_bits():
    """Low bits of a key."""
    return 21


@triton.constexpr_function
def most_kept():
    """Keys that a program can hold twice."""
    return 4096


@triton.constexpr_function
def most_searched():
    """Keys whose throughput is looked at at a time."""
    return 512


@triton.constexpr_function
def max_speed():
    """Steps per second are clamped to this."""
    return 1e280


@triton.jit(do_not_specialize=["num_requests"])
def schedule_kernel(
    confidence,  # [num_requests, DRAFT_LEN]
    weights,  # [num_requests], or None
    limits,  # Limits
    speed,  # [more than num_requests * (1 + DRAFT_LEN)], or None with MODE "budget"
    budget,  # [] integer, or None
    out,  # [num_requests] int64, written
    num_requests,
    stride,  # ConfidenceStrides
    MODE: tl.constexpr,
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LOG: tl.constexpr,
) -> None:
    """The lengths of a pool that one program holds; ``BLOCK_R * BLOCK_G = 2^LOG`` drafts. Grid: (1,).

    It sorts the keys, finds how many of them the search takes, and counts each request's keys up to the last of those.
    """
    request = tl.arange(0, BLOCK_R).to(tl.int64)
    key, floor, base = draft_keys(
        request, confidence, weights, limits, num_requests, stride, DRAFT_LEN, BLOCK_R, BLOCK_G
    )
    SIZE: tl.constexpr = BLOCK_R * BLOCK_G
    rank = tl.arange(0, SIZE)
    ranked = ascending(tl.reshape(key, [SIZE]), rank, LOG)
    forced = tl.sum(floor)
    if MODE == "budget":
        count = tl.load(budget).to(tl.int64) - forced
    else:
        rows = num_requests + forced
        num_speeds = num_requests.to(tl.int64) * (1 + DRAFT_LEN) + 1
        count = end_of_search(ranked, base, speed + rows, num_speeds - rows, MODE, SIZE)
    # The key of the last one taken.
    edge = tl.max(tl.where((rank < count) & (units_of(ranked) > 0), ranked, -1), axis=0)
    if most_kept() < SIZE:
        # Read again, so that registers hold one copy of the keys while they are sorted.
        key, floor, _ = draft_keys(
            request, confidence, weights, limits, num_requests, stride, DRAFT_LEN, BLOCK_R, BLOCK_G
        )
    taken = tl.sum((key <= edge).to(tl.int64), axis=1)  # [BLOCK_R]
    tl.store(out + request, floor + taken, mask=request < num_requests)


@triton.jit(do_not_specialize=["num_requests"])
def schedule_sort_kernel(
    confidence,  # [num_requests, DRAFT_LEN]
    weights,  # [num_requests], or None
    limits,  # Limits
    chunks,  # Chunks, written
    num_requests,
    stride,  # ConfidenceStrides
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LOG: tl.constexpr,
) -> None:
    """Sort the keys of a chunk of ``BLOCK_R`` requests. Grid: (chunks,)."""
    chunk = tl.program_id(0).to(tl.int64)
    request = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    key, floor, base = draft_keys(
        request, confidence, weights, limits, num_requests, stride, DRAFT_LEN, BLOCK_R, BLOCK_G
    )
    SIZE: tl.constexpr = BLOCK_R * BLOCK_G
    offs = tl.arange(0, SIZE)
    ranked = ascending(tl.reshape(key, [SIZE]), offs, LOG)
    tl.store(chunks.keys + chunk * SIZE + offs, ranked)
    tl.store(chunks.sums + chunk * SIZE + offs, tl.cumsum(units_of(ranked), axis=0))
    tl.store(chunks.base + chunk, base)
    tl.store(chunks.forced + chunk, tl.sum(floor))


@triton.jit(do_not_specialize=["num_requests"])
def schedule_rank_kernel(
    chunks,  # Chunks, from schedule_sort_kernel
    speed,  # as for schedule_kernel
    ranks,  # Ranks, written
    num_requests,
    MODE: tl.constexpr,
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    LOG: tl.constexpr,
) -> None:
    """Rank a part of a chunk, ``BLOCK_E`` drafts, among all drafts; say what it knows of where the search ends.

    Grid: (parts of all chunks,). A draft's rank is how many keys of each chunk are less, found by bisection; what those
    are worth, the sum at that place, gives the units ahead of the draft and with them both sides of its step of Theta.
    """
    num_chunks = tl.cdiv(num_requests, BLOCK_R)
    part = tl.program_id(0).to(tl.int64)
    key = tl.load(chunks.keys + part * BLOCK_E + tl.arange(0, BLOCK_E))  # [BLOCK_E]
    offs_c = tl.arange(0, CHUNKS)
    before = key * 0 + tl.sum(tl.load(chunks.base + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
    rank = tl.zeros([BLOCK_E], tl.int32)
    chunk_keys = chunks.keys
    chunk_sums = chunks.sums
    for _ in range(num_chunks):
        below = tl.zeros([BLOCK_E], tl.int32)  # how many of the chunk's keys are less
        half = SIZE
        for _ in range(LOG):
            half = half // 2
            below += tl.where(tl.load(chunk_keys + below + half - 1) < key, half, 0)
        below += (tl.load(chunk_keys + below) < key).to(tl.int32)
        rank += below
        if MODE != "budget":
            before += tl.where(below > 0, tl.load(chunk_sums + tl.maximum(below - 1, 0)), 0)
        chunk_keys += SIZE
        chunk_sums += SIZE
    place = key & ((1 << place_bits()) - 1)
    tl.store(ranks.rank + place, rank)

    units = units_of(key)
    none = CHUNKS * SIZE
    if MODE == "budget":
        count = tl.min(tl.where(units > 0, none, rank), axis=0)
    else:
        forced = tl.sum(tl.load(chunks.forced + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
        last = num_requests.to(tl.int64) * (1 + DRAFT_LEN)  # drafts worth nothing may rank past the curve
        rows = num_requests + forced + rank
        theta = (before + units).to(tl.float64) * load_speed(speed + tl.minimum(rows + 1, last), None)
        if MODE == "global":
            theta = tl.where(units > 0, theta, -1.0)
            best = tl.max(theta, axis=0)
            count = tl.min(tl.where(theta == best, rank + 1, none), axis=0)
            tl.store(ranks.theta + part, best)
        else:
            theta_before = before.to(tl.float64) * load_speed(speed + tl.minimum(rows, last), None)
            rises = (units > 0) & (theta > theta_before)
            count = tl.min(tl.where(rises, none, rank), axis=0)
    tl.store(ranks.end + part, count.to(tl.int64))


@triton.jit(do_not_specialize=["num_requests"])
def schedule_take_kernel(
    chunks,  # Chunks, from schedule_sort_kernel
    ranks,  # Ranks, from schedule_rank_kernel
    limits,  # Limits
    speed,  # as for schedule_kernel
    budget,  # [] integer, or None
    out,  # [num_requests] int64, written
    num_requests,
    MODE: tl.constexpr,
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Take what ranks before the end of the search; ``PARTS`` programs ranked each chunk of ``BLOCK_R`` requests.

    Grid: (chunks,). The search ends at the least of what the parts say, or where the best of their totals is.
    """
    num_chunks = tl.cdiv(num_requests, BLOCK_R)
    offs_p = tl.arange(0, CHUNKS * PARTS)
    mask_p = offs_p < num_chunks * PARTS
    offs_c = tl.arange(0, CHUNKS)
    forced = tl.sum(tl.load(chunks.forced + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
    none = CHUNKS * PARTS * BLOCK_R * BLOCK_G  # more than there are
    counts = tl.load(ranks.end + offs_p, mask=mask_p, other=none)  # [CHUNKS * PARTS]
    if MODE == "global":
        theta = tl.load(ranks.theta + offs_p, mask=mask_p, other=-1.0)
        best = tl.max(theta, axis=0)
        base = tl.sum(tl.load(chunks.base + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
        start = base.to(tl.float64) * load_speed(speed + num_requests + forced, None)
        count = tl.where(best > start, tl.min(tl.where(theta == best, counts, none), axis=0), 0)
    else:
        count = tl.min(counts, axis=0)
        if MODE == "budget":
            count = tl.minimum(count, tl.load(budget).to(tl.int64) - forced)
    request = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    _, floor = bounds_of(request, limits, num_requests, DRAFT_LEN)
    draft = tl.arange(0, BLOCK_G)[None, :]
    mask = (request < num_requests)[:, None] & (draft < DRAFT_LEN)
    rank = tl.load(ranks.rank + request[:, None] * BLOCK_G + draft, mask=mask, other=none)  # [BLOCK_R, BLOCK_G]
    taken = tl.sum((rank < count).to(tl.int64), axis=1)
    tl.store(out + request, floor + taken, mask=request < num_requests)


@triton.jit
def draft_keys(
    request, confidence, weights, limits, num_requests, stride, DRAFT_LEN: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Keys ``[BLOCK_R, BLOCK_G]`` of drafts, floors ``[BLOCK_R]``, and the units of what is verified anyway.

    A place that holds no draft, or one that may not be chosen, is worth nothing.
    """
    mask_r = request < num_requests
    if weights is not None:
        weight = load_double(weights + request, mask_r)
        weight = tl.minimum(tl.maximum(tl.where(weight == weight, weight, 0.0), 0.0), 1.0)
    else:
        weight = tl.full([BLOCK_R], 1.0, tl.float64)
    draft = tl.arange(0, BLOCK_G)[None, :]
    alive = tl.full([BLOCK_R], 1.0, tl.float64)
    units = tl.zeros([BLOCK_R, BLOCK_G], tl.int32)
    column = confidence + request * stride.request
    for k in range(DRAFT_LEN):
        chance = load_double(column, mask_r)
        alive *= tl.minimum(tl.maximum(tl.where(chance == chance, chance, 0.0), 0.0), 1.0)
        worth = (weight * alive * token_units()).to(tl.int32)  # [BLOCK_R]
        units = tl.where(draft == k, worth[:, None], units)
        column += stride.draft
    cap, floor = bounds_of(request, limits, num_requests, DRAFT_LEN)
    forced = draft < floor[:, None]
    anchors = tl.where(mask_r, (weight * token_units()).to(tl.int64), 0)
    base = tl.sum(anchors + tl.sum(tl.where(forced, units, 0).to(tl.int64), axis=1), axis=0)
    units = tl.where((draft >= floor[:, None]) & (draft < cap[:, None]), units, 0)
    place = request[:, None] * BLOCK_G + draft
    return ((-units + token_units()).to(tl.int64) << place_bits()) | place, floor, base


@triton.jit
def bounds_of(request, limits, num_requests, DRAFT_LEN: tl.constexpr):
    """The most and the fewest drafts of each request; both 0 where there is no request."""
    mask_r = request < num_requests
    cap = tl.where(mask_r, DRAFT_LEN, 0).to(tl.int64)
    if limits.most is not None:
        cap = tl.minimum(tl.maximum(tl.load(limits.most + request, mask=mask_r, other=0).to(tl.int64), 0), cap)
    floor = cap * 0
    if limits.least is not None:
        floor = tl.minimum(tl.maximum(tl.load(limits.least + request, mask=mask_r, other=0).to(tl.int64), 0), cap)
    return cap, floor


@triton.jit
def ascending(key, offs, LOG: tl.constexpr):
    """Sort ``[2^LOG]`` keys by a bitonic network. In loops: unrolled, 91 stages of 8,192 keys take long to compile."""
    for k in range(1, LOG + 1):
        for j in range(0, k):
            bit = k - 1 - j
            other = tl.gather(key, offs ^ (1 << bit), 0)
            keeps_less = ((offs >> bit) & 1) == ((offs >> k) & 1)
            key = tl.where(keeps_less, tl.minimum(key, other), tl.maximum(key, other))
    return key


@triton.jit
def end_of_search(ranked, base, speed, num_speeds, MODE: tl.constexpr, SIZE: tl.constexpr):
    """How many of the sorted keys ``[SIZE]`` to take. ``speed`` is where none of them is, ``num_speeds`` remain.

    The keys are looked at a tile at a time: registers do not hold all of their sums, speeds and products at once.
    """
    TILE: tl.constexpr = SIZE if most_searched() > SIZE else most_searched()
    offs = tl.arange(0, TILE)
    worth = base
    latest = base.to(tl.float64) * load_speed(speed, None)  # of throughput: the last seen, or the best
    count = base * 0 + (SIZE if MODE == "early_stop" else 0)
    for i in range(SIZE // TILE):
        units = units_of(tl.gather(ranked, i * TILE + offs, 0))  # [TILE]
        n = 1 + i * TILE + offs
        theta = (worth + tl.cumsum(units, axis=0)).to(tl.float64) * load_speed(speed + n, n < num_speeds)
        worth += tl.sum(units, axis=0)
        if MODE == "early_stop":
            before = tl.where(offs == 0, latest, tl.gather(theta, tl.maximum(offs - 1, 0), 0))
            rises = (units > 0) & (theta > before)
            count = tl.minimum(count, tl.min(tl.where(rises, SIZE, n - 1), axis=0).to(tl.int64))
            latest = tl.sum(tl.where(offs == TILE - 1, theta, 0.0), axis=0)
        else:
            theta = tl.where(units > 0, theta, -1.0)
            best = tl.max(theta, axis=0)
            first = tl.min(tl.where(theta == best, n, SIZE + 1), axis=0).to(tl.int64)
            count = tl.where(best > latest, first, count)
            latest = tl.maximum(latest, best)
    return count


@triton.jit
def units_of(key):
    """What a draft is worth, by its key."""
    return -(key >> place_bits()) + token_units()


@triton.jit
def load_speed(pointers, mask):
    """Steps per second in float64, where a product with any sum of units stays finite."""
    speed = load_double(pointers, mask)
    return tl.minimum(tl.maximum(tl.where(speed == speed, speed, 0.0), 0.0), max_speed())


@triton.jit
def load_double(pointers, mask):
    """A load of any float in float64, and 0 where it is masked off."""
    value = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)
    return value.to(tl.float64)
