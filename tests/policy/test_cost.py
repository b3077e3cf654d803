"""The cost profile: its curve, its measurement, its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.policy import (
    H200,
    RTX_4090,
    ConfidenceScheduled,
    CostProfile,
    Hardware,
    ModelSize,
    Signals,
    TrackedProfile,
    cost,
    roofline_profile,
)

SECONDS = st.floats(1e-6, 1e3)


@pytest.mark.parametrize(
    ("profile", "seconds"),
    [
        (CostProfile((1, 2, 4, 8), (1.0, 3.0, 4.0, 4.0)), [1, 3, 3.5, 4, 4, 4, 4, 4]),  # straight between its points
        (CostProfile((1, 2, 4), (1.0, 1.5, 2.5)), [1, 1.5, 2, 2.5, 3, 3.5, 4]),  # goes on by its last slope
        (CostProfile((1, 2), (2.0, 1.0)), [2, 1, 1, 1, 1, 1]),  # ends falling, but never reaches zero
        (CostProfile((4, 8), (1.0, 2.0)), [1, 1, 1, 1, 1.25]),  # level below its first point
        (CostProfile((3,), (0.5,)), [0.5, 0.5, 0.5, 0.5]),
        (
            CostProfile((1, 4, 8, 16), (1.0, 2.0, 3.0, 7.0), captured=(2, 4, 8)),  # padded to the next captured size
            [4 / 3, 4 / 3, 2, 2, 3, 3, 3, 3, 3.5, 4, 4.5, 5],
        ),
    ],
)
def test_the_curve_by_hand(profile: CostProfile, seconds: list[float]) -> None:
    table = 1 / profile.steps_per_second(len(seconds))
    assert table.tolist() == pytest.approx([seconds[0], *seconds])


@given(
    points=st.dictionaries(st.integers(1, 40), SECONDS, min_size=1, max_size=6),
    max_rows=st.integers(1, 64),
)
def test_a_curve_is_positive_and_finite_everywhere(points: dict[int, float], max_rows: int) -> None:
    rows = tuple(sorted(points))
    speed = CostProfile(rows, tuple(points[n] for n in rows)).steps_per_second(max_rows)
    assert speed.shape == (max_rows + 1,)
    assert speed.dtype == torch.float64
    assert bool((speed.isfinite() & (speed > 0)).all())
    assert speed[0] == speed[1]
    for n in rows:
        if n <= max_rows:
            assert speed[n].item() == pytest.approx(1 / points[n])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": (), "seconds": ()}, "same length >= 1, got 0 and 0"),
        ({"rows": (1, 2)}, "same length >= 1, got 2 and 1"),
        ({"rows": (0, 1), "seconds": (1.0, 1.0)}, "rows: expected increasing numbers from 1 up"),
        ({"rows": (2, 2), "seconds": (1.0, 1.0)}, "rows: expected increasing"),
        ({"seconds": (0.0,)}, "seconds: expected positive finite"),
        ({"seconds": (float("inf"),)}, "seconds: expected positive finite"),
        ({"seconds": (float("nan"),)}, "seconds: expected positive finite"),
        ({"draft_requests": (1,)}, "draft_requests, draft_seconds: expected the same length"),
        ({"captured": (4, 2)}, "captured: expected increasing"),
        ({"context_tokens": -1}, "context_tokens"),
        ({"seconds_per_context_token": float("inf")}, "seconds_per_context_token"),
        ({"source": "guessed"}, "source: expected 'measured' or 'modelled', got 'guessed'"),
    ],
)
def test_a_bad_profile_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostProfile(**{"rows": (1,), "seconds": (1.0,), **fields})


class Machine:
    """A clock that moves by what a round is said to take, in turn for each number of rows."""

    def __init__(self, takes: dict[int, list[float]]) -> None:
        self.now = 0.0
        self.calls: list[int] = []
        self._takes = {n: iter(times) for n, times in takes.items()}

    def run_round(self, n: int) -> None:
        self.calls.append(n)
        self.now += next(self._takes[n])

    def perf_counter(self) -> float:
        return self.now


def test_measuring_takes_the_median_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({1: [90, 1, 3, 2], 4: [90, 70, 5, 6]})
    monkeypatch.setattr(cost, "time", machine)
    profile = CostProfile.measure(machine.run_round, [1, 4], repeats=3)
    assert profile == CostProfile((1, 4), (2, 6))
    assert machine.calls == [1, 4] * 4  # interleaved, so that a busy moment does not fall on one size alone


def test_a_measured_curve_does_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({1: [0, 2], 2: [0, 1], 4: [0, 3]})
    monkeypatch.setattr(cost, "time", machine)
    assert CostProfile.measure(machine.run_round, [1, 2, 4], repeats=1).seconds == (2, 2, 3)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", {"rows": [1]}, {"rows": [1], "seconds": None}, {"rows": [1], "seconds": [0]}],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=r"not a cost profile|expected positive finite"):
        CostProfile.load(path)


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CostProfile.load(tmp_path / "none.json")


def test_drafting_costs_by_the_number_of_requests() -> None:
    profile = CostProfile((1, 2), (1.0, 2.0), draft_requests=(1, 3), draft_seconds=(0.5, 1.5))
    for requests, seconds in ((1, 0.5), (2, 1.0), (4, 2.0)):
        assert (1 / profile.steps_per_second(2, requests=requests)).tolist() == pytest.approx(
            [1 + seconds, 1 + seconds, 2 + seconds]
        )
    with pytest.raises(ValueError, match="requests: this profile knows what drafting costs"):
        profile.steps_per_second(2)


def test_context_has_its_price() -> None:
    profile = CostProfile((1, 2), (1.0, 2.0), context_tokens=100, seconds_per_context_token=0.01)
    assert profile.round_seconds(1) == pytest.approx(1.0)
    assert profile.round_seconds(1, context_tokens=150) == pytest.approx(1.5)
    assert profile.round_seconds(1, context_tokens=50) == pytest.approx(0.5)
    assert profile.round_seconds(1, context_tokens=0) > 0


def test_measuring_times_drafting_too(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = Machine({2: [9, 3, 5, 4], 4: [9, 1, 1, 1]})
    draft = Machine({1: [9, 2, 1, 3]})

    def run_draft(n: int) -> None:
        before = draft.now
        draft.run_round(n)
        verify.now += draft.now - before

    monkeypatch.setattr(cost, "time", verify)
    profile = CostProfile.measure(
        verify.run_round, [2, 4], 3, run_draft=run_draft, requests=[1], captured=[4], context_tokens=7, device="a card"
    )
    assert profile == CostProfile((2, 4), (4, 4), (1,), (2,), (4,), context_tokens=7, device="a card")
    with pytest.raises(ValueError, match="captured: expected some of rows"):
        CostProfile.measure(verify.run_round, [2], captured=[3])
    with pytest.raises(ValueError, match="run_draft, requests: expected both or neither"):
        CostProfile.measure(verify.run_round, [2], requests=[1])


def test_a_file_holds_all_of_a_profile(tmp_path: Path) -> None:
    curves = (1, 2), (0.1, 1 / 3), (1, 8), (0.01, 0.02), (1, 2)
    profile = CostProfile(*curves, 64, 1e-7, source="modelled", device="a card")
    profile.save(tmp_path / "profile.json")
    assert CostProfile.load(tmp_path / "profile.json") == profile
    assert json.loads((tmp_path / "profile.json").read_text())["source"] == "modelled"


# Rooflines


def test_a_roofline_is_level_up_to_its_knee() -> None:
    card = Hardware("a card", flops_per_second=1000.0, bytes_per_second=10.0)
    target = ModelSize(weight_bytes=100.0, flops_per_row=400.0, kv_bytes_per_token=2.0)
    profile = roofline_profile(card, target, overhead=0.5, context_tokens=5, captured=(1, 8))
    assert profile.source == "modelled"
    assert profile.device == "a card"
    # 10 s of weights, .4 s a row, .5 s beside, and 1 s of cache.
    plain = roofline_profile(card, target, overhead=0.5, context_tokens=5)
    assert [plain.round_seconds(n) for n in (1, 25, 26, 40, 400)] == pytest.approx([11.5, 11.5, 11.9, 17.5, 161.5])
    assert plain.round_seconds(1, context_tokens=10) == pytest.approx(12.5)
    assert profile.captured == (1, 8)


def test_a_roofline_of_a_drafter() -> None:
    card = Hardware("a card", flops_per_second=100.0, bytes_per_second=10.0)
    drafter = ModelSize(weight_bytes=10.0, flops_per_row=5.0)
    profile = roofline_profile(card, ModelSize(100.0, 10.0), drafter, draft_len=4)
    assert [profile.round_seconds(1, requests=n) for n in (1, 5, 10)] == pytest.approx([11.0, 11.0, 12.0])
    with pytest.raises(ValueError, match="draft_len: expected at least 1"):
        roofline_profile(card, ModelSize(100.0, 10.0), drafter)
    with pytest.raises(ValueError, match="overhead"):
        roofline_profile(card, ModelSize(100.0, 10.0), overhead=-1)


@pytest.mark.parametrize(("card", "knee"), [(H200, 181), (RTX_4090, 163)])
def test_the_built_in_cards_have_their_knee_where_their_rates_meet(card: Hardware, knee: int) -> None:
    profile = roofline_profile(card, ModelSize(weight_bytes=2e9, flops_per_row=2e9))
    assert profile.round_seconds(knee) == profile.round_seconds(1) < profile.round_seconds(knee + 1)


# Drift


def test_a_tracked_profile_approaches_what_is_measured() -> None:
    tracked = TrackedProfile(CostProfile((1, 8, 64), (1.0, 1.0, 4.0)), rate=0.1)
    for _ in range(300):
        for rows, seconds in ((1, 1.5), (8, 1.5), (64, 4.0)):
            tracked.observe(rows, seconds)
    assert [tracked.profile.round_seconds(n) for n in (1, 8, 64)] == pytest.approx([1.5, 1.5, 4.0], rel=0.02)
    assert tracked.base.seconds == (1.0, 1.0, 4.0)


def test_one_preempted_round_does_little() -> None:
    tracked = TrackedProfile(CostProfile((1, 8), (1.0, 2.0)), rate=0.02)
    tracked.observe(8, 1000.0)
    assert tracked.profile.round_seconds(8) < 2.1


def test_a_tracked_curve_does_not_fall() -> None:
    tracked = TrackedProfile(CostProfile((1, 8), (1.0, 1.1)), rate=0.5)
    for _ in range(20):
        tracked.observe(1, 5.0)
    assert tracked.profile.seconds[0] <= tracked.profile.seconds[1]


def test_drift_can_change_a_decision() -> None:
    """A row that became dear is no longer verified."""
    tracked = TrackedProfile(CostProfile((1, 2, 3, 4), (1.0, 1.05, 1.1, 1.15)), rate=0.5)
    policy = ConfidenceScheduled(tracked)
    asked = Signals((0,), torch.tensor([3]), 3, torch.tensor([[0.9, 0.9, 0.9]]))
    assert policy.plan(asked).tolist() == [3]
    for _ in range(40):
        tracked.observe(4, 3.0)
        tracked.observe(2, 1.05)
    assert policy.plan(asked).tolist() == [2]


def test_a_tracked_profile_refuses_what_is_no_time() -> None:
    tracked = TrackedProfile(CostProfile((1,), (1.0,)))
    with pytest.raises(ValueError, match="rows, seconds"):
        tracked.observe(1, 0.0)
    with pytest.raises(ValueError, match="rate"):
        TrackedProfile(tracked.base, rate=0.0)
