"""Toy models, sampling parameters and cost curves that the laws are checked on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dspark.ops.sample.reference import transform
from dspark.policy import CostProfile
from dspark.requests import SamplingParams, batch_sampling
from dspark.testing import ToyRequest, stepwise

Model = Callable[[tuple[int, ...]], tuple[float, ...]]

CURVES = {
    "flat": CostProfile((1, 2), (1.0, 1.0)),
    "steep": CostProfile((1, 2), (1.0, 3.0)),
    "bend": CostProfile((1, 4, 32), (1.0, 1.4, 8.0)),
    "appendix A": CostProfile((1, 2, 3), (1.0, 2.0, 1 / 0.45)),
    "jagged": CostProfile((1, 2, 3, 4, 5, 6, 7, 8), (1.0, 1.1, 1.9, 2.0, 2.1, 3.5, 3.6, 3.7)),
    "padded": CostProfile((1, 2, 3, 4, 5, 8), (1.0, 1.7, 1.7001, 1.7002, 3.4, 3.5)),
}

SAMPLINGS = {
    "plain": (SamplingParams(), SamplingParams()),
    "hot": (SamplingParams(temperature=1.7), SamplingParams(temperature=1.7)),
    "cold": (SamplingParams(temperature=0.6), SamplingParams(temperature=0.6)),
    "greedy": (SamplingParams(temperature=0), SamplingParams(temperature=0)),
    "top-k": (SamplingParams(top_k=2), SamplingParams(top_k=2)),
    "top-p": (SamplingParams(top_p=0.7), SamplingParams(top_p=0.7)),
    "min-p": (SamplingParams(min_p=0.4), SamplingParams(min_p=0.4)),
    "all": (SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1),) * 2,
    "greedy drafter": (SamplingParams(), SamplingParams(temperature=0)),
    "drafter's own top-k": (SamplingParams(), SamplingParams(top_k=2)),
    "target's own top-p": (SamplingParams(top_p=0.6), SamplingParams()),
    "two of their own": (SamplingParams(temperature=0.7, min_p=0.3), SamplingParams(temperature=1.5, top_k=2)),
}
"""Name -> parameters of the target and of the drafter."""


def markov(logits: Tensor, params: SamplingParams) -> Model:
    """A model of the last two tokens: ``logits [V, V, V]``, warped as the package warps them."""
    vocab_size = logits.shape[-1]
    rows = logits.reshape(-1, vocab_size)  # [V * V, V]
    warped = transform(rows, batch_sampling([params] * len(rows), [0] * len(rows))).double().softmax(-1)
    table = [[tuple(row) for row in block] for block in warped.view(vocab_size, vocab_size, -1).tolist()]
    return lambda tokens: table[tokens[-2]][tokens[-1]]


def toy(
    seed: int,
    vocab_size: int,
    max_tokens: int,
    sampling: str = "plain",
    *,
    confidence: bool = True,
    stop: frozenset[int] = frozenset(),
) -> ToyRequest:
    """A request with random models, and a confidence that depends on the last two tokens and is often tied."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocab_size,) * 3
    target = 1.5 * torch.randn(shape, generator=generator)
    drafter = target + torch.randn(shape, generator=generator)
    levels = [0.0, 0.4, 0.7, 0.85, 0.95, 1.0]
    sureness = torch.randint(1, 2 * len(levels), shape[:2], generator=generator).clamp(max=len(levels) - 1).tolist()
    return ToyRequest(
        target=markov(target, SAMPLINGS[sampling][0]),
        drafter=markov(drafter, SAMPLINGS[sampling][1]),
        max_tokens=max_tokens,
        confidence=stepwise(lambda tokens: levels[sureness[tokens[-2]][tokens[-1]]]) if confidence else None,
        prompt=(0, 1),
        stop=stop,
    )


def constant(
    p: tuple[float, ...],
    q: tuple[float, ...],
    max_tokens: int,
    confidence: Callable[[tuple[int, ...], tuple[int, ...]], list[float]] | None = None,
) -> ToyRequest:
    """A request whose models say the same at every position."""
    return ToyRequest(lambda tokens: p, lambda tokens: q, max_tokens, confidence)
