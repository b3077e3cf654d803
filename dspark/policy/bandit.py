"""One length for all, found by trying."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from dspark.policy.protocol import Outcome, Signals
from dspark.policy.tracked import AnyProfile, check_profile, learn_cost


@dataclass
class _Arm:
    """What a length has brought: weight of its rounds, and their weighted sum of tokens per second."""

    weight: float = 0.0
    reward: float = 0.0


class Bandit:
    """Verify K drafts of every request, the K that an upper confidence bound picks (UCB1 with discounting).

    The reward is the round's emitted tokens per second: over its measured time when the outcome has one, else over what
    the profile says. Loads differ, so there is one bandit for each power of two of running requests. Choices depend on
    past rounds and on the number of requests alone, so the policy is non-anticipating; and they use no random numbers,
    so ranks that see the same outcomes choose alike.

    Args:
        profile: needed unless outcomes are timed.
        width: of the confidence bound, in units of the best mean reward; 0 never explores once all K were tried.
        discount: what a round is worth one round later.

    Raises:
        TypeError: ``profile`` is neither a profile nor None.
        ValueError: a number is out of range, or (when observing) a round is not timed and there is no profile.
    """

    def __init__(self, profile: AnyProfile | None = None, *, width: float = 0.3, discount: float = 0.995) -> None:
        if width < 0 or not 0 < discount <= 1:
            raise ValueError(f"width, discount: expected at least 0 and in (0, 1], got {width} and {discount}")
        self.profile = None if profile is None else check_profile(profile)
        self.width, self.discount = width, discount
        self._arms: dict[int, list[_Arm]] = {}
        self._pulled: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"Bandit(width={self.width:g})"

    def plan(self, signals: Signals) -> Tensor:
        bucket = len(signals.request_ids).bit_length()
        arms = self._arms.setdefault(bucket, [_Arm() for _ in range(signals.draft_len + 1)])
        chosen = self._choose(arms)
        self._pulled = bucket, chosen
        return signals.max_lengths.clamp(max=chosen)

    def observe(self, outcome: Outcome) -> None:
        """Credit the length that was chosen; reads the outcome from the device."""
        learn_cost(self.profile, outcome)
        if self._pulled is None:
            return
        (bucket, chosen), self._pulled = self._pulled, None
        requests = len(outcome.request_ids)
        seconds = outcome.seconds
        if seconds is None:
            if self.profile is None:
                raise ValueError("outcome.seconds: a Bandit without a profile needs timed rounds, got None")
            rows = requests + int(outcome.lengths.sum())
            speed = self.profile.steps_per_second(rows, requests=requests, context_tokens=outcome.context_tokens)
            seconds = 1 / float(speed[rows])
        for arm in self._arms[bucket]:
            arm.weight *= self.discount
            arm.reward *= self.discount
        self._arms[bucket][chosen].weight += 1
        self._arms[bucket][chosen].reward += (requests + int(outcome.accepted.sum())) / seconds

    def _choose(self, arms: list[_Arm]) -> int:
        """The first arm not tried yet, from the longest down; else the one with the best bound, of equals the first."""
        for k in reversed(range(len(arms))):
            if arms[k].weight == 0:
                return k
        means = [arm.reward / arm.weight for arm in arms]
        total = math.log(max(math.e, sum(arm.weight for arm in arms)))
        scale = self.width * max(means)
        bounds = [m + scale * math.sqrt(total / arm.weight) for m, arm in zip(means, arms, strict=True)]
        return bounds.index(max(bounds))
