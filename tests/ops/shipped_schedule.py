"""Calls of the scheduler, as a server makes them: float32 confidences, caps, a float64 curve."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.schedule import schedule_prefix
from dspark.ops.schedule.reference import ScheduleMode
from dspark.testing.registry import Budget, budgets, meta

BUDGETS = {
    "schedule_kernel": budgets(Budget(128, 65_536), amd=Budget(128, 65_536)),
    "schedule_rank_kernel": budgets(Budget(64, 8_192), amd=Budget(64, 8_192)),
    "schedule_sort_kernel": budgets(Budget(128, 16_384), amd=Budget(96, 16_384)),
    "schedule_take_kernel": budgets(Budget(96, 16_384), amd=Budget(96, 16_384)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

CLAIMS: dict[str, dict[str, tuple[str, ...]]] = {}
"""Nothing here is streamed: what counts is that nothing spills."""


def _schedule(num_requests: int, draft_len: int, mode: ScheduleMode, adjusted: bool = False) -> None:
    lengths = meta(num_requests)
    schedule_prefix(
        meta(num_requests, draft_len, dtype=torch.float32),
        meta(num_requests * (1 + draft_len) + 1, dtype=torch.float64),
        mode=mode,
        budget=meta() if mode == "budget" else None,
        max_lengths=lengths,
        min_lengths=lengths if adjusted else None,
        weights=meta(num_requests, dtype=torch.float32) if adjusted else None,
        backend="triton",
    )


CALLS: dict[str, Callable[[], None]] = {
    "schedule, early stop": lambda: _schedule(64, 7, "early_stop"),
    "schedule, floors and weights": lambda: _schedule(512, 16, "early_stop", adjusted=True),
    "schedule, global": lambda: _schedule(512, 16, "global"),
    "schedule, budget": lambda: _schedule(512, 16, "budget"),
    "schedule, early stop of 4096": lambda: _schedule(4096, 16, "early_stop", adjusted=True),
    "schedule, global of 4096": lambda: _schedule(4096, 16, "global"),
    "schedule, budget of 4096": lambda: _schedule(4096, 16, "budget"),
}
"""Calls that between them launch every kernel in every configuration of note."""
