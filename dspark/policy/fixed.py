"""Policies that learn nothing: always k drafts, those that the drafter is sure of, none."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.policy.protocol import LearnsNothing, Signals


class FixedK(LearnsNothing):
    """Verify the first ``k`` drafts of every request, whatever the load: the policy that every engine starts with.

    Args:
        k: drafts to verify; 0 is plain decoding that pays for drafting.

    Raises:
        ValueError: ``k`` is negative, or (when planning) above the draft length.
    """

    def __init__(self, k: int) -> None:
        if k < 0:
            raise ValueError(f"k: expected at least 0, got {k}")
        self.k = k

    def __repr__(self) -> str:
        return f"FixedK({self.k})"

    def plan(self, signals: Signals) -> Tensor:
        if self.k > signals.draft_len:
            raise ValueError(f"k: expected at most the draft length {signals.draft_len}, got {self.k}")
        return signals.max_lengths.clamp(max=self.k)


class ConfidenceThreshold(LearnsNothing):
    """Verify a request's drafts while their chance of survival is at least ``threshold``: no cost model, no load.

    Slot k is decided by the confidences up to its own, which are functions of the tokens before it; so the policy is
    non-anticipating, and every request is decided alone.

    Args:
        threshold: from 0 (verify everything) to 1.
        per_slot: compare each confidence by itself instead of their running product.

    Raises:
        ValueError: ``threshold`` is not in [0, 1], or (when planning) the drafter gives no confidence.
    """

    def __init__(self, threshold: float, *, per_slot: bool = False) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: expected a number in [0, 1], got {threshold}")
        self.threshold = threshold
        self.per_slot = per_slot

    def __repr__(self) -> str:
        return f"ConfidenceThreshold({self.threshold:g}{', per_slot=True' if self.per_slot else ''})"

    def plan(self, signals: Signals) -> Tensor:
        chance = signals.confidence_for(self).double().nan_to_num(0.0).clamp(0, 1)
        passes = (chance if self.per_slot else chance.cumprod(1)) >= self.threshold
        return torch.minimum(passes.long().cumprod(1).sum(1), signals.max_lengths)


class NoSpeculation(LearnsNothing):
    """Plain decoding: nothing is drafted, so rounds pay for no draft either."""

    def __repr__(self) -> str:
        return "NoSpeculation()"

    def drafts(self, requests: int, context_tokens: int) -> bool:
        return False

    def plan(self, signals: Signals) -> Tensor:
        return torch.zeros_like(signals.max_lengths)
