"""A serving simulator: what a policy does to throughput and latency, from recorded or synthetic rounds."""

from dspark.policy.simulator.engine import Engine
from dspark.policy.simulator.known import KnownAcceptance
from dspark.policy.simulator.machine import MACHINES
from dspark.policy.simulator.plot import write_picture
from dspark.policy.simulator.replay import Replay
from dspark.policy.simulator.results import Result, markdown, summarize, write_csv, write_json
from dspark.policy.simulator.run import Run, simulate
from dspark.policy.simulator.sweep import PolicyMaker, sweep
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
