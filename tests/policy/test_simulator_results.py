"""Results as tables, files and pictures; what a step costs."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.policy import CostProfile, StepCost
from dspark.policy.simulator import (
    MACHINES,
    Engine,
    Result,
    markdown,
    write_csv,
    write_json,
    write_picture,
)

NAN = float("nan")
PLAIN = Result("plain", "closed", 8, 7.5, 40, 812.4, 101.55, 0.01, 0.011, 0.012, 0.1, 0.2, 0.3, 1.0, 0.0, NAN, 0.0)
FIXED = dataclasses.replace(PLAIN, policy="fixed:3", tau=3.25, verified_per_round=3.0, waste=0.25, drafted=1.0)


def test_the_table_has_a_row_per_result() -> None:
    lines = markdown([PLAIN, FIXED]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| plain | closed | 8 | 7.5 | 812 | 101.5 | 10.00 | 11.00 | 12.00 | 100 | 300 |")
    assert lines[2].endswith("| 1.00 | 0.00 | – | 0 |")
    assert lines[3].endswith("| 3.25 | 3.00 | 25 | 100 |")


def test_files_hold_every_field(tmp_path: Path) -> None:
    write_csv(tmp_path / "r.csv", [PLAIN, FIXED])
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["plain", "fixed:3"]
    assert rows[1].keys() == dataclasses.asdict(FIXED).keys()
    assert float(rows[1]["tau"]) == 3.25
    write_json(tmp_path / "r.json", [PLAIN, FIXED], {"seed": 3})
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["settings"] == {"seed": 3}
    assert content["results"][0]["waste"] is None
    assert content["results"][1] == dataclasses.asdict(FIXED)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    write_picture(tmp_path / "r.png", [PLAIN, FIXED, dataclasses.replace(FIXED, running=30.0)])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib; install it with: pip install \"dspark\[plot\]\""):
        write_picture(tmp_path / "r.png", [PLAIN])


# What a step costs

SPLIT = CostProfile((1, 4), (1.0, 2.5), (1, 3), (0.25, 0.75), context_tokens=10, seconds_per_context_token=0.01)


@given(rows=st.integers(1, 40), requests=st.integers(1, 9), context=st.integers(0, 200))
def test_a_drafted_step_costs_what_the_profile_says(rows: int, requests: int, context: int) -> None:
    for profile in (SPLIT, *MACHINES.values()):
        seconds = StepCost(profile).seconds(rows, requests, context, True)
        assert seconds == pytest.approx(profile.round_seconds(rows, requests, context), rel=1e-12)


def test_a_step_without_drafts_does_not_pay_for_them() -> None:
    cost = StepCost(SPLIT)
    assert cost.seconds(3, 2, 10, False) == 2.0
    assert cost.seconds(3, 2, 10, True) == 2.5
    assert cost.seconds(3, 2, 30, False) == pytest.approx(2.2)
    whole = CostProfile((1, 4), (1.0, 2.5))
    assert StepCost(whole).seconds(3, 2, 10, False) == 2.0  # it cannot tell
    assert StepCost(whole, CostProfile((1,), (0.5,))).seconds(3, 2, 10, False) == 0.5
    with pytest.raises(ValueError, match="plain: expected None, since the profile itself says what drafting costs"):
        Engine(SPLIT, plain=whole)


def test_machines_are_said_to_be_modelled() -> None:
    assert MACHINES.keys() == {"h200", "rtx4090"}
    assert all(profile.source == "modelled" for profile in MACHINES.values())
