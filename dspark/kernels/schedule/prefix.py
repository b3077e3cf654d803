"""Which drafts to verify, over all requests: ranks among integer keys, and sums of integers, so in any order the same.

Every draft has a key of its own: the first in ascending order is the draft worth most, and equals are in order of
request and slot. Its high bits are what the draft is worth, its low ones its place. One program sorts a small pool. Of
a large one, every program sorts a chunk, and a draft's rank is the sum of its places in all the chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = tl.constexpr(1 << 30)  # what a token is worth at most
INDEX_BITS = tl.constexpr(21)
PLACE = tl.constexpr((1 << 21) - 1)
MOST_KEPT = tl.constexpr(4096)  # keys that a program can hold twice
MOST_SEARCHED = tl.constexpr(512)  # keys whose throughput is looked at at a time
MAX_SPEED = tl.constexpr(1e280)


@triton.jit(do_not_specialize=["num_requests"])
def schedule_kernel(
    confidence_ptr,  # [num_requests, DRAFT_LEN]
    stride_confidence_request,
    stride_confidence_slot,
    speed_ptr,  # [more than num_requests * (1 + DRAFT_LEN)], or null with MODE "budget"
    budget_ptr,  # [] integer, or null
    cap_ptr,  # [num_requests] integer, or null
    floor_ptr,  # [num_requests] integer, or null
    weight_ptr,  # [num_requests], or null
    out_ptr,  # [num_requests] int64
    num_requests,
    MODE: tl.constexpr,
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LOG: tl.constexpr,
):
    """The lengths of a pool that one program holds; ``BLOCK_R * BLOCK_G = 2^LOG`` drafts."""
    request = tl.arange(0, BLOCK_R).to(tl.int64)
    key, floor, base = draft_keys(
        request, confidence_ptr, stride_confidence_request, stride_confidence_slot, cap_ptr, floor_ptr, weight_ptr,
        num_requests, DRAFT_LEN, BLOCK_R, BLOCK_G,
    )  # fmt: skip
    SIZE: tl.constexpr = BLOCK_R * BLOCK_G
    rank = tl.arange(0, SIZE)
    ranked = ascending(tl.reshape(key, [SIZE]), rank, LOG)
    forced = tl.sum(floor)
    if MODE == "budget":
        count = tl.load(budget_ptr).to(tl.int64) - forced
    else:
        rows = num_requests + forced
        num_speeds = num_requests.to(tl.int64) * (1 + DRAFT_LEN) + 1
        count = end_of_search(ranked, base, speed_ptr + rows, num_speeds - rows, MODE, SIZE)
    edge = tl.max(
        tl.where((rank < count) & (units_of(ranked) > 0), ranked, -1), axis=0
    )  # the key of the last one taken
    if SIZE > MOST_KEPT:
        # Read again, so that registers hold one copy of the keys while they are sorted.
        key, floor, _ = draft_keys(
            request, confidence_ptr, stride_confidence_request, stride_confidence_slot, cap_ptr, floor_ptr, weight_ptr,
            num_requests, DRAFT_LEN, BLOCK_R, BLOCK_G,
        )  # fmt: skip
    taken = tl.sum((key <= edge).to(tl.int64), axis=1)  # [BLOCK_R]
    tl.store(out_ptr + request, floor + taken, mask=request < num_requests)


@triton.jit(do_not_specialize=["num_requests"])
def schedule_sort_kernel(
    confidence_ptr,  # [num_requests, DRAFT_LEN]
    stride_confidence_request,
    stride_confidence_slot,
    cap_ptr,  # [num_requests] integer, or null
    floor_ptr,  # [num_requests] integer, or null
    weight_ptr,  # [num_requests], or null
    key_ptr,  # [chunks, BLOCK_R * BLOCK_G] int64, written, as are those below
    sum_ptr,  # [chunks, BLOCK_R * BLOCK_G] int64, running sums of units along the sorted keys
    base_ptr,  # [chunks] int64, units of what is verified anyway
    forced_ptr,  # [chunks] int64, drafts below the floors
    num_requests,
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LOG: tl.constexpr,
):
    """Sort the keys of a chunk of requests."""
    chunk = tl.program_id(0).to(tl.int64)
    request = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    key, floor, base = draft_keys(
        request, confidence_ptr, stride_confidence_request, stride_confidence_slot, cap_ptr, floor_ptr, weight_ptr,
        num_requests, DRAFT_LEN, BLOCK_R, BLOCK_G,
    )  # fmt: skip
    SIZE: tl.constexpr = BLOCK_R * BLOCK_G
    offs = tl.arange(0, SIZE)
    ranked = ascending(tl.reshape(key, [SIZE]), offs, LOG)
    tl.store(key_ptr + chunk * SIZE + offs, ranked)
    tl.store(sum_ptr + chunk * SIZE + offs, tl.cumsum(units_of(ranked), axis=0))
    tl.store(base_ptr + chunk, base)
    tl.store(forced_ptr + chunk, tl.sum(floor))


@triton.jit(do_not_specialize=["num_requests"])
def schedule_rank_kernel(
    key_ptr,  # [chunks, SIZE] int64, sorted, from schedule_sort_kernel, as are those below
    sum_ptr,  # [chunks, SIZE] int64
    base_ptr,  # [chunks] int64
    forced_ptr,  # [chunks] int64
    speed_ptr,  # [more than num_requests * (1 + DRAFT_LEN)], or null with MODE "budget"
    rank_ptr,  # [chunks * SIZE] int32, written, by request and slot
    count_ptr,  # [programs] int64, written: see the return of ``best_of_part``
    theta_ptr,  # [programs] float64, written with MODE "global"
    num_requests,
    MODE: tl.constexpr,
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    LOG: tl.constexpr,
):
    """Rank a part of a chunk among all drafts, and say what it knows of where the search ends."""
    num_chunks = tl.cdiv(num_requests, BLOCK_R)
    part = tl.program_id(0).to(tl.int64)
    key = tl.load(key_ptr + part * BLOCK_E + tl.arange(0, BLOCK_E))  # [BLOCK_E]
    offs_c = tl.arange(0, CHUNKS)
    before = key * 0 + tl.sum(tl.load(base_ptr + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
    rank = tl.zeros([BLOCK_E], tl.int32)
    chunk_key_ptr = key_ptr
    chunk_sum_ptr = sum_ptr
    for _ in range(num_chunks):
        below = tl.zeros([BLOCK_E], tl.int32)  # how many of the chunk's keys are less
        half = SIZE
        for _ in range(LOG):
            half = half // 2
            below += tl.where(tl.load(chunk_key_ptr + below + half - 1) < key, half, 0)
        below += (tl.load(chunk_key_ptr + below) < key).to(tl.int32)
        rank += below
        if MODE != "budget":
            before += tl.where(below > 0, tl.load(chunk_sum_ptr + tl.maximum(below - 1, 0)), 0)
        chunk_key_ptr += SIZE
        chunk_sum_ptr += SIZE
    place = key & PLACE
    tl.store(rank_ptr + place, rank)

    units = units_of(key)
    none = CHUNKS * SIZE
    if MODE == "budget":
        count = tl.min(tl.where(units > 0, none, rank), axis=0)
    else:
        forced = tl.sum(tl.load(forced_ptr + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
        last = num_requests.to(tl.int64) * (1 + DRAFT_LEN)  # drafts worth nothing may rank past the curve
        rows = num_requests + forced + rank
        theta = (before + units).to(tl.float64) * load_speed(speed_ptr + tl.minimum(rows + 1, last), None)
        if MODE == "global":
            theta = tl.where(units > 0, theta, -1.0)
            best = tl.max(theta, axis=0)
            count = tl.min(tl.where(theta == best, rank + 1, none), axis=0)
            tl.store(theta_ptr + part, best)
        else:
            theta_before = before.to(tl.float64) * load_speed(speed_ptr + tl.minimum(rows, last), None)
            rises = (units > 0) & (theta > theta_before)
            count = tl.min(tl.where(rises, none, rank), axis=0)
    tl.store(count_ptr + part, count.to(tl.int64))


@triton.jit(do_not_specialize=["num_requests"])
def schedule_take_kernel(
    rank_ptr,  # [chunks * SIZE] int32, from schedule_rank_kernel, as are the two below
    count_ptr,  # [programs] int64: how many are taken at most, or with MODE "global" where its best total is
    theta_ptr,  # [programs] float64
    base_ptr,  # [chunks] int64, from schedule_sort_kernel, as is the next
    forced_ptr,  # [chunks] int64
    speed_ptr,  # as there
    budget_ptr,  # [] integer, or null
    cap_ptr,  # [num_requests] integer, or null
    floor_ptr,  # [num_requests] integer, or null
    out_ptr,  # [num_requests] int64, written
    num_requests,
    MODE: tl.constexpr,
    DRAFT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Take what ranks before the end of the search; ``PARTS`` programs ranked each chunk of ``BLOCK_R`` requests."""
    num_chunks = tl.cdiv(num_requests, BLOCK_R)
    offs_p = tl.arange(0, CHUNKS * PARTS)
    mask_p = offs_p < num_chunks * PARTS
    offs_c = tl.arange(0, CHUNKS)
    forced = tl.sum(tl.load(forced_ptr + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
    none = CHUNKS * PARTS * BLOCK_R * BLOCK_G  # more than there are
    counts = tl.load(count_ptr + offs_p, mask=mask_p, other=none)  # [CHUNKS * PARTS]
    if MODE == "global":
        theta = tl.load(theta_ptr + offs_p, mask=mask_p, other=-1.0)
        best = tl.max(theta, axis=0)
        base = tl.sum(tl.load(base_ptr + offs_c, mask=offs_c < num_chunks, other=0), axis=0)
        start = base.to(tl.float64) * load_speed(speed_ptr + num_requests + forced, None)
        count = tl.where(best > start, tl.min(tl.where(theta == best, counts, none), axis=0), 0)
    else:
        count = tl.min(counts, axis=0)
        if MODE == "budget":
            count = tl.minimum(count, tl.load(budget_ptr).to(tl.int64) - forced)
    request = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    _, floor = limits(request, cap_ptr, floor_ptr, num_requests, DRAFT_LEN)
    slot = tl.arange(0, BLOCK_G)[None, :]
    mask = (request < num_requests)[:, None] & (slot < DRAFT_LEN)
    rank = tl.load(rank_ptr + request[:, None] * BLOCK_G + slot, mask=mask, other=none)  # [BLOCK_R, BLOCK_G]
    taken = tl.sum((rank < count).to(tl.int64), axis=1)
    tl.store(out_ptr + request, floor + taken, mask=request < num_requests)


@triton.jit
def draft_keys(
    request, confidence_ptr, stride_confidence_request, stride_confidence_slot, cap_ptr, floor_ptr, weight_ptr,
    num_requests, DRAFT_LEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Keys ``[BLOCK_R, BLOCK_G]`` of drafts, floors ``[BLOCK_R]``, and the units of what is verified anyway.

    A place that holds no draft, or one that may not be chosen, is worth nothing.
    """
    mask_r = request < num_requests
    if weight_ptr is not None:
        weight = load_double(weight_ptr + request, mask_r)
        weight = tl.minimum(tl.maximum(tl.where(weight == weight, weight, 0.0), 0.0), 1.0)
    else:
        weight = tl.full([BLOCK_R], 1.0, tl.float64)
    slot = tl.arange(0, BLOCK_G)[None, :]
    alive = tl.full([BLOCK_R], 1.0, tl.float64)
    units = tl.zeros([BLOCK_R, BLOCK_G], tl.int32)
    column_ptr = confidence_ptr + request * stride_confidence_request
    for k in range(DRAFT_LEN):
        chance = load_double(column_ptr, mask_r)
        alive *= tl.minimum(tl.maximum(tl.where(chance == chance, chance, 0.0), 0.0), 1.0)
        worth = (weight * alive * UNITS).to(tl.int32)  # [BLOCK_R]
        units = tl.where(slot == k, worth[:, None], units)
        column_ptr += stride_confidence_slot
    cap, floor = limits(request, cap_ptr, floor_ptr, num_requests, DRAFT_LEN)
    forced = slot < floor[:, None]
    anchors = tl.where(mask_r, (weight * UNITS).to(tl.int64), 0)
    base = tl.sum(anchors + tl.sum(tl.where(forced, units, 0).to(tl.int64), axis=1), axis=0)
    units = tl.where((slot >= floor[:, None]) & (slot < cap[:, None]), units, 0)
    place = request[:, None] * BLOCK_G + slot
    return ((-units + UNITS).to(tl.int64) << INDEX_BITS) | place, floor, base


@triton.jit
def limits(request, cap_ptr, floor_ptr, num_requests, DRAFT_LEN: tl.constexpr):
    """The most and the fewest drafts of each request; both 0 where there is no request."""
    mask_r = request < num_requests
    cap = tl.where(mask_r, DRAFT_LEN, 0).to(tl.int64)
    if cap_ptr is not None:
        cap = tl.minimum(tl.maximum(tl.load(cap_ptr + request, mask=mask_r, other=0).to(tl.int64), 0), cap)
    floor = cap * 0
    if floor_ptr is not None:
        floor = tl.minimum(tl.maximum(tl.load(floor_ptr + request, mask=mask_r, other=0).to(tl.int64), 0), cap)
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
def end_of_search(ranked, base, speed_ptr, num_speeds, MODE: tl.constexpr, SIZE: tl.constexpr):
    """How many of the sorted keys ``[SIZE]`` to take. ``speed_ptr`` is where none of them is, ``num_speeds`` remain.

    The keys are looked at a tile at a time: registers do not hold all of their sums, speeds and products at once.
    """
    TILE: tl.constexpr = SIZE if SIZE < MOST_SEARCHED else MOST_SEARCHED
    offs = tl.arange(0, TILE)
    worth = base
    latest = base.to(tl.float64) * load_speed(speed_ptr, None)  # of throughput: the last seen, or the best
    count = base * 0 + (SIZE if MODE == "early_stop" else 0)
    for i in range(SIZE // TILE):
        units = units_of(tl.gather(ranked, i * TILE + offs, 0))  # [TILE]
        n = 1 + i * TILE + offs
        theta = (worth + tl.cumsum(units, axis=0)).to(tl.float64) * load_speed(speed_ptr + n, n < num_speeds)
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
    return -(key >> INDEX_BITS) + UNITS


@triton.jit
def load_speed(speed_ptr, mask):
    """Steps per second in float64, where a product with any sum of units stays finite."""
    speed = load_double(speed_ptr, mask)
    return tl.minimum(tl.maximum(tl.where(speed == speed, speed, 0.0), 0.0), MAX_SPEED)


@triton.jit
def load_double(value_ptr, mask):
    """A load of any float in float64, and 0 where it is masked off."""
    value = tl.load(value_ptr) if mask is None else tl.load(value_ptr, mask=mask, other=0.0)
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)
    return value.to(tl.float64)
