"""Inputs that the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dspark.ops import DenseQ, DraftDistribution, Rule, Sampling

DRAFTS, VOCAB, RANK, HIDDEN = 7, 256, 16, 32
ROWS = DRAFTS + 1
CONTEXT = 40
LARGE_VOCAB = 151_936

Benchmark = Callable[..., Any]


def make_sampling(requests: int, temperature: float, device: str = "cpu") -> Sampling:
    """Plain sampling at one temperature."""
    return Sampling(
        temperature=torch.full((requests,), temperature, device=device),
        top_k=torch.zeros(requests, dtype=torch.int64, device=device),
        top_p=torch.ones(requests, device=device),
        min_p=torch.zeros(requests, device=device),
        seed=torch.arange(requests, device=device),
        all_greedy=temperature == 0,
        any_truncation=False,
    )


def make_q(rule: Rule, requests: int, vocab_size: int = VOCAB) -> DraftDistribution | None:
    """A dense q for the rules that divide by it."""
    return DenseQ(torch.randn(requests, DRAFTS, vocab_size)) if rule in ("ratio", "block") else None
