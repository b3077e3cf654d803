"""Policies, rules and temperatures compared with plain decoding on the same prompts, in paired, interleaved runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dspark.cli.lossless import is_lossless_by_law, is_lossless_by_tokens
from dspark.cli.setup import make_policy
from dspark.decode import Completion, Decoder, Round, SamplingParams, mean_emitted
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.ops.types import Rule
from dspark.policy import CostProfile

PLAIN = "plain"


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        prompts: token ids of each prompt.
        policies: names that :func:`~dspark.cli.setup.make_policy` knows; plain decoding is always measured beside them,
            and the oracle not under ``block``.
        rules, temperatures: each is combined with each.
        repeats: paired measurements per prompt.
        max_tokens: tokens to emit per prompt.
        seed: prompt ``i`` is sampled with ``seed + i``.
    """

    prompts: Sequence[Sequence[int]]
    policies: Sequence[str]
    rules: Sequence[Rule]
    temperatures: Sequence[float]
    repeats: int
    max_tokens: int
    seed: int = 0

    @property
    def runs(self) -> int:
        """How many times a prompt is decoded, all in all."""
        each = sum(1 + self.repeats * (1 + len(self.policies_under(rule))) for rule in self.rules)
        return len(self.prompts) * len(self.temperatures) * each

    def policies_under(self, rule: Rule) -> list[str]:
        """The policies that a rule is measured with: under ``block`` the oracle would bias the output."""
        return [name for name in self.policies if not (rule == "block" and name == "oracle")]


@dataclass(frozen=True)
class Row:
    """One policy under one rule at one temperature.

    Attributes:
        tokens_per_s: emitted tokens over seconds, prompt processing included; median over repeats.
        speedup: plain decoding's time per token over this policy's, measured next to it on the same prompt; median
            over prompts and repeats, with its quartiles in ``speedup_iqr``.
        tau: tokens emitted per round, the bonus included.
        verified_per_round: drafts sent to the target per round.
        accept_by_position: of the drafts verified at each position whose predecessors were accepted, the fraction
            accepted; None where there was none.
        lossless: at temperature 0 and under ``coupled``, the tokens equal plain decoding's; otherwise, the tokens fit
            the target's own distributions (chi-square, p > 1e-4); None where they are too few to tell.
        near_ties: prompts whose output left plain decoding's at two scores within rounding of each other; they count
            as lossless.
    """

    policy: str
    rule: str
    temperature: float
    tokens_per_s: float
    speedup: float
    speedup_iqr: tuple[float, float]
    tau: float
    verified_per_round: float
    accept_by_position: list[float | None]
    lossless: bool | None
    prompts: int
    tokens: int
    near_ties: int


@dataclass(frozen=True)
class _Setting:
    """All that a policy's runs at one setting share."""

    target: Target
    drafter: Drafter
    profile: CostProfile
    rule: Rule

    def decode(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams, accepted: Sequence[int] = ()
    ) -> tuple[Completion, float]:
        """Decode one prompt under the policy of that name, and say how many seconds it took."""
        policy = make_policy(name, self.profile, accepted)
        drafter = self.drafter if policy is not None else None
        decoder = Decoder(self.target, drafter, policy, self.rule, max_batch=1)
        start = time.perf_counter()
        [completion] = decoder.generate([prompt], sampling)
        return completion, time.perf_counter() - start


@dataclass
class _Measured:
    """One policy's runs: seconds by prompt and repeat, and each prompt's completion."""

    seconds: list[list[float]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)


def run_ablation(
    target: Target,
    drafter: Drafter,
    plan: Plan,
    profile: CostProfile,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Measure every combination of a plan, on one request at a time.

    For each prompt, plain decoding and every policy run one right after the other, in an order that rotates with each
    repeat, so that a machine that slows down slows them alike.

    Args:
        target, drafter: the pair.
        plan: what to compare.
        profile: cost curve for the scheduled policies.
        progress: called after each of ``plan.runs`` runs.
    """
    rows = []
    for rule in plan.rules:
        for temperature in plan.temperatures:
            rows += _compare(_Setting(target, drafter, profile, rule), plan, temperature, progress)
    return rows


def _compare(setting: _Setting, plan: Plan, temperature: float, progress: Callable[[str], None]) -> list[Row]:
    names = [PLAIN, *plan.policies_under(setting.rule)]
    measured = {name: _Measured() for name in names}
    stop = setting.target.config.eos_token_ids
    params = [
        SamplingParams(temperature=temperature, seed=plan.seed + i, max_tokens=plan.max_tokens, stop_token_ids=stop)
        for i in range(len(plan.prompts))
    ]
    for prompt, sampling in zip(plan.prompts, params, strict=True):
        # A pass over everything, for the oracle; and the warm-up.
        full, _ = setting.decode(f"fixed:{setting.drafter.block_size}", prompt, sampling)
        accepted = [r.accepted for r in full.rounds]
        progress(f"warm-up, {setting.rule}, T = {temperature:g}")
        for own in measured.values():
            own.seconds.append([])
        for repeat in range(plan.repeats):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                completion, seconds = setting.decode(name, prompt, sampling, accepted)
                measured[name].seconds[-1].append(seconds)
                if repeat == 0:
                    measured[name].completions.append(completion)
                progress(f"{name}, {setting.rule}, T = {temperature:g}")
    return [_row(setting, plan, name, measured[name], measured[PLAIN], params) for name in names]


def _row(
    setting: _Setting, plan: Plan, name: str, own: _Measured, plain: _Measured, params: Sequence[SamplingParams]
) -> Row:
    target, rule = setting.target, setting.rule
    rounds = [r for c in own.completions for r in c.rounds]
    count = [len(c.token_ids) for c in own.completions]
    plain_count = [len(c.token_ids) for c in plain.completions]
    ratios = [
        (p / plain_count[i]) / (o / count[i])
        for i in range(len(count))
        for p, o in zip(plain.seconds[i], own.seconds[i], strict=True)
    ]
    per_repeat = [sum(count) / sum(s[repeat] for s in own.seconds) for repeat in range(plan.repeats)]
    low, middle, high = (
        torch.tensor(ratios, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    )
    temperature = params[0].temperature
    lossless: bool | None
    if rule == "coupled" or temperature == 0:
        lossless, near_ties = is_lossless_by_tokens(target, plan.prompts, own.completions, plain.completions, params)
    else:
        lossless, near_ties = is_lossless_by_law(target, plan.prompts, own.completions, params), 0
    return Row(
        policy=name,
        rule=rule,
        temperature=temperature,
        tokens_per_s=statistics.median(per_repeat),
        speedup=middle,
        speedup_iqr=(low, high),
        tau=mean_emitted(rounds),
        verified_per_round=statistics.fmean(r.verified for r in rounds) if rounds else 0.0,
        accept_by_position=acceptance_by_position(rounds),
        lossless=lossless,
        prompts=len(plan.prompts),
        tokens=sum(count),
        near_ties=near_ties,
    )


def acceptance_by_position(rounds: Sequence[Round]) -> list[float | None]:
    """Conditional acceptance at each draft position.

    >>> acceptance_by_position([Round(2, 2, 2, 3), Round(2, 2, 0, 1)])
    [0.5, 1.0]
    """
    positions = range(1, max((r.proposed for r in rounds), default=0) + 1)
    reached = [sum(r.verified >= k and r.accepted >= k - 1 for r in rounds) for k in positions]
    passed = [sum(r.accepted >= k for r in rounds) for k in positions]
    return [p / n if n else None for p, n in zip(passed, reached, strict=True)]
