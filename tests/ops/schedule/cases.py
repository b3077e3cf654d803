"""Calls of the scheduler, as a server makes them: float32 confidences, caps, a float64 curve."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dspark.ops.schedule.reference import ScheduleMode
from dspark.testing.registry import Budget, budgets
from tests.ops.case import Case


def call(num_requests: int, draft_len: int, mode: ScheduleMode, adjusted: bool, device: str) -> tuple[Any, ...]:
    """Drafts worth less from one to the next; with floors and weights if ``adjusted``."""
    confidence = torch.linspace(1, 0.5, num_requests * draft_len, device=device).view(num_requests, draft_len)
    rows = torch.arange(num_requests * (1 + draft_len) + 1, dtype=torch.float64, device=device)
    budget = torch.full((), num_requests, device=device) if mode == "budget" else None
    caps = torch.full((num_requests,), draft_len, device=device)
    floors = caps // 4 if adjusted else None
    weights = torch.full((num_requests,), 0.75, device=device) if adjusted else None
    return confidence, 1 / (10 + rows), mode, budget, caps, floors, weights, None


def case(words: str, num_requests: int, draft_len: int, mode: ScheduleMode, adjusted: bool = False) -> Case:
    return Case("schedule_prefix", words, partial(call, num_requests, draft_len, mode, adjusted))


SMALL = [
    case("early stop", 3, 4, "early_stop"),
    case("floors and weights", 3, 4, "early_stop", adjusted=True),
    case("global", 3, 4, "global"),
    case("budget", 3, 4, "budget"),
    case("no drafts", 3, 0, "early_stop"),
]
SHIPPED = [
    case("early stop", 64, 7, "early_stop"),
    case("floors and weights", 512, 16, "early_stop", adjusted=True),
    case("global", 512, 16, "global"),
    case("budget", 512, 16, "budget"),
    case("early stop of 4096", 4096, 16, "early_stop", adjusted=True),
    case("global of 4096", 4096, 16, "global"),
    case("budget of 4096", 4096, 16, "budget"),
]
"""Calls that between them launch every kernel in every configuration of note."""

BUDGETS = {
    "schedule_kernel": budgets(Budget(128, 65_536), amd=Budget(128, 65_536)),
    "schedule_rank_kernel": budgets(Budget(64, 8_192), amd=Budget(64, 8_192)),
    "schedule_sort_kernel": budgets(Budget(128, 16_384), amd=Budget(96, 16_384)),
    "schedule_take_kernel": budgets(Budget(96, 16_384), amd=Budget(96, 16_384)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

CLAIMS: dict[str, dict[str, tuple[str, ...]]] = {}
"""Nothing here is streamed: what counts is that nothing spills."""
