"""Thresholds, and the policies that learn from outcomes: what they plan, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

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
    TrackedProfile,
    VerifyPolicy,
)
from tests.policy.helpers import BEND, FLAT, signals

NAN = float("nan")


def round_of(policy: VerifyPolicy, accept: int, *, requests: int = 1, draft_len: int = 3, **more: Any) -> list[int]:
    """One round in which every request would have ``accept`` drafts accepted."""
    asked = replace(signals(None, draft_len=draft_len, requests=requests), classes=more.get("classes"))
    lengths = policy.plan(asked)
    policy.observe(Outcome(asked.request_ids, lengths, lengths.clamp(max=accept), **more))
    return lengths.tolist()


def test_a_threshold_on_survival() -> None:
    asked = signals([[0.9, 0.9, 0.9], [0.8, 0.7, 1.0], [0.4, 1.0, 1.0], [NAN, 1.0, 1.0]], [3, 3, 3, 3])
    assert ConfidenceThreshold(0.5).plan(asked).tolist() == [3, 3, 0, 0]
    assert ConfidenceThreshold(0.75).plan(asked).tolist() == [2, 1, 0, 0]
    assert ConfidenceThreshold(0).plan(asked).tolist() == [3, 3, 3, 3]
    assert ConfidenceThreshold(1).plan(signals([[1.0, 1.0, 0.5]], [1])).tolist() == [1]


def test_a_threshold_on_each_slot() -> None:
    policy = ConfidenceThreshold(0.75, per_slot=True)
    assert policy.plan(signals([[0.9, 0.8, 0.9], [0.8, 0.7, 1.0]])).tolist() == [3, 1]
    assert repr(policy) == "ConfidenceThreshold(0.75, per_slot=True)"


@pytest.mark.parametrize("threshold", [-0.1, 1.1, NAN])
def test_a_threshold_is_a_probability(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold: expected a number in \[0, 1\]"):
        ConfidenceThreshold(threshold)


def test_thresholds_need_confidences() -> None:
    with pytest.raises(ValueError, match=r"confidence: ConfidenceThreshold needs"):
        ConfidenceThreshold(0.5).plan(signals(None))


def test_goodput_follows_acceptance() -> None:
    """Where the third draft is never accepted, two are verified; where none ever is, none."""
    for accepted in (0, 1, 2, 3):
        policy = Goodput(BEND, explore=0)
        for _ in range(60):
            last = round_of(policy, accepted)
        assert last == [accepted]


def test_p23_goodput_verifies_nothing_on_a_full_batch() -> None:
    policy = Goodput(CostProfile((1, 8, 80), (1.0, 1.0, 10.0)), explore=0)
    assert round_of(policy, 2) == [3]
    assert round_of(policy, 2, requests=8) == [0] * 8


def test_goodput_finds_out_when_drafts_become_good_again() -> None:
    policy, stuck = Goodput(BEND, decay=1.0, explore=4), Goodput(BEND, decay=1.0, explore=0)
    for accepted, rounds in ((0, 20), (3, 300)):
        for _ in range(rounds):
            learned, never = round_of(policy, accepted), round_of(stuck, accepted)
    assert learned == [3]
    assert never == [0]


def test_p25_goodput_keeps_statistics_by_class() -> None:
    """A class of which every draft is rejected does not spoil the other's rates."""
    policy = Goodput(BEND, explore=0)
    hopeless, good = {"classes": ("hot",)}, {"classes": ("cold",)}
    for _ in range(80):
        last = round_of(policy, 0, **hopeless), round_of(policy, 3, **good)
    assert last == ([0], [3])
    assert policy._state["seen"].shape == (2, 3)


def test_goodput_counts_the_drafts_that_were_judged() -> None:
    policy = Goodput(FLAT, decay=1.0, explore=0)
    asked = signals(None, [3, 1], requests=2)
    policy.plan(asked)
    policy.observe(Outcome((0, 1), torch.tensor([3, 1]), torch.tensor([1, 1])))
    assert {name: count.tolist() for name, count in policy._state.items()} == {
        "seen": [[2, 1, 0]],
        "accepted": [[2, 0, 0]],
    }


def test_the_bandit_settles_on_the_best_length() -> None:
    policy = Bandit(BEND, discount=1.0)
    chosen = [round_of(policy, 2)[0] for _ in range(400)]
    assert chosen[:4] == [3, 2, 1, 0]  # each once
    assert chosen[-200:].count(2) > 150


def test_the_bandit_learns_for_each_load_on_its_own() -> None:
    policy = Bandit(CostProfile((1, 8, 80), (1.0, 1.0, 10.0)), discount=1.0)
    for _ in range(300):
        one, eight = round_of(policy, 1), round_of(policy, 0, requests=8)
    assert one[0] >= 1  # what is verified beyond the one accepted costs nothing there
    assert eight == [0] * 8


def test_the_bandit_goes_by_measured_time_where_there_is_any() -> None:
    policy = Bandit(discount=1.0)
    for _ in range(200):
        asked = signals(None)
        lengths = policy.plan(asked)
        policy.observe(Outcome((0,), lengths, lengths, seconds=1.0 + 3.0 * abs(int(lengths) - 1)))
    assert round_of(policy, 3, seconds=1.0) == [1]
    with pytest.raises(ValueError, match="needs timed rounds"):
        round_of(policy, 3)


def test_a_round_without_a_plan_teaches_nothing() -> None:
    for policy in (Bandit(BEND), Goodput(BEND)):
        policy.observe(Outcome((0,), torch.tensor([0]), torch.tensor([0])))
        assert round_of(policy, 3) == [3]


@pytest.mark.parametrize("policy", [Bandit(BEND), Goodput(BEND)])
def test_a_copy_plans_as_its_original(policy: VerifyPolicy) -> None:
    for _ in range(7):
        round_of(policy, 1)
    copies = [copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
    rounds = [[round_of(p, 1) for _ in range(5)] for p in (policy, *copies)]
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Goodput(BEND, decay=0), "decay"),
        (lambda: Goodput(BEND, shrinkage=0), "shrinkage"),
        (lambda: Bandit(BEND, width=-1), "width"),
        (lambda: Bandit(BEND, discount=2), "discount"),
        (lambda: ConfidenceScheduled(BEND, floor=-1), "floor: expected at least 0"),
        (lambda: ConfidenceScheduled(BEND, caps={3: -1}), "caps: expected at least 0"),
        (lambda: ConfidenceScheduled(BEND, weights={3: NAN}), "weights: expected at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [Goodput, ConfidenceScheduled, lambda p: Bandit(profile=p), TrackedProfile])
def test_p24_what_is_no_profile_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="profile: expected a CostProfile, got str"):
        make("fast")


def test_an_oracle_of_the_law_schedules_by_the_true_chances() -> None:
    confident = signals([[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]])
    rates = torch.tensor([[0.95, 0.95, 0.95], [0.05, 0.95, 0.95]])
    expected = ConfidenceScheduled(BEND).plan(replace(confident, confidence=rates)).tolist()
    assert DistributionOracle(BEND, rates).plan(confident).tolist() == expected
    assert DistributionOracle(BEND, lambda asked: rates).plan(confident).tolist() == expected
    assert DistributionOracle(FLAT, torch.tensor([1.0, 1.0, 0.0])).plan(confident).tolist() == [2, 2]
    with pytest.raises(ValueError, match='acceptance: expected shape "G" or "R G"'):
        DistributionOracle(BEND, rates[:1]).plan(confident)


def test_floors_caps_and_weights_go_by_request() -> None:
    steep = CostProfile((1, 100), (1.0, 100.0))
    asked = signals([[0.9, 0.9], [0.9, 0.9], [0.9, 0.9]])
    assert ConfidenceScheduled(steep, floor=1).plan(asked).tolist() == [1, 1, 1]
    assert ConfidenceScheduled(steep, floor={2: 2, 7: 1}).plan(asked).tolist() == [0, 0, 2]
    assert ConfidenceScheduled(FLAT, caps={1: 1}).plan(asked).tolist() == [2, 1, 2]
    one_row = CostProfile((3, 4, 5), (1.0, 1.0, 9.0))
    assert ConfidenceScheduled(one_row).plan(asked).tolist() == [1, 0, 0]
    assert ConfidenceScheduled(one_row, weights={1: 5.0}).plan(asked).tolist() == [0, 1, 0]
    weighed = replace(asked, weights=torch.tensor([1.0, 1.0, 40.0]))
    assert ConfidenceScheduled(one_row).plan(weighed).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="weights: expected from the policy or from the signals, got both"):
        ConfidenceScheduled(one_row, weights={1: 5.0}).plan(weighed)


def test_only_the_ratios_of_weights_matter() -> None:
    asked = signals([[0.9, 0.5], [0.7, 0.6], [0.2, 0.9]])
    assert ConfidenceScheduled(BEND).plan(asked).tolist() == [1, 1, 0]
    for scale in (1e-6, 1.0, 1e6):
        weighed = replace(asked, weights=scale * torch.tensor([1.0, 3.0, 2.0]))
        assert ConfidenceScheduled(BEND).plan(weighed).tolist() == [0, 1, 0]


def test_an_outcome_tells_a_tracked_profile_what_a_round_took() -> None:
    tracked = TrackedProfile(BEND, rate=0.5)
    for policy in (ConfidenceScheduled(tracked), Goodput(tracked), Bandit(tracked)):
        before = tracked.profile
        policy.observe(Outcome((0,), torch.tensor([3]), torch.tensor([1]), seconds=2.0))
        assert tracked.profile.seconds[1] > before.seconds[1]
