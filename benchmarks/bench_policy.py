"""What a policy's decision costs the host, observing included, at a few requests and at many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.setup import Benchmark
from dspark.policy import (
    Bandit,
    ConfidenceScheduled,
    ConfidenceThreshold,
    CostProfile,
    FixedK,
    Goodput,
    Outcome,
    Signals,
    VerifyPolicy,
)

PROFILE = CostProfile((1, 64, 4096, 70_000), (0.01, 0.011, 0.05, 0.8))
DRAFTS = 7
POLICIES: dict[str, Callable[[], VerifyPolicy]] = {
    "fixed": lambda: FixedK(3),
    "threshold": lambda: ConfidenceThreshold(0.5),
    "scheduled": lambda: ConfidenceScheduled(PROFILE),
    "scheduled, lag 2": lambda: ConfidenceScheduled(PROFILE, lag=2),
    "goodput": lambda: Goodput(PROFILE),
    "bandit": lambda: Bandit(PROFILE),
}


@pytest.mark.parametrize("num_requests", [8, 256], ids="R={}".format)
@pytest.mark.parametrize("name", POLICIES)
def test_round(benchmark: Benchmark, name: str, num_requests: int) -> None:
    policy = POLICIES[name]()
    ids = tuple(range(num_requests))
    caps = torch.full((num_requests,), DRAFTS)
    signals = Signals(ids, caps, DRAFTS, torch.rand(num_requests, DRAFTS) ** 0.25)

    def decide() -> torch.Tensor:
        lengths = policy.plan(signals)
        policy.observe(Outcome(ids, lengths, lengths // 2))
        return lengths

    lengths = benchmark(decide)
    assert lengths.shape == (num_requests,)
