"""Policies compared at a range of loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from dspark.policy.protocol import VerifyPolicy
from dspark.policy.simulator.engine import Engine
from dspark.policy.simulator.replay import Replay
from dspark.policy.simulator.results import Result, summarize
from dspark.policy.simulator.run import simulate
from dspark.policy.simulator.workload import Workload
from dspark.policy.traces import Trace

PolicyMaker = Callable[[Engine], VerifyPolicy]
"""Makes a fresh policy for an engine, since a policy may learn."""


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
