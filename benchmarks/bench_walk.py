"""``draft_walk``: the reference."""

from __future__ import annotations

import torch

from benchmarks.setup import CONTEXT, DRAFTS, HIDDEN, RANK, VOCAB, Benchmark
from dspark.ops import ConfidenceHead, MarkovHead, Sampling, Stream, draft_walk


def test_reference(benchmark: Benchmark, requests: int, sampling: Sampling) -> None:
    w1, w2 = torch.randn(VOCAB, RANK), torch.randn(VOCAB, RANK)
    draft = benchmark(
        draft_walk,
        torch.randn(requests, DRAFTS, VOCAB),
        torch.randint(VOCAB, (requests,)),
        head=MarkovHead(w1, w2),
        hidden=torch.randn(requests, DRAFTS, HIDDEN),
        confidence_head=ConfidenceHead(torch.randn(HIDDEN + RANK), torch.zeros(()), w1),
        sampling=sampling,
        position=torch.full((requests,), CONTEXT),
        stream=Stream.TARGET,
        return_logits=False,
    )
    assert draft.tokens.min() >= 0
