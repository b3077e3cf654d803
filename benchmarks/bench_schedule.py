"""``schedule_prefix``: the reference."""

from __future__ import annotations

import pytest
import torch

from benchmarks.setup import DRAFTS, ROWS, Benchmark
from dspark.ops import schedule_prefix


@pytest.mark.parametrize("mode", ["early_stop", "global", "budget"])
def test_schedule_prefix(benchmark: Benchmark, requests: int, mode: str) -> None:
    steps_per_second = 1000 / (10 + torch.arange(requests * ROWS + 1, dtype=torch.float64))
    budget = torch.tensor(3) if mode == "budget" else None
    confidence = torch.rand(requests, DRAFTS)
    lengths = benchmark(schedule_prefix, confidence, steps_per_second, mode=mode, budget=budget)
    assert lengths.shape == (requests,)
