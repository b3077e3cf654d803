"""What the paper's figures show, on synthetic traces and modelled machines."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dspark.policy import (
    H200,
    ConfidenceScheduled,
    ConfidenceThreshold,
    CostProfile,
    FixedK,
    Gated,
    ModelSize,
    NoSpeculation,
    Outcome,
    Signals,
    VerifyPolicy,
    roofline_profile,
)
from dspark.policy.simulator import (
    Engine,
    KnownAcceptance,
    Replay,
    Result,
    Workload,
    simulate,
    summarize,
    sweep,
    synthetic_trace,
)
from tests.tolerances import IDLE_SPECULATION, SCHEDULED

TARGET = ModelSize(weight_bytes=8e9, flops_per_row=8e9, kv_bytes_per_token=18_000)
LIGHT = roofline_profile(H200, TARGET, ModelSize(0.25e9, 0.25e9), draft_len=7, overhead=2e-4)
HEAVY = roofline_profile(H200, TARGET, ModelSize(2e9, 2e9), draft_len=7, overhead=2e-4)
TRACE = synthetic_trace(requests=24, tokens=160)
LOADS = (8, 32, 96, 192)
FIXED = (1, 2, 3, 5, 7)


def serve(replay: Replay, policy: VerifyPolicy, profile: CostProfile, concurrency: int, turns: int = 3) -> Result:
    work = Workload.closed(turns * concurrency, prompt_tokens=64, output_tokens=64)
    run = simulate(replay, policy, work, Engine(profile, max_batch=concurrency, prefill_chunk=0))
    return summarize(run, repr(policy), work.name, concurrency)


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, int], Result]:
    policies = {
        "plain": lambda engine: NoSpeculation(),
        **{f"fixed:{k}": (lambda engine, k=k: FixedK(k)) for k in FIXED},
        "scheduled": lambda engine: ConfidenceScheduled(engine.profile),
        "lag 2": lambda engine: ConfidenceScheduled(engine.profile, lag=2),
        "oracle": lambda engine: KnownAcceptance(),
    }
    loads = [(Workload.closed(max(48, 3 * c), prompt_tokens=64, output_tokens=64), c) for c in LOADS]
    results = sweep(Replay(TRACE), policies, loads, Engine(LIGHT, prefill_chunk=0))
    return {(r.policy, r.concurrency): r for r in results}


def best_fixed(figures: dict[tuple[str, int], Result], load: int) -> Result:
    return max((figures[f"fixed:{k}", load] for k in FIXED), key=lambda r: r.tokens_per_s)


@pytest.mark.parametrize("domain", ["math", "code", "chat"])
def test_figure_5_verified_drafts_are_accepted_more_often_as_the_threshold_rises(domain: str) -> None:
    replay = Replay(TRACE.select(domain))
    results = [serve(replay, ConfidenceThreshold(t, per_slot=True), LIGHT, 24) for t in (0.0, 0.2, 0.4, 0.6, 0.8)]
    rates = [1 - r.waste for r in results]
    assert rates == sorted(rates)
    assert rates[-1] > 0.8
    assert (
        {"math": 0.7, "code": 0.6, "chat": 0.35}[domain] < rates[0] < {"math": 0.9, "code": 0.8, "chat": 0.55}[domain]
    )
    budgets = [r.verified_per_round for r in results]
    assert budgets == sorted(budgets, reverse=True)


def test_figure_5_chat_gains_most_from_a_threshold() -> None:
    gain = {}
    for domain in ("math", "code", "chat"):
        replay = Replay(TRACE.select(domain))
        low, high = (serve(replay, ConfidenceThreshold(t, per_slot=True), LIGHT, 24) for t in (0.0, 0.8))
        gain[domain] = low.waste - high.waste
    assert gain["chat"] > gain["code"] > gain["math"]


@pytest.mark.parametrize("load", LOADS)
def test_figure_7_the_scheduler_keeps_up_with_every_fixed_length(
    load: int, figures: dict[tuple[str, int], Result]
) -> None:
    best = best_fixed(figures, load)
    for name in ("scheduled", "lag 2"):
        assert figures[name, load].tokens_per_s > (1 - SCHEDULED) * best.tokens_per_s
    assert figures["oracle", load].tokens_per_s >= figures["scheduled", load].tokens_per_s


def test_figure_7_no_fixed_length_keeps_up_with_the_scheduler(figures: dict[tuple[str, int], Result]) -> None:
    """The fixed length that is best at one load is not at another; and the best of each closes less of the gap."""
    chosen = [best_fixed(figures, load).policy for load in LOADS]
    assert chosen[0] == "fixed:7"
    assert len(set(chosen)) > 1
    for load in LOADS[-2:]:
        best, own, oracle = best_fixed(figures, load), figures["scheduled", load], figures["oracle", load]
        assert own.tokens_per_s > 1.05 * best.tokens_per_s
        assert own.user_tokens_per_s > best.user_tokens_per_s
        assert (own.tokens_per_s - best.tokens_per_s) / (oracle.tokens_per_s - best.tokens_per_s) > 0.3
    lead = [figures["scheduled", load].tokens_per_s / figures["fixed:7", load].tokens_per_s for load in LOADS]
    assert lead == sorted(lead)
    assert lead[-1] > 1.2


def test_figure_8_the_verify_budget_shrinks_as_load_grows(figures: dict[tuple[str, int], Result]) -> None:
    for name in ("scheduled", "lag 2"):
        budgets = [figures[name, load].verified_per_round for load in LOADS]
        assert budgets == sorted(budgets, reverse=True)
        assert budgets[0] > 4
        assert budgets[-1] < budgets[0] / 2
    wasted = [figures["scheduled", load].waste for load in LOADS]
    assert wasted == sorted(wasted, reverse=True)


def test_p23_the_scheduler_goes_to_zero_where_every_row_costs() -> None:
    """A full batch past the knee, drafts for nothing: a further row costs its share, and a draft is worth less."""
    bound = CostProfile((1, 32, 320), (1.0, 1.0, 10.0))
    replay = Replay(TRACE.select("chat"))
    plain, scheduled, fixed = (
        serve(replay, policy, bound, 64) for policy in (NoSpeculation(), ConfidenceScheduled(bound), FixedK(3))
    )
    assert scheduled.verified_per_round == 0
    assert scheduled.tokens_per_s >= (1 - IDLE_SPECULATION) * plain.tokens_per_s
    assert fixed.tokens_per_s < 0.9 * plain.tokens_per_s


def test_p23_a_gate_saves_the_drafting_where_speculation_loses() -> None:
    """Drafts that are made are paid for: the scheduler then makes the best of them, and loses. The gate stops it."""
    replay = Replay(TRACE.select("chat"))
    serve_full = partial(serve, replay, profile=HEAVY, concurrency=192, turns=10)
    cost = Engine(HEAVY).cost
    plain, fixed = serve_full(NoSpeculation()), serve_full(FixedK(3))
    bare, gated = serve_full(ConfidenceScheduled(HEAVY)), serve_full(Gated(ConfidenceScheduled(HEAVY), cost))
    assert fixed.tokens_per_s < 0.7 * plain.tokens_per_s
    assert bare.tokens_per_s < 0.9 * plain.tokens_per_s
    assert gated.tokens_per_s >= (1 - IDLE_SPECULATION) * plain.tokens_per_s
    assert gated.drafted < 0.05


def test_the_gate_stays_open_where_speculation_pays() -> None:
    replay, cost = Replay(TRACE), Engine(HEAVY).cost
    for load, turns in ((1, 8), (16, 2)):
        bare = serve(replay, ConfidenceScheduled(HEAVY), HEAVY, load, turns)
        gated = serve(replay, Gated(ConfidenceScheduled(HEAVY), cost), HEAVY, load, turns)
        assert gated.tokens_per_s == bare.tokens_per_s


def test_the_gate_rests_longer_after_each_try_that_fails() -> None:
    cost = Engine(CostProfile((1, 2), (1.0, 2.0), (1, 2), (1.0, 2.0))).cost
    gate = Gated(FixedK(1), cost, rest=2, max_rest=5)
    signals = Signals((0,), torch.tensor([1]), 1, None)
    nothing = Outcome((0,), torch.tensor([1]), torch.tensor([0]), None, None, 0)
    asked = []
    for _ in range(120):
        asked.append(gate.drafts(1, 0))
        if asked[-1]:
            gate.plan(signals)
        gate.observe(nothing)
    first = asked.index(False)
    assert asked[first:][:20] == [False] * 2 + [True] + [False] * 4 + [True] + [False] * 5 + [True] + [False] * 5 + [
        True
    ]
    with pytest.raises(ValueError, match="rest: expected 1 <= rest <= max_rest, got 3 and 2"):
        Gated(FixedK(1), cost, rest=3, max_rest=2)


def test_an_oracle_that_verifies_the_first_rejected_draft_pays_for_it() -> None:
    known, sound = (KnownAcceptance(through_rejected=sound) for sound in (False, True))
    free, paid = (serve(Replay(TRACE), policy, LIGHT, 96) for policy in (known, sound))
    assert paid.tau == free.tau
    assert paid.verified_per_round - free.verified_per_round == pytest.approx(paid.verified_per_round * paid.waste)
    assert paid.tokens_per_s < free.tokens_per_s


def test_the_gate_lets_its_policy_know_what_it_would() -> None:
    told = Gated(KnownAcceptance(), Engine(LIGHT).cost)
    bare, gated = (serve(Replay(TRACE), policy, LIGHT, 8) for policy in (KnownAcceptance(), told))
    assert (bare.tokens_per_s, bare.waste) == (gated.tokens_per_s, 0)
    with pytest.raises(ValueError, match="reveal: expected what will be accepted before each plan"):
        KnownAcceptance().plan(Signals((0,), torch.tensor([1]), 1, None))
