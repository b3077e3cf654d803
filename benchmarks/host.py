"""What calling an op costs the host, Triton's binder included, with no GPU; two commits can be compared.

``python -m benchmarks.host`` prints a table of the working tree, ``--against COMMIT`` (``make bench BASE=COMMIT``) one
that compares it with a commit, in about a minute.

A call runs as it would on a GPU, up to the launch: the op's checks, its allocations, and Triton's ``JITFunction.run``
with the binder, the key, the look-up of the compiled kernel and the grid. What Triton's launcher and the CUDA driver
do after that is left out. The tensors are on the CPU: memory is taken from its allocator, and torch's own operators
compute.

Two commits are compared by two processes, one for each, which measure in turn: one op, some calls here and as many
there, and again. Other programs on the machine slow both alike, so read the ratios: the median of those of the rounds,
and beside it their 20th and 80th percentiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

ROOT = Path(__file__).parent.parent
ROUNDS, CALLS = 40, 60
SUM = "sum"


class Timing(TypedDict):
    """Microseconds per call."""

    median: float
    p5: float


class Comparison(TypedDict):
    """Microseconds per call in a good round (the 20th percentile of medians), and after / before in the rounds."""

    op: str
    before: float
    after: float
    ratio: float
    p20: float
    p80: float


def make_calls() -> dict[str, Callable[[], Any]]:
    """The calls of this checkout, of kernels that are compiled, on tensors of the CPU."""
    import torch
    from triton import knobs

    knobs.runtime.interpret = False  # what decorates a kernel asks this,
    os.environ["TRITON_INTERPRET"] = "1"  # and an op that is told to run its kernel on a CPU this
    from benchmarks.host_calls import make_calls as build

    torch.set_num_threads(1)
    return build()


def measure(call: Callable[[], Any], calls: int) -> Timing:
    """Time calls one by one, in one thread, without collections of garbage."""
    for _ in range(min(calls, 10)):
        call()
    clock, times = time.perf_counter_ns, []
    gc.collect()
    gc.disable()
    try:
        for _ in range(calls):
            start = clock()
            call()
            times.append(clock() - start)
    finally:
        gc.enable()
    return Timing(median=statistics.median(times) / 1000, p5=_percentile(times, 5) / 1000)


def serve(requests: Iterable[str]) -> None:
    """Answer lines ``{"op": ..., "calls": ...}`` with a :class:`Timing` each; say first what can be asked for."""
    from benchmarks.host_launches import launches_stopped

    calls = make_calls()
    with launches_stopped() as launches:
        counted = {op: launches.count(op, call) for op, call in calls.items()}
        print(json.dumps({"root": str(ROOT), "launches": counted}), flush=True)
        for line in requests:
            request = json.loads(line)
            print(json.dumps(measure(calls[request["op"]], request["calls"])), flush=True)


class Side:
    """The process that measures one checkout.

    Attributes:
        launches: of one call of each op.
    """

    def __init__(self, root: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "benchmarks.host", "--serve"]
        self._root = root
        self._process = subprocess.Popen(
            command, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self) -> None:
        """Wait until it is ready.

        Raises:
            RuntimeError: it cannot measure, or measures another checkout.
        """
        hello = self._answer()
        if Path(hello["root"]) != self._root:
            raise RuntimeError(f"expected to measure {self._root}, got {hello['root']}")
        self.launches: dict[str, int] = hello["launches"]

    def measure(self, op: str, calls: int) -> Timing:
        """See :func:`measure`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, "calls": calls}) + "\n")
        self._process.stdin.flush()
        answer: Timing = self._answer()
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"benchmarks.host of {self._root} ended with {self._process.wait()}; it says why above")
        return json.loads(line)


@contextmanager
def sides(*roots: Path) -> Iterator[list[Side]]:
    """A process for each checkout, all of them ready."""
    started = [Side(root.resolve()) for root in roots]
    try:
        for side in started:
            side.start()
        yield started
    finally:
        for side in started:
            side.close()


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A folder that holds a commit, within the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def compare(before: Side, after: Side, ops: Sequence[str], rounds: int, calls: int) -> list[Comparison]:
    """Measure both sides in turn; the last row is the sum, whose ratio is the ops', weighted by what they took."""
    times: dict[str, tuple[list[float], list[float]]] = {op: ([], []) for op in ops}
    for number in range(rounds):
        for op in ops:
            for side in (0, 1) if number % 2 else (1, 0):
                times[op][side].append((before, after)[side].measure(op, calls)["median"])
    rows = [_compared(op, *both) for op, both in times.items()]
    sums = [[sum(column) for column in zip(*(times[op][side] for op in ops), strict=True)] for side in (0, 1)]
    total = _compared(SUM, *sums)  # a round in which one op was disturbed counts little in the three that follow
    total["before"], total["after"] = sum(row["before"] for row in rows), sum(row["after"] for row in rows)
    total["ratio"] = sum(row["before"] * row["ratio"] for row in rows) / total["before"]
    return [*rows, total]


def _compared(op: str, before: list[float], after: list[float]) -> Comparison:
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return Comparison(
        op=op,
        before=_percentile(before, 20),
        after=_percentile(after, 20),
        ratio=statistics.median(ratios),
        p20=_percentile(ratios, 20),
        p80=_percentile(ratios, 80),
    )


def _percentile(values: Sequence[float], per_cent: int) -> float:
    return sorted(values)[round(per_cent / 100 * (len(values) - 1))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Host time per call of the ops, Triton's binder included, no GPU.")
    parser.add_argument("--against", metavar="COMMIT", help="measure it and the working tree in turn, and compare")
    parser.add_argument("--ops", default="", metavar="WORDS", help="only ops whose names hold one of these, a,b,...")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS, help="of each op in a round")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per row")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(sys.stdin)
    elif options.against is None:
        with sides(ROOT) as (side,):
            _report(_alone(side, _chosen(side.launches, options.ops), options.rounds, options.calls), options.json)
    else:
        with checkout(options.against) as path, sides(path, ROOT) as (before, after):
            common = [op for op in before.launches if op in after.launches]
            rows = compare(before, after, _chosen(common, options.ops), options.rounds, options.calls)
            _report(rows, options.json)
            for op in sorted(before.launches.keys() ^ after.launches.keys()):
                print(f"only {'before' if op in before.launches else 'after'}: {op}", file=sys.stderr)


def _chosen(ops: Iterable[str], words: str) -> list[str]:
    chosen = [op for op in ops if any(word in op for word in words.split(","))]
    if not chosen:
        raise SystemExit(f"no op's name holds one of {words!r}; there are: {', '.join(ops)}")
    return chosen


def _alone(side: Side, ops: Sequence[str], rounds: int, calls: int) -> list[dict[str, Any]]:
    rows = []
    for op in ops:
        timings = [side.measure(op, calls) for _ in range(rounds)]
        columns = {name: statistics.median(t[name] for t in timings) for name in ("median", "p5")}
        rows.append({"op": op, "launches": side.launches[op], **columns})
    total: dict[str, Any] = {name: sum(row[name] for row in rows) for name in ("launches", "median", "p5")}
    return [*rows, {"op": SUM, **total}]


def _report(rows: Sequence[Any], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    names = [name for name in rows[0] if name != "op"]
    print(f"{'microseconds per call':<26}" + "".join(f"{name:>10}" for name in names))
    for row in rows:
        digits = {"launches": 0, "ratio": 3, "p20": 3, "p80": 3}
        print(f"{row['op']:<26}" + "".join(f"{row[name]:>10.{digits.get(name, 1)}f}" for name in names))


if __name__ == "__main__":
    main()
