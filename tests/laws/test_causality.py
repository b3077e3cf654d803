"""Shipped policies decide from what is known before a draft is drawn, and the check catches those that do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.schedule import schedule_prefix
from dspark.policy import (
    Bandit,
    ConfidenceScheduled,
    ConfidenceThreshold,
    CostProfile,
    DistributionOracle,
    FixedK,
    Goodput,
    Oracle,
    Outcome,
    Signals,
    TrackedProfile,
    VerifyPolicy,
)
from dspark.testing import Turn, assert_non_anticipating, find_anticipation, random_history
from dspark.testing.strategies import histories
from tests.laws.toys import CURVES

SHIPPED: dict[str, Callable[[], VerifyPolicy]] = {
    **{f"fixed {k}": lambda k=k: FixedK(k) for k in range(3)},  # type: ignore[misc]
    **{
        f"scheduled {name} lag {lag}": lambda curve=curve, lag=lag: ConfidenceScheduled(curve, lag)  # type: ignore[misc]
        for (name, curve), lag in itertools.product(CURVES.items(), (0, 2))
    },
    "oracle": lambda: Oracle({r: [0, 3, 1, 2] for r in range(3)}),
}


def known(signals: Signals) -> Tensor:
    """The true chances, which these histories give as their confidence."""
    assert signals.confidence is not None
    return signals.confidence


ADJUSTED: dict[str, Callable[[], VerifyPolicy]] = {
    "oracle of the law": lambda: DistributionOracle(CURVES["bend"], known),
    "threshold": lambda: ConfidenceThreshold(0.5),
    "threshold per slot": lambda: ConfidenceThreshold(0.7, per_slot=True),
    "goodput": lambda: Goodput(CURVES["bend"], shrinkage=0.5, explore=2),
    "bandit": lambda: Bandit(CURVES["bend"]),
    "floors": lambda: ConfidenceScheduled(CURVES["steep"], floor={0: 1, 2: 2}),
    "floor, lag 2": lambda: ConfidenceScheduled(CURVES["jagged"], lag=2, floor=1),
    "weights": lambda: ConfidenceScheduled(CURVES["bend"], weights={0: 0.1, 1: 2.0}, caps={1: 2}),
    "weights, lag 2": lambda: ConfidenceScheduled(CURVES["jagged"], lag=2, weights={0: 0.1}),
    "tracked": lambda: ConfidenceScheduled(TrackedProfile(CURVES["bend"])),
}
"""Other policies, and the scheduler with all that a caller may set."""


@given(history=histories())
@pytest.mark.parametrize("policy", SHIPPED)
def test_shipped_policies_do_not_anticipate(policy: str, history: list[Turn]) -> None:
    assert_non_anticipating(SHIPPED[policy], [history])


@settings(max_examples=8)
@given(history=histories())
@pytest.mark.parametrize("policy", ADJUSTED)
def test_other_policies_and_settings_do_not_anticipate(policy: str, history: list[Turn]) -> None:
    assert_non_anticipating(ADJUSTED[policy], [history])


@given(seconds=st.lists(st.floats(0.05, 8), min_size=2, max_size=13), lag=st.sampled_from([0, 2]), history=histories())
def test_the_scheduler_does_not_anticipate_on_any_curve(seconds: list[float], lag: int, history: list[Turn]) -> None:
    profile = CostProfile(tuple(range(1, len(seconds) + 1)), tuple(seconds))
    assert_non_anticipating(lambda: ConfidenceScheduled(profile, lag), [history])  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["scheduled bend lag 0", "scheduled jagged lag 2"])
def test_shipped_policies_pass_the_histories_of_the_public_check(policy: str) -> None:
    assert_non_anticipating(SHIPPED[policy])


class Planted(FixedK):
    """A policy that a subclass spoils; ``k`` does not matter."""

    def __init__(self) -> None:
        super().__init__(0)

    def lengths(self, confidence: Tensor, caps: Tensor) -> Tensor:
        raise NotImplementedError

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        return torch.minimum(self.lengths(signals.confidence, signals.max_lengths), signals.max_lengths)


class GlobalSearch(Planted):
    """The scheduler without early stop and without lag."""

    def lengths(self, confidence: Tensor, caps: Tensor) -> Tensor:
        speed = CURVES["jagged"].steps_per_second(confidence.shape[0] * (1 + confidence.shape[1]))
        return schedule_prefix(confidence, speed, mode="global", max_lengths=caps)


class BlockMean(Planted):
    """All of a block or nothing, by the mean of all its confidences."""

    def lengths(self, confidence: Tensor, caps: Tensor) -> Tensor:
        return torch.where(confidence.mean(1) > 0.6, caps, 0)


class OneAhead(Planted):
    """A threshold that looks at the confidence of the slot after the one that it admits."""

    def lengths(self, confidence: Tensor, caps: Tensor) -> Tensor:
        return (confidence[:, 1:] > 0.5).long().cumprod(1).sum(1)


class Crossed(Planted):
    """Each request's length follows the next one's last confidence, whatever that one's own length."""

    def lengths(self, confidence: Tensor, caps: Tensor) -> Tensor:
        return torch.where(confidence.roll(1, 0)[:, -1] > 0.5, caps, 0)


class FloorOfTheConfident(ConfidenceScheduled):
    """A floor that is no constant: a request whose block looks good is given two drafts."""

    def __init__(self) -> None:
        super().__init__(CURVES["steep"])

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        good = (signals.confidence.mean(1) > 0.6).tolist()
        self.floor = {request: 2 * int(own) for request, own in zip(signals.request_ids, good, strict=True)}
        return super().plan(signals)


class LagLost(ConfidenceScheduled):
    """The lagged scheduler, but from its third round on it takes the budget of the round itself."""

    def __init__(self) -> None:
        super().__init__(CURVES["jagged"], lag=2)
        self._planned = 0

    def plan(self, signals: Signals) -> Tensor:
        self._planned += 1
        if self._planned < 3:
            return super().plan(signals)
        assert signals.confidence is not None
        speed = self.profile.steps_per_second(signals.confidence.shape[0] * (1 + signals.draft_len))
        today = schedule_prefix(signals.confidence, speed, mode="global", max_lengths=signals.max_lengths).sum()
        return schedule_prefix(signals.confidence, speed, mode="budget", budget=today, max_lengths=signals.max_lengths)


class Fickle(Planted):
    """Plans by how often anybody has asked, which no copy can keep to."""

    calls = itertools.count()

    def lengths(self, confidence: Tensor, caps: Tensor) -> Tensor:
        return caps * (next(self.calls) % 2)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (GlobalSearch, "after a change of"),
        (BlockMean, "round 0: request 0 verifies"),
        (OneAhead, "round 0: request 0 verifies"),
        (Crossed, "confidences past those entries"),
        (FloorOfTheConfident, "round 0: request 0 verifies"),
        (LagLost, "round [23]: .* after a change of"),
        (Fickle, "planning twice"),
    ],
)
def test_policies_that_anticipate_are_caught(planted: Callable[[], VerifyPolicy], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_non_anticipating(planted)


def test_a_lost_lag_shows_in_later_rounds_only() -> None:
    """What makes the check of several rounds worth its time."""
    assert_non_anticipating(LagLost, (random_history(seed, rounds=2) for seed in range(50)))


def test_appendix_a_is_an_anticipation_of_the_global_search_and_not_of_the_scheduler() -> None:
    signals = Signals((0,), torch.tensor([2]), 2, torch.tensor([[0.8, 0.9]]))
    turn = Turn(signals, torch.tensor([[0.8, 0.0]]), torch.tensor([2]))

    class Unstopped(GlobalSearch):
        def lengths(self, confidence: Tensor, caps: Tensor) -> Tensor:
            return schedule_prefix(confidence, CURVES["appendix A"].steps_per_second(3), mode="global")

    fault = find_anticipation(Unstopped(), turn)
    assert fault is not None
    assert "request 0 verifies 2 drafts, and 0 after" in fault
    assert find_anticipation(ConfidenceScheduled(CURVES["appendix A"]), turn) is None


def test_the_policy_checked_is_left_as_it_is() -> None:
    policy = ConfidenceScheduled(CURVES["bend"], lag=2)
    assert find_anticipation(policy, random_history(0)[0]) is None
    assert not policy._budgets


def test_a_policy_without_confidences_has_nothing_to_look_ahead_at() -> None:
    turn = random_history(0)[0]
    assert find_anticipation(FixedK(1), replace(turn, signals=replace(turn.signals, confidence=None))) is None


class Learner(FixedK):
    """Verifies one more after each acceptance, one less after none: it may, for that is past."""

    def observe(self, outcome: Outcome) -> None:
        self.k = min(self.k + 1, 4) if bool(outcome.accepted.any()) else max(self.k - 1, 0)


def test_learning_from_outcomes_is_no_anticipation() -> None:
    assert_non_anticipating(lambda: Learner(2))
