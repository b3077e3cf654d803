"""Sequential temperature scaling and its reports: fits, labels, files, and what they refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.policy import calibration
from dspark.policy.calibration import SequentialTemperatures, fit_sts, split_by_request, temper
from dspark.policy.calibration_report import calibration_report, write_reliability_diagram
from dspark.policy.reliability import Reliability, area_under_curve, calibration_floor, expected_calibration_error
from dspark.policy.simulator import synthetic_trace
from dspark.policy.traces import Trace
from tests.policy.helpers import recorded
from tests.tolerances import SIGMAS, TEMPERATURE

TRACE = synthetic_trace(requests=12, tokens=200, draft_len=4)
"""Exactly calibrated."""


def distorted(trace: Trace, temperatures: list[float]) -> Trace:
    """Confidences whose logits are divided by a number of each position's own."""
    return replace(
        trace, confidence=temper(torch.from_numpy(trace.confidence), torch.tensor(temperatures)).float().numpy()
    )


def by_hand(confidence: list[list[float]], accepted: list[int]) -> Trace:
    """A round of each request."""
    shown = np.array(confidence, dtype=np.float32)
    return recorded([[a] for a in accepted], draft_len=shown.shape[1], confidence=shown)


# The fit


def test_each_position_gets_the_temperature_that_undoes_its_distortion() -> None:
    applied = [0.5, 2.0, 1.0, 0.6]
    fitted = fit_sts(distorted(TRACE, applied)).temperatures
    assert fitted == pytest.approx([1 / t for t in applied], rel=TEMPERATURE)


def test_calibration_error_on_other_requests_is_at_most_half_of_before() -> None:
    fitted, judged = split_by_request(distorted(TRACE, [0.5] * 4))
    before, after = calibration_report(judged, fit_sts(fitted)).survival_ece
    assert after <= before / 2


def test_calibrated_confidences_are_left_nearly_alone() -> None:
    assert fit_sts(TRACE).temperatures == pytest.approx([1] * 4, rel=TEMPERATURE)


def test_the_product_is_held_to_all_drafts_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that held each product to its own position's draft would be another one."""
    seen: list[list[bool]] = []

    def watch(predicted: Tensor, happened: Tensor, bins: int) -> float:
        seen.append(happened.tolist())
        return expected_calibration_error(predicted, happened, bins)

    monkeypatch.setattr(calibration, "expected_calibration_error", watch)
    fit_sts(by_hand([[0.9, 0.8], [0.7, 0.6], [0.5, 0.4]], [2, 1, 0]))
    assert seen[0] == [True, True, False]
    assert seen[-1] == [True, False, False]


def test_positions_are_fitted_left_to_right() -> None:
    """A position's temperature depends on those before it, and not on those after it."""
    applied = distorted(TRACE, [0.5, 1.0, 1.0, 1.0])
    other = applied.confidence.copy()
    other[:, 2:] = 0.5
    changed = fit_sts(replace(applied, confidence=other)).temperatures
    fitted = fit_sts(applied).temperatures
    assert changed[:2] == fitted[:2]
    assert fitted[1] == pytest.approx(1, rel=TEMPERATURE)  # what position 1 had wrong is not put right twice


def test_a_temperature_has_to_earn_its_distance_from_one() -> None:
    few = by_hand([[0.6], [0.6], [0.6]], [1, 1, 1])
    assert fit_sts(few, prior=0).temperatures[0] < 0.2
    assert fit_sts(few, prior=5).temperatures == (1.0,)


def test_p25_domains_do_not_change_each_others_temperatures() -> None:
    trace = synthetic_trace(requests=3, tokens=100, draft_len=2)
    wild = distorted(trace, [0.4, 0.4]).confidence
    chat = trace.domain == trace.domains.index("chat")
    mixed = replace(trace, confidence=np.where(chat[:, None], wild, trace.confidence))
    fitted, alone = fit_sts(mixed, by_domain=True), fit_sts(trace, by_domain=True)
    assert fitted.by_class["code"] == alone.by_class["code"]
    assert fitted.by_class["chat"][0] > 1.5
    shared = fitted.apply(torch.tensor([[0.9, 0.9]] * 3), ("code", "chat", "unheard of"))
    assert shared[0, 0] > shared[2, 0] > shared[1, 0]


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="trace: expected confidences, got none"):
        fit_sts(replace(TRACE, confidence=None))
    with pytest.raises(ValueError, match="trace: expected at least one row"):
        fit_sts(TRACE.take(np.zeros(len(TRACE), dtype=bool)))
    with pytest.raises(ValueError, match="prior: expected at least 0, got -1"):
        fit_sts(TRACE, prior=-1)


# Applying and keeping them


@given(
    rows=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=6),
    temperature=st.floats(0.125, 8),
)
def test_the_order_within_a_position_is_kept(rows: list[float], temperature: float) -> None:
    tempered = SequentialTemperatures((temperature,)).apply(torch.tensor(sorted(rows))[:, None])[:, 0]
    assert bool((tempered.diff() >= 0).all())
    assert bool(((tempered >= 0) & (tempered <= 1)).all())
    assert tempered.dtype == torch.float32


def test_the_ends_stay_and_one_changes_nothing() -> None:
    confidence = [0.0, 1.0, 0.5, 0.3]
    tempered = SequentialTemperatures((8.0, 0.125, 8.0, 1.0)).apply(torch.tensor([confidence]))
    assert tempered[0].tolist() == pytest.approx(confidence)


def test_fewer_drafts_than_temperatures_are_fine_and_more_are_not() -> None:
    both = SequentialTemperatures((2.0, 1.0))
    assert both.apply(torch.tensor([[0.9]])).tolist() == [[0.75]]
    with pytest.raises(ValueError, match=r'confidence: expected shape "R G" with G at most 2, got \[1, 3\]'):
        both.apply(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="classes: expected one for each of 1 requests, got 2"):
        both.apply(torch.zeros(1, 2), ("a", "b"))


def test_they_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "temperatures.json"
    kept = SequentialTemperatures((1.5, 0.7), {"code": (2.0, 1.0)}, bins=12, rows=34)
    kept.save(path)
    assert SequentialTemperatures.load(path) == kept


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no", "not a file of sequential temperatures"),
        ("[]", "not a file of sequential temperatures"),
        ('{"temperatures": [1.0]}', "expected schema 1, got None"),
        ('{"schema": 2, "temperatures": [1.0]}', "expected schema 1, got 2"),
        ('{"schema": 1, "temperatures": [0.0]}', "positive finite"),
        ('{"schema": 1, "temperatures": []}', "got none"),
        ('{"schema": 1, "temperatures": [1.0], "by_class": {"a": [1.0, 2.0]}}', "a: expected 1 positive"),
        ('{"schema": 1, "temperatures": [1.0], "other": 1}', r"unknown fields \['other'\]"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        SequentialTemperatures.load(path)


# Splits


def test_a_split_keeps_requests_whole_in_every_domain() -> None:
    fitted, judged = split_by_request(TRACE, held_out=0.25)
    assert len(fitted) + len(judged) == len(TRACE)
    assert not set(fitted.request.tolist()) & set(judged.request.tolist())
    for name in TRACE.domains:
        assert (fitted.select(name).num_requests, judged.select(name).num_requests) == (9, 3)
    again = split_by_request(TRACE, held_out=0.25)[0]
    assert again.request.tolist() == fitted.request.tolist()
    assert split_by_request(TRACE, held_out=0.25, seed=1)[0].request.tolist() != fitted.request.tolist()


@pytest.mark.parametrize(("share", "message"), [(0.0, "between 0 and 1"), (0.01, "leaves a part empty")])
def test_a_split_that_leaves_nothing_is_refused(share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_by_request(TRACE, share)


# Reliability


def test_the_area_under_the_curve_counts_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, positive = torch.randint(5, (40,), generator=generator), torch.rand(40, generator=generator) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive].tolist() for b in scores[~positive].tolist()]
    assert area_under_curve(scores, positive) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(area_under_curve(torch.zeros(3), torch.ones(3, dtype=torch.bool)))


def test_the_calibration_error_is_what_a_hand_finds() -> None:
    predicted = torch.tensor([0.05, 0.95, 0.95, 1.0, 0.5])
    happened = torch.tensor([True, True, False, True, False])
    by_bin = abs(0.05 - 1) + abs(0.95 + 0.95 + 1.0 - 2) + abs(0.5 - 0)
    assert expected_calibration_error(predicted, happened) == pytest.approx(by_bin / 5)
    with pytest.raises(ValueError, match='expected shape "n" of both'):
        expected_calibration_error(predicted, happened[:2])
    with pytest.raises(ValueError, match="bins: expected at least 1"):
        expected_calibration_error(predicted, happened, 0)


def test_the_floor_is_the_mean_error_of_exact_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(400, generator=generator)
    errors = torch.tensor(
        [expected_calibration_error(predicted, torch.rand(400, generator=generator) < predicted) for _ in range(300)]
    )
    deviation = float(errors.std()) / len(errors) ** 0.5
    assert abs(float(errors.mean()) - calibration_floor(predicted)) < SIGMAS * deviation


def test_nothing_to_compare_is_no_error() -> None:
    none = Reliability.of(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert (none.count, none.predicted, none.auc, none.ece, none.bins) == (0, None, None, 0.0, ())


# Reports


def test_a_draft_counts_where_those_before_it_were_accepted_and_a_product_everywhere() -> None:
    report = calibration_report(TRACE, SequentialTemperatures((1.0,) * 4))
    summary = TRACE.summary()
    for k, row in enumerate(report.positions):
        assert row.draft.before.count == int((TRACE.accepted >= k).sum())
        assert row.draft.before.observed == pytest.approx(summary.acceptance_by_position[k])
        assert row.draft.before.predicted == pytest.approx(summary.confidence_by_position[k])  # type: ignore[index]
        assert row.survival.before.count == len(TRACE)
        assert row.survival.before.observed == pytest.approx(float((TRACE.accepted > k).mean()))
        assert row.draft.before.ece == pytest.approx(row.draft.after.ece)
    assert report.tau == pytest.approx(summary.tau)


def test_domains_are_judged_by_temperatures_of_their_own() -> None:
    own = SequentialTemperatures((1.0,) * 4, dict.fromkeys(TRACE.domains, (2.0,) * 4))
    assert calibration_report(TRACE, own).survival_ece[1] == pytest.approx(
        calibration_report(TRACE, SequentialTemperatures((2.0,) * 4)).survival_ece[1]
    )


def test_a_report_is_text_json_and_a_picture(tmp_path: Path) -> None:
    one = by_hand([[0.9, 0.65], [0.7, 0.8], [0.5, 0.4]], [2, 1, 0])
    report = calibration_report(one, SequentialTemperatures((2.0, 1.0)))
    report.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["positions"][0]["temperature"] == 2.0
    assert content["positions"][1]["draft"]["before"]["count"] == 2
    lines = report.markdown().splitlines()
    assert lines[0] == "3 rounds of 3 requests, τ = 2.00. AUC of the confidences: 0.667."
    assert len(lines) == 4 + 2 + 2
    write_reliability_diagram(tmp_path / "some.png", report)
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
