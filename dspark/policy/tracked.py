"""A cost profile that follows its machine, and what policies ask of either kind."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dspark.policy.cost import CostProfile
from dspark.policy.protocol import Outcome, Signals

_MOST = math.log(2.0)


class TrackedProfile:
    """A profile that slow changes of the machine (clocks, neighbours, context) correct.

    Each timed round moves a running estimate of measured over predicted time, in logarithms, at the points of the curve
    next to it, and half as much at all points. One round counts as at most twice or half of what was predicted, so that
    a preempted one does little harm. A factor common to all points changes no decision of a scheduler, only what is
    reported; what changes decisions is that some sizes have become dearer than others.

    Rounds of the past decide, so it is as non-anticipating as the policy that uses it.

    Args:
        profile: what to begin with.
        rate: share of an error that one round corrects.

    Raises:
        TypeError: ``profile`` is not a :class:`CostProfile`.
        ValueError: ``rate`` is not in (0, 1].
    """

    def __init__(self, profile: CostProfile, rate: float = 0.02) -> None:
        if not isinstance(profile, CostProfile):
            raise TypeError(f"profile: expected a CostProfile, got {type(profile).__name__}")
        if not 0 < rate <= 1:
            raise ValueError(f"rate: expected a number in (0, 1], got {rate}")
        self.base = profile
        self.rate = rate
        self.profile = profile
        self._common = 0.0
        self._local = [0.0] * len(profile.rows)

    def __repr__(self) -> str:
        return f"TrackedProfile({self.base.device or self.base.source}, rate={self.rate})"

    def observe(
        self, rows: int, seconds: float, *, requests: int | None = None, context_tokens: int | None = None
    ) -> None:
        """Learn that a round of so many rows took so long; other arguments as of ``steps_per_second``.

        Raises:
            ValueError: ``seconds`` or ``rows`` is not positive.
        """
        if not 0 < seconds < math.inf or rows < 1:
            raise ValueError(f"rows, seconds: expected positive numbers, got {rows} and {seconds}")
        predicted = self.profile.round_seconds(rows, requests, context_tokens)
        error = max(-_MOST, min(_MOST, math.log(seconds / predicted)))
        self._common += self.rate * error / 2
        for i, weight in self._near(rows):
            self._local[i] += self.rate * error * weight
        floor, corrected = 0.0, []
        for own, second in zip(self._local, self.base.seconds, strict=True):
            floor = max(floor, second * math.exp(self._common + own))
            corrected.append(floor)
        scale = math.exp(self._common)
        self.profile = replace(
            self.base,
            seconds=tuple(corrected),
            draft_seconds=tuple(s * scale for s in self.base.draft_seconds),
            seconds_per_context_token=self.base.seconds_per_context_token * scale,
        )

    def steps_per_second(
        self,
        max_rows: int,
        device: torch.device | str = "cpu",
        *,
        requests: int | None = None,
        context_tokens: int | None = None,
    ) -> Tensor:
        """As of :class:`CostProfile`, corrected."""
        return self.profile.steps_per_second(max_rows, device, requests=requests, context_tokens=context_tokens)

    def _near(self, rows: int) -> list[tuple[int, float]]:
        """The points on either side of a number of rows, and how much of its error is theirs."""
        points = self.base.rows
        padded = next((n for n in self.base.captured if n >= rows), rows)
        right = next((i for i, n in enumerate(points) if n >= padded), len(points) - 1)
        if right == 0 or points[right] <= padded:
            return [(right, 1.0)]
        share = (padded - points[right - 1]) / (points[right] - points[right - 1])
        return [(right - 1, 1 - share), (right, share)]


AnyProfile = CostProfile | TrackedProfile


def check_profile(profile: AnyProfile) -> AnyProfile:
    """Return ``profile``.

    Raises:
        TypeError: it is none; without one, a scheduler would verify everything.
    """
    if not isinstance(profile, (CostProfile, TrackedProfile)):
        raise TypeError(f"profile: expected a CostProfile, got {type(profile).__name__}")
    return profile


def speeds(profile: AnyProfile, signals: Signals) -> Tensor:
    """Steps per second ``[R * (1 + G) + 1]`` float64 at every number of rows that a round may verify."""
    requests = len(signals.request_ids)
    return profile.steps_per_second(
        requests * (1 + signals.draft_len),
        signals.max_lengths.device,
        requests=requests,
        context_tokens=signals.context_tokens,
    )


def learn_cost(profile: AnyProfile | None, outcome: Outcome) -> None:
    """Tell a tracked profile of a timed round; reads the lengths from the device."""
    if isinstance(profile, TrackedProfile) and outcome.seconds is not None:
        requests = len(outcome.request_ids)
        rows = requests + int(outcome.lengths.sum())
        profile.observe(rows, outcome.seconds, requests=requests, context_tokens=outcome.context_tokens)
