"""Policies, rules, temperatures and draft lengths compared with plain decoding on the same prompts, in paired runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dspark.cli.lossless import is_lossless_by_law, is_lossless_by_tokens
from dspark.cli.rows import PLAIN, Row, acceptance_by_position, speedups
from dspark.cli.setup import make_policy, most_verified, needs_margins, runs_under, tree_shape
from dspark.decode import Completion, Decoder, SamplingParams, mean_emitted
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.ops.types import Rule
from dspark.policy import CostProfile


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        prompts: token ids of each prompt.
        policies: names that :func:`~dspark.cli.setup.make_policy` or :func:`~dspark.cli.setup.tree_shape` knows; plain
            decoding is always measured beside them, and none under a rule or draft length that it does not go with.
        rules, temperatures, draft_lens: each is combined with each; a draft length of None is the drafter's block size.
        repeats: paired measurements per prompt.
        max_tokens: tokens to emit per prompt.
        seed: prompt ``i`` is sampled with ``seed + i``.
        domains: of each prompt, for rows of each domain beside those of all; empty for none.
    """

    prompts: Sequence[Sequence[int]]
    policies: Sequence[str]
    rules: Sequence[Rule]
    temperatures: Sequence[float]
    repeats: int
    max_tokens: int
    seed: int = 0
    draft_lens: Sequence[int | None] = (None,)
    domains: Sequence[str] = ()

    @property
    def runs(self) -> int:
        """How many times a prompt is decoded, all in all."""
        each = sum(1 + self.repeats * (1 + len(self.policies_under(rule, g))) for rule, _, g in self.settings())
        return len(self.prompts) * each

    def settings(self) -> Iterator[tuple[Rule, float, int | None]]:
        """Every combination."""
        for rule in self.rules:
            for temperature in self.temperatures:
                for draft_len in self.draft_lens:
                    yield rule, temperature, draft_len

    def policies_under(self, rule: Rule, draft_len: int | None = None) -> list[str]:
        """The policies that a rule and a draft length are measured with."""
        return [
            name
            for name in self.policies
            if runs_under(name, rule) and (draft_len is None or most_verified(name) <= draft_len)
        ]

    def groups(self) -> dict[str, list[int]]:
        """Prompts by domain, and all of them, by index."""
        found = {"all": list(range(len(self.prompts)))}
        if len(set(self.domains)) > 1:
            for i, domain in enumerate(self.domains):
                found.setdefault(domain, []).append(i)
        return found


@dataclass(frozen=True)
class _Setting:
    """All that a policy's runs at one setting share."""

    target: Target
    drafter: Drafter
    profile: CostProfile
    rule: Rule
    draft_len: int

    def decode(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams, accepted: Sequence[int] = ()
    ) -> tuple[Completion, float]:
        """Decode one prompt under the policy of that name, and say how many seconds it took."""
        tree = tree_shape(name)
        policy = make_policy(name, self.profile, accepted) if tree is None else None
        plain = policy is None and tree is None
        decoder = Decoder(
            self.target,
            None if plain else self.drafter,
            policy,
            self.rule,
            draft_len=None if plain else self.draft_len,
            tree=tree,
            max_batch=1,
            margins=needs_margins(name),
        )
        start = time.perf_counter()
        [completion] = decoder.generate([prompt], sampling)
        return completion, time.perf_counter() - start


@dataclass
class _Measured:
    """One policy's runs: seconds by prompt and repeat, and each prompt's completion."""

    seconds: list[list[float]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def per_token(self, i: int) -> list[float]:
        """Seconds per token of a prompt, by repeat."""
        return [s / len(self.completions[i].token_ids) for s in self.seconds[i]]


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
    for rule, temperature, draft_len in plan.settings():
        setting = _Setting(target, drafter, profile, rule, draft_len or drafter.block_size)
        names = [PLAIN, *plan.policies_under(rule, draft_len)]
        rows += _compare(setting, plan, names, temperature, progress)
    return rows


def _compare(
    setting: _Setting, plan: Plan, names: list[str], temperature: float, progress: Callable[[str], None]
) -> list[Row]:
    measured = {name: _Measured() for name in names}
    stop = setting.target.config.eos_token_ids
    params = [
        SamplingParams(temperature=temperature, seed=plan.seed + i, max_tokens=plan.max_tokens, stop_token_ids=stop)
        for i in range(len(plan.prompts))
    ]
    where = f"{setting.rule}, T = {temperature:g}"
    for prompt, sampling in zip(plan.prompts, params, strict=True):
        # A pass over everything, for the oracle; and the warm-up.
        full, _ = setting.decode(f"fixed:{setting.draft_len}", prompt, sampling)
        accepted = [r.accepted for r in full.rounds]
        progress(f"warm-up, {where}")
        for own in measured.values():
            own.seconds.append([])
        for repeat in range(plan.repeats):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                completion, seconds = setting.decode(name, prompt, sampling, accepted)
                measured[name].seconds[-1].append(seconds)
                if repeat == 0:
                    measured[name].completions.append(completion)
                progress(f"{name}, {where}")
    return [
        _row(setting, plan, name, measured, params, domain, chosen)
        for domain, chosen in plan.groups().items()
        for name in names
    ]


def _row(
    setting: _Setting,
    plan: Plan,
    name: str,
    measured: dict[str, _Measured],
    params: Sequence[SamplingParams],
    domain: str,
    chosen: Sequence[int],
) -> Row:
    own, plain = measured[name], measured[PLAIN]
    completions = [own.completions[i] for i in chosen]
    rounds = [r for c in completions for r in c.rounds]
    tokens = sum(len(c.token_ids) for c in completions)
    speedup = speedups([own.per_token(i) for i in chosen], [plain.per_token(i) for i in chosen])
    per_repeat = sorted(tokens / sum(own.seconds[i][repeat] for i in chosen) for repeat in range(plan.repeats))
    temperature, prompts = params[0].temperature, [plan.prompts[i] for i in chosen]
    judged = setting.target, prompts, completions
    lossless: bool | None
    if setting.rule == "coupled" or temperature == 0:
        baseline = [plain.completions[i] for i in chosen]
        lossless, near_ties = is_lossless_by_tokens(*judged, baseline, [params[i] for i in chosen])
    else:
        lossless, near_ties = is_lossless_by_law(*judged, [params[i] for i in chosen]), 0
    return Row(
        policy=name,
        rule=setting.rule,
        temperature=temperature,
        draft_len=setting.draft_len,
        domain=domain,
        tokens_per_s=(per_repeat[(len(per_repeat) - 1) // 2] + per_repeat[len(per_repeat) // 2]) / 2,
        speedup=speedup.median,
        speedup_ci=(speedup.low, speedup.high),
        tau=mean_emitted(rounds),
        verified_per_round=sum(r.verified for r in rounds) / len(rounds) if rounds else 0.0,
        accept_by_position=acceptance_by_position(rounds)[: setting.draft_len],
        lossless=lossless,
        prompts=len(prompts),
        tokens=tokens,
        near_ties=near_ties,
    )
