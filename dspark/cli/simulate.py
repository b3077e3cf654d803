"""``python -m dspark simulate``: what a policy does to throughput and latency of a service, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markdown import Markdown

from dspark.cli.setup import POLICY_HELP, check_policy, console_of, draw, make_policy, progress_bar
from dspark.policy import CostProfile, Gated, NoSpeculation, VerifyPolicy, simulator
from dspark.policy.oracle import KnownAcceptance
from dspark.policy.simulator.replay import Between
from dspark.policy.traces import Trace

app = typer.Typer()

_POLICIES = ["plain", "fixed:1", "fixed:3", "fixed:7", "scheduled", "gated:scheduled", "oracle-sound", "oracle"]
_CONCURRENCY = [1, 8, 32, 64, 128, 256]
_POLICY_HELP = (
    f"Repeatable: {POLICY_HELP} oracle verifies what will be accepted and no more; oracle-sound the first rejected "
    "draft as well, as the oracle of ablate does."
)


@app.command()
def simulate(
    trace: Annotated[Path | None, typer.Option(help="Recorded rounds (.npz); a synthetic trace by default.")] = None,
    domain: Annotated[str | None, typer.Option(help="Only this domain of the trace.")] = None,
    between: Annotated[str, typer.Option(help="Stand-in at positions without a row: nearest or tokens.")] = "nearest",
    miscalibration: Annotated[
        float, typer.Option(help="Of the synthetic trace: temperature of the confidences; below 1, over-confident.")
    ] = 1.0,
    policy: Annotated[list[str], typer.Option(help=_POLICY_HELP)] = _POLICIES,
    concurrency: Annotated[list[int], typer.Option(help="Repeatable: most requests in flight.", min=1)] = _CONCURRENCY,
    rate: Annotated[
        list[float] | None, typer.Option(help="Repeatable: Poisson arrivals per second, instead of a closed loop.")
    ] = None,
    arrivals: Annotated[Path | None, typer.Option(help="File of arrival times in seconds, one a line.")] = None,
    requests: Annotated[
        int, typer.Option(help="Requests of a run, and at least 4 times the concurrency.", min=1)
    ] = 256,
    prompt_tokens: Annotated[int, typer.Option(help="Mean.", min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(help="Mean.", min=1)] = 256,
    spread: Annotated[float, typer.Option(help="Of the lengths' logarithm; 0 is all alike.", min=0.0)] = 0.5,
    profile: Annotated[
        str, typer.Option(help=f"Cost: a profile's JSON file, or a modelled machine: {', '.join(simulator.MACHINES)}.")
    ] = "h200",
    plain_profile: Annotated[
        Path | None, typer.Option(help="Cost of steps without drafts, where the profile does not tell.")
    ] = None,
    pages: Annotated[int | None, typer.Option(help="Of the key/value cache; no limit by default.", min=1)] = None,
    page_size: Annotated[int, typer.Option(help="Tokens per page.", min=1)] = 16,
    prefill_chunk: Annotated[
        int, typer.Option(help="Prompt tokens per step; 0: prompts are processed elsewhere.", min=0)
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Of all draws.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for results and picture.")] = Path("runs/simulate"),
) -> None:
    """Serve the same requests under several policies and loads, and compare throughput and latency."""
    torch.set_num_threads(1)
    rows = simulator.synthetic_trace(temperature=miscalibration, seed=seed) if trace is None else Trace.load(trace)
    if trace is not None and miscalibration != 1:
        raise ValueError("--miscalibration: a recorded trace has its own confidences; leave it at 1")
    if domain is not None:
        rows = rows.select(domain)
    if between not in ("nearest", "tokens"):
        raise ValueError(f"--between: expected nearest or tokens, got {between!r}")
    stand_in: Between = "nearest" if between == "nearest" else "tokens"
    chosen, plain = _profiles(profile, plain_profile)
    engine = simulator.Engine(chosen, plain=plain, num_pages=pages, page_size=page_size, prefill_chunk=prefill_chunk)
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "spread": spread, "seed": seed}
    loads = _loads(concurrency, rate or [], arrivals, requests, lengths)
    makers = {name: policy_maker(name, rows.draft_len) for name in policy}

    console = console_of(160)
    results = []
    with progress_bar(console) as bar:
        task = bar.add_task("simulating", total=len(loads) * len(makers))
        for result in simulator.sweep(simulator.Replay(rows, seed, stand_in), makers, loads, engine):
            results.append(result)
            bar.update(task, advance=1, description=f"{result.policy}, {result.arrivals}, {result.concurrency}")
    out.mkdir(parents=True, exist_ok=True)
    text = simulator.markdown(results)
    (out / "results.md").write_text(text, encoding="utf-8")
    simulator.write_csv(out / "results.csv", results)
    settings = {
        "trace": "synthetic" if trace is None else str(trace),
        "domains": rows.domains,
        "miscalibration": miscalibration,
        "between": between,
        "profile": profile,
        "plain_profile": None if plain_profile is None else str(plain_profile),
        "modelled": engine.profile.source == "modelled",
        "pages": pages,
        "page_size": page_size,
        "prefill_chunk": prefill_chunk,
        **lengths,
    }
    simulator.write_json(out / "results.json", results, settings)
    console.print(Markdown(text))
    if engine.profile.source == "modelled":
        console.print(f"{profile}: a model of a machine, not a measurement")
    draw(console, "picture", lambda path: simulator.write_picture(path, results), out / "results.png")
    console.print(f"wrote {out}")


def _profiles(profile: str, plain: Path | None) -> tuple[CostProfile, CostProfile | None]:
    if profile not in simulator.MACHINES and not profile.endswith(".json"):
        raise ValueError(f"--profile: expected a .json file or one of {', '.join(simulator.MACHINES)}, got {profile!r}")
    chosen = simulator.MACHINES[profile] if profile in simulator.MACHINES else CostProfile.load(profile)
    return chosen, None if plain is None else CostProfile.load(plain)


def _loads(
    concurrency: list[int], rates: list[float], arrivals: Path | None, requests: int, lengths: dict[str, int | float]
) -> list[tuple[simulator.Workload, int]]:
    if rates and arrivals is not None:
        raise ValueError("--rate, --arrivals: give one of them, or neither for a closed loop")
    if arrivals is not None:
        try:
            times = [float(line) for line in arrivals.read_text(encoding="utf-8").split()]
        except ValueError as error:
            raise ValueError(f"{arrivals}: expected one time in seconds per line: {error}") from error
        return [(simulator.Workload.replay(times, **lengths), most) for most in concurrency]
    if rates:
        return [(simulator.Workload.poisson(requests, rate, **lengths), most) for most in concurrency for rate in rates]
    return [(simulator.Workload.closed(max(requests, 4 * most), **lengths), most) for most in concurrency]


def policy_maker(name: str, draft_len: int) -> simulator.PolicyMaker:
    """What makes the policy of that name for a simulation, whose oracles are told what will be accepted; checked."""
    if name == "plain":
        return lambda engine: NoSpeculation()
    if name in ("oracle", "oracle-sound"):
        sound = name == "oracle-sound"
        return lambda engine: Gated(KnownAcceptance(through_rejected=sound), engine.cost)
    check_policy(name, draft_len)
    inner = name.removeprefix("gated:")

    def make(engine: simulator.Engine) -> VerifyPolicy:
        policy = make_policy(inner, engine.profile)
        if policy is None:
            raise ValueError(f"policy {name!r}: not one that drafts")
        return policy if inner == name else Gated(policy, engine.cost)

    return make
