"""Where confidences come from: what each provider says, how it learns, and that none looks ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dspark.decode import Decoder, SamplingParams
from dspark.policy import (
    Bandit,
    ConfidenceScheduled,
    ConfidenceThreshold,
    FixedK,
    Gated,
    Goodput,
    Oracle,
    Outcome,
    Signals,
    StepCost,
    VerifyPolicy,
)
from dspark.policy.calibration import SequentialTemperatures
from dspark.policy.confidence import ConfidenceProvider, ConstantConfidence, Tempered, TrainedHead, WithConfidence
from dspark.policy.learned import HeadMarginLogistic, MarginLogistic, OnlineTempered, RunningMean
from dspark.testing import RatioToy, Turn, assert_exact_law, assert_non_anticipating, random_history, toy_request
from dspark.testing.strategies import histories
from tests.decode.pairs import narrow_pair
from tests.policy.helpers import BEND, outcome, signals
from tests.tolerances import LEARNED, TEMPERATURE

PROVIDERS: dict[str, Callable[[], ConfidenceProvider]] = {
    "head": TrainedHead,
    "tempered": lambda: Tempered(SequentialTemperatures((2.0, 0.5, 1.0, 3.0))),
    "online": lambda: OnlineTempered(prior=0.1, decay=0.9),
    "margin": lambda: MarginLogistic(decay=0.9),
    "head and margin": lambda: HeadMarginLogistic(decay=0.9),
    "mean": lambda: RunningMean(decay=0.9),
    "constant": lambda: ConstantConfidence(0.7),
}
LEARNERS = ["online", "margin", "head and margin", "mean"]


# The wrapper


def test_p22_a_provider_changes_how_much_is_verified() -> None:
    shown = signals(torch.full((2, 3), 0.9))
    for value, lengths in ((0.9, [3, 3]), (0.5, [1, 1]), (0.1, [0, 0])):
        policy = WithConfidence(ConfidenceThreshold(0.5), ConstantConfidence(value))
        assert policy.plan(shown).tolist() == lengths


def test_the_wrapper_hands_on_what_happened() -> None:
    class Noted(FixedK):
        seen: Outcome | None = None

        def observe(self, outcome: Outcome) -> None:
            self.seen = outcome

    inner, provider = Noted(1), RunningMean()
    policy = WithConfidence(inner, provider)
    policy.plan(signals())
    happened = outcome([1], [1])
    policy.observe(happened)
    assert inner.seen is happened
    assert float(provider.confidence(signals())[0, 0]) > 0.8


@pytest.mark.parametrize("blind", [FixedK(1), Oracle({}), Goodput(BEND), Bandit(BEND)])
def test_p24_a_provider_without_effect_is_refused(blind: VerifyPolicy) -> None:
    with pytest.raises(ValueError, match="policy: expected one that looks at confidences"):
        WithConfidence(blind, TrainedHead())


def test_p24_a_gate_inside_which_nobody_would_ask_is_refused() -> None:
    gated = Gated(ConfidenceThreshold(0.5), StepCost(BEND))
    with pytest.raises(ValueError, match="policy: expected one without a gate, got Gated"):
        WithConfidence(gated, TrainedHead())


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (TrainedHead(), "TrainedHead needs a drafter with a confidence head"),
        (OnlineTempered(), "TrainedHead needs a drafter with a confidence head"),
        (Tempered(SequentialTemperatures((1.0,))), "TrainedHead needs a drafter with a confidence head"),
        (MarginLogistic(), "margin: MarginLogistic needs the drafter's margins"),
        (HeadMarginLogistic(), "confidence: HeadMarginLogistic needs a drafter with a confidence head"),
        (ConstantConfidence((0.5, 0.5)), r'value: expected shape "G" = \[3\], got \[2\]'),
    ],
)
def test_p24_a_provider_without_its_signal_says_so(provider: ConfidenceProvider, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        provider.confidence(signals())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConstantConfidence(1.5),
        lambda: RunningMean(decay=0.0),
        lambda: RunningMean(shrinkage=0.0),
        lambda: MarginLogistic(prior=0.0),
        lambda: OnlineTempered(prior=0.0),
        lambda: OnlineTempered(bins=0),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], ConfidenceProvider]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_another_shape_is_refused() -> None:
    class Wide(TrainedHead):
        def confidence(self, signals: Signals) -> Tensor:
            return torch.ones(1, 4)

    with pytest.raises(ValueError, match=r'provider: expected shape "R G" = \[1, 3\], got \[1, 4\]'):
        WithConfidence(ConfidenceThreshold(0.5), Wide()).plan(signals())


# Learning


def test_the_running_mean_counts_drafts_whose_predecessors_were_accepted() -> None:
    provider = RunningMean(decay=1.0, shrinkage=1.0)
    provider.confidence(signals(torch.ones(3, 3)))
    provider.observe(outcome([3, 2, 1], [1, 2, 0]))  # judged: yes no; yes yes; no
    level = (3 + 0.8) / (5 + 1)
    expected = [(2 + level) / (3 + 1), (1 + level) / (2 + 1), level]
    assert provider.confidence(signals())[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_round_without_drafts_teaches_nothing(name: str) -> None:
    provider = PROVIDERS[name]()
    shown = signals([[0.6, 0.7, 0.8]], margin=[[1.0, 2.0, 3.0]])
    before = provider.confidence(shown)
    provider.observe(outcome([0], [0]))
    provider.observe(outcome([3], [3]))  # nobody asked before this round
    assert torch.equal(provider.confidence(shown), before)


@pytest.mark.parametrize("name", LEARNERS)
def test_other_requests_and_draft_lengths_are_refused(name: str) -> None:
    provider = PROVIDERS[name]()
    provider.confidence(signals(torch.ones(1, 3), margin=torch.ones(1, 3)))
    with pytest.raises(ValueError, match=r"outcome: expected requests \(0,\), got \(0, 1\)"):
        provider.observe(outcome([1, 1], [1, 1]))
    with pytest.raises(ValueError, match="signals: expected draft length 3 as before, got 2"):
        provider.confidence(signals(torch.ones(1, 2), margin=torch.ones(1, 2)))


@pytest.mark.parametrize("name", LEARNERS)
def test_p25_a_class_learns_from_its_own_requests_alone(name: str) -> None:
    """Whatever the other class does: its estimates do not move, nor fade."""
    generator = torch.Generator().manual_seed(0)
    alone, crowded, spoiled = PROVIDERS[name](), PROVIDERS[name](), PROVIDERS[name]()
    for _ in range(12):
        confidence, margin = torch.rand(2, 3, generator=generator), 5 * torch.rand(2, 3, generator=generator)
        accepted = torch.randint(4, (1,), generator=generator).tolist()
        one = signals(confidence[:1], margin=margin[:1], classes=("steady",))
        both = signals(confidence, margin=margin, classes=("steady", "wild"))
        mixed = replace(both, classes=None)
        expected = alone.confidence(one)
        assert torch.equal(crowded.confidence(both)[:1], expected)
        spoiled.confidence(mixed)
        alone.observe(outcome([3], accepted))
        crowded.observe(outcome([3, 3], [*accepted, 0]))
        spoiled.observe(outcome([3, 3], [*accepted, 0]))
    assert not torch.equal(spoiled.confidence(mixed)[:1], alone.confidence(one))  # what one class for all would do


def served(
    provider: ConfidenceProvider, policy: VerifyPolicy, rounds: int, distort: Callable[[Tensor], Tensor], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Serve 16 requests whose drafts are accepted with random chances; the last round's chances and confidences.

    The provider is shown distorted chances, and margins that a curve of its own form takes to the chances.
    """
    generator = torch.Generator().manual_seed(seed)
    wrapped = WithConfidence(policy, provider)
    for _ in range(rounds):
        margin = 6 * torch.rand(16, 3, generator=generator)
        chance = torch.sigmoid(-1 + 2 * margin.log1p())
        accepted = (torch.rand(16, 3, generator=generator) < chance).long().cumprod(1).sum(1)
        shown = signals(distort(chance), margin=margin)
        lengths = wrapped.plan(shown)
        given = provider.confidence(shown)
        wrapped.observe(Outcome(shown.request_ids, lengths, torch.minimum(lengths, accepted)))
    return chance, given


def overconfident(chance: Tensor) -> Tensor:
    return torch.sigmoid(2 * torch.logit(chance))


def test_online_temperatures_find_what_undoes_a_distortion() -> None:
    provider = OnlineTempered()
    chance, given = served(provider, ConfidenceThreshold(0.0), 60, overconfident)
    assert provider.temperatures()[:2] == pytest.approx([2.0] * 2, rel=TEMPERATURE)
    assert float((given - chance).abs().mean()) < LEARNED
    assert provider.temperatures("never seen") == [1.0] * 3


class EarlyRejectionsCount(OnlineTempered):
    """Takes a rejection for known at the positions behind the last verified one, too."""

    def observe(self, outcome: Outcome) -> None:
        rejected = outcome.accepted < outcome.lengths
        super().observe(replace(outcome, lengths=torch.where(rejected, 3, outcome.lengths)))


def test_rounds_cut_short_do_not_bias_online_temperatures() -> None:
    """Of rounds that verify one draft, those that end in a rejection would tell of the others: of failures alone."""
    generator = torch.Generator().manual_seed(0)
    shown, lengths = signals(torch.full((16, 3), 0.8)), torch.ones(16, dtype=torch.int64)
    honest, biased = OnlineTempered(), EarlyRejectionsCount()
    for _ in range(30):
        accepted = (torch.rand(16, generator=generator) < 0.8).long()
        for provider in (honest, biased):
            provider.confidence(shown)
            provider.observe(Outcome(shown.request_ids, lengths, accepted))
    assert honest.temperatures()[0] == pytest.approx(1, rel=TEMPERATURE)
    assert honest.temperatures()[1:] == [1, 1]
    assert min(biased.temperatures()[1:]) > 2


def test_the_margins_curve_is_learned() -> None:
    chance, given = served(MarginLogistic(), ConfidenceThreshold(0.0), 60, overconfident)
    assert float((given - chance).abs().mean()) < LEARNED
    chance, given = served(ConstantConfidence(0.8), ConfidenceThreshold(0.0), 2, overconfident)
    assert float((given - chance).abs().mean()) > LEARNED  # where it began


def test_head_and_margin_begin_with_the_head() -> None:
    shown = signals([[0.2, 0.5, 0.9], [0.0, 1.0, float("nan")]], margin=torch.full((2, 3), 2.0))
    assert HeadMarginLogistic().confidence(shown).flatten().tolist() == pytest.approx(
        [0.2, 0.5, 0.9, 0.0, 1.0, 0.0], abs=LEARNED
    )


@pytest.mark.parametrize("head", [overconfident, lambda chance: torch.full_like(chance, 0.6)])
def test_head_and_margin_learn_whom_to_believe(head: Callable[[Tensor], Tensor]) -> None:
    chance, given = served(HeadMarginLogistic(), ConfidenceThreshold(0.0), 60, head)
    assert float((given - chance).abs().mean()) < LEARNED
    assert float((head(chance) - chance).abs().mean()) > LEARNED  # where it began


def test_surprises_do_not_break_the_curve() -> None:
    provider = MarginLogistic(decay=1.0)
    shown = signals(margin=torch.full((4, 1), 1e6))
    for accepted in [1] * 50 + [0] * 3 + [1] * 50:
        provider.confidence(shown)
        provider.observe(outcome([1] * 4, [accepted] * 4))
    assert 0.8 < float(provider.confidence(shown)[0, 0]) < 1.0


# What they may know


@pytest.mark.parametrize("name", PROVIDERS)
def test_no_provider_anticipates(name: str) -> None:
    for policy in (ConfidenceThreshold(0.4), ConfidenceScheduled(BEND)):
        assert_non_anticipating(
            lambda policy=policy: WithConfidence(policy, PROVIDERS[name]()),  # type: ignore[misc]
            [random_history(seed, requests=2) for seed in range(4)],
        )


@pytest.mark.parametrize("name", LEARNERS)
@given(history=histories(max_requests=2, max_draft_len=3, max_rounds=3, classes=("chat", "code")))
@settings(max_examples=10)
def test_learning_by_class_does_not_anticipate(name: str, history: list[Turn]) -> None:
    assert_non_anticipating(lambda: WithConfidence(ConfidenceThreshold(0.5), PROVIDERS[name]()), [history])


class Smoothed(TrainedHead):
    """Each slot's confidence is the mean over its block."""

    def confidence(self, signals: Signals) -> Tensor:
        raw = super().confidence(signals)
        return raw.mean(1, keepdim=True).expand_as(raw)


class Leading(MarginLogistic):
    """Looks at the margin of the slot behind."""

    def confidence(self, signals: Signals) -> Tensor:
        return signals.margin.roll(-1, 1) / 8


@pytest.mark.parametrize(("planted", "message"), [(Smoothed, "after a change of"), (Leading, "change of its margins")])
def test_providers_that_anticipate_are_caught(planted: Callable[[], ConfidenceProvider], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_non_anticipating(WithConfidence(ConfidenceThreshold(0.4), planted()))


class FromConfidence:
    """Shows a provider confidences as margins, since exact laws have no margins."""

    def __init__(self, provider: ConfidenceProvider) -> None:
        self.provider = provider

    def confidence(self, signals: Signals) -> Tensor:
        return self.provider.confidence(replace(signals, margin=4 * signals.confidence))

    def observe(self, outcome: Outcome) -> None:
        self.provider.observe(outcome)


BATCHES = [[toy_request(0, max_tokens=4)], [toy_request(1, max_tokens=2), toy_request(2, max_tokens=3)]]


@pytest.mark.parametrize("name", LEARNERS)
def test_learning_leaves_the_exact_law_as_it_is(name: str) -> None:
    policy = WithConfidence(ConfidenceThreshold(0.5), FromConfidence(PROVIDERS[name]()))
    assert_exact_law(RatioToy(), policy, BATCHES)


def test_smoothing_over_a_block_does_not() -> None:
    with pytest.raises(AssertionError, match="from plain decoding"):
        assert_exact_law(RatioToy(), WithConfidence(ConfidenceThreshold(0.4), Smoothed()))


@pytest.mark.parametrize("provider", [OnlineTempered(prior=0.1), RunningMean(shrinkage=1.0)], ids=repr)
def test_a_decoder_with_a_learner_emits_what_the_target_would(provider: ConfidenceProvider) -> None:
    model, drafter = narrow_pair(16)
    prompts, params = [[1, 2], [3]], [SamplingParams(max_tokens=20, seed=seed) for seed in (1, 2)]
    policy = WithConfidence(ConfidenceThreshold(0.3), provider)
    drafted = Decoder(model, drafter, policy, "coupled").generate(prompts, params)
    plain = Decoder(model).generate(prompts, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert len({r.verified for c in drafted for r in c.rounds}) > 1
