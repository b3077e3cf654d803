"""Launch of the kernels behind ``schedule_prefix``: one for what one program can sort, three beyond."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, float64, int32, int64

from dspark.ops.launch import check_contiguous, check_devices, contiguous, launch, padded, power_of_two, scratch
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
        block_slots: places for each one's drafts.
        block_ranked: drafts that a program ranks among all, when there is more than one chunk.
    """

    block_requests: int
    block_slots: int
    block_ranked: int

    @property
    def size(self) -> int:
        """Drafts that a program sorts."""
        return self.block_requests * self.block_slots

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
    ScheduleConfig(block_requests=512, block_slots=16, block_ranked=256)
    >>> schedule_config(4096, 16).size, schedule_config(4096, 16).chunks(4096)
    (2048, 32)
    """
    slots = power_of_two(draft_len)
    pool = power_of_two(num_requests) * slots
    if pool <= MAX_SORTED:
        size = max(pool, _MIN_SORTED)
    else:
        size = _CHUNK if pool <= _CHUNK * _CHUNKS_BEFORE_LARGER else MAX_SORTED
    size = max(size, slots)
    return ScheduleConfig(size // slots, slots, min(size, 256))


def workspace_bytes(num_requests: int, draft_len: int, config: ScheduleConfig | None = None) -> int:
    """Bytes of scratch memory that a call of these sizes takes."""
    return 4 * sum(_sizes(num_requests, config or schedule_config(num_requests, draft_len)))


def _sizes(num_requests: int, config: ScheduleConfig) -> list[int]:
    """In float32 elements: keys, running sums, ranks; by chunk, worth and floors; by part, counts and throughput."""
    chunks = config.chunks(num_requests)
    if chunks <= 1:
        return []
    drafts, parts = chunks * config.size, chunks * config.parts
    return [padded(n) for n in (2 * drafts, 2 * drafts, drafts, 2 * chunks, 2 * chunks, 2 * parts, 2 * parts)]


@cache
def _kernels() -> tuple[Any, Any, Any, Any]:
    from dspark.kernels.schedule.prefix import (
        schedule_kernel,
        schedule_rank_kernel,
        schedule_sort_kernel,
        schedule_take_kernel,
    )

    return schedule_kernel, schedule_sort_kernel, schedule_rank_kernel, schedule_take_kernel


def schedule_triton(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: ScheduleMode,
    budget: Tensor | None,
    max_lengths: Tensor | None,
    min_lengths: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    config: ScheduleConfig | None = None,
) -> None:
    """Write the lengths to ``out``; arguments as checked by :func:`dspark.ops.schedule_prefix`, with R and G above 0.

    Args:
        config: how the pool is cut; by default what :func:`schedule_config` says. The result is the same.

    Raises:
        ValueError: a tensor's device or layout, the workspace or the draft length does not serve.
    """
    num_requests, draft_len = confidence.shape
    if draft_len > MAX_SORTED:
        raise ValueError(f'confidence: the kernels take shape "R G" with G <= {MAX_SORTED}, got G = {draft_len}')
    config = config or schedule_config(num_requests, draft_len)
    check_devices(
        confidence.device,
        steps_per_second=steps_per_second,
        budget=budget,
        max_lengths=max_lengths,
        min_lengths=min_lengths,
        weights=weights,
        out=out,
    )
    check_contiguous("out", out)
    pool = {
        "confidence_ptr": confidence,
        "stride_confidence_request": confidence.stride(0),
        "stride_confidence_slot": confidence.stride(1),
        "weight_ptr": None if weights is None else contiguous(weights),
        "BLOCK_G": config.block_slots,
        "LOG": config.size.bit_length() - 1,
        "num_warps": config.num_warps,
    }
    limits = {
        "cap_ptr": None if max_lengths is None else contiguous(max_lengths),
        "floor_ptr": None if min_lengths is None else contiguous(min_lengths),
        "num_requests": num_requests,
        "DRAFT_LEN": draft_len,
        "BLOCK_R": config.block_requests,
    }
    search = {
        # A budget is spent whatever the speed is.
        "speed_ptr": None if steps_per_second is None or mode == "budget" else contiguous(steps_per_second),
        "MODE": mode,
    }
    ends = {"budget_ptr": budget, "out_ptr": out}
    schedule_kernel = _kernels()[0]
    if config.chunks(num_requests) == 1:
        launch(schedule_kernel, (1,), pool | limits | search | ends)
    else:
        _schedule_chunks(num_requests, config, pool, limits, search, ends, workspace)


def _schedule_chunks(
    num_requests: int,
    config: ScheduleConfig,
    pool: dict[str, Any],
    limits: dict[str, Any],
    search: dict[str, Any],
    ends: dict[str, Any],
    workspace: Tensor | None,
) -> None:
    _, schedule_sort_kernel, schedule_rank_kernel, schedule_take_kernel = _kernels()
    regions = scratch(_sizes(num_requests, config), ends["out_ptr"].device, workspace)
    keys, sums, rank, base, forced, count, theta = regions
    chunks = config.chunks(num_requests)
    of_chunks = {"base_ptr": base.view(int64), "forced_ptr": forced.view(int64)}
    keyed = {"key_ptr": keys.view(int64), "sum_ptr": sums.view(int64)}
    ranked = {"rank_ptr": rank.view(int32), "count_ptr": count.view(int64), "theta_ptr": theta.view(float64)}
    cut = {"CHUNKS": power_of_two(chunks)}
    launch(schedule_sort_kernel, (chunks,), pool | limits | keyed | of_chunks)
    own = {name: limits[name] for name in ("num_requests", "DRAFT_LEN", "BLOCK_R")}
    own |= {"BLOCK_E": config.block_ranked, "SIZE": config.size, "LOG": pool["LOG"], "num_warps": 4}
    launch(schedule_rank_kernel, (chunks * config.parts,), own | keyed | of_chunks | ranked | search | cut)
    grid = {"BLOCK_G": config.block_slots, "PARTS": config.parts, "num_warps": 4}
    launch(schedule_take_kernel, (chunks,), limits | ranked | of_chunks | search | ends | cut | grid)
