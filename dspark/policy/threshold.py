"""Verify while the drafter is confident: no cost model, no load."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals


class ConfidenceThreshold:
    """Verify a request's drafts while their chance of survival is at least ``threshold``.

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
        if signals.confidence is None:
            raise ValueError("confidence: ConfidenceThreshold needs a drafter with a confidence head, got None")
        chance = signals.confidence.double().nan_to_num(0.0).clamp(0, 1)
        passes = (chance if self.per_slot else chance.cumprod(1)) >= self.threshold
        return torch.minimum(passes.long().cumprod(1).sum(1), signals.max_lengths)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""
