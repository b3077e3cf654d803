"""``python -m dspark calibrate``: temperatures that make the drafter's confidences mean what they say."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from dspark.cli.setup import check_rule, load_models, read_prompts
from dspark.decode import Decoder, SamplingParams
from dspark.models.cache import pages_for
from dspark.models.tiny import held_out_prompts
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
    target: Annotated[Path | None, typer.Option(help="Hugging Face folder; the tiny pair by default.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="DeepSpec folder.")] = None,
    seed: Annotated[int, typer.Option(help="Prompt i is sampled with seed + i; and of the split.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for temperatures, report and picture.")] = Path("runs/calibrate"),
) -> None:
    """Fit temperatures on some requests, and report on the others how well confidences fit before and after."""
    torch.set_num_threads(1)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    out.mkdir(parents=True, exist_ok=True)
    if trace is None:
        console.print("recording rounds, with every draft verified")
        rounds = _record(target, drafter, file, prompts, max_tokens, temperature, check_rule(rule), seed)
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
    if find_spec("matplotlib") is None:
        console.print(f'wrote {out}; for a reliability diagram, too: pip install "dspark[plot]"', markup=False)
        return
    write_reliability_diagram(out / "reliability.png", report)
    console.print(f"wrote {out}")


def _record(
    target: Path | None,
    drafter: Path | None,
    file: Path | None,
    prompts: int,
    max_tokens: int,
    temperature: float,
    rule: Rule,
    seed: int,
) -> Trace:
    """Decode prompts with all drafts verified, and keep the rounds; the request's id is the prompt's number."""
    pair, guesser, tokenizer = load_models(target, drafter)
    texts = held_out_prompts() if file is None else read_prompts(file)
    chosen = texts[:: max(1, len(texts) // prompts)][:prompts]
    ids = [tokenizer.encode(p.text).ids for p in chosen]
    recorder = TraceRecorder({i: p.domain for i, p in enumerate(chosen)})
    batch = min(8, len(ids))
    longest = max(map(len, ids)) + max_tokens + 2 * guesser.block_size
    decoder = Decoder(
        pair,
        guesser,
        rule=rule,
        num_pages=batch * (1 + pages_for(longest, _PAGE_SIZE)),
        page_size=_PAGE_SIZE,
        max_batch=batch,
        recorder=recorder,
        margins=True,
    )
    decoder.generate(
        ids,
        [SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens) for i in range(len(ids))],
    )
    return recorder.trace()
