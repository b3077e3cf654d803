"""What each shipped policy plans, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.ops.schedule import schedule_prefix
from dspark.policy import ConfidenceScheduled, CostProfile, FixedK, Oracle, Signals
from tests.policy.helpers import BEND, FLAT, outcome, signals

APPENDIX_A = CostProfile((1, 2, 3), (1.0, 2.0, 1 / 0.45))


def test_signals_hold_nothing_that_was_drawn() -> None:
    """A draft's token or probability here would let a policy decide from it; the outcome alone tells of draws."""
    names = {field.name for field in dataclasses.fields(Signals)}
    assert names == {
        "request_ids", "max_lengths", "draft_len", "confidence", "margin", "weights", "classes", "context_tokens",
    }  # fmt: skip


# FixedK


@pytest.mark.parametrize("k", range(4))
def test_p22_fixed_k_verifies_k(k: int) -> None:
    planned = FixedK(k).plan(signals(None, [3, 3, 1, 0], requests=4))
    assert planned.tolist() == [k, k, min(k, 1), 0]
    assert planned.dtype == torch.int64


def test_p11_fixed_k_outside_0_to_the_draft_length_is_refused() -> None:
    with pytest.raises(ValueError, match="k: expected at most the draft length 3, got 4"):
        FixedK(4).plan(signals(None))
    with pytest.raises(ValueError, match="k: expected at least 0, got -1"):
        FixedK(-1)


# ConfidenceScheduled


def test_the_scheduler_stops_where_appendix_a_does() -> None:
    """Admitting one draft lowers throughput from 1 to 0.9; that a second would raise it to 1.134 is not looked at."""
    for second in (0.9, 0.0):
        assert ConfidenceScheduled(APPENDIX_A).plan(signals([[0.8, second]])).tolist() == [0]


def test_p22_confidence_changes_how_much_is_verified() -> None:
    policy = ConfidenceScheduled(BEND)
    planned = policy.plan(signals([[0.95, 0.95, 0.95], [0.95, 0.05, 0.95], [0.05, 0.95, 0.95]]))
    assert planned.tolist() == [3, 1, 0]
    assert policy.plan(signals([[0.0, 0.0, 0.0]])).tolist() == [0]


def test_p23_a_full_batch_verifies_nothing_where_rows_cost() -> None:
    """Eight rows are free and more cost in proportion: one request speculates, eight do not."""
    policy = ConfidenceScheduled(CostProfile((1, 8, 80), (1.0, 1.0, 10.0)))
    sure = [0.9, 0.8, 0.7]
    assert policy.plan(signals([sure])).tolist() == [3]
    assert policy.plan(signals([sure] * 8)).tolist() == [0] * 8


@pytest.mark.parametrize("lag", [0, 2])
@given(data=st.data())
def test_the_scheduler_keeps_to_the_caps(lag: int, data: st.DataObject) -> None:
    policy = ConfidenceScheduled(FLAT, lag)  # type: ignore[arg-type]
    for _ in range(4):
        requests = data.draw(st.integers(1, 4))
        caps = data.draw(st.lists(st.integers(0, 3), min_size=requests, max_size=requests))
        planned = policy.plan(signals([[0.9, 0.9, 0.9]] * requests, caps))
        assert planned.dtype == torch.int64
        assert all(0 <= n <= cap for n, cap in zip(planned.tolist(), caps, strict=True))
        if lag == 0:
            assert planned.tolist() == caps  # extra rows are free


def test_ties_go_to_the_earlier_request() -> None:
    profile = CostProfile((2, 3, 4), (1.0, 1.0, 2.0))
    assert ConfidenceScheduled(profile).plan(signals([[0.5], [0.5]])).tolist() == [1, 0]


def test_the_lagged_scheduler_spends_the_budget_of_two_rounds_ago() -> None:
    policy = ConfidenceScheduled(BEND, lag=2)
    rounds = [
        [[0.95, 0.95, 0.95], [0.05, 0.05, 0.05]],
        [[0.9, 0.05, 0.05], [0.05, 0.05, 0.05]],
        [[0.1, 0.1, 0.1], [0.9, 0.9, 0.05]],
        [[0.6, 0.5, 0.5], [0.7, 0.9, 0.9]],
        [[0.5, 0.5, 0.5], [0.4, 0.4, 0.4]],
    ]
    speed = BEND.steps_per_second(8)
    budgets = [int(schedule_prefix(torch.tensor(c), speed, mode="global").sum()) for c in rounds]
    assert budgets[:3] == [3, 1, 2]
    planned = [policy.plan(signals(c)).tolist() for c in rounds]
    assert planned[:2] == [[3, 0], [1, 0]]  # nothing to look back at: the early stop
    assert planned[2:] == [[1, 2], [0, 1], [1, 1]]  # 3, 1 and 2 drafts, ranked by the round's own survivals


def test_the_lagged_budget_comes_from_an_unconstrained_search() -> None:
    """The first two rounds stop early at 0; the budget that they leave is the global optimum, 2."""
    policy = ConfidenceScheduled(APPENDIX_A, lag=2)
    assert [policy.plan(signals([[0.8, 0.9]])).tolist() for _ in range(3)] == [[0], [0], [2]]


def test_the_lagged_scheduler_goes_on_when_requests_join_and_leave() -> None:
    policy = ConfidenceScheduled(FLAT, lag=2)
    for requests, total in ((1, 3), (3, 9), (2, 3), (1, 3), (3, 6), (1, 3)):
        assert int(policy.plan(signals([[0.9, 0.9, 0.9]] * requests)).sum()) == total


def test_p24_the_scheduler_refuses_other_lags_and_what_is_missing() -> None:
    with pytest.raises(TypeError, match="profile: expected a CostProfile, got NoneType"):
        ConfidenceScheduled(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lag: expected 0 or 2, got 1"):
        ConfidenceScheduled(FLAT, lag=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"confidence: .* needs a drafter with a confidence head"):
        ConfidenceScheduled(FLAT).plan(signals(None))


# Oracle


def test_the_oracle_verifies_through_the_first_rejected_draft() -> None:
    policy = Oracle({0: [0, 2], 1: [3, 1]})
    assert policy.plan(signals(None, requests=2)).tolist() == [1, 3]  # 3 accepted of 3: none is rejected
    policy.observe(outcome((0, 3), (0, 3)))
    assert policy.plan(signals(None, requests=2)).tolist() == [3, 2]
    assert not policy.diverged


def test_p19_the_oracle_verifies_all_once_a_request_has_left_its_path() -> None:
    policy = Oracle({0: [0, 0, 0], 1: [0, 0, 0]})
    policy.observe(outcome((0, 1), (0, 1)))
    assert policy.diverged == {1}
    assert policy.plan(signals(None, requests=2)).tolist() == [1, 3]
    policy.observe(outcome((0, 0), (0, 0)))
    assert policy.plan(signals(None, requests=2)).tolist() == [1, 3]


def test_the_oracle_goes_by_request_and_not_by_place() -> None:
    policy = Oracle({7: [0, 2], 4: [1]})
    caps = torch.tensor([3, 3])
    assert policy.plan(Signals((4, 7), caps, 3, None)).tolist() == [2, 1]
    policy.observe(outcome([0], [0], (7,)))
    assert policy.plan(Signals((7, 4), caps, 3, None)).tolist() == [3, 2]
    assert policy.plan(Signals((7, 4), torch.tensor([1, 0]), 3, None)).tolist() == [1, 0]


@pytest.mark.parametrize("record", [{}, {0: []}, {1: [2, 2]}])
def test_the_oracle_says_when_its_record_ends(record: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match="request 0: no accepted length recorded for round 0"):
        Oracle(record).plan(signals(None))


def test_the_oracle_keeps_its_own_copy_of_the_record() -> None:
    record = {0: [1]}
    policy = Oracle(record)
    record[0][0] = 2
    assert policy.plan(signals(None)).tolist() == [2]


def test_policies_say_what_they_are() -> None:
    assert repr(FixedK(3)) == "FixedK(3)"
    assert repr(ConfidenceScheduled(FLAT, 2)) == "ConfidenceScheduled(lag=2)"
    assert repr(Oracle({})) == "Oracle()"
