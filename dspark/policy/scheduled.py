"""Confidence-scheduled verification (paper, section 3.2 and algorithm 1; its asynchronous form, section 5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dspark.ops.schedule import schedule_prefix
from dspark.policy.protocol import Outcome, Signals
from dspark.policy.tracked import AnyProfile, check_profile, learn_cost, speeds


class ConfidenceScheduled:
    """Verify the drafts whose expected gain is worth their cost, over all running requests together.

    With ``lag=0`` drafts are admitted in descending order of survival while expected throughput rises, and the search
    stops at the first that does not raise it, which keeps the decision non-anticipating. With ``lag=2`` the number of
    drafts to verify comes from an unconstrained search over the confidences of two rounds ago, which today's tokens
    cannot have influenced, and today's confidences only rank who gets them; the first two rounds, which have nothing
    to look back at, use the ``lag=0`` search.

    The lagged budget is a total over the batch: drafts, not drafts per request. Requests may join and leave between
    the rounds; whoever runs today shares the budget of the round two before, and what today's caps leave over is not
    spent. Rounds in which nobody could verify anything are not planned and do not count.

    Args:
        profile: what a round costs at each number of verified rows; a
            :class:`~dspark.policy.tracked.TrackedProfile` learns from rounds whose outcome is timed.
        lag: rounds between the confidences and the budget taken from them, 0 or 2.
        floor: drafts that a request verifies whatever its confidence says, within its cap; one number, or one by
            request id (0 for others). It is set beforehand, so nothing drawn can have influenced it.
        caps: most drafts by request id, beside the engine's own caps.
        weights: how much a token of a request counts, by request id (1 for others); or leave it to
            ``Signals.weights``. Only ratios matter. Drafts are ranked by weight times survival, in which a request's
            own keep their order.

    Raises:
        TypeError: ``profile`` is no profile; without one, everything would be verified.
        ValueError: ``lag`` is neither 0 nor 2, a floor, cap or weight is negative, or (when planning) the drafter
            gives no confidence or weights come from both sides.
    """

    def __init__(
        self,
        profile: AnyProfile,
        lag: Literal[0, 2] = 0,
        *,
        floor: int | Mapping[int, int] = 0,
        caps: Mapping[int, int] | None = None,
        weights: Mapping[int, float] | None = None,
    ) -> None:
        if lag not in (0, 2):
            raise ValueError(f"lag: expected 0 or 2, got {lag!r}")
        self.profile = check_profile(profile)
        self.lag = lag
        self.floor = floor if isinstance(floor, int) else dict(floor)
        self.caps, self.weights = dict(caps or {}), dict(weights or {})
        floors = {0: self.floor} if isinstance(self.floor, int) else self.floor
        for name, numbers in (("floor", floors), ("caps", self.caps), ("weights", self.weights)):
            if any(not number >= 0 for number in numbers.values()):
                raise ValueError(f"{name}: expected at least 0, got {numbers}")
        self._budgets: deque[Tensor] = deque(maxlen=2)

    def __repr__(self) -> str:
        return f"ConfidenceScheduled(lag={self.lag})"

    def plan(self, signals: Signals) -> Tensor:
        choose = partial(
            schedule_prefix,
            signals.confidence_for(self),
            speeds(self.profile, signals),
            max_lengths=self._caps(signals),
            min_lengths=self._floors(signals),
            weights=self._weights(signals),
        )
        if self.lag == 0:
            return choose(mode="early_stop")
        lagged = self._budgets[0] if len(self._budgets) == 2 else None
        self._budgets.append(choose(mode="global").sum())
        return choose(mode="early_stop") if lagged is None else choose(mode="budget", budget=lagged)

    def observe(self, outcome: Outcome) -> None:
        """Let a tracked profile learn from a timed round; there is nothing else to learn."""
        learn_cost(self.profile, outcome)

    def _caps(self, signals: Signals) -> Tensor:
        if not self.caps:
            return signals.max_lengths
        return torch.minimum(signals.max_lengths, _by_request(signals, self.caps, signals.draft_len))

    def _floors(self, signals: Signals) -> Tensor | None:
        if isinstance(self.floor, int):
            return torch.full_like(signals.max_lengths, self.floor) if self.floor else None
        return _by_request(signals, self.floor, 0)

    def _weights(self, signals: Signals) -> Tensor | None:
        weights = signals.weights
        if self.weights:
            if weights is not None:
                raise ValueError("weights: expected from the policy or from the signals, got both")
            weights = _by_request(signals, self.weights, 1.0)
        if weights is None or not weights.numel():
            return None
        # The op takes weights of up to 1.
        return weights.double() / weights.double().amax().clamp(min=1e-300)


def _by_request(signals: Signals, numbers: Mapping[int, int] | Mapping[int, float], other: float) -> Tensor:
    """``[R]`` numbers by request id, int64 or float64 as they are."""
    dtype = torch.int64 if isinstance(other, int) else torch.float64
    values = [numbers.get(request, other) for request in signals.request_ids]
    return torch.tensor(values, dtype=dtype, device=signals.max_lengths.device)
