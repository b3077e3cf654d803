"""Every rule with every shipped policy and every warper emits exactly what plain decoding would, in law."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.ops.schedule import schedule_prefix
from dspark.ops.types import Rule
from dspark.policy import ConfidenceScheduled, CostProfile, FixedK, Oracle, Signals, VerifyPolicy, scheduled
from dspark.testing import (
    BlockToy,
    CoupledToy,
    JointLaw,
    MatchToy,
    RatioToy,
    ToyRequest,
    ToyRule,
    exact_law,
    marginal,
    plain_law,
    stepwise,
    total_variation,
)
from dspark.testing.rules import Noise, emission_table
from tests.laws.toys import CURVES, SAMPLINGS, constant, toy
from tests.tolerances import LAW

RULES: dict[str, ToyRule] = {
    "ratio": RatioToy(),
    "block": BlockToy(),
    "match": MatchToy(),
    "coupled": CoupledToy(),
    "coupled backwards": CoupledToy("backwards"),
    "coupled independent": CoupledToy("independent"),
}
FIXED: dict[str, VerifyPolicy] = {f"fixed {k}": FixedK(k) for k in range(4)}
SCHEDULED: dict[str, VerifyPolicy] = {
    f"scheduled {name} lag {lag}": ConfidenceScheduled(curve, lag)  # type: ignore[arg-type]
    for (name, curve), lag in itertools.product(CURVES.items(), (0, 2))
}
POLICIES = {**FIXED, **SCHEDULED, "oracle": None}
SHIPPED = ("ratio", "coupled", "block", "match")


def pairs(*policies: str, rules: tuple[str, ...] = SHIPPED) -> pytest.MarkDecorator:
    """Every rule with every policy, but for the oracle under ``block``, which is lossy (see ``test_negative``)."""
    product = itertools.product(rules, policies or POLICIES)
    return pytest.mark.parametrize(("rule", "policy"), [p for p in product if p != ("block", "oracle")])


def law_of(
    requests: list[ToyRequest], rule: str, policy: str, draft_len: int, *, max_batch: int | None = None
) -> JointLaw:
    """The law under a policy by its name; the oracle is made in each branch, from what the branch would accept."""
    chosen = POLICIES[policy]
    replay = Oracle if chosen is None else None
    return exact_law(requests, RULES[rule], chosen, draft_len=draft_len, replay=replay, max_batch=max_batch)


@pairs()
def test_p04_every_policy_keeps_the_law(rule: str, policy: str) -> None:
    request = toy(1, vocab_size=3, max_tokens=5 if rule in ("ratio", "block") else 4)
    law = law_of([request], rule, policy, draft_len=3)
    assert sum(law.values()) == pytest.approx(1, abs=LAW)
    assert total_variation(law, plain_law([request])) < LAW


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pairs("fixed 3", "scheduled jagged lag 0", "scheduled padded lag 2", "oracle")
def test_p02_every_warper_keeps_the_law(rule: str, policy: str, sampling: str) -> None:
    """Among them drafters with parameters of their own, whose support lies inside or beyond the target's."""
    request = toy(2, vocab_size=4 if rule in ("ratio", "block") else 3, max_tokens=4, sampling=sampling)
    law = law_of([request], rule, policy, draft_len=3)
    assert total_variation(law, plain_law([request])) < LAW


@pytest.mark.parametrize("policy", ["fixed 2", "scheduled bend lag 0", "scheduled jagged lag 2", "oracle"])
@pytest.mark.parametrize("rule", ["coupled backwards", "coupled independent"])
def test_any_coupling_of_the_two_draws_keeps_the_law(rule: str, policy: str) -> None:
    request = toy(3, vocab_size=2, max_tokens=5)
    law = law_of([request], rule, policy, draft_len=3)
    assert total_variation(law, plain_law([request])) < LAW


@pytest.mark.parametrize("sampling", ["plain", "two of their own"])
@pairs(*(name for name in POLICIES if name not in ("fixed 3", "fixed 0")))
def test_requests_scheduled_together_stay_independent(rule: str, policy: str, sampling: str) -> None:
    """The joint law is the product of the plain ones, though the scheduler weighs one request against the other."""
    requests = [toy(4, 2, 3, sampling), toy(5, 2, 4, sampling)]
    law = law_of(requests, rule, policy, draft_len=2)
    assert total_variation(law, plain_law(requests)) < LAW
    for i, request in enumerate(requests):
        assert total_variation(marginal(law, i), plain_law([request])) < LAW


@pairs("scheduled bend lag 0", "scheduled jagged lag 2", rules=("ratio", "block"))
def test_requests_scheduled_together_stay_independent_with_more_to_choose_from(rule: str, policy: str) -> None:
    requests = [toy(4, 3, 4), toy(5, 3, 4)]
    assert total_variation(law_of(requests, rule, policy, draft_len=2), plain_law(requests)) < LAW


@pairs("fixed 2", "scheduled jagged lag 0", "scheduled padded lag 2", "oracle")
def test_a_greedy_and_a_sampled_request_keep_their_laws_in_one_batch(rule: str, policy: str) -> None:
    requests = [toy(4, 2, 3, "greedy"), toy(5, 2, 3, "cold")]
    law = law_of(requests, rule, policy, draft_len=2)
    assert len(marginal(law, 0)) == 1
    assert total_variation(law, plain_law(requests)) < LAW


@pairs("fixed 2", "scheduled jagged lag 0", "scheduled padded lag 2", "oracle")
def test_requests_that_stop_join_and_leave_keep_the_law(rule: str, policy: str) -> None:
    """A stop token ends the first early, which is when the third joins the second."""
    requests = [toy(6, 2, 3, stop=frozenset({1})), toy(7, 2, 3), toy(8, 2, 2)]
    law = law_of(requests, rule, policy, draft_len=2, max_batch=2)
    assert {len(own) for own, _, _ in law} == {1, 2, 3}
    assert total_variation(law, plain_law(requests)) < LAW


@pytest.mark.parametrize(
    ("policy", "modes"),
    [("scheduled bend lag 0", {"early_stop"}), ("scheduled bend lag 2", {"early_stop", "global", "budget"})],
)
def test_the_scheduler_has_choices_to_make(policy: str, modes: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the laws above agree for its sake, and not because it verified one length throughout."""
    planned = defaultdict(set)

    def spy(*args: Any, mode: str, **kwargs: Any) -> torch.Tensor:
        lengths = schedule_prefix(*args, mode=mode, **kwargs)  # type: ignore[arg-type]
        planned[mode].add(tuple(lengths.tolist()))
        return lengths

    monkeypatch.setattr(scheduled, "schedule_prefix", spy)
    law_of([toy(1, vocab_size=3, max_tokens=5)], "ratio", policy, draft_len=3)
    assert planned.keys() == modes
    assert all(len(lengths) > 1 for lengths in planned.values()), planned


@settings(max_examples=12)
@given(st.data())
def test_random_models_curves_and_confidences_keep_the_law(data: st.DataObject) -> None:
    share = st.integers(0, 6)
    row = st.lists(share, min_size=3, max_size=3).filter(any).map(lambda xs: tuple(x / sum(xs) for x in xs))
    p, q = data.draw(st.lists(row, min_size=3, max_size=3)), data.draw(st.lists(row, min_size=3, max_size=3))
    sure = data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), min_size=3, max_size=3))
    seconds = data.draw(st.lists(st.floats(0.1, 4.0), min_size=4, max_size=4))
    policy = ConfidenceScheduled(CostProfile((1, 2, 3, 4), tuple(seconds)), data.draw(st.sampled_from([0, 2])))
    request = ToyRequest(
        target=lambda tokens: p[tokens[-1]],
        drafter=lambda tokens: q[tokens[-1]],
        max_tokens=3,
        confidence=stepwise(lambda tokens: sure[tokens[-1]]),
    )
    for rule in SHIPPED:
        law = exact_law([request], RULES[rule], policy, draft_len=3)
        assert total_variation(law, plain_law([request])) < LAW


@pytest.mark.parametrize("rule", SHIPPED)
def test_p21_an_emitted_token_is_in_the_targets_support(rule: str) -> None:
    request = toy(2, vocab_size=4, max_tokens=3, sampling="two of their own")
    law = law_of([request], rule, "fixed 3", draft_len=3)
    for (tokens,), probability in law.items():
        for n, token in enumerate(tokens):
            assert request.target(request.prompt + tokens[:n])[token] > 0, (tokens, probability)


def expected_accepted(rule: str, request: ToyRequest, prefix: tuple[int, ...], drafts: int) -> float:
    """The mean number of drafts that the next round accepts if it makes and verifies so many."""
    cases = RULES[rule].realise(request, prefix, Noise(), drafts, drafts)
    return sum(case.probability * case.accepted for case in cases)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_p04_block_accepts_at_least_as_much_as_ratio(seed: int, sampling: str) -> None:
    """Of each drafter, after each pair of tokens (all that these models look at), at each number of drafts."""
    request = toy(seed, vocab_size=4, max_tokens=5, sampling=sampling)
    gains = []
    for prefix, drafts in itertools.product(itertools.product(range(4), repeat=2), (1, 2, 3)):
        block, ratio = (expected_accepted(rule, request, prefix, drafts) for rule in ("block", "ratio"))
        assert block >= ratio - LAW, (prefix, drafts)
        gains.append(block - ratio)
        if drafts == 1:
            assert block == pytest.approx(ratio, abs=LAW)
    certain = ("greedy", "greedy drafter")  # w_i is then the product of the probabilities, as in ratio
    assert max(gains) > 0.01 or sampling in certain


@settings(max_examples=25)
@given(st.data())
def test_p04_block_accepts_at_least_as_much_as_ratio_on_random_models(data: st.DataObject) -> None:
    share = st.integers(0, 6)
    row = st.lists(share, min_size=3, max_size=3).filter(any).map(lambda xs: tuple(x / sum(xs) for x in xs))
    p, q = data.draw(st.lists(row, min_size=3, max_size=3)), data.draw(st.lists(row, min_size=3, max_size=3))
    request = ToyRequest(lambda tokens: p[tokens[-1]], lambda tokens: q[tokens[-1]], max_tokens=4)
    for anchor, drafts in itertools.product(range(3), (1, 2, 3)):
        block, ratio = (expected_accepted(rule, request, (anchor,), drafts) for rule in ("block", "ratio"))
        assert block >= ratio - LAW


@pytest.mark.parametrize("rule", ["coupled", "match"])
@pytest.mark.parametrize("draft_len", [0, 1, 2])
def test_samples_are_emitted_down_to_the_first_difference(draft_len: int, rule: Rule) -> None:
    """What the toys take from ``accept``, written out; target rows past the difference do not matter."""
    vocab_size = 3
    table = emission_table(rule, vocab_size, draft_len)
    assert len(table) == vocab_size ** (2 * draft_len + 1)
    for digits, emitted in table.items():
        drafts, samples = digits[:draft_len], digits[draft_len:]
        same = [x == y for x, y in zip(drafts, samples, strict=False)]
        accepted = (*same, False).index(False)
        assert emitted == samples[: accepted + 1]


def test_a_policy_is_left_as_it_was() -> None:
    policy = ConfidenceScheduled(CURVES["bend"], lag=2)
    exact_law([toy(1, 2, 4)], RatioToy(), policy, draft_len=2)
    assert not policy._budgets


def test_a_policy_that_cannot_be_pickled_is_followed_too() -> None:
    class Local(FixedK):
        def __init__(self) -> None:
            super().__init__(1)
            self.unpicklable = lambda: None

    request = toy(1, 2, 3)
    assert total_variation(exact_law([request], RatioToy(), Local(), draft_len=2), plain_law([request])) < LAW


def test_total_variation() -> None:
    coin = constant((0.7, 0.3), (0.5, 0.5), 1)
    law = plain_law([coin])
    assert law == {((0,),): 0.7, ((1,),): 0.3}
    assert total_variation(law, {((0,),): 0.5, ((1,),): 0.5}) == pytest.approx(0.2)
    assert total_variation(law, {((2,),): 1.0}) == pytest.approx(1)


class Excessive(FixedK):
    def plan(self, signals: Signals) -> torch.Tensor:
        return torch.full_like(signals.max_lengths, self.k)


def test_errors_say_what_is_wrong() -> None:
    request = toy(1, 2, 2)
    with pytest.raises(ValueError, match="exactly one"):
        exact_law([request], RatioToy(), draft_len=1)
    with pytest.raises(ValueError, match="exactly one"):
        exact_law([request], RatioToy(), FixedK(1), replay=Oracle, draft_len=1)
    with pytest.raises(ValueError, match="all or none"):
        exact_law([request, toy(1, 2, 2, confidence=False)], RatioToy(), FixedK(1), draft_len=1)
    with pytest.raises(ValueError, match=r"lengths from 0 to \[1\], got \[7\]"):
        exact_law([request], RatioToy(), Excessive(7), draft_len=1)
    with pytest.raises(ValueError, match="coupling"):
        CoupledToy("sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens"):
        constant((1.0,), (1.0,), 0)
