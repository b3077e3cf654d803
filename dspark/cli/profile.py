"""``python -m dspark profile``: what a round costs on this machine, as JSON for the scheduled policies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from dspark.cli.setup import DrafterFolder, TargetFolder, load_models
from dspark.measure import measure_cost

app = typer.Typer()


@app.command()
def profile(
    target: TargetFolder = None,
    drafter: DrafterFolder = None,
    max_rows: Annotated[int, typer.Option(help="Most rows of a verification.", min=1)] = 64,
    max_requests: Annotated[int, typer.Option(help="Most requests drafted for at once.", min=1)] = 8,
    context_len: Annotated[int | None, typer.Option(help="Tokens behind the rows; 256 where they fit.", min=0)] = None,
    repeats: Annotated[int, typer.Option(help="Timings of each size; the median counts.", min=1)] = 9,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("runs/profile.json"),
) -> None:
    """Measure the seconds of verification by rows and of drafting by requests."""
    torch.set_num_threads(threads)
    pair, guesser, _ = load_models(target, drafter)
    found = measure_cost(
        pair, guesser, max_rows=max_rows, max_requests=max_requests, context_len=context_len, repeats=repeats
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    found.save(out)
    lines = [f"{n:>6} rows      {1e3 * s:8.2f} ms" for n, s in zip(found.rows, found.seconds, strict=True)]
    drafts = zip(found.draft_requests, found.draft_seconds, strict=True)
    lines += [f"{n:>6} drafts for {1e3 * s:8.2f} ms" for n, s in drafts]
    sys.stdout.write("\n".join([*lines, f"wrote {out}"]) + "\n")
