"""``python -m dspark train``: the tiny pair from nothing but this machine's Python standard library."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from dspark.cli.evaluate import evaluate
from dspark.models.loading import load_drafter, load_target
from dspark.models.tiny import load_tokenizer
from dspark.models.training import corpus
from dspark.models.training.corpus import PROMPT_TOKENS, documents, special_id, token_stream
from dspark.models.training.drafter import (
    TINY_DRAFTER_SHAPE,
    DrafterTraining,
    Rollouts,
    new_drafter,
    train_drafter,
    trainable,
)
from dspark.models.training.export import save_drafter, save_target
from dspark.models.training.loop import StepLog, Training, initialise
from dspark.models.training.target import TINY_TARGET_SHAPE, TargetTraining, roll_out, train_target
from dspark.models.transformer import CausalLM

app = typer.Typer(
    help="Train the tiny pair: target, rollouts, drafter, report, in this order. Trainings resume where they stopped.",
    no_args_is_help=True,
)

ROLLOUT_BATCH = 128

Out = Annotated[Path, typer.Option(help="Folder for checkpoints, logs and the finished models.")]
Steps = Annotated[int, typer.Option(help="Optimiser steps.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights and of the data's order.")]


@app.command()
def target(out: Out = Path("runs/tiny"), steps: Steps = TargetTraining.steps, seed: Seed = TargetTraining.seed) -> None:
    """Train a tokenizer and the target on the standard library's training files."""
    docs = [d for d in documents() if not d.held_out]
    tokenizer_file = out / "target" / "tokenizer.json"
    if not tokenizer_file.exists():
        tokenizer_file.parent.mkdir(parents=True, exist_ok=True)
        corpus.train_tokenizer((d.text for d in docs), TINY_TARGET_SHAPE.vocab_size).save(str(tokenizer_file))
    tokenizer = load_tokenizer(out / "target")
    network = CausalLM(
        dataclasses.replace(TINY_TARGET_SHAPE, eos_token_ids=(special_id(tokenizer, corpus.END_OF_TEXT),))
    )
    initialise(network, seed)
    training = TargetTraining(steps=steps, seed=seed)
    stream = token_stream(tokenizer, docs, seed)
    _run(train_target(network, stream, out / "target.pt", training), training, out, "target")
    save_target(network, out / "target")


@app.command()
def rollouts(
    out: Out = Path("runs/tiny"),
    count: Annotated[int, typer.Option(help="Texts to write.", min=1)] = 6144,
    new_tokens: Annotated[int, typer.Option(help="Tokens in each, after its prompt.", min=1)] = 160,
    seed: Seed = DrafterTraining.seed,
) -> None:
    """Let the target continue training texts, which its drafter learns from: a third greedily, the others at T = 1."""
    network = load_target(out / "target").network
    stream = token_stream(load_tokenizer(out / "target"), [d for d in documents() if not d.held_out], seed)
    prompts = torch.from_numpy(corpus.crops(stream, count, PROMPT_TOKENS, (seed,))).long()
    temperature = (torch.arange(count) % 3 > 0).float()
    texts: list[Tensor] = []
    with Progress() as progress:
        task = progress.add_task("rollouts", total=count)
        for start in range(0, count, ROLLOUT_BATCH):
            part = slice(start, start + ROLLOUT_BATCH)
            written = roll_out(network, prompts[part], temperature[part], new_tokens, seed + start)
            texts.append(torch.cat([prompts[part], torch.stack(list(written), 1)], 1))
            progress.update(task, advance=len(texts[-1]))
    result = Rollouts(torch.cat(texts), PROMPT_TOKENS, temperature)
    torch.save(dataclasses.asdict(result), out / "rollouts.pt")


@app.command()
def drafter(
    out: Out = Path("runs/tiny"),
    steps: Steps = DrafterTraining.steps,
    rate: Annotated[float, typer.Option(help="Highest learning rate.", min=0.0)] = DrafterTraining.peak_rate,
    coupled_weight: Annotated[
        float,
        typer.Option(help="Weight of the chance that rule coupled rejects, as a loss beside the paper's.", min=0.0),
    ] = DrafterTraining.coupled_weight,
    seed: Seed = DrafterTraining.seed,
    start: Annotated[
        Path | None, typer.Option("--from", help="Folder of a drafter to go on from; by default it is new.")
    ] = None,
) -> None:
    """Train the DSpark drafter for the target in OUT/target on its rollouts, and pick the held-out prompts."""
    model = load_target(out / "target")
    frozen = model.network
    tokenizer = load_tokenizer(out / "target")
    if not (out / "rollouts.pt").exists():
        raise FileNotFoundError(f"{out / 'rollouts.pt'}: run 'train rollouts' first")
    written = Rollouts(**torch.load(out / "rollouts.pt"))
    if start is None:
        config = dataclasses.replace(TINY_DRAFTER_SHAPE, mask_token_id=special_id(tokenizer, corpus.MASK))
        network = new_drafter(config, frozen, seed)
    else:
        network = trainable(load_drafter(start, model).network)
    training = DrafterTraining(steps=steps, peak_rate=rate, coupled_weight=coupled_weight, seed=seed)
    _run(train_drafter(network, frozen, written, out / "drafter.pt", training), training, out, "drafter")
    save_drafter(network, out / "drafter")
    corpus.write_prompts(out / "prompts.jsonl", corpus.openings(documents(), tokenizer, per_domain=12))


def _run(logs: Iterable[StepLog], training: Training, out: Path, name: str) -> None:
    """Run a training to its end behind a progress bar, appending every tenth step's log to OUT/NAME.jsonl."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns) as progress, (out / f"{name}.jsonl").open("a") as file:
        task = progress.add_task(name, total=training.steps)
        for log in logs:
            progress.update(task, completed=log.step + 1, description=f"{name}: loss {log.loss:.3f}")
            if log.step % 10 == 0:
                file.write(json.dumps(dataclasses.asdict(log)) + "\n")
                file.flush()
    typer.echo(f"{name}: done after {training.steps} steps, in {out / name}")


@app.command()
def report(
    out: Out = Path("runs/tiny"),
    prompts: Annotated[int, typer.Option(help="Held-out texts to continue, of each domain.", min=1)] = 48,
) -> None:
    """Measure the pair in OUT on held-out files, and write the figures of its model card to OUT/evaluation.json."""
    model = load_target(out / "target")
    guesser = load_drafter(out / "drafter", model)
    held_out = [d for d in documents() if d.held_out]
    result = evaluate(model, guesser, load_tokenizer(out / "target"), held_out, prompts)
    text = json.dumps(result, indent=1)
    (out / "evaluation.json").write_text(text + "\n")
    typer.echo(text)
