"""What every benchmark shares: one thread, fixed seeds, and the columns that say where a figure comes from.

Run with ``pytest --benchmark`` or ``make bench``. On a CPU they measure the host: what a call costs before a kernel
runs, and what the references take at shapes where there is next to nothing to compute. None of it tells how fast an op
is on a real model. Compare medians; means follow the machine's load. With a GPU there are timings of kernels too.
``benchmarks.host`` measures calls with Triton's binder, and compares two commits.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # so that the launch path may be walked; no kernel runs

from benchmarks.setup import make_sampling
from dspark.ops import Sampling


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


COMMON = {
    "commit": _commit(),
    "python": platform.python_version(),
    "torch": torch.__version__,
    "triton": _version("triton"),
    "threads": 1,
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
}


@pytest.fixture(autouse=True)
def settled(benchmark: Any) -> Iterator[None]:
    """One thread and one seed; says of each row what it was measured on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    benchmark.extra_info |= COMMON
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 8], ids="R={}".format)
def requests(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(params=[0.0, 1.0], ids="T={}".format)
def sampling(request: pytest.FixtureRequest, requests: int) -> Sampling:
    return make_sampling(requests, request.param)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The columns that pytest-benchmark's table lacks, of the rows that have a device time."""
    session = getattr(config, "_benchmarksession", None)
    rows = [b for b in getattr(session, "benchmarks", []) if "percent_of_ceiling" in b.extra_info]
    if not rows:
        return
    terminalreporter.section(
        "device time per call, from graphs of many; the bytes it must move, per cent of a copy's speed"
    )
    for row in rows:
        info = row.extra_info
        terminalreporter.write_line(
            f"{row.name:<60} {info['median_us']:>9.1f} us (p20 {info['p20_us']:.1f}, p80 {info['p80_us']:.1f})  "
            f"{info['lower_bound'] / 1e6:>9.2f} MB  {info['gb_per_s']:>7.0f} GB/s  {info['percent_of_ceiling']:>5.1f} %"
        )
