"""``torch.ops.dspark.schedule_prefix``: opcheck, and a graph that ``torch.compile`` does not break."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops.schedule import schedule_prefix
from dspark.ops.schedule.reference import ScheduleMode

CONFIDENCE = torch.tensor([[0.9, 0.8], [0.5, 0.9], [0.99, 0.1]])
SPEED = 1 / (3 + torch.arange(10, dtype=torch.float64))
MODES = ["early_stop", "global", "budget"]


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode: ScheduleMode) -> None:
    budget = torch.tensor(3) if mode == "budget" else None
    limits, out = torch.tensor([1, 2, 0]), torch.zeros(3, dtype=torch.int64)
    arguments = (CONFIDENCE, SPEED, mode, budget, limits, None, torch.ones(3), out, None, "reference")
    results = torch.library.opcheck(torch.ops.dspark.schedule_prefix.default, arguments, raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("mode", MODES)
def test_it_compiles_as_one_graph(mode: ScheduleMode) -> None:
    options: dict[str, Any] = {"mode": mode, "budget": torch.tensor(3) if mode == "budget" else None}

    def step(confidence: torch.Tensor, caps: torch.Tensor) -> torch.Tensor:
        return schedule_prefix(confidence.sqrt(), SPEED, max_lengths=caps, **options)

    caps = torch.tensor([2, 1, 2])
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(CONFIDENCE, caps), step(CONFIDENCE, caps))
