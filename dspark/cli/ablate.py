"""``python -m dspark ablate``: policies against plain decoding, in one table."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.cli.ablation import Plan, run_ablation
from dspark.cli.report import comparison, read_rows, table, write_picture, write_results
from dspark.cli.setup import POLICY_HELP, RULE_HELP, check_policy, check_rule, load_models, read_prompts
from dspark.measure import measure_cost
from dspark.models.tiny import held_out_prompts
from dspark.policy import CostProfile

app = typer.Typer()

_POLICIES = ["fixed:3", "fixed:7", "tree:7", "scheduled", "oracle"]
_RULES = ["coupled", "ratio"]
_TEMPERATURES = [0.0, 1.0]


@app.command()
def ablate(
    policy: Annotated[list[str], typer.Option(help=f"Repeatable: {POLICY_HELP} Or tree:NODES.")] = _POLICIES,
    rule: Annotated[list[str], typer.Option(help=f"Repeatable: {RULE_HELP}.")] = _RULES,
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
    target: Annotated[Path | None, typer.Option(help="Hugging Face folder; the tiny pair by default.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="DeepSpec folder.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Cost profile (JSON of the command profile); measured at the start by default.")
    ] = None,
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
        sys.stdout.write(comparison(read_rows(compare[0]), read_rows(compare[1])))
        return
    torch.set_num_threads(threads)
    pair, guesser, tokenizer = load_models(target, drafter)
    for name in policy:
        check_policy(name, guesser.block_size)
    for length in draft_len or ():
        if not 1 <= length <= guesser.block_size:
            raise ValueError(f"--draft-len: expected 1 to the drafter's block size {guesser.block_size}, got {length}")
    texts = held_out_prompts() if file is None else read_prompts(file)
    chosen = texts[:: max(1, len(texts) // prompts)][:prompts]
    plan = Plan(
        prompts=[tokenizer.encode(p.text).ids for p in chosen],
        policies=[name for name in policy if name != "plain"],
        rules=[check_rule(r) for r in rule],
        temperatures=temperature,
        repeats=repeats,
        max_tokens=max_tokens,
        seed=seed,
        draft_lens=draft_len or [None],
        domains=[p.domain for p in chosen] if by_domain else [],
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width, and the table would be folded to 80 columns
    for each in plan.rules:
        left_out = [name for name in plan.policies if name not in plan.policies_under(each)]
        if left_out:
            console.print(f"rule {each}: without {', '.join(left_out)}, which it does not go with")
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring what a round costs", total=plan.runs)
        cost = measure_cost(pair, guesser) if profile is None else CostProfile.load(profile)
        rows = run_ablation(pair, guesser, plan, cost, lambda name: bar.update(task, advance=1, description=name))
    console.print(table(rows))
    written = write_results(out, rows)
    if find_spec("matplotlib") is None:
        console.print('for a picture, too: pip install "dspark[plot]"', markup=False)
    else:
        written.append(out.with_suffix(".png"))
        write_picture(written[-1], rows)
    console.print(f"wrote {', '.join(map(str, written))}")
