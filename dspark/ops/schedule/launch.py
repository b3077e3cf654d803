"""Launch of the kernels behind ``schedule_prefix``: one for what one program can sort, three beyond."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, float64, int32, int64

from dspark.ops.launch import Kernel, padded, power_of_two
from dspark.ops.schedule.reference import ScheduleMode

MAX_SORTED = 8192
"""Drafts that one program sorts at most."""
_MIN_SORTED = 16
_CHUNK = 2048
_CHUNKS_BEFORE_LARGER = 64


@dataclass(frozen=True)
class ScheduleConfig:
    """How the pool of drafts is cut.

    Attributes:
        block_requests: requests that a program sorts.
        block_drafts: places for each one's drafts.
        block_ranked: drafts that a program ranks among all, when there is more than one chunk.
    """

    block_requests: int
    block_drafts: int
    block_ranked: int

    @property
    def size(self) -> int:
        """Drafts that a program sorts."""
        return self.block_requests * self.block_drafts

    @property
    def num_warps(self) -> int:
        """Of a program that sorts."""
        return max(1, min(16, self.size // 256))

    @property
    def parts(self) -> int:
        """Programs that rank a chunk."""
        return self.size // self.block_ranked

    def chunks(self, num_requests: int) -> int:
        """Programs that sort."""
        return -(-num_requests // self.block_requests)


def schedule_config(num_requests: int, draft_len: int) -> ScheduleConfig:
    """The configuration that is launched for ``R`` requests and ``G`` drafts of each.

    >>> schedule_config(512, 16)
    ScheduleConfig(block_requests=512, block_drafts=16, block_ranked=256)
    >>> schedule_config(4096, 16).size, schedule_config(4096, 16).chunks(4096)
    (2048, 32)
    """
    drafts = power_of_two(draft_len)
    pool = power_of_two(num_requests) * drafts
    if pool <= MAX_SORTED:
        size = max(pool, _MIN_SORTED)
    else:
        size = _CHUNK if pool <= _CHUNK * _CHUNKS_BEFORE_LARGER else MAX_SORTED
    size = max(size, drafts)
    return ScheduleConfig(size // drafts, drafts, min(size, 256))


def scratch_sizes(num_requests: int, config: ScheduleConfig) -> list[int]:
    """In float32 elements: keys, running sums, ranks; by chunk, worth and floors; by part, counts and throughput."""
    chunks = config.chunks(num_requests)
    if chunks <= 1:
        return []
    drafts, parts = chunks * config.size, chunks * config.parts
    return [padded(n) for n in (2 * drafts, 2 * drafts, drafts, 2 * chunks, 2 * chunks, 2 * parts, 2 * parts)]


class ConfidenceStrides(NamedTuple):
    """Elements between requests and between a request's drafts."""

    request: int
    draft: int


class Limits(NamedTuple):
    """``[R]`` integers: the most and the least drafts that are verified of each request; None where there is none."""

    most: Tensor | None
    least: Tensor | None


class Chunks(NamedTuple):
    """Sorted chunks of the pool.

    Attributes:
        keys: ``[chunks, size]`` int64 in ascending order.
        sums: ``[chunks, size]`` int64, running sums of units along them.
        base: ``[chunks]`` int64, units of what is verified anyway.
        forced: ``[chunks]`` int64, drafts below the floors.
    """

    keys: Tensor
    sums: Tensor
    base: Tensor
    forced: Tensor


class Ranks(NamedTuple):
    """Drafts ranked among all, and what the ``parts`` programs that ranked each chunk know of the search.

    Attributes:
        rank: ``[chunks * size]`` int32, by request and draft.
        end: ``[chunks * parts]`` int64, how many are taken at most, or under ``"global"`` where its best total is.
        theta: ``[chunks * parts]`` float64, that total.
    """

    rank: Tensor
    end: Tensor
    theta: Tensor


class ChunkedPlan(NamedTuple):
    """The launches for a pool that one program cannot sort."""

    sort: Kernel
    rank: Kernel
    take: Kernel
    sizes: list[int]


def plan(
    sizes: dict[str, int],
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: ScheduleMode,
    *_: Any,
    config: ScheduleConfig | None = None,
) -> Kernel | ChunkedPlan:
    """One program that sorts all drafts, or one for each chunk and then for its parts.

    Raises:
        ValueError: the kernels do not take so many drafts of a request.
    """
    from dspark.kernels.schedule import prefix as kernels

    num_requests, draft_len, device = sizes["R"], sizes["G"], confidence.device
    if draft_len > MAX_SORTED:
        raise ValueError(f'confidence: the kernels take shape "R G" with G <= {MAX_SORTED}, got G = {draft_len}')
    config = config or schedule_config(num_requests, draft_len)
    chunks, log = config.chunks(num_requests), config.size.bit_length() - 1
    shape = {"num_requests": num_requests, "DRAFT_LEN": draft_len, "BLOCK_R": config.block_requests}
    pool = shape | {
        "stride": ConfidenceStrides(*confidence.stride()),
        "BLOCK_G": config.block_drafts,
        "LOG": log,
        "num_warps": config.num_warps,
    }
    if chunks == 1:
        return Kernel(kernels.schedule_kernel, (1,), device, MODE=mode, **pool)
    search = shape | {"MODE": mode, "CHUNKS": power_of_two(chunks), "num_warps": 4}
    cut = {"BLOCK_E": config.block_ranked, "SIZE": config.size, "LOG": log}
    places = {"BLOCK_G": config.block_drafts, "PARTS": config.parts}
    return ChunkedPlan(
        Kernel(kernels.schedule_sort_kernel, (chunks,), device, **pool),
        Kernel(kernels.schedule_rank_kernel, (chunks * config.parts,), device, **search, **cut),
        Kernel(kernels.schedule_take_kernel, (chunks,), device, **search, **places),
        scratch_sizes(num_requests, config),
    )


def run(
    plan: Kernel | ChunkedPlan,
    regions: tuple[Tensor, ...],
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: ScheduleMode,
    budget: Tensor | None,
    max_lengths: Tensor | None,
    min_lengths: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
) -> None:
    """The launches of a call."""
    limits = Limits(max_lengths, min_lengths)
    speed = None if mode == "budget" else steps_per_second  # a budget is spent whatever the speed is
    if isinstance(plan, Kernel):
        plan(confidence, weights, limits, speed, budget, out)
        return
    keys, sums, rank, base, forced, count, theta = regions
    chunks = Chunks(keys.view(int64), sums.view(int64), base.view(int64), forced.view(int64))
    ranks = Ranks(rank.view(int32), count.view(int64), theta.view(float64))
    plan.sort(confidence, weights, limits, chunks)
    plan.rank(chunks, speed, ranks)
    plan.take(chunks, ranks, limits, speed, budget, out)
