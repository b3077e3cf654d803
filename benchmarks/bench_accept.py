"""``accept``: the reference, what a call costs the host before kernels run, and the kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_timing
from benchmarks.setup import CONTEXT, DRAFTS, LARGE_VOCAB, ROWS, VOCAB, Benchmark, make_q, make_sampling
from dspark.ops import DenseQ, Rows, Rule, Sampling, Verdict, accept
from dspark.ops.launch import recorded_launches
from dspark.testing import bounds

RULES: tuple[Rule, ...] = ("coupled", "match", "ratio", "block")
ROTATING_BYTES = 2**28
"""More than any cache holds, so that a call finds its inputs in memory."""

FLOPS_PER_LOGIT = 4
"""Scale, compare, exponentiate, add. Philox is integer work and is not counted."""


def make_rows(tokens: Tensor) -> Rows:
    """Rows of ``ROWS`` tokens for each request."""
    requests, device = len(tokens) // ROWS, tokens.device
    position = torch.full((requests,), CONTEXT, device=device)
    return Rows(tokens, torch.arange(requests + 1, device=device) * ROWS, position, ROWS)


@pytest.mark.parametrize("rule", RULES)
def test_reference(benchmark: Benchmark, requests: int, sampling: Sampling, rule: Rule) -> None:
    verdict = benchmark(
        accept,
        torch.randn(requests * ROWS, VOCAB),
        make_rows(torch.randint(VOCAB, (requests * ROWS,))),
        rule=rule,
        sampling=sampling,
        q=make_q(rule, requests),
        backend="reference",
    )
    assert verdict.num_emitted.min() >= 1


@pytest.mark.parametrize("rule", RULES)
def test_host_overhead(benchmark: Benchmark, requests: int, rule: Rule) -> None:
    """Checks, configuration, allocation and the arguments of every launch; the launches themselves do nothing."""
    logits = torch.zeros(1, LARGE_VOCAB, dtype=torch.bfloat16).expand(requests * ROWS, LARGE_VOCAB)
    scores = torch.zeros(1, 1, LARGE_VOCAB, dtype=torch.bfloat16).expand(requests, DRAFTS, LARGE_VOCAB)
    q = DenseQ(scores) if rule in ("ratio", "block") else None
    rows, sampling = make_rows(torch.zeros(requests * ROWS, dtype=torch.int64)), make_sampling(requests, 1.0)

    with recorded_launches() as launches:

        def call() -> Verdict:
            launches.clear()
            return accept(
                logits,
                rows,
                rule=rule,
                sampling=sampling,
                q=q,
                backend="triton",
            )

        call()  # the first one imports the kernels
        benchmark(call)
        assert launches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_device_time(benchmark: Any, num_requests: int, rule: Rule) -> None:
    num_rows = num_requests * ROWS
    call_bytes = num_rows * LARGE_VOCAB * 2
    copies = max(2, -(-ROTATING_BYTES // call_bytes))
    sampling = make_sampling(num_requests, 1.0, "cuda")

    def make_call() -> Any:
        logits = torch.randn(num_rows, LARGE_VOCAB, device="cuda").bfloat16()
        rows = make_rows(torch.randint(LARGE_VOCAB, (num_rows,), device="cuda"))
        q = None
        if rule in ("ratio", "block"):
            q = DenseQ(torch.randn(num_requests, DRAFTS, LARGE_VOCAB, device="cuda").bfloat16())
        return lambda: accept(
            logits,
            rows,
            rule=rule,
            sampling=sampling,
            q=q,
            backend="triton",
        )

    calls = [make_call() for _ in range(copies)]
    drafts = num_requests * DRAFTS * (rule in ("ratio", "block"))
    residuals = sum(0 < n < ROWS for n in calls[0]().num_emitted.tolist())
    again = {"ratio": residuals, "block": drafts}.get(rule, 0)
    bound = bounds.accept(num_rows, LARGE_VOCAB, drafts=drafts, again=again, q_width=LARGE_VOCAB)
    benchmark.extra_info |= {"R": num_requests, "rule": rule, "V": LARGE_VOCAB}
    gpu_timing.measure(benchmark, calls, bound, FLOPS_PER_LOGIT * bound // 2)
