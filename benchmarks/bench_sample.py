"""``sample``, ``truncate`` and ``process_logits``: the references, what a call costs the host, kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_timing
from benchmarks.setup import CONTEXT, LARGE_VOCAB, ROWS, VOCAB, Benchmark, make_sampling
from dspark.ops import Processors, Rows, Sampling, process_logits, sample, truncate
from dspark.ops.launch import recorded_launches
from dspark.testing import bounds

ROTATING_BYTES = 2**28
"""More than any cache holds, so that a call finds its inputs in memory."""
FLOPS_PER_LOGIT = 4
"""Scale, compare, exponentiate, add; of a penalty, compare, scale, multiply, subtract."""


def test_reference(benchmark: Benchmark, requests: int, sampling: Sampling) -> None:
    tokens = benchmark(sample, torch.randn(requests, VOCAB), sampling, torch.full((requests,), CONTEXT))
    assert tokens.shape == (requests,)


def test_truncate_reference(benchmark: Benchmark, requests: int) -> None:
    sampling = make_sampling(requests, 1.0)._replace(top_p=torch.full((requests,), 0.9), any_truncation=True)
    thresholds = benchmark(truncate, torch.randn(requests, VOCAB), sampling)
    assert thresholds.shape == (requests,)


def test_host_overhead(benchmark: Benchmark, requests: int) -> None:
    logits = torch.zeros(1, LARGE_VOCAB, dtype=torch.bfloat16).expand(requests, LARGE_VOCAB)
    sampling, position = make_sampling(requests, 1.0), torch.full((requests,), CONTEXT)
    with recorded_launches() as launches:

        def call() -> None:
            launches.clear()
            sample(logits, sampling, position, backend="triton")

        call()  # the first one imports the kernels
        benchmark(call)
        assert launches


def test_process_host_overhead(benchmark: Benchmark, requests: int) -> None:
    num_rows = requests * ROWS
    logits = torch.zeros(num_rows, VOCAB)
    processors = Processors(
        output_counts=torch.zeros(requests, VOCAB, dtype=torch.int32), repetition_penalty=torch.ones(requests)
    )
    query_start, position = torch.arange(requests + 1) * ROWS, torch.full((requests,), CONTEXT)
    rows = Rows(torch.zeros(num_rows, dtype=torch.int64), query_start, position, ROWS)
    with recorded_launches() as launches:

        def call() -> None:
            launches.clear()
            process_logits(logits, rows, processors=processors, out=logits, backend="triton")

        call()  # the first one imports the kernels
        benchmark(call)
        assert launches


def _measure(benchmark: Any, calls: list[Any], bound: int, num_logits: int, **columns: Any) -> None:
    benchmark.extra_info |= {**columns, "V": LARGE_VOCAB}
    gpu_timing.measure(benchmark, calls, bound, FLOPS_PER_LOGIT * num_logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_rows", [1, 64, 512])
def test_device_time(benchmark: Any, num_rows: int, temperature: float) -> None:
    sampling, position = make_sampling(num_rows, temperature, "cuda"), torch.arange(num_rows, device="cuda")
    bound = bounds.sample(num_rows, LARGE_VOCAB)

    def make_call() -> Any:
        logits = torch.randn(num_rows, LARGE_VOCAB, device="cuda").bfloat16()
        return lambda: sample(logits, sampling, position, backend="triton")

    calls = [make_call() for _ in range(max(2, -(-ROTATING_BYTES // bound)))]
    _measure(benchmark, calls, bound, num_rows * LARGE_VOCAB, T=num_rows, temperature=temperature)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("penalties", [False, True])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_process_device_time(benchmark: Any, num_requests: int, penalties: bool) -> None:
    num_rows = num_requests * ROWS
    tokens = torch.randint(LARGE_VOCAB, (num_rows,), device="cuda")
    query_start = torch.arange(num_requests + 1, device="cuda") * ROWS
    rows = Rows(tokens, query_start, torch.full((num_requests,), CONTEXT, device="cuda"), ROWS)
    banned = torch.randint(LARGE_VOCAB, (num_requests, 4), device="cuda")
    bound = bounds.process_logits(num_rows, LARGE_VOCAB, requests=num_requests, counts=penalties)

    def make_call() -> Any:
        logits = torch.randn(num_rows, LARGE_VOCAB, device="cuda").bfloat16()
        processors = Processors(banned_tokens=banned)
        if penalties:
            counts = torch.zeros(num_requests, LARGE_VOCAB, dtype=torch.int32, device="cuda")
            number = torch.full((num_requests,), 0.1, device="cuda")
            processors = processors._replace(output_counts=counts, frequency_penalty=number)
        return lambda: process_logits(logits, rows, processors=processors, backend="triton")

    calls = [make_call() for _ in range(max(2, -(-ROTATING_BYTES // bound)))]
    _measure(benchmark, calls, bound, num_rows * LARGE_VOCAB, R=num_requests, penalties=penalties)
