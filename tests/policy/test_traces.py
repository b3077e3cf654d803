"""Traces: what they hold, what they refuse, their file, and their recorder."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.policy import FixedK, Outcome, Signals
from dspark.policy.simulator import synthetic_trace
from dspark.policy.traces import SCHEMA, Trace, TraceRecorder
from tests.policy.helpers import outcome, signals


def small(**changed: Any) -> Trace:
    """Two requests, the first of two rounds, with two drafts each."""
    arrays: dict[str, Any] = {
        "domains": ("code", "chat"),
        "request": np.array([3, 3, 8]),
        "round": np.array([0, 1, 0]),
        "position": np.array([1, 4, 1]),
        "context": np.array([10, 13, 20]),
        "domain": np.array([0, 0, 1]),
        "accepted": np.array([2, 0, 1]),
        "draft_len": 2,
        "confidence": np.array([[0.9, 0.8], [0.4, 0.5], [0.7, 0.2]], dtype=np.float32),
    }
    return Trace(**{**arrays, **changed})


def equal(one: Trace, other: Trace) -> bool:
    return all(
        np.array_equal(getattr(one, f.name), getattr(other, f.name))
        for f in fields(Trace)
        if getattr(one, f.name) is not None or getattr(other, f.name) is not None
    )


def test_summary_counts_by_hand() -> None:
    summary = small().summary()
    assert (summary.requests, summary.rows, summary.tau) == (2, 3, 2.0)
    assert summary.acceptance_by_position == pytest.approx((2 / 3, 1 / 2))
    assert summary.confidence_by_position == pytest.approx((2 / 3, 1 / 2))  # (.9 + .4 + .7) / 3 and (.8 + .2) / 2
    assert small(confidence=None).summary().confidence_by_position is None


def test_select_keeps_one_domain() -> None:
    chat = small().select("chat")
    assert chat.domains == ("chat",)
    assert (chat.request.tolist(), chat.domain.tolist()) == ([8], [0])
    assert chat.confidence.shape == (1, 2)
    with pytest.raises(ValueError, match="domain: expected one of code, chat, got 'law'"):
        small().select("law")


def test_concat_numbers_requests_anew_and_merges_domains() -> None:
    both = Trace.concat([small(), small(domains=("chat", "law"))])
    assert both.domains == ("code", "chat", "law")
    assert both.request.tolist() == [0, 0, 1, 2, 2, 3]
    assert both.domain.tolist() == [0, 0, 1, 1, 1, 2]
    assert both.summary().tau == small().summary().tau
    assert Trace.concat([small()]).num_requests == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([], "traces: expected at least one, got none"),
        ([small(), small(confidence=None)], "traces: expected the same confidence in all, got none and some"),
        (
            [small(), small(draft_len=3, confidence=None), small()],
            "traces: expected the same draft_len in all, got 2 and 3",
        ),
    ],
)
def test_concat_refuses_what_does_not_fit(other: list[Trace], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trace.concat(other)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accepted": np.array([3, 0, 1])}, r"accepted: expected finite values from 0 to 2, got 0 to 3"),
        ({"accepted": np.array([2, 0])}, r'accepted: expected shape "n" = \[3\], got \[2\]'),
        ({"domain": np.array([0, 0, 2])}, "domain: expected finite values from 0 to 1, got 0 to 2"),
        ({"domain": np.array([0, 1, 1])}, "domain: expected one for all rows of a request, got several"),
        ({"request": np.array([8, 3, 3])}, r"request: expected rows in order of \(request, round\)"),
        ({"round": np.array([1, 1, 0])}, "round: expected it to increase within a request, got a step of 0"),
        ({"position": np.array([4, 1, 1])}, "position: expected it to increase within a request, got a step of -3"),
        ({"confidence": np.full((3, 2), 1.5)}, "confidence: expected finite values from 0 to 1, got 1.5 to 1.5"),
        ({"confidence": np.full((3, 2), np.nan)}, "confidence: expected finite values from 0 to 1, got nan to nan"),
        ({"confidence": np.full((3, 3), 0.5)}, r'confidence: expected shape "n G" = \[3, 2\], got \[3, 3\]'),
        ({"margin": np.full((3, 2), np.inf)}, "margin: expected finite values from any to any, got inf to inf"),
        ({"logprob": np.full((3, 2), 0.1)}, "logprob: expected finite values from any to 0, got 0.1 to 0.1"),
        ({"draft_len": 0}, "draft_len: expected at least 1, got 0"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changed)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match='accepted: expected a integer array "n", got float64'):
        small(accepted=np.array([1.0, 1.0, 1.0]))
    with pytest.raises(TypeError, match='confidence: expected a floating array "n G", got list'):
        small(confidence=[[0.5, 0.5]] * 3)


# The file


@given(seed=st.integers(0, 1000), margins=st.booleans())
def test_a_file_gives_back_what_was_saved(tmp_path_factory: pytest.TempPathFactory, seed: int, margins: bool) -> None:
    trace = synthetic_trace(requests=2, tokens=5, draft_len=3, seed=seed)
    if margins:
        trace = replace(trace, margin=trace.confidence, logprob=-np.ones((len(trace), 3)))
    path = tmp_path_factory.mktemp("traces") / "some.npz"
    trace.save(path)
    loaded = Trace.load(path)
    assert equal(loaded, trace)
    assert (loaded.margin is not None) == margins


def stored(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema": np.array(SCHEMA + 1)}, f"expected a trace of schema {SCHEMA}, got {SCHEMA + 1}"),
        ({"schema": None}, f"expected a trace of schema {SCHEMA}, got none"),
        ({"schema": np.array([SCHEMA, SCHEMA])}, f"expected a trace of schema {SCHEMA}"),
        ({"accepted": None}, r"not a trace of schema 1: missing \['accepted'\], unknown \[\]"),
        ({"tokens": np.arange(3)}, r"not a trace of schema 1: missing \[\], unknown \['tokens'\]"),
        ({"accepted": np.array([0, 0, 9])}, "accepted: expected finite values from 0 to 2, got 0 to 9"),
        ({"round": np.array([0.5, 1, 0])}, 'round: expected a integer array "n", got float64'),
    ],
)
def test_another_schema_or_content_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = tmp_path / "some.npz"
    small().save(path)
    arrays = {**stored(path), **changed}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match=f"some.npz: {message}"):
        Trace.load(path)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path, array, pickled = (tmp_path / name for name in ("some.npz", "array.npz", "pickle.npz"))
    with pytest.raises(FileNotFoundError):
        Trace.load(path)
    with array.open("wb") as file:
        np.save(file, np.arange(3))
    np.savez(pickled, schema=np.array(SCHEMA), request=np.array([object()]))
    for content in (b"", b"not a zip", b"PK\x03\x04broken", array.read_bytes(), pickled.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"some.npz: not a trace"):
            Trace.load(path)


# Rows of a run that verifies everything


def test_the_full_verification_path_starts_each_round_where_the_last_ended() -> None:
    dense = synthetic_trace(requests=3, tokens=60)
    path = dense.full_verification_path()
    assert len(path) < len(dense)
    for request in range(path.num_requests):
        own = path.request == request
        step = np.diff(path.position[own])
        assert (step == path.accepted[own][:-1] + 1).all()
    again = path.full_verification_path()
    assert equal(again, path)


# The recorder


def test_the_recorder_keeps_rounds_that_verified_everything() -> None:
    recorder = TraceRecorder({5: "code"})
    buffer = torch.tensor([[0.9, 0.8], [0.6, 0.5]])
    shown = Signals((5, 2), torch.tensor([2, 2]), 2, buffer, buffer)
    recorder.record(shown, outcome([2, 2], [2, 0], (5, 2)), context=torch.tensor([9, 4]))
    buffer.zero_()  # an engine uses its buffers again
    buffer[0] = 0.25
    shown = replace(shown, request_ids=(2, 5))
    recorder.record(shown, outcome([2, 1], [1, 1], (2, 5)), context=torch.tensor([5, 12]))
    recorder.record(None, outcome([0], [0], (2,)), context=torch.tensor([7]))
    last = torch.tensor([[0.1, 0.1]])
    shown = Signals((2,), torch.tensor([2]), 2, last, last)
    recorder.record(shown, outcome([2], [0], (2,)), context=torch.tensor([8]))
    trace = recorder.trace()
    assert trace.domains == ("code", "text")
    assert trace.request.tolist() == [2, 2, 2, 5]
    assert trace.round.tolist() == [0, 1, 3, 0]
    assert trace.position.tolist() == [1, 2, 5, 1]  # 1 + 1 + 0, then 1 + 1, then 1 without drafts
    assert trace.context.tolist() == [4, 5, 8, 9]
    assert trace.accepted.tolist() == [0, 1, 0, 2]
    assert [trace.domains[d] for d in trace.domain] == ["text", "text", "text", "code"]
    assert trace.confidence == pytest.approx(np.array([[0.6, 0.5], [0.25, 0.25], [0.1, 0.1], [0.9, 0.8]]))
    assert trace.margin is not None
    assert trace.logprob is None


def test_the_recorder_needs_rounds_that_fit_together() -> None:
    recorder = TraceRecorder()
    with pytest.raises(ValueError, match="record: expected at least one round with drafts, got none"):
        recorder.trace()
    some = signals([[0.5, 0.5]])
    with pytest.raises(ValueError, match=r"outcome: expected requests \(0,\), got \(1,\)"):
        recorder.record(some, outcome([2], [0], (1,)))
    recorder.record(some, outcome([2], [0]))
    with pytest.raises(ValueError, match="signals: expected draft length 2, got 3"):
        recorder.record(signals(draft_len=3), outcome([3], [0]))
    recorder.record(signals(draft_len=2), outcome([2], [0]))
    with pytest.raises(ValueError, match="confidence: expected it in every round or in none, got it in some"):
        recorder.trace()


def test_a_watched_policy_plans_and_learns_as_before() -> None:
    class Counting(FixedK):
        seen = 0

        def observe(self, outcome: Outcome) -> None:
            self.seen += 1

    recorder, policy = TraceRecorder("code"), Counting(2)
    watched = recorder.watch(policy)
    shown = signals([[0.5, 0.5]])
    assert watched.plan(shown).tolist() == [2]
    watched.observe(outcome([2], [1]))
    watched.observe(outcome([0], [0]))  # a round without drafts
    watched.plan(shown)
    watched.observe(outcome([2], [0]))
    assert policy.seen == 3
    assert recorder.trace().position.tolist() == [1, 4]
