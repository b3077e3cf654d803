"""Calls of ``schedule_prefix`` whose traffic is counted."""

from __future__ import annotations

import torch

from dspark.ops.cost import Cost
from dspark.ops.cost.schedule import ScheduleCall, schedule_cost
from dspark.ops.op import OPS
from dspark.ops.schedule.launch import ScheduleConfig
from dspark.ops.schedule.reference import ScheduleMode
from tests.gates.traffic.case import Case

CHUNKED = ScheduleConfig(block_requests=4, block_drafts=4, block_ranked=8)


def schedule_case(
    mode: ScheduleMode, requests: int, draft_len: int, *, adjusted: bool = False, config: ScheduleConfig | None = None
) -> Case:
    """A call on random confidences, with caps, floors and weights if ``adjusted``."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(requests, draft_len, generator=generator) ** 0.25
    speed = 1 / (10 + torch.arange(requests * (1 + draft_len) + 1, dtype=torch.float64))
    caps = torch.full((requests,), draft_len) if adjusted else None
    floors = torch.arange(requests) % 2 if adjusted else None
    weights = torch.rand(requests, generator=generator) if adjusted else None
    budget = torch.tensor(requests) if mode == "budget" else None
    out = torch.empty(requests, dtype=torch.int64)

    def run() -> Cost:
        OPS["schedule_prefix"]("triton", confidence, speed, mode, budget, caps, floors, weights, out, config=config)
        call = ScheduleCall(
            requests, draft_len, mode, capped=adjusted, floored=adjusted, weighted=adjusted,
            forced=requests // 2 if adjusted else 0,
        )  # fmt: skip
        return schedule_cost(call, config)

    cut = " in chunks" if config else ""
    return Case("schedule", f"{requests} of {draft_len}{cut}", f"{mode}{' adjusted' if adjusted else ''}", run)


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for."""
    modes: tuple[ScheduleMode, ...] = ("early_stop", "global", "budget")
    return [
        *(schedule_case(mode, 64, 7) for mode in modes),
        schedule_case("early_stop", 512, 16),
        *(schedule_case(mode, 1024, 16) for mode in modes),
    ]


def cases() -> list[Case]:
    """Small calls of every kind."""
    modes: tuple[ScheduleMode, ...] = ("early_stop", "global", "budget")
    return [
        *(schedule_case(mode, 5, 3, adjusted=mode != "global") for mode in modes),
        *(schedule_case(mode, 10, 3, adjusted=mode != "global", config=CHUNKED) for mode in modes),
        schedule_case("global", 600, 7),
    ]
