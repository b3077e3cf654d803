"""``draft_walk``: the reference beside DeepSpec's loop, what a call costs the host, and the kernels on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gpu_timing
from benchmarks.setup import CONTEXT, DRAFTS, HIDDEN, LARGE_VOCAB, RANK, VOCAB, Benchmark, make_sampling
from dspark.ops import (
    BiasTable,
    ConfidenceHead,
    Draft,
    MarkovHead,
    Sampling,
    Stream,
    build_bias_table,
    draft_walk,
    draft_walk_certified,
)
from dspark.ops.draft.certified_reference import certified_steps
from dspark.ops.draft.walk_reference import WalkInputs
from dspark.ops.launch import recorded_launches
from dspark.testing import bounds

ROTATING_BYTES = 2**28
LARGE_RANK, LARGE_HIDDEN = 256, 2560
WIDE_VOCAB = 32_000


def deepspec_loop(base_logits: Tensor, anchor: Tensor, head: MarkovHead, temperature: float) -> Tensor:
    """The walk as DeepSpec's sampling loop formulates it: embed, project, add, softmax, draw, for each slot in turn."""
    previous, tokens = anchor, []
    for k in range(base_logits.shape[1]):
        logits = base_logits[:, k] + F.linear(F.embedding(previous, head.w1), head.w2)
        if temperature == 0:
            previous = logits.argmax(-1)
        else:
            previous = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1).squeeze(-1)
        tokens.append(previous)
    return torch.stack(tokens, dim=1)


def make_walk(requests: int, sampling: Sampling, vocab_size: int, rank: int, confidence: bool) -> dict[str, Any]:
    w1, w2 = torch.randn(vocab_size, rank), torch.randn(vocab_size, rank)
    return {
        "base_logits": torch.randn(requests, DRAFTS, vocab_size),
        "anchor": torch.randint(vocab_size, (requests,)),
        "head": MarkovHead(w1, w2),
        "hidden": torch.randn(requests, DRAFTS, HIDDEN) if confidence else None,
        "confidence_head": ConfidenceHead(torch.randn(HIDDEN + rank), torch.zeros(()), w1) if confidence else None,
        "sampling": sampling,
        "position": torch.full((requests,), CONTEXT),
        "stream": Stream.TARGET,
    }


def test_reference(benchmark: Benchmark, requests: int, sampling: Sampling) -> None:
    draft = benchmark(draft_walk, **make_walk(requests, sampling, VOCAB, RANK, True), return_logits=False)
    assert draft.tokens.min() >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", ["reference", "candidates", "deepspec loop"])
def test_wide_block(benchmark: Benchmark, form: str, temperature: float) -> None:
    """One block of one request over 32,000 tokens, rank 128, without a confidence: the same work in three forms.

    The candidates are those of the certified walk, alone.
    """
    walk = make_walk(1, make_sampling(1, temperature), WIDE_VOCAB, 128, confidence=False)
    call: partial[Any]
    if form == "reference":
        call = partial(draft_walk, **walk, return_logits=False)
    elif form == "candidates":
        inputs = WalkInputs(**walk, confidence_hidden=None)
        call = partial(certified_steps, inputs, BiasTable(*_table_of(walk["head"])), 128)
    else:
        call = partial(deepspec_loop, walk["base_logits"], walk["anchor"], walk["head"], temperature)
    benchmark.pedantic(call, rounds=15, warmup_rounds=2)


def _table_of(head: MarkovHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A table of no use: what it costs to look something up in it is the same."""
    size = head.w2.shape[0]
    tokens = torch.arange(64, dtype=torch.int32).expand(size, 64).contiguous()
    return tokens, torch.zeros(size, 64), torch.zeros(size), torch.ones(size)


@pytest.mark.parametrize("form", ["exact", "exact with q", "certified", "certified with fallback"])
def test_host_overhead(benchmark: Benchmark, requests: int, form: str) -> None:
    """Checks, configuration, allocation and the arguments of every launch; the launches themselves do nothing."""
    rows = torch.zeros(1, LARGE_RANK, dtype=torch.bfloat16).expand(LARGE_VOCAB, LARGE_RANK)
    head = MarkovHead(rows, rows)
    walk = {
        "base_logits": torch.zeros(1, 1, LARGE_VOCAB, dtype=torch.bfloat16).expand(requests, DRAFTS, LARGE_VOCAB),
        "anchor": torch.zeros(requests, dtype=torch.int64),
        "head": head,
        "hidden": torch.zeros(requests, DRAFTS, HIDDEN),
        "confidence_head": ConfidenceHead(torch.zeros(HIDDEN + LARGE_RANK), torch.zeros(()), rows),
        "sampling": make_sampling(requests, 1.0),
        "position": torch.full((requests,), CONTEXT),
        "stream": Stream.TARGET,
        "backend": "triton",
    }
    call: partial[Any]
    if form.startswith("exact"):
        call = partial(draft_walk, **walk, return_logits=form == "exact with q")
    else:
        table = BiasTable(*_table_of(head))
        call = partial(draft_walk_certified, **walk, table=table, fallback=form.endswith("fallback"))

    with recorded_launches() as launches:

        def recorded() -> None:
            launches.clear()
            call()

        recorded()  # the first one imports the kernels
        benchmark(recorded)
        assert launches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("form", ["exact", "certified", "certified with fallback"])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_device_time(benchmark: Any, num_requests: int, form: str) -> None:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    head = MarkovHead(randn(LARGE_VOCAB, LARGE_RANK) / 16, randn(LARGE_VOCAB, LARGE_RANK))
    confidence = ConfidenceHead(randn(LARGE_HIDDEN + LARGE_RANK), randn(1)[0], head.w1)
    table = None if form == "exact" else build_bias_table(head)
    sampling = make_sampling(num_requests, 1.0, "cuda")
    position = torch.full((num_requests,), CONTEXT, device="cuda")
    block_bytes = num_requests * DRAFTS * LARGE_VOCAB * 2
    copies = max(2, -(-ROTATING_BYTES // block_bytes))

    def make_call() -> Any:
        walk = {
            "base_logits": 4 * randn(num_requests, DRAFTS, LARGE_VOCAB),
            "anchor": torch.randint(LARGE_VOCAB, (num_requests,), device="cuda"),
            "head": head,
            "hidden": randn(num_requests, DRAFTS, LARGE_HIDDEN),
            "confidence_head": confidence,
            "sampling": sampling,
            "position": position,
            "stream": Stream.TARGET,
        }
        if table is None:
            return partial(draft_walk, **walk, return_logits=False)
        return partial(draft_walk_certified, **walk, table=table, fallback=form.endswith("fallback"))

    calls = [make_call() for _ in range(copies)]
    result: Draft | Any = calls[0]()
    if table is not None:
        benchmark.extra_info["certified"] = float(result.certified.float().mean()) / DRAFTS
    shape = (num_requests, DRAFTS, LARGE_VOCAB)
    bound = bounds.draft_walk(*shape, LARGE_RANK) if table is None else bounds.draft_walk_certified(*shape)
    flops = 2 * num_requests * DRAFTS * LARGE_VOCAB * LARGE_RANK if table is None else 0
    benchmark.extra_info |= {"R": num_requests, "form": form, "V": LARGE_VOCAB}
    gpu_timing.measure(benchmark, calls, bound, flops)
