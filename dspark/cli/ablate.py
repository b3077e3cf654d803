"""``python -m dspark ablate``: policies against plain decoding, in one table."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.cli.ablation import Plan, run_ablation
from dspark.cli.report import table, write_json, write_picture
from dspark.cli.setup import POLICY_HELP, RULE_HELP, check_policy, check_rule, load_models, read_prompts
from dspark.measure import measure_cost
from dspark.models.tiny import held_out_prompts

app = typer.Typer()

_POLICIES = ["fixed:3", "fixed:7", "scheduled", "scheduled-lag2", "oracle"]
_RULES = ["coupled", "ratio"]
_TEMPERATURES = [0.0, 1.0]


@app.command()
def ablate(
    policy: Annotated[list[str], typer.Option(help=f"Repeatable: {POLICY_HELP}")] = _POLICIES,
    rule: Annotated[list[str], typer.Option(help=f"Repeatable: {RULE_HELP}.")] = _RULES,
    temperature: Annotated[list[float], typer.Option(help="Repeatable.", min=0.0)] = _TEMPERATURES,
    prompts: Annotated[int, typer.Option(help="How many prompts, taken evenly over the file.", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="Paired measurements of each prompt.", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Tokens to emit per prompt.", min=2)] = 80,
    seed: Annotated[int, typer.Option(help="Prompt i is sampled with seed + i.")] = 0,
    file: Annotated[Path | None, typer.Option(help="Prompts: text, or JSON lines; held-out text by default.")] = None,
    target: Annotated[Path | None, typer.Option(help="Hugging Face folder; the tiny pair by default.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="DeepSpec folder.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; more than one makes timings noisy.", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="JSON results; a picture goes beside them.")] = Path("runs/ablate.json"),
) -> None:
    """Compare policies, rules and temperatures with plain decoding on the same prompts."""
    torch.set_num_threads(threads)
    pair, guesser, tokenizer = load_models(target, drafter)
    for name in policy:
        check_policy(name, guesser.block_size)
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
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width, and the table would be folded to 80 columns
    if "block" in rule and "oracle" in policy:
        console.print("rule block without the oracle: it would bias the output")
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring what a round costs", total=plan.runs)
        profile = measure_cost(pair, guesser)
        rows = run_ablation(pair, guesser, plan, profile, lambda name: bar.update(task, advance=1, description=name))
    console.print(table(rows))
    write_json(out, rows)
    if find_spec("matplotlib") is None:
        console.print(f'wrote {out}; for a picture, too: pip install "dspark[plot]"')
        return
    picture = out.with_suffix(".png")
    write_picture(picture, rows)
    console.print(f"wrote {out} and {picture}")
