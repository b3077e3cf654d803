"""Biased forms, which the exact laws must see: each breaks the law by a known amount (contract C9, appendix A)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from dspark.ops.schedule import schedule_prefix
from dspark.policy import ConfidenceScheduled, CostProfile, FixedK, Oracle, Outcome, Signals
from dspark.testing import (
    BlockToy,
    CoupledToy,
    JointLaw,
    MatchToy,
    RatioToy,
    ToyRequest,
    exact_law,
    marginal,
    plain_law,
    total_variation,
)
from dspark.testing.rules import Noise, Tokens
from tests.laws.toys import CURVES, constant, toy
from tests.tolerances import LAW

P, Q = (0.7, 0.3), (0.5, 0.5)
"""Appendix A's target and drafter; token 0 is its A."""


def first_token(law: JointLaw) -> list[float]:
    """The law of the first token of the only request, as a list."""
    one = marginal(law, 0, length=1)
    return [one.get(((token,),), 0.0) for token in range(max(key[0][0] for key in one) + 1)]


class Gate(FixedK):
    """Verify drafts while their signal is at least a threshold: sound or not as the signal is."""

    def __init__(self, threshold: float) -> None:
        super().__init__(0)
        self.threshold = threshold

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        leading = (signals.confidence >= self.threshold).long().cumprod(1).sum(1)
        return torch.minimum(leading, signals.max_lengths)


def test_a_gate_on_the_drafted_tokens_own_q_is_lossy() -> None:
    p, q = (0.5, 0.3, 0.2), (0.6, 0.3, 0.1)
    peeking = constant(p, q, 2, lambda prefix, draft: [q[token] for token in draft])
    law = exact_law([peeking], RatioToy(), Gate(0.3), draft_len=1)
    assert first_token(law) == pytest.approx([0.55, 0.33, 0.12], abs=LAW)
    assert total_variation(law, plain_law([peeking])) > 0.07


def test_the_same_gate_on_what_was_known_before_the_draw_is_lossless() -> None:
    p, q = (0.5, 0.3, 0.2), (0.6, 0.3, 0.1)
    honest = constant(p, q, 3, lambda prefix, draft: [q[token] for token in (prefix + draft)[len(prefix) - 1 : -1]])
    law = exact_law([honest], RatioToy(), Gate(0.3), draft_len=2)
    assert total_variation(law, plain_law([honest])) < LAW


class MostLikelyDrafts(FixedK):
    """A budget that goes to the drafts which the drafter itself gave the largest probability, as realised."""

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        return schedule_prefix(
            signals.confidence, None, mode="budget", budget=torch.tensor(self.k), max_lengths=signals.max_lengths
        )


def test_a_budget_ranked_by_realised_draft_probabilities_is_lossy() -> None:
    """Of two requests with one draft each the one with the likelier token is verified; of the other, p is drawn.

    Request 0 is verified if q(x_0) >= q(x_1): surely if x_0 is token 0, with probability .4 if 1, with .1 if 2.
    """
    p, q = (0.5, 0.3, 0.2), (0.6, 0.3, 0.1)
    peeking = constant(p, q, 2, lambda prefix, draft: [q[token] for token in draft])
    law = exact_law([peeking, peeking], RatioToy(), MostLikelyDrafts(1), draft_len=1, length=1)
    assert first_token(law) == pytest.approx([0.635, 0.201, 0.164], abs=LAW)
    known_before = constant(p, q, 2, lambda prefix, draft: [0.9] * len(draft))
    honest = exact_law([known_before] * 2, RatioToy(), MostLikelyDrafts(1), draft_len=1, length=1)
    assert total_variation(honest, plain_law([known_before] * 2, length=1)) < LAW


class AcceptedOnly(Oracle):
    """An oracle that verifies the drafts that will be accepted and not the one that will be rejected."""

    def __init__(self, accepted: Mapping[int, Sequence[int]]) -> None:
        super().__init__({request: [n - 1 for n in counts] for request, counts in accepted.items()})


def test_an_oracle_that_stops_before_the_rejected_draft_is_lossy() -> None:
    request = constant(P, Q, 2)
    law = exact_law([request], RatioToy(), replay=AcceptedOnly, draft_len=1)
    assert first_token(law) == pytest.approx([0.64, 0.36], abs=LAW)
    assert first_token(exact_law([request], RatioToy(), replay=Oracle, draft_len=1)) == pytest.approx(P, abs=LAW)


class GlobalSearch(FixedK):
    """The scheduler without its early stop: today's confidences, all of them, decide today's lengths."""

    def __init__(self, profile: CostProfile) -> None:
        super().__init__(0)
        self.profile = profile

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        speed = self.profile.steps_per_second(signals.confidence.numel() + len(signals.request_ids))
        return schedule_prefix(signals.confidence, speed, mode="global", max_lengths=signals.max_lengths)


def appendix_a() -> ToyRequest:
    return constant(P, Q, 3, lambda prefix, draft: [0.8, 0.9 if draft[0] == 0 else 0.0])


def test_a_search_without_the_early_stop_is_lossy() -> None:
    law = exact_law([appendix_a()], RatioToy(), GlobalSearch(CURVES["appendix A"]), draft_len=2)
    assert first_token(law) == pytest.approx([0.85, 0.15], abs=LAW)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_shipped_scheduler_is_lossless_there(lag: int) -> None:
    policy = ConfidenceScheduled(CURVES["appendix A"], lag)  # type: ignore[arg-type]
    law = exact_law([appendix_a()], RatioToy(), policy, draft_len=2)
    assert total_variation(law, plain_law([appendix_a()])) < LAW


@pytest.mark.parametrize(
    "rule",
    [CoupledToy("forwards"), CoupledToy("backwards"), CoupledToy("independent"), MatchToy()],
    ids=["coupled forwards", "coupled backwards", "coupled independent", "match"],
)
def test_any_policy_is_lossless_where_the_targets_own_samples_are_emitted(rule: CoupledToy) -> None:
    """Even those."""
    request = appendix_a()
    searched = exact_law([request], rule, GlobalSearch(CURVES["appendix A"]), draft_len=2)
    assert total_variation(searched, plain_law([request])) < LAW
    peeking = constant(P, (0.6, 0.4), 4, lambda prefix, draft: [0.6 if token == 0 else 0.4 for token in draft])
    assert total_variation(exact_law([peeking], rule, Gate(0.5), draft_len=3), plain_law([peeking])) < LAW
    assert total_variation(exact_law([request], rule, replay=AcceptedOnly, draft_len=2), plain_law([request])) < LAW


class Crossed(FixedK):
    """Each request is verified if the *other's* first draft was token 0: neither looks ahead at itself."""

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        other = signals.confidence.flip(0)[:, 1] > 0.5
        return torch.where(other, signals.max_lengths, 0) if len(signals.request_ids) == 2 else signals.max_lengths


def test_requests_that_peek_at_each_other_are_no_longer_independent() -> None:
    """Each request's own law holds; only the joint law shows it."""
    request = constant(P, Q, 2, lambda prefix, draft: [1.0, float(draft[0] == 0)])
    law = exact_law([request, request], RatioToy(), Crossed(2), draft_len=2, length=1)
    for i in range(2):
        assert marginal(law, i) == pytest.approx(plain_law([request], length=1), abs=LAW)
    assert law[(0,), (0,)] == pytest.approx((1 + 2 * 0.7 * 0.4 + 0.7**2) / 4, abs=LAW)  # and not 0.49
    assert total_variation(law, plain_law([request, request], length=1)) > 0.02


class PositionNoise(RatioToy):
    """The ratio rule over a drafter whose noise is addressed by position, and by ``salt`` of the anchor's position."""

    def __init__(self, salt: Callable[[int], int]) -> None:
        super().__init__()
        self._salt = salt

    def draw_draft(
        self, noise: Noise, position: int, anchor: int, q: Sequence[float]
    ) -> Iterator[tuple[int, float, Noise]]:
        return noise.draw((position, self._salt(anchor)), q)


REUSE_CURVE = CostProfile((1, 2, 3, 4, 5), (1.0, 1 / 0.45, 1 / 0.3, 1 / 0.22, 1 / 0.21))


def remembered() -> ToyRequest:
    """Two rounds verify nothing; the third verifies all four drafts or none, as the first round's third draft was.

    That draft and the third round's first are for the same position.
    """
    return constant(P, Q, 5, lambda prefix, draft: [1.0, 1.0, 1.0, 1.0 if draft[2] == 0 else 0.0])


def test_draft_noise_used_again_after_a_rejection_is_lossy() -> None:
    """The lagged scheduler remembers what an earlier round's confidences told of that noise."""
    policy = ConfidenceScheduled(REUSE_CURVE, lag=2)
    law = exact_law([remembered()], PositionNoise(lambda anchor: 0), policy, draft_len=4, length=3)
    third: dict[int, float] = {0: 0.0, 1: 0.0}
    for (tokens,), p in law.items():
        third[tokens[2]] += p
    assert third == pytest.approx({0: 0.85, 1: 0.15}, abs=LAW)


def test_draft_noise_salted_with_the_anchor_is_lossless() -> None:
    policy = ConfidenceScheduled(REUSE_CURVE, lag=2)
    law = exact_law([remembered()], PositionNoise(lambda anchor: 1 + anchor), policy, draft_len=4, length=3)
    assert total_variation(law, plain_law([remembered()], length=3)) < LAW


def test_reused_draft_noise_is_harmless_to_a_policy_without_memory() -> None:
    request = toy(1, vocab_size=3, max_tokens=4)
    policy = ConfidenceScheduled(CURVES["bend"], lag=0)
    law = exact_law([request], PositionNoise(lambda anchor: 0), policy, draft_len=3)
    assert total_variation(law, plain_law([request])) < LAW


class GivenDraft(RatioToy):
    """The ratio rule where every draft is one known token: what is left when the noise behind it is given."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self._token = token

    def draw_draft(
        self, noise: Noise, position: int, anchor: int, q: Sequence[float]
    ) -> Iterator[tuple[int, float, Noise]]:
        yield self._token, 1.0, noise


def test_requests_that_share_their_draft_noise_are_lossy_under_the_scheduler() -> None:
    """Two requests of one seed at one position draft the same token: the second's confidences tell of the first's."""
    weak = constant(P, Q, 3, lambda prefix, draft: [0.5, 0.0])
    strong = constant(P, Q, 3, lambda prefix, draft: [1.0, 0.9 if draft[0] == 0 else 0.0])
    policy = ConfidenceScheduled(CostProfile((2, 3, 4, 5), (1.0, 1.0, 1.0, 2.0)))
    given = [exact_law([weak, strong], GivenDraft(token), policy, draft_len=2, length=1) for token in (0, 1)]
    shared = {key: sum(Q[x] * law.get(key, 0.0) for x, law in enumerate(given)) for key in given[0] | given[1]}
    assert first_token(shared) == pytest.approx([0.55, 0.45], abs=LAW)

    own = exact_law([weak, strong], RatioToy(), policy, draft_len=2, length=1)
    assert total_variation(own, plain_law([weak, strong], length=1)) < LAW


class AgainstTheAnchor(BlockToy):
    """Block verification whose accept numbers are addressed by position, and by ``salt`` of the anchor's position."""

    def __init__(self, salt: Callable[[int], int]) -> None:
        self._salt = salt

    def draw_number(
        self, noise: Noise, position: int, anchor: int, parts: Sequence[float]
    ) -> Iterator[tuple[int, float, Noise]]:
        return noise.draw((position, self._salt(anchor)), parts)


def test_p08_block_whose_accept_numbers_are_used_again_is_lossy() -> None:
    """A rejection tells that the numbers of the drafts after it were large; the next round reads one of them again.

    Of (.7, .3) drafted with (.5, .5), two drafts are both rejected if the first is token 1 (w_1 = .6, h_1 = 0) and the
    second's number lies above w_2, which is .84 or .36.
    """
    request = constant(P, Q, 3)
    law = exact_law([request], AgainstTheAnchor(lambda anchor: 0), FixedK(2), draft_len=2)
    assert total_variation(law, plain_law([request])) > 0.02
    assert first_token(law) == pytest.approx([0.7, 0.3], abs=LAW)  # the first round is as it should be
    own = exact_law([request], AgainstTheAnchor(lambda anchor: 1 + anchor), FixedK(2), draft_len=2)
    assert total_variation(own, plain_law([request])) < LAW


def test_an_oracle_is_lossy_under_block() -> None:
    """Verifying less than everything may keep a draft for which the ones after it spoke against."""
    request = constant(P, Q, 3)
    law = exact_law([request], BlockToy(), replay=Oracle, draft_len=2)
    assert total_variation(law, plain_law([request])) > 0.02


P3, Q3 = (0.4, 0.4, 0.2), (0.6, 0.3, 0.1)


class Unweighted(BlockToy):
    """Block verification that replaces a rejected draft from (p - q)+, without the weight of the drafts before it."""

    def verdict(
        self, toy: ToyRequest, prefix: Tokens, drafts: Sequence[Tokens], verified: int
    ) -> tuple[list[list[float]], list[list[list[float]]]]:
        chance, residual = super().verdict(toy, prefix, drafts, verified)
        excess = [max(p - q, 0.0) for p, q in zip(P3, Q3, strict=True)]
        unweighted = [x / sum(excess) for x in excess]
        return chance, [[unweighted] * verified + [own[verified]] for own in residual]


class EachOnItsOwn(BlockToy):
    """Block verification with the thresholds of the ratio rule, of which the last one passed counts."""

    def verdict(
        self, toy: ToyRequest, prefix: Tokens, drafts: Sequence[Tokens], verified: int
    ) -> tuple[list[list[float]], list[list[list[float]]]]:
        _, residual = super().verdict(toy, prefix, drafts, verified)
        chance = [[min(1.0, P3[x] / Q3[x]) for x in draft[:verified]] for draft in drafts]
        return [[*own, 0.0] for own in chance], residual


@pytest.mark.parametrize("rule", [Unweighted(), EachOnItsOwn()])
def test_p04_a_wrong_block_formula_is_lossy(rule: BlockToy) -> None:
    request = constant(P3, Q3, 3)
    assert total_variation(exact_law([request], rule, FixedK(2), draft_len=2), plain_law([request])) > 0.01


class OtherQ(RatioToy):
    """The ratio rule dividing by another q than the drafts were sampled from."""

    def __init__(self, q: tuple[float, ...]) -> None:
        super().__init__()
        self._q = q

    def verdict(self, toy: ToyRequest, prefix: Tokens, token: int) -> tuple[float, list[float]]:
        return super().verdict(constant(tuple(toy.target(prefix)), self._q, 1), prefix, token)


def test_p02_dividing_by_a_q_that_was_not_sampled_from_is_lossy() -> None:
    """The drafter keeps its best token only; the rule divides by the whole distribution."""
    request = constant((0.4, 0.3, 0.3), (1.0, 0.0, 0.0), 2)
    law = exact_law([request], OtherQ((0.4, 0.3, 0.3)), FixedK(1), draft_len=1)
    assert first_token(law)[0] == pytest.approx(1, abs=LAW)
    assert total_variation(law, plain_law([request])) > 0.5


class Unclamped(RatioToy):
    """The ratio rule with a residual of |p - q| where (p - q)+ belongs."""

    def verdict(self, toy: ToyRequest, prefix: Tokens, token: int) -> tuple[float, list[float]]:
        chance, _ = super().verdict(toy, prefix, token)
        excess = [abs(p - q) for p, q in zip(toy.target(prefix), toy.drafter(prefix), strict=True)]
        return chance, [x / sum(excess) for x in excess]


class BonusForResidual(RatioToy):
    """The ratio rule that replaces a rejected draft from p."""

    def verdict(self, toy: ToyRequest, prefix: Tokens, token: int) -> tuple[float, list[float]]:
        return super().verdict(toy, prefix, token)[0], list(toy.target(prefix))


@pytest.mark.parametrize(("rule", "first"), [(Unclamped(), 0.6), (BonusForResidual(), 0.64)])
def test_a_wrong_residual_is_lossy(rule: RatioToy, first: float) -> None:
    law = exact_law([constant(P, Q, 2)], rule, FixedK(1), draft_len=1)
    assert first_token(law)[0] == pytest.approx(first, abs=LAW)


class Lucky(FixedK):
    """Verify one draft more after a round that accepted: memory of the past is allowed."""

    def observe(self, outcome: Outcome) -> None:
        self.k = 1 + int(outcome.accepted.sum() > 0)


def test_a_policy_that_learns_from_outcomes_is_lossless() -> None:
    request = toy(1, vocab_size=3, max_tokens=5)
    assert total_variation(exact_law([request], RatioToy(), Lucky(1), draft_len=2), plain_law([request])) < LAW
