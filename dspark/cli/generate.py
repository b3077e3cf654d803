"""``python -m dspark generate``: continue a prompt, streaming."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli.setup import (
    RULE_HELP,
    DrafterFolder,
    ProfileFile,
    TargetFolder,
    check_policy,
    check_rule,
    load_models,
    make_policy,
    needs_margins,
    needs_profile,
    read_prompts,
)
from dspark.decode import Decoder, SamplingParams, TreeShape, mean_emitted
from dspark.measure import measure_cost
from dspark.models.tiny import Prompt
from dspark.policy.cost import CostProfile
from dspark.policy.traces import Trace, TraceRecorder

app = typer.Typer()


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read prompts from a text file, or one per line of a .jsonl.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="plain, fixed:K, scheduled (the default) or scheduled-lag2.")
    ] = None,
    rule: Annotated[str, typer.Option(help=f"Acceptance rule: {RULE_HELP}.")] = "coupled",
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Makes tokens of prompt and output less likely; 1 is off.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="The same for tokens of the output; 0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, by how often they came; 0 is off.")] = 0.0,
    min_new_tokens: Annotated[int, typer.Option(help="No end token before so many tokens.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to emit.", min=1)] = 128,
    draft_len: Annotated[
        int | None, typer.Option(help="Drafts per round; the drafter's block size by default.")
    ] = None,
    tree: Annotated[
        int | None, typer.Option(help="Draft trees of so many nodes instead of chains, all of which are verified.")
    ] = None,
    branching: Annotated[int, typer.Option(help="Most children of a node of a tree.")] = 4,
    profile: ProfileFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Record rounds to this .npz, for simulate and calibrate; verifies all drafts by default."),
    ] = None,
    target: TargetFolder = None,
    drafter: DrafterFolder = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt instead of text.")
    ] = False,
) -> None:
    """Continue a prompt with speculative decoding. The text is the target's own, whatever the drafter and policy."""
    if (prompt is None) == (file is None):
        raise ValueError("prompt, --file: give exactly one of them")
    if policy is not None and tree is not None:
        raise ValueError("--policy, --tree: give one of them; all nodes of a tree are verified")
    shape = None if tree is None else TreeShape(tree, branching)
    prompts = [Prompt("text", "", prompt)] if prompt is not None else read_prompts(file or Path())
    pair, guesser, tokenizer = load_models(target, drafter)
    most = guesser.block_size if draft_len is None else draft_len
    if policy is None:
        policy = f"tree:{tree}:{branching}" if tree is not None else "scheduled" if trace is None else f"fixed:{most}"
    if trace is not None and policy == "plain":
        raise ValueError("--trace: plain decoding has no rounds with drafts to record")
    check_policy(policy, most)
    if profile is not None and not needs_profile(policy):
        raise ValueError(f"--profile: policy {policy} weighs no costs")
    cost = None
    if needs_profile(policy):
        cost = measure_cost(pair, guesser) if profile is None else CostProfile.load(profile)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=pair.config.eos_token_ids,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_new_tokens=min_new_tokens,
    )
    traces = []
    plain = policy == "plain"
    for source in prompts:
        text = source.text
        recorder = None if trace is None else TraceRecorder(source.domain)
        decoder = Decoder(
            pair,
            None if plain else guesser,
            None if shape is not None else make_policy(policy, cost),
            check_rule(rule),
            draft_len=None if plain else draft_len,
            tree=shape,
            recorder=recorder,
            margins=recorder is not None or needs_margins(policy),
        )
        start = time.perf_counter()
        completion = decoder.add_request(tokenizer.encode(text).ids, params)
        shown = 0
        for _ in decoder.stream():
            if json_output:
                continue
            so_far = tokenizer.decode(completion.token_ids)
            if completion.finish_reason is None:
                so_far = so_far.rstrip("\ufffd")  # the rest of a character may still come
            sys.stdout.write(so_far[shown:])
            sys.stdout.flush()
            shown = len(so_far)
        seconds = time.perf_counter() - start
        rounds = completion.rounds
        tau = mean_emitted(rounds)
        if json_output:
            row = dataclasses.asdict(completion) | {
                "prompt": text,
                "text": tokenizer.decode(completion.token_ids),
                "policy": policy,
                "rule": rule,
                "tau": tau,
                "seconds": seconds,
            }
            sys.stdout.write(json.dumps(row) + "\n")
        else:
            sys.stdout.write("\n")
            count = len(completion.token_ids)
            summary = f"{count} tokens in {len(rounds)} rounds, τ = {tau:.2f}, {count / seconds:.0f} tokens/s"
            typer.echo(f"[{summary}, finish: {completion.finish_reason}]", err=True)
        if recorder is not None:
            traces.append(recorder.trace())
    if trace is not None:
        Trace.concat(traces).save(trace)
