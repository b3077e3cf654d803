"""The public checks: sound engines and policies pass, and each planted fault is caught by one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from dspark.cli.lossless import replay_logits
from dspark.decode import Decoder
from dspark.ops.schedule import schedule_prefix
from dspark.policy import ConfidenceScheduled, ConfidenceThreshold, CostProfile, FixedK, Signals, VerifyPolicy
from dspark.requests import SamplingParams
from dspark.testing import (
    BlockToy,
    CoupledToy,
    RatioToy,
    assert_exact_law,
    assert_lossless,
    assert_lossless_outputs,
    assert_non_anticipating,
    certify_policy,
    detectable_variation,
)
from dspark.testing.causality import fresh_policy
from dspark.testing.statistics import joint_fit
from tests.decode.pairs import narrow_pair
from tests.laws import engines
from tests.laws.toys import CURVES
from tests.tolerances import SIGMAS

PLAIN = SamplingParams(max_tokens=4)


def judge(engine: engines.Engine, sampling: SamplingParams = PLAIN, samples: int = 3000, **options: object) -> object:
    return assert_lossless(
        engine, engines.target, [[0], [1, 2]], sampling, gives="probabilities", samples=samples, **options
    )  # type: ignore[arg-type]


# Engines


def test_a_sound_engine_is_certified_and_told_what_would_have_shown() -> None:
    certificate = assert_lossless(
        engines.Engine(), engines.target, [[0], [1, 2]], PLAIN, gives="probabilities", samples=3000
    )
    assert (certificate.outputs, certificate.tokens, certificate.near_ties) == (3000, 12_000, 0)
    assert set(certificate.p_values) == {"tokens", "pairs", "first tokens"}
    assert min(certificate.p_values.values()) > 1e-3
    assert certificate.detectable is not None
    assert 0.05 < certificate.detectable < 0.15


@pytest.mark.parametrize(
    "fault",
    [
        engines.GateOnOwnProbability,
        engines.GlobalSearch,
        engines.SharedNoise,
        engines.Unclamped,
        engines.BonusAfterTruncation,
    ],
)
def test_p01_p04_an_engine_with_a_planted_fault_is_caught(fault: type[engines.Engine]) -> None:
    with pytest.raises(AssertionError, match="do not follow the target"):
        judge(fault())


def test_p08_tokens_that_share_a_number_are_caught_though_each_is_right() -> None:
    with pytest.raises(AssertionError, match="pairs do not follow the target"):
        judge(engines.OneNumberTwice(), SamplingParams(max_tokens=16), samples=200, first=1)


def test_one_seed_for_all_requests_is_caught() -> None:
    class Seedless(engines.Engine):
        def __call__(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> list[int]:
            return super().__call__(prompt, sampling, 0)

    with pytest.raises(AssertionError, match="do not follow the target"):
        judge(Seedless(), samples=500)


def test_the_message_says_what_came_too_often() -> None:
    with pytest.raises(AssertionError, match=r"first tokens do not .* came \d+ times where \d+\.\d were expected"):
        assert_lossless_outputs(
            [[0]] * 200, [[0, 1]] * 100 + [[1, 0]] * 100, lambda tokens: (0.5, 0.5), SamplingParams(max_tokens=2),
            gives="probabilities",
        )  # fmt: skip


def test_p16_an_output_ends_with_its_first_stop_token() -> None:
    stopping = SamplingParams(max_tokens=4, stop_token_ids=(2,))
    judge(engines.Engine(), stopping)

    class RunsOn(engines.Engine):
        def end(self, out: list[int], sampling: SamplingParams) -> list[int]:
            return out[: sampling.max_tokens]

    with pytest.raises(AssertionError, match="expected the output to end with its first stop token"):
        judge(RunsOn(), stopping)


def test_p08_more_tokens_than_asked_for_are_caught() -> None:
    class Eager(engines.Engine):
        def end(self, out: list[int], sampling: SamplingParams) -> list[int]:
            return out

    with pytest.raises(AssertionError, match="expected the output to end after 4 tokens"):
        judge(Eager())


@pytest.mark.parametrize(
    ("token", "message"), [(3, "outside the vocabulary of 3"), (-1, "outside the vocabulary"), (1, "has probability 0")]
)
def test_p05_p21_an_impossible_token_is_caught(token: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_lossless_outputs(
            [[0]], [[token]], lambda tokens: torch.tensor([2.0, 1.0, 0.0]), SamplingParams(max_tokens=1, top_k=1)
        )


def greedy_logits(tokens: Sequence[int]) -> Tensor:
    """Token n + 1 follows n, nearly tied with n + 2."""
    scores = torch.zeros(8)
    scores[(tokens[-1] + 1) % 8] = 1.0
    scores[(tokens[-1] + 2) % 8] = 1.0 - 1e-5
    return scores


def test_p19_at_temperature_0_tokens_are_the_best_and_near_ties_are_counted() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=3)

    def certify(output: list[int]) -> int:
        return assert_lossless(lambda prompt, sampling, seed: output, greedy_logits, [[0]], greedy).near_ties

    assert certify([1, 2, 3]) == 0
    assert certify([1, 3, 4]) == 1
    with pytest.raises(AssertionError, match=r"after \[0, 1\]: expected token 2, got 4, whose score is 1 lower"):
        certify([1, 4, 5])


def test_a_decoder_of_ours_is_certified_from_a_batch() -> None:
    """Logits are asked for once per prefix that came up, and the sampling parameters are applied to them."""
    model, drafter = narrow_pair(8)
    sampling = SamplingParams(max_tokens=3, temperature=1.3, top_k=6)
    prompts = [[1, 2]] * 400
    params = [SamplingParams(max_tokens=3, temperature=1.3, top_k=6, seed=seed) for seed in range(400)]
    decoder = Decoder(model, drafter, FixedK(2), "ratio", max_batch=100, num_pages=256)
    outputs = [completion.token_ids for completion in decoder.generate(prompts, params)]

    def logits(tokens: Sequence[int]) -> Tensor:
        return replay_logits(model, tokens, [0])[0]

    assert assert_lossless_outputs(prompts, outputs, logits, sampling).tokens == 1200
    with pytest.raises(AssertionError, match=r"do not follow the target|has probability 0"):
        assert_lossless_outputs(prompts, outputs, logits, SamplingParams(max_tokens=3, temperature=0.7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 1}, "prompts, samples: expected one or more of each, got 2 and 1"),
        ({"first": 0}, "first, false_alarm: expected"),
        ({"false_alarm": 0}, "first, false_alarm: expected"),
        ({"sampling": SamplingParams(max_tokens=1), "samples": 2}, "too few for any test"),
    ],
)
def test_a_check_that_could_tell_nothing_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge(engines.Engine(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gives", "row", "sampling", "message"),
    [
        ("probabilities", (0.5, 0.6), PLAIN, "expected probabilities"),
        ("logits", (float("nan"), 0.0), PLAIN, "expected logits"),
        ("logits", (0.0, 0.0), SamplingParams(max_tokens=4, repetition_penalty=2.0), "with logits processors"),
        ("odds", (0.0, 0.0), PLAIN, "gives: expected"),
    ],
)
def test_a_target_that_is_no_distribution_is_refused(
    gives: str, row: tuple[float, ...], sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assert_lossless_outputs([[0]], [[0] * 4], lambda tokens: row, sampling, gives=gives)  # type: ignore[arg-type]


# Its statistics


def test_false_alarms_are_as_rare_as_stated() -> None:
    """At a rate of 20 %, of 40 sound engines about 8 fail."""
    alarms = 0
    for shift in range(40):
        outputs = [engines.Engine()([0], PLAIN, 1000 * shift + seed) for seed in range(150)]
        try:
            assert_lossless_outputs([[0]] * 150, outputs, engines.target, PLAIN, gives="probabilities", false_alarm=0.2)
        except AssertionError:
            alarms += 1
    assert 0 < alarms <= 8 + SIGMAS * (40 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize(("count", "degrees"), [(500, 1), (3000, 26), (20_000, 120)])
def test_the_detectable_variation_is_missed_as_rarely_as_stated(count: int, degrees: int) -> None:
    limit = stats.chi2.isf(1e-4, degrees)
    missed = stats.ncx2.cdf(limit, degrees, 4 * count * detectable_variation(count, degrees, 1e-4) ** 2)
    assert 0.001 < missed < 0.02


def test_rare_sequences_share_a_cell() -> None:
    """Of a wide vocabulary only what comes up often is told apart; the rest is counted together."""
    row = torch.full((1000,), 0.1 / 998, dtype=torch.float64)
    row[:2] = torch.tensor([0.6, 0.3])
    fair = torch.multinomial(row, 2 * 400, replacement=True, generator=torch.Generator().manual_seed(0))
    fit = joint_fit(fair.view(-1, 2).tolist(), lambda tokens: row, 2)
    assert fit.degrees == 6  # 2 x 2 sequences, the rest after each, and the rest at first, less one
    skewed = [[5, 5]] * 100 + fair.view(-1, 2).tolist()[100:]
    assert joint_fit(skewed, lambda tokens: row, 2).statistic > 10 * fit.statistic


# Policies and rules


class Search(FixedK):
    """The scheduler without stop and without lag."""

    def __init__(self) -> None:
        super().__init__(0)

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        speed = CURVES["jagged"].steps_per_second(signals.confidence.numel() + len(signals.request_ids))
        return schedule_prefix(signals.confidence, speed, mode="global", max_lengths=signals.max_lengths)


class Peek(FixedK):
    """Verifies all of a block or nothing, by its last confidence."""

    def __init__(self) -> None:
        super().__init__(0)

    def plan(self, signals: Signals) -> Tensor:
        assert signals.confidence is not None
        return torch.where(signals.confidence[:, -1] > 0.6, signals.max_lengths, 0)


def test_a_shipped_policy_is_certified() -> None:
    certify_policy(ConfidenceThreshold(0.6))
    assert_exact_law(RatioToy(), ConfidenceScheduled(CostProfile((1, 4, 32), (1.0, 1.4, 8.0)), lag=2))


@pytest.mark.parametrize("planted", [Search, Peek])
def test_a_policy_that_peeks_fails_either_check(planted: Callable[[], VerifyPolicy]) -> None:
    with pytest.raises(AssertionError, match="after a change of"):
        certify_policy(planted)
    with pytest.raises(AssertionError, match=r"total variation .* instead of"):
        assert_exact_law(RatioToy(), planted)


class Unclamped(RatioToy):
    """A residual of |p - q|."""

    def verdict(self, toy: object, prefix: tuple[int, ...], token: int) -> tuple[float, list[float]]:
        chance, _ = super().verdict(toy, prefix, token)  # type: ignore[arg-type]
        rows = zip(toy.target(prefix), toy.drafter(prefix), strict=True)  # type: ignore[attr-defined]
        excess = [abs(p - q) for p, q in rows]
        return chance, [x / sum(excess) for x in excess]


def test_rules_are_held_to_the_exact_law() -> None:
    assert_exact_law(CoupledToy(), Search)
    assert_exact_law(BlockToy(), FixedK(2))
    with pytest.raises(AssertionError, match="batch 0: total variation"):
        assert_exact_law(Unclamped(), FixedK(2))


def test_a_policy_may_be_given_itself_or_by_what_makes_it() -> None:
    policy = FixedK(1)
    assert fresh_policy(policy) is not policy
    assert isinstance(fresh_policy(Search), Search)
    assert isinstance(fresh_policy(lambda: FixedK(2)), FixedK)
    assert_non_anticipating(policy)
