"""``schedule_prefix``: the reference, what a call costs the host before kernels run, and the kernels on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_timing
from benchmarks.setup import DRAFTS, ROWS, Benchmark
from dspark.ops import schedule_prefix
from dspark.ops.launch import recorded_launches
from dspark.ops.schedule.reference import ScheduleMode
from dspark.testing import bounds

MODES: list[ScheduleMode] = ["early_stop", "global", "budget"]


def make_call(requests: int, draft_len: int, mode: ScheduleMode, device: str = "cpu") -> dict[str, Any]:
    """Confidences of which most are high, and a curve with a knee: a search that ends somewhere in the middle."""
    rows = torch.arange(requests * (1 + draft_len) + 1, dtype=torch.float64, device=device)
    return {
        "confidence": torch.rand(requests, draft_len, device=device) ** 0.1,
        "steps_per_second": 1000 / (10 + rows / requests),
        "mode": mode,
        "budget": torch.tensor(3 * requests, device=device) if mode == "budget" else None,
        "max_lengths": torch.full((requests,), draft_len, device=device),
    }


@pytest.mark.parametrize("mode", MODES)
def test_schedule_prefix(benchmark: Benchmark, requests: int, mode: ScheduleMode) -> None:
    lengths = benchmark(schedule_prefix, **make_call(requests, DRAFTS, mode))
    assert lengths.shape == (requests,)


@pytest.mark.parametrize("mode", MODES)
def test_reference_of_a_large_batch(benchmark: Benchmark, mode: ScheduleMode) -> None:
    """4,096 requests of 16 drafts."""
    torch.zeros(2**22)  # a process that has freed a large tensor keeps its heap, as an engine does
    lengths = benchmark(schedule_prefix, **make_call(4096, 16, mode))
    assert 0 < int(lengths.sum()) < 4096 * 16


@pytest.mark.parametrize(("num_requests", "launches"), [(1, 1), (8, 1), (512, 1), (4096, 3)])
def test_host_overhead(benchmark: Benchmark, num_requests: int, launches: int) -> None:
    """Checks, configuration, allocation and the arguments of every launch; the launches themselves do nothing."""
    call = make_call(num_requests, 16, "early_stop")
    with recorded_launches() as recorded:

        def run() -> Tensor:
            recorded.clear()
            return schedule_prefix(**call, backend="triton")

        run()  # the first one imports the kernels
        benchmark(run)
        assert len(recorded) == launches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_requests", "draft_len"), [(64, ROWS - 1), (512, 16), (4096, 16)])
def test_device_time(benchmark: Any, num_requests: int, draft_len: int, mode: ScheduleMode) -> None:
    calls = [make_call(num_requests, draft_len, mode, "cuda") for _ in range(4)]
    bound = bounds.schedule_prefix(num_requests, draft_len, by_request=8, entries=0 if mode == "budget" else None)
    benchmark.extra_info |= {"R": num_requests, "G": draft_len, "mode": mode}
    runs = [partial(schedule_prefix, **call) for call in calls]
    gpu_timing.measure(benchmark, runs, bound, 0)  # bytes say little here: a sort in one program is latency
