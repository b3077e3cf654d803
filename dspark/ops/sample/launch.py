"""Plan and launch of ``sample`` and ``truncate``, over rows that belong to no chain or tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dspark.ops.launch import Kernel, RowConfig
from dspark.ops.sample.statistics_launch import (
    KernelRows,
    KernelSampling,
    StatisticsPlan,
    gather_statistics,
    plan_draw,
    plan_statistics,
    statistics_sizes,
)
from dspark.ops.types import Sampling, Stream


class SamplePlan(NamedTuple):
    """The statistics, then the draw."""

    sizes: Sequence[int]
    statistics: StatisticsPlan
    draw: Kernel


class TruncatePlan(NamedTuple):
    """The passes that end with the thresholds; None where nothing is truncated."""

    sizes: Sequence[int]
    statistics: StatisticsPlan | None


def workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Bytes of scratch memory for so many rows."""
    return 4 * sum(statistics_sizes(num_rows, vocab_size))


def plan_sample(
    sizes: dict[str, int],
    logits: Tensor,
    sampling: Sampling,
    position: Tensor,
    request: Tensor | None,
    stream: int,
    salt: Tensor | None,
    out: Tensor,
    config: RowConfig | None = None,
) -> SamplePlan:
    """Two launches, and two more with truncation."""
    noise = not sampling.all_greedy
    statistics = plan_statistics(
        logits, lines=sizes["T"], truncated=sampling.truncates, noise=noise, stream=Stream(stream), config=config
    )
    draw = plan_draw(statistics, logits, "gumbel" if noise else "greedy", statistics.tiles_p2)
    return SamplePlan(statistics.sizes, statistics, draw)


def run_sample(
    plan: SamplePlan,
    regions: Sequence[Tensor],
    logits: Tensor,
    sampling: Sampling,
    position: Tensor,
    request: Tensor | None,
    stream: int,
    salt: Tensor | None,
    out: Tensor,
) -> None:
    """Write one token per row to ``out``."""
    planes, threshold = regions
    rows, given = KernelRows(None, None, position), KernelSampling(*sampling[:5])
    stats = gather_statistics(plan.statistics, planes, threshold, logits, rows, given, None, request, salt)
    plan.draw(None, rows, given, None, stats, None, request, out)


def plan_truncate(
    sizes: dict[str, int],
    logits: Tensor,
    sampling: Sampling,
    request: Tensor | None,
    out: Tensor,
    config: RowConfig | None = None,
) -> TruncatePlan:
    """Two launches, or none."""
    if not sampling.truncates:
        return TruncatePlan((), None)
    statistics = plan_statistics(logits, lines=sizes["T"], truncated=True, config=config)
    return TruncatePlan(statistics.sizes, statistics)


def run_truncate(
    plan: TruncatePlan,
    regions: Sequence[Tensor],
    logits: Tensor,
    sampling: Sampling,
    request: Tensor | None,
    out: Tensor,
) -> None:
    """Write each row's threshold to ``out``."""
    if plan.statistics is None:
        out.fill_(-float("inf"))
    else:
        rows, given = KernelRows(None, None, None), KernelSampling(*sampling[:5])
        gather_statistics(plan.statistics, regions[0], out, logits, rows, given, None, request)
