"""Device time of a call: a graph of many calls over rotating buffers, after a warm-up, beside the device's ceiling."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

COPY_BYTES = 2**30
REPLAYS = 30


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Capture the calls one after another, once each has run outside of the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def seconds_per_call(graph: torch.cuda.CUDAGraph, num_calls: int, replays: int = REPLAYS) -> list[float]:
    """Device seconds of one call, for each replay, in ascending order."""
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / num_calls)
    return sorted(times)


@functools.cache
def copy_ceiling() -> float:
    """Bytes per second, read and written, of the device's own copy of a large buffer, in this process."""
    source = torch.randint(-128, 127, (COPY_BYTES,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    graph = graph_of([lambda: target.copy_(source)] * 4)
    return 2 * COPY_BYTES / statistics.median(seconds_per_call(graph, 4))


def columns(times: Sequence[float], num_bytes: int, flops: int) -> dict[str, Any]:
    """The columns of a row; the bandwidth and its share of a copy's are those of the bytes that a call must move."""
    median = statistics.median(times)
    fifths = statistics.quantiles(times, n=5)
    return {
        "lower_bound": num_bytes,
        "flops": flops,
        "gb_per_s": num_bytes / median / 1e9,
        "ceiling_gb_per_s": copy_ceiling() / 1e9,
        "percent_of_ceiling": 100 * num_bytes / median / copy_ceiling(),
        "median_us": median * 1e6,
        "p20_us": fifths[0] * 1e6,
        "p80_us": fifths[3] * 1e6,
    }


def measure(benchmark: Any, calls: Sequence[Callable[[], object]], num_bytes: int, flops: int) -> None:
    """Fill a benchmark's row from a graph of the calls, each of which must move ``num_bytes``."""
    graph = graph_of(calls)
    benchmark.extra_info |= columns(seconds_per_call(graph, len(calls)), num_bytes, flops)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.pedantic(replay, rounds=REPLAYS, warmup_rounds=3)
    benchmark.extra_info["calls_per_round"] = len(calls)
