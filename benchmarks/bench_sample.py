"""``sample``, ``truncate`` and ``process_logits``: the references, and what a call costs the host."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.setup import CONTEXT, LARGE_VOCAB, ROWS, VOCAB, Benchmark, make_sampling
from dspark.ops import Sampling, sample, truncate
from dspark.ops.launch import recorded_launches
from dspark.ops.process import process_logits
from dspark.ops.types import Processors


def test_reference(benchmark: Benchmark, requests: int, sampling: Sampling) -> None:
    tokens = benchmark(sample, torch.randn(requests, VOCAB), sampling, torch.full((requests,), CONTEXT))
    assert tokens.shape == (requests,)


def test_truncate_reference(benchmark: Benchmark, requests: int) -> None:
    sampling = replace(make_sampling(requests, 1.0), top_p=torch.full((requests,), 0.9), any_truncation=True)
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
    tokens, query_start = torch.zeros(num_rows, dtype=torch.int64), torch.arange(requests + 1) * ROWS
    with recorded_launches() as launches:

        def call() -> None:
            launches.clear()
            process_logits(
                logits, tokens, query_start, processors=processors, max_query_len=ROWS, out=logits, backend="triton"
            )

        call()  # the first one imports the kernels
        benchmark(call)
        assert launches
