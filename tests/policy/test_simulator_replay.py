"""Synthetic traces, and what is replayed of a trace at positions that it has and has not."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.policy import ConfidenceScheduled, CostProfile, FixedK, VerifyPolicy
from dspark.policy.simulator import Domain, Engine, Replay, Result, Workload, simulate, summarize, synthetic_trace
from dspark.policy.simulator.replay import Between
from dspark.policy.traces import Trace
from tests.policy.helpers import FLAT, recorded
from tests.tolerances import REPLAY, SIGMAS

FLOAT32 = float(np.finfo(np.float32).eps)


# Synthetic traces


def test_a_seed_gives_one_trace() -> None:
    one, same, other = (synthetic_trace(requests=2, tokens=40, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.confidence, same.confidence)  # type: ignore[arg-type]
    assert np.array_equal(one.accepted, same.accepted)
    assert not np.array_equal(one.accepted, other.accepted)


def excess(trace: Trace) -> tuple[float, float]:
    """Acceptance beyond confidence, over drafts of more and of less than even confidence, in standard errors."""
    slot = np.arange(trace.draft_len)
    reached = slot <= trace.accepted[:, None]
    sure = trace.confidence > 0.5

    def standard_errors(chosen: np.ndarray) -> float:
        c, passed = trace.confidence[chosen].astype(float), (slot < trace.accepted[:, None])[chosen]
        return float((passed - c).sum() / np.sqrt((c * (1 - c)).sum()))

    return standard_errors(reached & sure), standard_errors(reached & ~sure)


def test_confidences_are_calibrated_unless_told_otherwise() -> None:
    # One row in eight: the ones between share tokens with it.
    def thinned(temperature: float) -> Trace:
        return synthetic_trace(requests=64, tokens=256, temperature=temperature).take(np.arange(64 * 256 * 3) % 8 == 0)

    calibrated, over_confident = thinned(1.0), thinned(0.5)
    assert all(abs(e) < SIGMAS for e in excess(calibrated))
    high, low = excess(over_confident)
    assert high < -SIGMAS
    assert low > SIGMAS
    assert np.array_equal(over_confident.accepted, calibrated.accepted)
    order = np.argsort(calibrated.confidence, axis=None)
    assert (np.diff(over_confident.confidence.reshape(-1)[order]) >= -FLOAT32).all()  # the order stays


def test_acceptance_falls_along_the_block_and_from_code_to_chat() -> None:
    trace = synthetic_trace(requests=24, tokens=256).full_verification_path()
    math, code, chat = (trace.select(d).summary() for d in ("math", "code", "chat"))
    assert math.tau > code.tau > chat.tau
    dense = synthetic_trace([Domain("x", (0.9, 0.5), persistence=0.0)], requests=64, tokens=240, draft_len=3)
    apart = dense.take(np.arange(len(dense)) % 3 == 0)  # rows that share no token
    means, reached = np.array([0.9, 0.5, 0.5]), len(apart) * np.array([1, 0.9, 0.45])
    error = np.array(apart.summary().acceptance_by_position) - means
    assert (abs(error) < SIGMAS * np.sqrt(means * (1 - means) / reached)).all()


def test_rows_agree_about_the_tokens_that_they_share() -> None:
    """Where acceptance does not depend on the slot, a round from the middle of another accepts what is left of it."""
    trace = synthetic_trace([Domain("x", (0.8,))], requests=1, tokens=300, draft_len=5)
    accepted = trace.accepted
    for i in range(len(trace) - 1):
        if accepted[i] > 0:
            assert accepted[i + 1] >= accepted[i] - 1
            if accepted[i] < 5:
                assert accepted[i + 1] == accepted[i] - 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: synthetic_trace(requests=0), "requests: expected at least 1, got 0"),
        (lambda: synthetic_trace([]), "domains: expected at least 1, got 0"),
        (lambda: synthetic_trace(temperature=0), "temperature: expected a positive finite number, got 0"),
        (lambda: Domain("x", (1.0,)), r"acceptance: expected chances between 0 and 1, got \(1.0,\)"),
        (lambda: Domain("x", (0.5,), concentration=0), "concentration: expected a positive finite number, got 0"),
        (lambda: Domain("x", (0.5,), persistence=1), "persistence: expected 0 <= persistence < 1, got 1"),
    ],
)
def test_synthetic_traces_refuse_values_outside_their_ranges(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


# The index


def test_a_position_between_rounds_takes_the_nearest_row() -> None:
    replay = Replay(recorded([[4, 3, 0], [2]], [[1, 6, 8], [3]], draft_len=4))
    assert (replay.begin.tolist(), replay.end.tolist()) == ([0, 8], [8, 11])
    #                   position: 1  2  3  4  5  6  7  8 | 3  4  5; 7 lies between 6 and 8: the earlier
    assert replay.accepted.tolist() == [4, 4, 4, 3, 3, 3, 3, 0, 2, 2, 2]


@given(data=st.data())
def test_the_nearest_row_is_the_one_that_a_search_finds(data: st.DataObject) -> None:
    requests = data.draw(st.integers(1, 3))
    positions, accepted = [], []
    for _ in range(requests):
        steps = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
        positions.append(np.cumsum(steps).tolist())
        accepted.append(data.draw(st.lists(st.integers(0, 4), min_size=len(steps), max_size=len(steps))))
    replay = Replay(recorded(accepted, positions, draft_len=4))
    for request, own in enumerate(positions):
        assert replay.end[request] - replay.begin[request] == own[-1] + accepted[request][-1] + 1 - own[0]
        for place in range(replay.begin[request], replay.end[request]):
            position = own[0] + place - replay.begin[request]
            nearest = min(range(len(own)), key=lambda i: (abs(own[i] - position), i))
            assert replay.accepted[place] == accepted[request][nearest]


def test_a_round_between_recorded_ones_is_put_together_of_their_tokens() -> None:
    confidence = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    trace = recorded([[2, 1, 0], [0]], [[1, 4, 6], [3]], draft_len=4, confidence=confidence, margin=2 * confidence)
    replay = Replay(trace, between="tokens")
    assert (replay.begin.tolist(), replay.end.tolist()) == ([0, 6], [6, 7])
    #  position: 1     2     3    4    5    6   | 3
    #     drafts: yes,  yes,  no | yes, no | no | no
    assert replay.accepted.tolist() == [2, 1, 0, 1, 0, 0, 0]
    said = (16 * replay.confidence).int().tolist()
    assert said[0] == [0, 1, 2, 3]  # the row that was recorded, past its rejected draft, too
    assert said[1] == [1, 2, 4, 5]  # what is left of it, then the tokens of the next
    assert said[2] == [2, 4, 5, 8]
    assert said[3] == [4, 5, 6, 7]
    assert said[4] == [5, 8, 8, 8]  # the text ends
    assert said[5:] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert (replay.margin == 2 * replay.confidence).all()


@pytest.mark.parametrize(("chance", "passed"), [(0.0, False), (1.0, True)])
def test_the_token_after_a_full_block_passes_with_the_chance_of_the_last_draft(chance: float, passed: bool) -> None:
    trace = recorded([[2, 2, 0]], draft_len=2)
    confidence = np.array([[0.5, chance]] * 3, dtype=np.float32)
    replay = Replay(dataclasses.replace(trace, confidence=confidence), between="tokens")
    assert replay.accepted.tolist() == [2, 1 + passed, 2 * passed, 2, 1 + passed, int(passed), 0]
    unsaid = Replay(trace, between="tokens")  # every block that reached its last draft passed it
    assert unsaid.accepted.tolist() == [2, 2, 2, 2, 2, 1, 0]


@given(data=st.data())
def test_a_dense_trace_and_recorded_rows_are_replayed_as_they_are(data: st.DataObject) -> None:
    dense = synthetic_trace(requests=2, tokens=20, draft_len=3, seed=data.draw(st.integers(0, 99)))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(dense), max_size=len(dense))))
    keep[::20] = True
    between = data.draw(st.sampled_from(get_args(Between)))
    for trace in (dense, dense.take(keep)):
        replay = Replay(trace, between=between)
        place = replay.begin[trace.request] + trace.position - 1
        assert np.array_equal(replay.accepted[place], trace.accepted)
        assert np.array_equal(replay.confidence.numpy()[place], trace.confidence)  # type: ignore[arg-type]
        assert len(replay.accepted) == replay.end[-1]
        assert ((replay.accepted >= 0) & (replay.accepted <= 3)).all()


def test_what_follows_is_of_the_same_domain_and_depends_on_request_and_turn_alone() -> None:
    replay = Replay(recorded([[0]] * 6, domains=[0, 1, 0, 1, 1, 0]), seed=3)
    request = np.arange(400)
    for origin, domain in ((0, {0, 2, 5}), (1, {1, 3, 4})):
        followers = replay.follow(np.full(400, origin), request, np.ones(400, dtype=np.int64))
        assert set(followers.tolist()) == domain
        backwards = replay.follow(np.full(400, origin), request[::-1], np.ones(400, dtype=np.int64))
        assert np.array_equal(followers, backwards[::-1])
        again = replay.follow(np.full(400, origin), request, np.full(400, 2))
        assert not np.array_equal(followers, again)
    other = Replay(recorded([[0]] * 6, domains=[0, 1, 0, 1, 1, 0]), seed=4)
    assert not np.array_equal(replay.order(60), other.order(60))
    assert sorted(replay.order(12).tolist()) == sorted([*range(6)] * 2)


def test_an_empty_trace_and_another_stand_in_are_refused() -> None:
    trace = synthetic_trace(requests=1, tokens=2)
    with pytest.raises(ValueError, match="between: expected one of nearest, tokens, got 'rows'"):
        Replay(trace, between="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trace: expected at least one row, got none"):
        Replay(trace.take(np.zeros(len(trace), dtype=bool)))


# How good the stand-in is


BENDS = CostProfile((1, 128, 512), (1.0, 1.1, 2.0))


def served(trace: Trace | Replay, policy: VerifyPolicy) -> Result:
    work = Workload.closed(256, output_tokens=200, spread=0.0)
    engine = Engine(BENDS, max_batch=64, prefill_chunk=0)
    return summarize(simulate(trace, policy, work, engine), "", "", 64)


@pytest.mark.parametrize("between", get_args(Between))
@pytest.mark.parametrize("policy", [FixedK(2), FixedK(6), FixedK(7), ConfidenceScheduled(BENDS)], ids=repr)
def test_a_recorded_run_stands_for_what_it_did_not_record(policy: VerifyPolicy, between: Between) -> None:
    """A dense trace knows every position; a run that verified everything, one in τ. The latter is exact at k = G."""
    dense = synthetic_trace(requests=64, tokens=256, seed=5)
    sparse = Replay(dense.full_verification_path(), between=between)
    exact, approximate = served(dense, policy), served(sparse, policy)
    relative = 1e-12 if repr(policy) == "FixedK(7)" else REPLAY[between]
    assert approximate.tau == pytest.approx(exact.tau, rel=relative)
    assert approximate.tokens_per_s == pytest.approx(exact.tokens_per_s, rel=relative)
    assert approximate.verified_per_round == pytest.approx(exact.verified_per_round, rel=relative)


def test_rounds_in_order_replay_a_recorded_run_row_by_row() -> None:
    trace = synthetic_trace(requests=1, tokens=100, seed=2).select("chat").full_verification_path()
    seen: list[np.ndarray] = []

    class Watching(FixedK):
        def plan(self, signals):  # type: ignore[no-untyped-def]
            seen.append(signals.confidence.numpy()[0])
            return super().plan(signals)

    simulate(trace, Watching(7), Workload.closed(1, output_tokens=60, spread=0), Engine(FLAT, max_batch=1))
    assert np.array_equal(np.stack(seen), trace.confidence[: len(seen)])
    assert len(seen) > 10
    no_confidence = dataclasses.replace(trace, confidence=None)
    simulate(no_confidence, FixedK(7), Workload.closed(1, output_tokens=9, spread=0), Engine(FLAT, max_batch=1))
