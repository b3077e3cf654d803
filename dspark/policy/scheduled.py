"""Confidence-scheduled verification (paper, section 3.2 and algorithm 1; its asynchronous form, section 5.2)."""

from __future__ import annotations

from collections import deque
from typing import Literal

from torch import Tensor

from dspark.ops.schedule import schedule_prefix
from dspark.policy.cost import CostProfile
from dspark.policy.protocol import Outcome, Signals


class ConfidenceScheduled:
    """Verify the drafts whose expected gain is worth their cost, over all running requests together.

    With ``lag=0`` drafts are admitted in descending order of survival while expected throughput rises, and the search
    stops at the first that does not raise it, which keeps the decision non-anticipating. With ``lag=2`` the number of
    drafts to verify comes from an unconstrained search over the confidences of two rounds ago, which today's tokens
    cannot have influenced, and today's confidences only rank who gets them; the first two rounds, which have nothing
    to look back at, use the ``lag=0`` search.

    Args:
        profile: what a round costs at each number of verified rows.
        lag: rounds between the confidences and the budget taken from them, 0 or 2.

    Raises:
        TypeError: ``profile`` is not a :class:`CostProfile`; without one, everything would be verified.
        ValueError: ``lag`` is neither 0 nor 2, or (when planning) the drafter gives no confidence.
    """

    def __init__(self, profile: CostProfile, lag: Literal[0, 2] = 0) -> None:
        if not isinstance(profile, CostProfile):
            raise TypeError(f"profile: expected a CostProfile, got {type(profile).__name__}")
        if lag not in (0, 2):
            raise ValueError(f"lag: expected 0 or 2, got {lag!r}")
        self.profile = profile
        self.lag = lag
        self._budgets: deque[Tensor] = deque(maxlen=2)

    def __repr__(self) -> str:
        return f"ConfidenceScheduled(lag={self.lag})"

    def plan(self, signals: Signals) -> Tensor:
        if signals.confidence is None:
            raise ValueError("confidence: ConfidenceScheduled needs a drafter with a confidence head, got None")
        confidence, caps = signals.confidence, signals.max_lengths
        requests, draft_len = confidence.shape
        speed = self.profile.steps_per_second(requests * (1 + draft_len), device=confidence.device)
        if self.lag == 0:
            return schedule_prefix(confidence, speed, mode="early_stop", max_lengths=caps)
        lagged = self._budgets[0] if len(self._budgets) == 2 else None
        self._budgets.append(schedule_prefix(confidence, speed, mode="global", max_lengths=caps).sum())
        if lagged is None:
            return schedule_prefix(confidence, speed, mode="early_stop", max_lengths=caps)
        return schedule_prefix(confidence, speed, mode="budget", budget=lagged, max_lengths=caps)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""
