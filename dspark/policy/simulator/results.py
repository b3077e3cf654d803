"""Policies compared at a range of loads: runs in numbers, and these as a table, files and a picture."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark.policy.output import markdown_table, picture, write_records
from dspark.policy.protocol import VerifyPolicy
from dspark.policy.simulator.replay import Replay
from dspark.policy.simulator.run import Engine, Run, simulate
from dspark.policy.simulator.workload import Workload
from dspark.policy.traces import Trace

PolicyMaker = Callable[[Engine], VerifyPolicy]
"""Makes a fresh policy for an engine, since a policy may learn."""


@dataclass(frozen=True)
class Result:
    """One policy under one load, in steady state.

    Attributes:
        policy, arrivals: names.
        concurrency: most requests in flight that the engine takes.
        running: decoding requests, mean over rounds.
        requests: how many the figures by request come from.
        tokens_per_s: emitted by the service.
        user_tokens_per_s: emitted after the first token by a request while it runs, over all requests.
        tpot_p50, tpot_p90, tpot_p99: percentiles over requests of the seconds per output token after the first.
        ttft_p50, ttft_p90, ttft_p99: percentiles over requests of the seconds from arrival to first token.
        tau: tokens emitted per request and round.
        verified_per_round: drafts verified per request and round.
        waste: fraction of the verified drafts that were rejected (those behind a rejected one included); NaN when none
            was verified.
        drafted: fraction of requests' rounds in which drafts were made.
    """

    policy: str
    arrivals: str
    concurrency: int
    running: float
    requests: int
    tokens_per_s: float
    user_tokens_per_s: float
    tpot_p50: float
    tpot_p90: float
    tpot_p99: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tau: float
    verified_per_round: float
    waste: float
    drafted: float


def summarize(run: Run, policy: str, arrivals: str, concurrency: int, warmup: float = 0.1) -> Result:
    """The figures of a run's steady state.

    That is the time between two admissions: that of the request after the first ``warmup`` of all (at least
    ``concurrency``, so that the first batch, which starts in step, is over; at most half of all) and that of the last
    request. What is by step is over the steps that began between them; what is by request, over the requests admitted
    between them. When the two are at the same time, all steps count.

    Args:
        run: what :func:`~dspark.policy.simulator.simulate` gave.
        policy, arrivals, concurrency: names for the result.
        warmup: fraction of the requests to leave out.

    Raises:
        ValueError: ``warmup`` is not from 0 up to but excluding 1.
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup: expected 0 <= warmup < 1, got {warmup}")
    count = len(run.admitted)
    skipped = min(max(concurrency, math.ceil(warmup * count)), count // 2)
    begin, end = run.admitted[skipped], run.admitted[-1]
    steps = (run.start >= begin) & (run.start < end)
    if not steps.any():
        begin, end = run.admitted[0], run.finish.max()
        steps = np.ones_like(steps)
    chosen = np.arange(count) >= skipped
    several = chosen & (run.output > 1)
    decoding = (run.finish - run.first)[several]
    tpot = decoding / (run.output[several] - 1)
    ttft = (run.first - run.arrival)[chosen]
    rounds, verified = _total(run.requests[steps]), _total(run.verified[steps])
    accepted = _total(run.accepted[steps])
    return Result(
        policy=policy,
        arrivals=arrivals,
        concurrency=concurrency,
        running=_ratio(rounds, float(np.count_nonzero(run.requests[steps]))),
        requests=int(chosen.sum()),
        tokens_per_s=_ratio(_total(run.emitted[steps]), float(end - begin)),
        user_tokens_per_s=_ratio(_total(run.output[several] - 1), float(decoding.sum())),
        **{f"tpot_p{p}": _percentile(tpot, p) for p in (50, 90, 99)},
        **{f"ttft_p{p}": _percentile(ttft, p) for p in (50, 90, 99)},
        tau=_ratio(rounds + accepted, rounds),
        verified_per_round=_ratio(verified, rounds),
        waste=_ratio(verified - accepted, verified),
        drafted=_ratio(_total(run.drafted[steps]), rounds),
    )


def sweep(
    trace: Trace | Replay,
    policies: Mapping[str, PolicyMaker],
    loads: Sequence[tuple[Workload, int]],
    engine: Engine,
    *,
    seed: int = 0,
) -> Iterator[Result]:
    """Simulate each policy under each load, all on the same text.

    Args:
        trace: to replay.
        policies: name -> what makes the policy.
        loads: workloads, each with the most requests in flight that the engine then takes.
        engine: machine; its ``max_batch`` is replaced by that of the load.
        seed: of the order of the trace's requests.

    Yields:
        A result for each load and policy, when it is known.
    """
    replay = trace if isinstance(trace, Replay) else Replay(trace, seed)
    for workload, concurrency in loads:
        machine = replace(engine, max_batch=concurrency)
        for name, make in policies.items():
            run = simulate(replay, make(machine), workload, machine)
            yield summarize(run, name, workload.name, concurrency)


def _total(array: Any) -> float:
    return float(array.sum())


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def _percentile(values: Any, percent: int) -> float:
    return float(np.percentile(values, percent)) if values.size else float("nan")


_COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "policy": ("policy", 1, ""),
    "arrivals": ("arrivals", 1, ""),
    "concurrency": ("concurrency", 1, "d"),
    "running": ("running", 1, ".1f"),
    "tokens_per_s": ("tokens/s", 1, ".0f"),
    "user_tokens_per_s": ("per user", 1, ".1f"),
    "tpot_p50": ("TPOT p50, ms", 1e3, ".2f"),
    "tpot_p90": ("p90", 1e3, ".2f"),
    "tpot_p99": ("p99", 1e3, ".2f"),
    "ttft_p50": ("TTFT p50, ms", 1e3, ".0f"),
    "ttft_p99": ("p99", 1e3, ".0f"),
    "tau": ("τ", 1, ".2f"),
    "verified_per_round": ("verified", 1, ".2f"),
    "waste": ("wasted, %", 1e2, ".0f"),
    "drafted": ("drafted, %", 1e2, ".0f"),
}


def markdown(results: Sequence[Result]) -> str:
    """Results as a Markdown table, in their order."""
    rule = "|" + "|".join("---:" if form else "---" for _, _, form in _COLUMNS.values()) + "|"
    rows = [[_cell(getattr(r, name), scale, form) for name, (_, scale, form) in _COLUMNS.items()] for r in results]
    return markdown_table([heading for heading, _, _ in _COLUMNS.values()], rows, rule)


def _cell(value: Any, scale: float, form: str) -> str:
    if not form:
        return str(value)
    if value != value:
        return "–"
    return format(value if form == "d" else value * scale, form)


def write_csv(path: str | Path, results: Sequence[Result]) -> None:
    """Write one line per result, under the names of :class:`Result`'s fields."""
    write_records(path, [f.name for f in dataclasses.fields(Result)], map(dataclasses.asdict, results))


def write_json(path: str | Path, results: Sequence[Result], settings: Mapping[str, Any]) -> None:
    """Write ``{"settings": ..., "results": [...]}``; NaN is null."""
    rows = [
        {name: None if value != value else value for name, value in dataclasses.asdict(result).items()}
        for result in results
    ]
    content = json.dumps({"settings": dict(settings), "results": rows}, indent=1, allow_nan=False)
    Path(path).write_text(content + "\n", encoding="utf-8")


def write_picture(path: str | Path, results: Sequence[Result]) -> None:
    """Draw throughput against speed per user, and what is verified and wasted against the load, a line per policy.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    with picture(path, 3, (16, 4.5)) as (speed, budget, waste):
        for policy in dict.fromkeys(result.policy for result in results):
            own = [result for result in results if result.policy == policy]
            running = [result.running for result in own]
            per_user, service = [r.user_tokens_per_s for r in own], [r.tokens_per_s for r in own]
            speed.plot(per_user, service, "o-", label=policy, markersize=3)
            budget.plot(running, [r.verified_per_round for r in own], "o-", label=policy, markersize=3)
            waste.plot(running, [100 * r.waste for r in own], "o-", label=policy, markersize=3)
        speed.set(xlabel="tokens/s per user", ylabel="tokens/s of the service", yscale="log")
        budget.set(xlabel="running requests", ylabel="drafts verified per request and round")
        waste.set(xlabel="running requests", ylabel="verified drafts that were rejected, %")
        speed.legend(fontsize=8)
        for axes in (budget, waste):
            axes.set_xscale("log", base=2)
        for axes in (speed, budget, waste):
            axes.grid(alpha=0.3)
