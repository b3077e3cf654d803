"""``python -m dspark ablate``: policies, rules, temperatures, draft lengths against plain decoding, in paired runs."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

from dspark.cli import report, setup
from dspark.cli.lossless import is_lossless_by_law, is_lossless_by_tokens
from dspark.decode import Completion, Decoder, SamplingParams, mean_emitted
from dspark.measure import measure_cost
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.ops.types import Rule
from dspark.policy import CostProfile

app = typer.Typer()

_POLICIES = ["fixed:3", "fixed:7", "tree:7", "scheduled", "oracle"]
_RULES = ["coupled", "ratio"]
_TEMPERATURES = [0.0, 1.0]


@app.command()
def ablate(
    policy: Annotated[list[str], typer.Option(help=f"Repeatable: {setup.POLICY_HELP} Or tree:NODES.")] = _POLICIES,
    rule: Annotated[list[str], typer.Option(help=f"Repeatable: {setup.RULE_HELP}.")] = _RULES,
    temperature: Annotated[list[float], typer.Option(help="Repeatable.", min=0.0)] = _TEMPERATURES,
    prompts: Annotated[int, typer.Option(help="How many prompts, taken evenly over the file.", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="Paired measurements of each prompt.", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Tokens to emit per prompt.", min=2)] = 80,
    draft_len: Annotated[
        list[int] | None, typer.Option(help="Repeatable: drafts per round; the drafter's block size by default.")
    ] = None,
    by_domain: Annotated[bool, typer.Option(help="Rows for each kind of text, too.")] = False,
    seed: Annotated[int, typer.Option(help="Prompt i is sampled with seed + i.")] = 0,
    file: Annotated[Path | None, typer.Option(help="Prompts: text, or JSON lines; held-out text by default.")] = None,
    target: setup.TargetFolder = None,
    drafter: setup.DrafterFolder = None,
    profile: setup.ProfileFile = None,
    threads: Annotated[int, typer.Option(help="CPU threads; more than one makes timings noisy.", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="JSON results; Markdown, CSV and a picture go beside them.")] = Path(
        "runs/ablate.json"
    ),
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Measure nothing: set two JSON results side by side.")
    ] = None,
) -> None:
    """Compare policies, rules, temperatures and draft lengths with plain decoding on the same prompts."""
    if compare is not None:
        sys.stdout.write(report.comparison(report.read_rows(compare[0]), report.read_rows(compare[1])))
        return
    torch.set_num_threads(threads)
    pair, guesser, tokenizer = setup.load_models(target, drafter)
    for name in policy:
        setup.check_policy(name, guesser.block_size)
    for length in draft_len or ():
        if not 1 <= length <= guesser.block_size:
            raise ValueError(f"--draft-len: expected 1 to the drafter's block size {guesser.block_size}, got {length}")
    chosen = setup.choose_prompts(file, prompts)
    plan = Plan(
        prompts=[tokenizer.encode(p.text).ids for p in chosen],
        policies=[name for name in policy if name != report.PLAIN],
        rules=[setup.check_rule(r) for r in rule],
        temperatures=temperature,
        repeats=repeats,
        max_tokens=max_tokens,
        seed=seed,
        draft_lens=draft_len or [None],
        domains=[p.domain for p in chosen] if by_domain else [],
    )
    console = setup.console_of(120)
    for each in plan.rules:
        left_out = [name for name in plan.policies if name not in plan.policies_under(each)]
        if left_out:
            console.print(f"rule {each}: without {', '.join(left_out)}, which it does not go with")
    with setup.progress_bar(console) as bar:
        task = bar.add_task("measuring what a round costs", total=plan.runs)
        cost = measure_cost(pair, guesser) if profile is None else CostProfile.load(profile)
        rows = run_ablation(pair, guesser, plan, cost, lambda name: bar.update(task, advance=1, description=name))
    console.print(report.table(rows))
    written = report.write_results(out, rows)
    written += setup.draw(console, "picture", lambda path: report.write_picture(path, rows), out.with_suffix(".png"))
    console.print(f"wrote {', '.join(map(str, written))}")


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
        return itertools.product(self.rules, self.temperatures, self.draft_lens)

    def policies_under(self, rule: Rule, draft_len: int | None = None) -> list[str]:
        """The policies that a rule and a draft length are measured with."""
        return [
            name
            for name in self.policies
            if setup.runs_under(name, rule) and (draft_len is None or setup.most_verified(name) <= draft_len)
        ]

    def groups(self) -> dict[str, list[int]]:
        """Prompts by domain, and all of them, by index."""
        found = {"all": list(range(len(self.prompts)))}
        if len(set(self.domains)) > 1:
            for i, domain in enumerate(self.domains):
                found.setdefault(domain, []).append(i)
        return found


def run_ablation(
    target: Target,
    drafter: Drafter,
    plan: Plan,
    profile: CostProfile,
    progress: Callable[[str], None] = lambda name: None,
) -> list[report.Row]:
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
        names = [report.PLAIN, *plan.policies_under(rule, draft_len)]
        setting = _Setting(target, drafter, profile, plan, rule, temperature, draft_len or drafter.block_size)
        measured = setting.measure(names, progress)
        rows += [
            setting.row(name, measured, domain, chosen) for domain, chosen in plan.groups().items() for name in names
        ]
    return rows


@dataclass
class _Measured:
    """One policy's runs: seconds by prompt and repeat, and each prompt's completion."""

    seconds: list[list[float]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def per_token(self, i: int) -> list[float]:
        """Seconds per token of a prompt, by repeat."""
        return [s / len(self.completions[i].token_ids) for s in self.seconds[i]]


@dataclass(frozen=True)
class _Setting:
    """All policies of a plan under one rule, at one temperature and draft length."""

    target: Target
    drafter: Drafter
    profile: CostProfile
    plan: Plan
    rule: Rule
    temperature: float
    draft_len: int

    def params(self, i: int) -> SamplingParams:
        """How prompt ``i`` is sampled."""
        stop = self.target.config.eos_token_ids
        seed, most = self.plan.seed + i, self.plan.max_tokens
        return SamplingParams(temperature=self.temperature, seed=seed, max_tokens=most, stop_token_ids=stop)

    def decode(self, name: str, i: int, accepted: Sequence[int] = ()) -> tuple[Completion, float]:
        """Decode prompt ``i`` under the policy of that name, and say how many seconds it took."""
        tree = setup.tree_shape(name)
        policy = setup.make_policy(name, self.profile, accepted) if tree is None else None
        plain = policy is None and tree is None
        decoder = Decoder(
            self.target,
            None if plain else self.drafter,
            policy,
            self.rule,
            draft_len=None if plain else self.draft_len,
            tree=tree,
            max_batch=1,
            margins=setup.needs_margins(name),
        )
        start = time.perf_counter()
        [completion] = decoder.generate([self.plan.prompts[i]], self.params(i))
        return completion, time.perf_counter() - start

    def measure(self, names: list[str], progress: Callable[[str], None]) -> dict[str, _Measured]:
        """Run every policy on every prompt, as often as planned."""
        measured = {name: _Measured() for name in names}
        where = f"{self.rule}, T = {self.temperature:g}"
        for i in range(len(self.plan.prompts)):
            # A pass over everything, for the oracle; and the warm-up.
            full, _ = self.decode(f"fixed:{self.draft_len}", i)
            accepted = [r.accepted for r in full.rounds]
            progress(f"warm-up, {where}")
            for own in measured.values():
                own.seconds.append([])
            for repeat in range(self.plan.repeats):
                first = repeat % len(names)
                for name in names[first:] + names[:first]:
                    completion, seconds = self.decode(name, i, accepted)
                    measured[name].seconds[-1].append(seconds)
                    if repeat == 0:
                        measured[name].completions.append(completion)
                    progress(f"{name}, {where}")
        return measured

    def row(self, name: str, measured: dict[str, _Measured], domain: str, chosen: Sequence[int]) -> report.Row:
        """One policy's figures over the prompts in ``chosen``."""
        own, plain = measured[name], measured[report.PLAIN]
        completions = [own.completions[i] for i in chosen]
        rounds = [r for c in completions for r in c.rounds]
        tokens = sum(len(c.token_ids) for c in completions)
        speedup, interval = report.speedups([own.per_token(i) for i in chosen], [plain.per_token(i) for i in chosen])
        params = [self.params(i) for i in chosen]
        judged = self.target, [self.plan.prompts[i] for i in chosen], completions
        lossless: bool | None
        if self.rule == "coupled" or self.temperature == 0:
            baseline = [plain.completions[i] for i in chosen]
            lossless, near_ties = is_lossless_by_tokens(*judged, baseline, params)
        else:
            lossless, near_ties = is_lossless_by_law(*judged, params), 0
        repeats = range(self.plan.repeats)
        return report.Row(
            policy=name,
            rule=self.rule,
            temperature=self.temperature,
            draft_len=self.draft_len,
            domain=domain,
            tokens_per_s=statistics.median(tokens / sum(own.seconds[i][repeat] for i in chosen) for repeat in repeats),
            speedup=speedup,
            speedup_ci=interval,
            tau=mean_emitted(rounds),
            verified_per_round=sum(r.verified for r in rounds) / len(rounds) if rounds else 0.0,
            accept_by_position=report.acceptance_by_position(rounds)[: self.draft_len],
            lossless=lossless,
            prompts=len(chosen),
            tokens=tokens,
            near_ties=near_ties,
        )
