"""A serving simulator: what a policy does to throughput and latency, from recorded or synthetic rounds."""

from dspark.policy.oracle import KnownAcceptance
from dspark.policy.roofline import MACHINES
from dspark.policy.simulator.replay import Replay
from dspark.policy.simulator.results import (
    PolicyMaker,
    Result,
    markdown,
    summarize,
    sweep,
    write_csv,
    write_json,
    write_picture,
)
from dspark.policy.simulator.run import Engine, Run, simulate
from dspark.policy.simulator.synthetic import DOMAINS, Domain, synthetic_trace
from dspark.policy.simulator.workload import Workload

__all__ = [
    "DOMAINS",
    "MACHINES",
    "Domain",
    "Engine",
    "KnownAcceptance",
    "PolicyMaker",
    "Replay",
    "Result",
    "Run",
    "Workload",
    "markdown",
    "simulate",
    "summarize",
    "sweep",
    "synthetic_trace",
    "write_csv",
    "write_json",
    "write_picture",
]
