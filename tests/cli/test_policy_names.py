"""Policies by name, and by module and class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.cli.setup import check_policy, make_policy, needs_margins, needs_profile
from dspark.policy import CostProfile, FixedK, Outcome, Signals
from dspark.policy.calibration import SequentialTemperatures

PROFILE = CostProfile((1, 2), (1.0, 1.5))


class Half:
    """Verifies half of what it may."""

    def plan(self, signals: Signals) -> torch.Tensor:
        return signals.max_lengths // 2

    def observe(self, outcome: Outcome) -> None:
        pass


class Priced(Half):
    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile


class Planless:
    pass


NUMBER = 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fixed:2", "FixedK(2)"),
        ("threshold:0.6", "ConfidenceThreshold(0.6)"),
        ("scheduled", "ConfidenceScheduled(lag=0)"),
        ("scheduled-lag2", "ConfidenceScheduled(lag=2)"),
        ("goodput", "Goodput(decay=0.98)"),
        ("bandit", "Bandit(width=0.3)"),
        ("plain", "None"),
        ("gated:scheduled", "Gated(ConfidenceScheduled(lag=0))"),
        ("threshold:0.6@margin", "WithConfidence(ConfidenceThreshold(0.6), MarginLogistic(decay=0.999))"),
        ("scheduled@online", "WithConfidence(ConfidenceScheduled(lag=0), OnlineTempered(TrainedHead()))"),
        (
            "gated:scheduled@head+margin",
            "Gated(WithConfidence(ConfidenceScheduled(lag=0), HeadMarginLogistic(decay=0.999)))",
        ),
    ],
)
def test_names(name: str, words: str) -> None:
    assert repr(make_policy(name, PROFILE)) == words
    check_policy(name, 3)


def test_who_needs_margins() -> None:
    names = ["scheduled", "scheduled@online", "gated:threshold:0.6@margin", "scheduled@head+margin"]
    assert [needs_margins(name) for name in names] == [False, False, True, True]


def test_calibrated_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "temperatures.json"
    SequentialTemperatures((2.0, 2.0, 1.0)).save(path)
    policy = make_policy(f"threshold:0.6@{path}", None)
    assert not needs_profile(f"threshold:0.6@{path}")
    assert needs_profile(f"scheduled@{path}")
    signals = Signals((0,), torch.tensor([3]), 3, torch.tensor([[0.9, 0.9, 0.6]]))
    assert policy.plan(signals).tolist() == [1]
    for name, message in (
        (f"plain@{path}", "plain decoding has no confidences"),
        (f"fixed:2@{path}", "expected one that looks at confidences"),
        ("gated:plain", "gated:NAME takes a policy that drafts"),
    ):
        with pytest.raises(ValueError, match=message):
            make_policy(name, PROFILE)


def test_a_class_of_ones_own() -> None:
    assert isinstance(make_policy(f"{__name__}:Half", None), Half)
    priced = make_policy(f"{__name__}:Priced", PROFILE)
    assert isinstance(priced, Priced)
    assert priced.profile is PROFILE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("threshold:much", "policy 'threshold:much': expected threshold:T with T from 0 to 1"),
        ("threshold:1.5", "expected threshold:T"),
        ("threshold", "expected threshold:T"),
        ("fixed:x", "policy 'fixed:x': expected plain, fixed:K"),
        ("goodput:3", "policy 'goodput:3': expected plain, fixed:K"),
        ("no_such_module:Half", "policy 'no_such_module:Half': No module named 'no_such_module'"),
        (f"{__name__}:Whole", "has no attribute 'Whole'"),
        (f"{__name__}:NUMBER", "expected a class, got int"),
        (f"{__name__}:Planless", "expected methods plan and observe"),
        (f"{__name__}:Priced", "needs a cost profile"),
        ("goodput", "policy 'goodput': needs a cost profile"),
    ],
)
def test_what_is_wrong_is_said(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(name, None)


def test_which_need_a_profile() -> None:
    assert [needs_profile(n) for n in ("plain", "fixed:1", "threshold:1", "goodput", "bandit", "scheduled-lag2")] == [
        False, False, False, True, True, True,
    ]  # fmt: skip
    assert needs_profile("module:Class")
    assert isinstance(make_policy("fixed:3", None), FixedK)
