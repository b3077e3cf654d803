"""What ``schedule_prefix`` moves and launches: bytes requested from memory, exactly, and the least that it must read.

The lower bound reads each confidence, each limit and each entry of the curve that the search may reach once, and writes
the lengths. A pool that one program holds twice in its registers is close to it, a larger one of one program reads the
confidences again, and chunks look each draft up in all the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.ops.cost.types import Cost
from dspark.ops.schedule.launch import ScheduleConfig, schedule_config
from dspark.ops.schedule.reference import ScheduleMode

MOST_KEPT = 4096
"""Drafts whose keys a program keeps while it sorts; ``dspark.kernels.schedule.prefix`` has the same number."""


@dataclass(frozen=True)
class ScheduleCall:
    """A call of ``schedule_prefix``.

    Attributes:
        num_requests, draft_len, mode: of the call.
        itemsize: bytes per confidence.
        speed_itemsize: bytes per entry of the curve.
        capped, floored, weighted: whether it has ``max_lengths`` and ``min_lengths`` (int64) and ``weights`` (float32).
        forced: drafts below the floors, over all requests.
    """

    num_requests: int
    draft_len: int
    mode: ScheduleMode
    itemsize: int = 4
    speed_itemsize: int = 8
    capped: bool = False
    floored: bool = False
    weighted: bool = False
    forced: int = 0


def schedule_cost(call: ScheduleCall, config: ScheduleConfig | None = None) -> Cost:
    """The cost of a call.

    >>> cost = schedule_cost(ScheduleCall(num_requests=64, draft_len=7, mode="early_stop"))
    >>> cost.read, cost.written, cost.launches, cost.total == cost.lower_bound
    (5384, 512, 1, True)
    """
    config = config or schedule_config(call.num_requests, call.draft_len)
    limits = call.num_requests * 8 * (call.capped + call.floored)
    confidences = call.num_requests * (call.draft_len * call.itemsize + 4 * call.weighted)
    written = call.num_requests * 8
    searched = call.mode != "budget"
    curve = call.num_requests * call.draft_len - call.forced + 1 if searched else 0
    budget = 0 if searched else 8
    least = confidences + limits + curve * call.speed_itemsize + budget + written
    if config.chunks(call.num_requests) == 1:
        passes = 1 if config.size <= MOST_KEPT else 2
        read = passes * (confidences + limits) + curve * call.speed_itemsize + budget
        return Cost(read, written, launches=1, lower_bound=least)
    read, between = _chunks(call, config)
    return Cost(confidences + 2 * limits + read + budget, written + between, launches=3, lower_bound=least)


def _chunks(call: ScheduleCall, config: ScheduleConfig) -> tuple[int, int]:
    """Bytes that the three kernels of chunks read and write, but for the inputs by request and the lengths."""
    chunks = config.chunks(call.num_requests)
    drafts, parts = chunks * config.size, chunks * config.parts
    searched, best = call.mode != "budget", call.mode == "global"
    steps = config.size.bit_length()  # of a search for a key's place in a chunk
    sorted_away = drafts * 16 + chunks * 16  # keys and sums; by chunk, worth and floors
    ranked_away = drafts * 4 + parts * (8 + 8 * best)  # ranks; by part, a count and the best throughput
    ranking = drafts * 8 + parts * chunks * 8 + drafts * chunks * 8 * (steps + searched)
    if searched:
        ranking += parts * chunks * 8 + drafts * call.speed_itemsize * (1 if best else 2)
    each = chunks * 8 + parts * (8 + 8 * best) + (chunks * 8 + call.speed_itemsize if best else 0)
    taking = chunks * each + call.num_requests * call.draft_len * 4
    if not searched:
        taking += (chunks - 1) * 8  # the budget, by every program
    return ranking + taking, sorted_away + ranked_away
