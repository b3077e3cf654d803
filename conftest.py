"""``pytest --benchmark``: run ``benchmarks/``, and leave it out of every other run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--benchmark",
        action="store_true",
        help="Run the benchmarks (all of benchmarks/, or the paths that are named) and print their table.",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--benchmark"):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(BENCHMARKS)]
    config.option.benchmark_enable = True
    if config.option.benchmark_columns is None:
        config.option.benchmark_columns = ["min", "median", "iqr", "rounds"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Benchmarks are collected when they are asked for, by the option or by name."""
    if BENCHMARKS not in (collection_path, *collection_path.parents) or config.getoption("--benchmark"):
        return None
    named = [Path(os.path.abspath(config.invocation_params.dir / arg.partition("::")[0])) for arg in config.args]
    return None if any(BENCHMARKS in (path, *path.parents) for path in named) else True
