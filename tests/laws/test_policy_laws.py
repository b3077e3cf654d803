"""The policies beyond the scheduler's plain forms: what they emit has the law of plain decoding, together and alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dspark.policy import (
    Bandit,
    ConfidenceScheduled,
    ConfidenceThreshold,
    CostProfile,
    DistributionOracle,
    Goodput,
    Outcome,
    Signals,
    TrackedProfile,
    VerifyPolicy,
)
from dspark.testing import BlockToy, RatioToy, ToyRequest, ToyRule, exact_law, plain_law, stepwise, total_variation
from tests.laws.toys import CURVES, toy
from tests.tolerances import LAW


class Timed(ConfidenceScheduled):
    """The scheduler on a curve that rounds of its own correct: they take longer the more they accept."""

    def __init__(self) -> None:
        super().__init__(TrackedProfile(CURVES["bend"], rate=0.5))

    def observe(self, outcome: Outcome) -> None:
        super().observe(replace(outcome, seconds=1.0 + 2.0 * float(outcome.accepted.sum())))


class Weighted(ConfidenceScheduled):
    """The scheduler with weights that come with the signals and follow what is left to emit, which is past."""

    def plan(self, signals: Signals) -> torch.Tensor:
        return super().plan(replace(signals, weights=1.0 + signals.max_lengths.float()))


def seen(signals: Signals) -> torch.Tensor:
    """The true chances, which the toys of this file give as their confidence."""
    assert signals.confidence is not None
    return signals.confidence


POLICIES: dict[str, Callable[[], VerifyPolicy]] = {
    "threshold": lambda: ConfidenceThreshold(0.6),
    "threshold per slot": lambda: ConfidenceThreshold(0.8, per_slot=True),
    "goodput": lambda: Goodput(CURVES["bend"], shrinkage=0.5, decay=0.5, explore=3),
    "bandit": lambda: Bandit(CURVES["bend"]),
    "floor": lambda: ConfidenceScheduled(CURVES["steep"], floor=1),
    "floors, lag 2": lambda: ConfidenceScheduled(CURVES["jagged"], lag=2, floor={0: 1}),
    "weights": lambda: ConfidenceScheduled(CURVES["bend"], weights={0: 0.2, 1: 3.0}),
    "weights, lag 2": lambda: ConfidenceScheduled(CURVES["jagged"], lag=2, weights={1: 0.5}),
    "weights of the signals": lambda: Weighted(CURVES["bend"]),
    "caps": lambda: ConfidenceScheduled(CURVES["flat"], caps={0: 1, 1: 2}),
    "oracle of the law": lambda: DistributionOracle(CURVES["bend"], seen),
    "oracle of the law, lag 2": lambda: DistributionOracle(CURVES["jagged"], seen, lag=2),
    "oracle of constants": lambda: DistributionOracle(CURVES["bend"], torch.tensor([0.8, 0.5, 0.9])),
    "tracked costs": Timed,
    "padded graphs": lambda: ConfidenceScheduled(CostProfile((1, 4, 8), (1.0, 1.5, 4.0), captured=(2, 4))),
}


def truthful(request: ToyRequest) -> ToyRequest:
    """The request with 1 - TV(p, q) as its confidence."""

    def acceptance(tokens: tuple[int, ...]) -> float:
        return sum(min(p, q) for p, q in zip(request.target(tokens), request.drafter(tokens), strict=True))

    return replace(request, confidence=stepwise(acceptance))


def request_of(policy: str, seed: int, **sizes: int) -> ToyRequest:
    request = toy(seed, **sizes)
    return truthful(request) if policy.startswith("oracle") else request


@pytest.mark.parametrize("rule", [RatioToy(), BlockToy()], ids=["ratio", "block"])
@pytest.mark.parametrize("policy", POLICIES)
def test_p04_each_keeps_the_law(policy: str, rule: ToyRule) -> None:
    request = request_of(policy, 1, vocab_size=3, max_tokens=4)
    law = exact_law([request], rule, POLICIES[policy](), draft_len=3)
    assert sum(law.values()) == pytest.approx(1, abs=LAW)
    assert total_variation(law, plain_law([request])) < LAW


@pytest.mark.parametrize("policy", POLICIES)
def test_each_keeps_the_joint_law_of_two_requests(policy: str) -> None:
    """Requests that a policy weighs against each other stay independent; the second one leaves before the first."""
    requests = [request_of(policy, 3, vocab_size=2, max_tokens=4), request_of(policy, 4, vocab_size=2, max_tokens=3)]
    law = exact_law(requests, RatioToy(), POLICIES[policy](), draft_len=3)
    assert total_variation(law, plain_law(requests)) < LAW
