"""The simulated service: its clock, its queue, its cache, and what it tells a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.policy import CostProfile, FixedK, NoSpeculation, Outcome, Signals
from dspark.policy.simulator import Engine, Run, Workload, simulate, summarize, synthetic_trace
from tests.policy.helpers import FLAT, recorded
from tests.tolerances import SIGMAS

BY_ROW = CostProfile((1, 2), (1.0, 2.0))
TRACE = synthetic_trace(requests=2, tokens=64, draft_len=3)


def workload(prompt: list[int], output: list[int], arrival: list[float] | None = None) -> Workload:
    times = None if arrival is None else np.array(arrival)
    return Workload("given", times, np.array(prompt), np.array(output))


def in_flight(run: Run) -> np.ndarray:
    """Requests in flight in each step."""
    begun = (run.admitted[:, None] <= run.start).sum(0)
    ended = (run.finish[:, None] <= run.start).sum(0)
    return begun - ended


# The clock


def test_one_request_by_hand() -> None:
    """Two steps of prefill, then rounds of 1 + 2, 1 + 0 and 1 + 1 tokens; a step of n rows takes n seconds."""
    engine = Engine(BY_ROW, max_batch=4, prefill_chunk=4)
    run = simulate(recorded([[2, 0, 3]]), FixedK(2), workload([6], [7]), engine)
    assert run.seconds.tolist() == [4, 2, 3, 3, 2]  # the last has room for one draft
    assert run.prefill.tolist() == [4, 2, 0, 0, 0]
    assert run.verified.tolist() == [0, 0, 2, 2, 1]
    assert run.accepted.tolist() == [0, 0, 2, 0, 1]
    assert run.emitted.tolist() == [0, 1, 3, 1, 2]
    assert (run.arrival[0], run.admitted[0], run.first[0], run.finish[0]) == (0, 0, 6, 14)


def test_a_prompt_is_processed_beside_the_rounds_of_others() -> None:
    engine = Engine(BY_ROW, max_batch=2, prefill_chunk=3)
    run = simulate(recorded([[0]]), FixedK(1), workload([1, 5], [4, 2]), engine)
    assert run.prefill.tolist() == [3, 3, 0, 0]  # the first prompt and two tokens of the second share a step
    assert run.requests.tolist() == [0, 1, 2, 1]
    assert run.seconds.tolist() == [3, 5, 3, 1]  # in the third, one request has room for a draft and the other has not
    assert run.first.tolist() == [3, 8]


def test_prompts_that_are_processed_elsewhere_cost_nothing_here() -> None:
    run = simulate(recorded([[0]]), FixedK(0), workload([500], [3]), Engine(BY_ROW, prefill_chunk=0))
    assert run.seconds.tolist() == [1, 1]
    assert run.first.tolist() == [0]


def test_a_request_of_one_token_ends_with_its_prompt() -> None:
    run = simulate(recorded([[0]]), FixedK(3), workload([2, 2, 2], [1, 1, 3]), Engine(BY_ROW, max_batch=1))
    assert run.finish.tolist() == [2, 4, 9]
    assert run.first.tolist() == [2, 4, 6]


def test_the_service_idles_until_the_next_arrival() -> None:
    run = simulate(recorded([[0]]), FixedK(0), workload([1, 1], [2, 2], [5.0, 100.0]), Engine(BY_ROW))
    assert run.start.tolist() == [5, 6, 100, 101]
    assert run.finish.tolist() == [7, 102]


def test_waiting_times_are_those_of_queueing_theory() -> None:
    """One server, constant service time, Poisson arrivals: the mean wait is u / (2 (1 - u)) service times."""
    load, count = 0.5, 8_000
    work = Workload.poisson(count, load, prompt_tokens=1, output_tokens=1, spread=0.0, seed=3)
    run = simulate(recorded([[0]]), NoSpeculation(), work, Engine(FLAT, max_batch=1))
    wait = run.admitted - run.arrival
    means = wait.reshape(40, -1).mean(1)  # of long stretches, which hardly depend on each other
    assert abs(means.mean() - load / (2 * (1 - load))) < SIGMAS * means.std() / np.sqrt(len(means))


# Rooms and queues


@given(data=st.data())
def test_every_request_is_served_within_the_limits(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    sizes = st.lists(st.integers(1, 30), min_size=count, max_size=count)
    gaps = data.draw(st.none() | st.lists(st.floats(0, 20), min_size=count, max_size=count))
    work = workload(data.draw(sizes), data.draw(sizes), None if gaps is None else np.cumsum(gaps).tolist())
    engine = Engine(
        BY_ROW,
        max_batch=data.draw(st.integers(1, 5)),
        num_pages=data.draw(st.none() | st.integers(16, 40)),
        page_size=4,
        prefill_chunk=data.draw(st.sampled_from([0, 1, 7, 64])),
    )
    run = simulate(TRACE, FixedK(data.draw(st.integers(0, 3))), work, engine)
    assert run.emitted.sum() + (0 if engine.prefill_chunk else count) == work.output.sum()
    assert run.prefill.sum() == (work.prompt.sum() if engine.prefill_chunk else 0)
    assert (run.arrival <= run.admitted).all()
    assert (run.admitted <= run.first).all()
    assert (run.first <= run.finish).all()
    assert (np.diff(run.admitted) >= 0).all()  # in order of arrival
    assert in_flight(run).max(initial=0) <= engine.max_batch
    assert (np.diff(run.start) >= run.seconds[:-1] - 1e-9).all()
    if engine.num_pages is not None:
        pages = -(-(work.prompt + work.output + 3) // 4)
        held = (run.admitted[:, None] <= run.start) & (run.finish[:, None] > run.start)
        assert (pages[:, None] * held).sum(0).max(initial=0) <= engine.num_pages


def test_a_request_waits_for_pages_and_holds_up_those_behind_it() -> None:
    work = workload([10, 20, 1], [3, 3, 3])
    engine = Engine(BY_ROW, max_batch=3, num_pages=4, page_size=8, prefill_chunk=0)  # 2, 4 and 1 pages
    run = simulate(recorded([[0]]), FixedK(0), work, engine)
    assert run.admitted.tolist() == [0, 2, 4]


def test_p13_a_request_that_never_fits_is_refused() -> None:
    engine = Engine(BY_ROW, num_pages=4, page_size=8)
    with pytest.raises(ValueError, match="num_pages: request 1 needs 5 pages of 8 tokens, and the cache has 4"):
        simulate(recorded([[0]]), FixedK(0), workload([10, 20], [3, 10]), engine)


# Policies


def test_the_policy_sees_and_learns_what_a_decoder_would_tell_it() -> None:
    class Watching(FixedK):
        seen: list[tuple[Signals, Outcome]] = []  # noqa: RUF012

        def plan(self, signals: Signals) -> torch.Tensor:
            self._signals = signals
            return super().plan(signals)

        def observe(self, outcome: Outcome) -> None:
            self.seen.append((self._signals, outcome))

    policy = Watching(2)
    run = simulate(TRACE, policy, workload([7, 9, 8], [30, 9, 20]), Engine(BY_ROW, max_batch=2, prefill_chunk=0))
    first, done = policy.seen[0]
    assert first.request_ids == done.request_ids == (0, 1)
    assert first.max_lengths.tolist() == [3, 3]
    assert first.draft_len == 3
    assert first.confidence.shape == (2, 3)
    assert set(first.classes) <= {"math", "code", "chat"}
    assert first.context_tokens == done.context_tokens == 16
    for (signals, outcome), seconds, verified, accepted in zip(
        policy.seen, run.seconds.tolist(), run.verified.tolist(), run.accepted.tolist(), strict=True
    ):
        assert outcome.seconds == seconds
        assert (int(outcome.lengths.sum()), int(outcome.accepted.sum())) == (verified, accepted)
        assert (outcome.lengths <= signals.max_lengths).all()
    assert any(signals.request_ids == (0, 2) or signals.request_ids == (1, 2) for signals, _ in policy.seen)


@pytest.mark.parametrize("planned", [[4], [-1], [1, 1]])
def test_lengths_outside_their_bounds_are_refused(planned: list[int]) -> None:
    class Wrong(FixedK):
        def plan(self, signals: Signals) -> torch.Tensor:
            return torch.tensor(planned)

    with pytest.raises(ValueError, match=r"policy: expected lengths from 0 to \[3\], got .* from FixedK"):
        simulate(TRACE, Wrong(1), workload([5], [9]), Engine(BY_ROW))


def test_p22_fewer_verified_drafts_make_rounds_cheaper() -> None:
    seconds = [
        simulate(recorded([[1] * 20]), FixedK(k), workload([1], [21]), Engine(BY_ROW, prefill_chunk=0)).seconds.sum()
        for k in (1, 2, 3)
    ]
    assert seconds == [20, 29, 38]  # 10 rounds each; the last ones have room for fewer


def same(one: Run, other: Run) -> bool:
    return all(np.array_equal(getattr(one, name), value) for name, value in vars(other).items())


def test_p20_a_seed_gives_one_run_and_one_text_for_all_policies() -> None:
    work = Workload.poisson(24, 0.02, prompt_tokens=20, output_tokens=90, seed=1)

    def run(policy: Any, seed: int) -> Run:
        return simulate(TRACE, policy, work, Engine(BY_ROW, max_batch=4), seed=seed)

    assert same(run(FixedK(2), 1), run(FixedK(2), 1))
    assert not same(run(FixedK(2), 1), run(FixedK(2), 2))
    # What a request would say does not depend on how it is batched.
    alone = simulate(TRACE, FixedK(3), work, Engine(BY_ROW, max_batch=1), seed=1)
    together = simulate(TRACE, FixedK(3), work, Engine(BY_ROW, max_batch=40), seed=1)
    assert (alone.accepted.sum(), alone.requests.sum()) == (together.accepted.sum(), together.requests.sum())


# Figures


def test_a_closed_loop_keeps_its_concurrency_and_littles_law() -> None:
    work = Workload.closed(200, output_tokens=40)
    result = summarize(
        simulate(TRACE, FixedK(3), work, Engine(BY_ROW, max_batch=8, prefill_chunk=0)), "fixed:3", "closed", 8
    )
    assert result.running == pytest.approx(8, rel=0.01)
    assert result.tokens_per_s == pytest.approx(result.running * result.user_tokens_per_s, rel=0.05)
    assert result.ttft_p99 == 0


def test_summary_by_hand() -> None:
    run = simulate(recorded([[2, 0, 3]]), FixedK(2), workload([6], [7]), Engine(BY_ROW, max_batch=4, prefill_chunk=4))
    result = summarize(run, "fixed:2", "given", 4)
    assert result.tokens_per_s == 7 / 14
    assert result.user_tokens_per_s == 6 / 8
    assert result.tpot_p50 == 8 / 6
    assert result.ttft_p50 == 6
    assert (result.tau, result.verified_per_round, result.waste) == (2.0, 5 / 3, 2 / 5)
    assert (result.running, result.drafted, result.requests) == (1.0, 1.0, 1)


def test_the_warm_up_is_left_out() -> None:
    """The first batch starts in step and waits for nobody."""
    work = Workload.closed(12, prompt_tokens=4, output_tokens=10, spread=0)
    run = simulate(recorded([[0]]), FixedK(0), work, Engine(BY_ROW, max_batch=4, prefill_chunk=64))
    assert summarize(run, "", "", 4).requests == 8
    assert summarize(run, "", "", 2, warmup=0.0).requests == 10
    assert summarize(run, "", "", 100).requests == 6
    with pytest.raises(ValueError, match="warmup: expected 0 <= warmup < 1, got 1"):
        summarize(run, "", "", 4, warmup=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Engine(FLAT, max_batch=0), "max_batch: expected at least 1, got 0"),
        (lambda: Engine(FLAT, num_pages=0), "num_pages: expected at least 1, got 0"),
        (lambda: Engine(FLAT, page_size=0), "page_size: expected at least 1, got 0"),
        (lambda: Engine(FLAT, prefill_chunk=-1), "prefill_chunk: expected at least 0, got -1"),
        (lambda: Workload.closed(0), "requests: expected at least 1, got 0"),
        (lambda: Workload.closed(1, output_tokens=0), "output_tokens: expected at least 1, got 0"),
        (lambda: Workload.closed(1, spread=-1), "spread: expected at least 0, got -1"),
        (lambda: Workload.poisson(1, 0.0), "rate: expected a positive finite number, got 0"),
        (lambda: Workload.replay([2.0, 1.0]), "arrival: expected finite times from 0 up that do not decrease"),
        (lambda: Workload.replay([float("nan")]), "arrival: expected finite times"),
        (lambda: workload([1, 2], [1]), r'output: expected shape "N" = \[2\], got \[1\]'),
        (lambda: workload([1], [0]), "output: expected at least 1 token, got 0"),
    ],
)
def test_values_outside_their_ranges_are_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    work = Workload.closed(20_000, prompt_tokens=100, output_tokens=50)
    for lengths, mean in ((work.prompt, 100), (work.output, 50)):
        assert abs(lengths.mean() - mean) < SIGMAS * lengths.std() / np.sqrt(len(lengths))
        assert lengths.max() <= 8 * mean
