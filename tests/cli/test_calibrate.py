"""``calibrate``: what it writes, from recorded rounds and from rounds of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.cli import setup
from dspark.policy.calibration import SequentialTemperatures
from dspark.policy.simulator import synthetic_trace
from dspark.policy.traces import Trace
from tests.cli.helpers import run

FILES = {"temperatures.json", "report.json", "report.md", "reliability.png"}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    synthetic_trace(requests=4, tokens=60, draft_len=3, temperature=0.5).save(tmp_path / "rounds.npz")
    return tmp_path / "rounds.npz"


def test_recorded_rounds_give_temperatures_and_a_report(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    printed = run("calibrate", "--trace", str(recorded), "--by-domain", "--out", str(out))
    assert {path.name for path in out.iterdir()} == FILES
    temperatures = SequentialTemperatures.load(out / "temperatures.json")
    assert temperatures.temperatures[0] > 1.4
    assert set(temperatures.by_class) == {"math", "code", "chat"}
    assert temperatures.rows == 6 * 60
    report = json.loads((out / "report.json").read_text())
    assert report["requests"] == 6
    assert "before" in printed
    assert (out / "report.md").read_text().startswith("360 rounds of 6 requests")


def test_one_domain_can_be_chosen(recorded: Path, tmp_path: Path) -> None:
    run("calibrate", "--trace", str(recorded), "--domain", "chat", "--held-out", "0.25", "--out", str(tmp_path))
    assert json.loads((tmp_path / "report.json").read_text())["requests"] == 1


def test_without_matplotlib_everything_else_is_written(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    out = tmp_path / "out"
    printed = run("calibrate", "--trace", str(recorded), "--out", str(out))
    assert '"dspark[plot]"' in printed
    assert {path.name for path in out.iterdir()} == FILES - {"reliability.png"}


def test_the_tiny_pair_is_recorded(tmp_path: Path) -> None:
    run("calibrate", "--prompts", "4", "--max-tokens", "24", "--rule", "ratio", "--out", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"trace.npz"}
    trace = Trace.load(tmp_path / "trace.npz")
    assert (trace.num_requests, trace.draft_len) == (4, 7)
    assert set(trace.domains) == {"code", "prose"}
    assert json.loads((tmp_path / "report.json").read_text())["requests"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "some"], "--trace: was recorded before"),
        (["--domain", "poetry"], "domain: expected one of"),
        (["--held-out", "1.5"], "held_out: expected a number between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused(recorded: Path, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("calibrate", "--trace", str(recorded), *options, "--out", str(tmp_path))


def test_p24_a_trace_without_confidences_is_refused(recorded: Path, tmp_path: Path) -> None:
    replace(Trace.load(recorded), confidence=None).save(recorded)
    with pytest.raises(ValueError, match="trace: expected confidences, got none"):
        run("calibrate", "--trace", str(recorded), "--out", str(tmp_path))


def test_an_unknown_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rule 'best': expected one of"):
        run("calibrate", "--rule", "best", "--out", str(tmp_path))
