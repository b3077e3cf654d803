"""``pytest --benchmark``: benchmarks run when they are asked for, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run_pytest(*arguments: str, cwd: Path = ROOT) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def collected() -> str:
    return run_pytest("--benchmark", "--collect-only", "-q")


def test_the_option_collects_all_benchmarks_and_nothing_else(collected: str) -> None:
    items = [line for line in collected.splitlines() if "::" in line]
    assert items
    assert all(line.startswith("benchmarks/") for line in items)
    files = {line.partition("::")[0] for line in items}
    assert files == {path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").glob("bench_*.py")}


def test_it_prints_the_table_and_passes_options_on(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    quick = ("--benchmark-min-rounds=2", "--benchmark-max-time=0.0001", f"--benchmark-json={report}")
    out = run_pytest("--benchmark", *quick, "-k", "schedule_prefix and early_stop", "-q")
    assert "Median" in out
    assert "Rounds" in out
    results = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    assert results
    for result in results:
        assert {"torch", "commit", "threads"} <= result["extra_info"].keys()


def test_a_path_narrows_it() -> None:
    out = run_pytest("--benchmark", "benchmarks/bench_schedule.py", "--collect-only", "-q")
    items = [line for line in out.splitlines() if "::" in line]
    assert items
    assert all(line.startswith("benchmarks/bench_schedule.py") for line in items)


def test_runs_without_it_leave_benchmarks_out() -> None:
    out = run_pytest(".", "--ignore=tests", "--ignore=dspark", "--ignore=runs", "--collect-only", "-q")
    assert "benchmarks/" not in out
    assert "bench_" not in out


def test_a_benchmark_that_is_named_runs_without_it() -> None:
    out = run_pytest("benchmarks/bench_schedule.py", "--collect-only", "-q")
    assert "bench_schedule.py::" in out
