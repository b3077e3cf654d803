"""``python -m dspark calibrate``: temperatures that make the drafter's confidences mean what they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markdown import Markdown

from dspark.cli.setup import DrafterFolder, TargetFolder, check_rule, choose_prompts, console_of, draw, load_models
from dspark.decode import Decoder, SamplingParams
from dspark.models.cache import pages_for
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.models.tiny import Prompt
from dspark.ops.types import Rule
from dspark.policy.calibration import fit_sts, split_by_request
from dspark.policy.calibration_report import calibration_report, write_reliability_diagram
from dspark.policy.traces import Trace, TraceRecorder

app = typer.Typer()

_PAGE_SIZE = 16


@app.command()
def calibrate(
    trace: Annotated[Path | None, typer.Option(help="Recorded rounds (.npz); by default some are recorded.")] = None,
    domain: Annotated[str | None, typer.Option(help="Only this domain of the rounds.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the requests that the fit is judged by.")] = 0.5,
    by_domain: Annotated[bool, typer.Option(help="Temperatures for each domain, too.")] = False,
    bins: Annotated[int, typer.Option(help="Of the calibration error.", min=1)] = 10,
    prior: Annotated[float, typer.Option(help="How firmly temperatures are kept near 1.", min=0.0)] = 1.0,
    prompts: Annotated[int, typer.Option(help="To record: how many, taken evenly over the file.", min=2)] = 21,
    max_tokens: Annotated[int, typer.Option(help="To record: tokens per prompt.", min=2)] = 160,
    temperature: Annotated[float, typer.Option(help="To record: of sampling.", min=0.0)] = 1.0,
    rule: Annotated[str, typer.Option(help="To record: coupled, ratio, block or match.")] = "coupled",
    file: Annotated[Path | None, typer.Option(help="To record: text, or JSON lines; held-out text by default.")] = None,
    target: TargetFolder = None,
    drafter: DrafterFolder = None,
    seed: Annotated[int, typer.Option(help="Prompt i is sampled with seed + i; and of the split.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for temperatures, report and picture.")] = Path("runs/calibrate"),
) -> None:
    """Fit temperatures on some requests, and report on the others how well confidences fit before and after."""
    torch.set_num_threads(1)
    console = console_of(120)
    out.mkdir(parents=True, exist_ok=True)
    if trace is None:
        console.print("recording rounds, with every draft verified")
        pair, guesser, tokenizer = load_models(target, drafter)
        chosen = choose_prompts(file, prompts)
        tokens = [tokenizer.encode(p.text).ids for p in chosen]
        rounds = record(pair, guesser, chosen, tokens, temperature, max_tokens, check_rule(rule), seed)
        rounds.save(out / "trace.npz")
    elif target is not None or drafter is not None or file is not None:
        raise ValueError("--trace: was recorded before; leave out --target, --drafter and --file")
    else:
        rounds = Trace.load(trace)
    if domain is not None:
        rounds = rounds.select(domain)
    fitted, judged = split_by_request(rounds, held_out, seed)
    temperatures = fit_sts(fitted, bins=bins, prior=prior, by_domain=by_domain)
    report = calibration_report(judged, temperatures)
    temperatures.save(out / "temperatures.json")
    report.save(out / "report.json")
    text = report.markdown()
    (out / "report.md").write_text(text, encoding="utf-8")
    console.print(f"fitted on {len(fitted)} rounds of {fitted.num_requests} requests; on the others:")
    console.print(Markdown(text))
    draw(console, "reliability diagram", lambda path: write_reliability_diagram(path, report), out / "reliability.png")
    console.print(f"wrote {out}")


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    temperature: float = 1.0,
    max_tokens: int = 160,
    rule: Rule = "coupled",
    seed: int = 0,
) -> Trace:
    """Decode prompts with all drafts verified, and keep the rounds; the request's id is the prompt's number.

    Args:
        target, drafter: the pair.
        prompts: texts, whose domains the trace has.
        tokens: their token ids.
        temperature, max_tokens: of sampling; prompt i is sampled with ``seed + i``.
        rule: of acceptance.
        seed: of the first prompt.
    """
    recorder = TraceRecorder({i: p.domain for i, p in enumerate(prompts)})
    batch = min(8, len(tokens))
    longest = max(map(len, tokens)) + max_tokens + 2 * drafter.block_size
    decoder = Decoder(
        target,
        drafter,
        rule=rule,
        num_pages=batch * (1 + pages_for(longest, _PAGE_SIZE)),
        page_size=_PAGE_SIZE,
        max_batch=batch,
        recorder=recorder,
        margins=True,
    )
    params = [SamplingParams(temperature, seed=seed + i, max_tokens=max_tokens) for i in range(len(tokens))]
    decoder.generate(tokens, params)
    return recorder.trace()
