"""``benchmarks.host``: every launch that it times goes through Triton's binder, and a commit compares with itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from benchmarks.host_launches import launches_stopped
from dspark.ops.launch import Kernel, recorded_launches

ROOT = Path(__file__).parent.parent.parent


def toy_kernel(x_ptr: Any, n: int, BLOCK: tl.constexpr) -> None:
    """Is never run."""


def run_host(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.host", "--json", "--rounds=3", "--calls=5", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_launch_is_counted_when_it_was_bound() -> None:
    kernel, x = JITFunction(toy_kernel), torch.zeros(4)
    with launches_stopped() as launches:
        assert launches.count("toy", lambda: [kernel[(1,)](x, n, BLOCK=n) for n in (4, 8, 8)]) == 3
        key = next(iter(kernel.device_caches[0][0]))
        assert "*fp32" in key
        assert "('constexpr', 4)" in key
    assert JITFunction._do_compile.__module__ == "triton.runtime.jit"


def test_what_is_not_bound_is_refused() -> None:
    kernel, x = JITFunction(toy_kernel), torch.zeros(4)
    with launches_stopped() as launches:
        compiled = kernel[(1,)](x, 4, BLOCK=4)
        with pytest.raises(RuntimeError, match=r"toy: expected all launches .* got 0 of 1"):
            launches.count("toy", lambda: compiled.run(1, 1, 1, 0, x, 4))
        with recorded_launches(), pytest.raises(RuntimeError, match="got 0 of 0"):
            launches.count("toy", lambda: Kernel(kernel, (1,), x.device, n=4, BLOCK=4)(x))


@pytest.mark.slow
def test_one_op() -> None:
    row, total = run_host("--ops=commit_kv")
    assert (row["op"], row["launches"], total["op"]) == ("commit_kv", 1, "sum")
    assert 0 < row["p5"] <= row["median"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with a commit, and this is no checkout of git")
def test_a_commit_compares_with_itself() -> None:
    worktrees = ["git", "-C", str(ROOT), "worktree", "list", "--porcelain"]
    before = set(subprocess.run(worktrees, capture_output=True, text=True, check=True).stdout.splitlines())
    rows = run_host("--against=HEAD", "--ops=append_kv,schedule_prefix")
    assert [row["op"] for row in rows] == ["schedule_prefix", "append_kv", "rope_append_kv", "sum"]
    *ops, total = rows
    for row in ops:
        assert min(row["before"], row["after"]) > 0
        assert row["p20"] <= row["ratio"] <= row["p80"]
    for side in ("before", "after"):
        assert total[side] == pytest.approx(sum(row[side] for row in ops))
    assert min(row["ratio"] for row in ops) <= total["ratio"] <= max(row["ratio"] for row in ops)
    after = subprocess.run(worktrees, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [line for line in after if line not in before and line.endswith("/checkout")]
