"""The cost profile: its curve, its measurement, its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.policy import CostProfile, cost

SECONDS = st.floats(1e-6, 1e3)


def seconds_at(profile: CostProfile, max_rows: int) -> list[float]:
    return (1 / profile.steps_per_second(max_rows)).tolist()


def test_the_curve_goes_through_its_points_and_straight_between() -> None:
    profile = CostProfile((1, 2, 4, 8), (1.0, 3.0, 4.0, 4.0))
    assert seconds_at(profile, 8) == pytest.approx([1, 1, 3, 3.5, 4, 4, 4, 4, 4])


def test_the_curve_goes_on_by_its_last_slope() -> None:
    profile = CostProfile((1, 2, 4), (1.0, 1.5, 2.5))
    assert seconds_at(profile, 7)[4:] == pytest.approx([2.5, 3, 3.5, 4])


def test_a_curve_that_ends_falling_never_reaches_zero() -> None:
    assert seconds_at(CostProfile((1, 2), (2.0, 1.0)), 6) == pytest.approx([2, 2, 1, 1, 1, 1, 1])


def test_below_its_first_point_the_curve_is_level() -> None:
    assert seconds_at(CostProfile((4, 8), (1.0, 2.0)), 5) == pytest.approx([1, 1, 1, 1, 1, 1.25])


def test_one_point_is_a_level_curve() -> None:
    assert CostProfile((3,), (0.5,)).steps_per_second(4).tolist() == [2.0] * 5


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
    ("rows", "seconds", "message"),
    [
        ((), (), "same length >= 1, got 0 and 0"),
        ((1, 2), (1.0,), "same length >= 1, got 2 and 1"),
        ((0, 1), (1.0, 1.0), "rows: expected increasing numbers from 1 up"),
        ((2, 2), (1.0, 1.0), "rows: expected increasing"),
        ((1, 2), (1.0, 0.0), "seconds: expected positive finite"),
        ((1, 2), (1.0, float("inf")), "seconds: expected positive finite"),
        ((1, 2), (1.0, float("nan")), "seconds: expected positive finite"),
    ],
)
def test_a_bad_profile_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostProfile(rows, seconds)


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


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = CostProfile((1, 2, 64), (0.1, 1 / 3, 2.0))
    profile.save(tmp_path / "profile.json")
    assert CostProfile.load(tmp_path / "profile.json") == profile


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
