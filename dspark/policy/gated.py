"""Policies that decide whether to draft at all: a plan comes when the drafts, and their cost, are made."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from dspark.policy.cost import StepCost
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy

_HORIZON = 64
"""Rounds of requests that a gate looks back on: one round of many requests says as much as many rounds of few."""


@runtime_checkable
class DraftGate(Protocol):
    """A policy that is asked before each round whether to draft at all."""

    def drafts(self, requests: int, context_tokens: int) -> bool:
        """Whether to draft for ``requests`` with ``context_tokens`` of context; if not, nothing is planned."""
        ...


@runtime_checkable
class Clairvoyant(Protocol):
    """A policy that the simulator tells, before each plan, what would be accepted."""

    def reveal(self, accepted: Tensor) -> None:
        """Take ``[R]`` int64, the drafts that the target would accept of each request."""
        ...


class Gated:
    """Another policy, and no drafts while drafting does not pay.

    A :meth:`plan` comes when the drafts are made, and their cost with them: a policy that verifies none of them has
    still paid for all. This one compares the tokens per second of drafted rounds, at their modelled cost, with those of
    plain rounds of as many requests. While the running mean of that ratio is below 1, it rests from drafting, then
    tries one round; each try that fails doubles the rest. It looks at earlier rounds only, so nothing drawn in a round
    decides about that round.

    Args:
        policy: plans the rounds that are drafted.
        cost: of rounds with drafts and without.
        rest: rounds without drafts before the first try.
        max_rest: most of them.

    Raises:
        ValueError: not 1 <= rest <= max_rest.
    """

    def __init__(self, policy: VerifyPolicy, cost: StepCost, *, rest: int = 16, max_rest: int = 256) -> None:
        if not 1 <= rest <= max_rest:
            raise ValueError(f"rest: expected 1 <= rest <= max_rest, got {rest} and {max_rest}")
        self.policy, self.cost = policy, cost
        self._first_rest, self._max_rest = rest, max_rest
        self._rest, self._left = rest, 0
        self._gain = 2.0  # one unlucky round at the start is no reason to rest
        self._drafted = False

    def __repr__(self) -> str:
        return f"Gated({self.policy!r})"

    def drafts(self, requests: int, context_tokens: int) -> bool:
        self._left = max(0, self._left - 1)
        return self._left == 0

    def plan(self, signals: Signals) -> Tensor:
        self._drafted = True
        return self.policy.plan(signals)

    def reveal(self, accepted: Tensor) -> None:
        if isinstance(self.policy, Clairvoyant):
            self.policy.reveal(accepted)

    def observe(self, outcome: Outcome) -> None:
        self.policy.observe(outcome)
        if not self._drafted:
            return
        self._drafted = False
        requests, context = len(outcome.request_ids), outcome.context_tokens or 0
        verified, accepted = int(outcome.lengths.sum()), int(outcome.accepted.sum())
        drafted = (requests + accepted) / self.cost.seconds(requests + verified, requests, context, True)
        gain = drafted * self.cost.seconds(requests, requests, context, False) / requests
        self._gain += (gain - self._gain) * requests / (requests + _HORIZON)
        if self._gain >= 1:
            self._rest = self._first_rest
        else:
            self._left = self._rest + 1
            self._rest = min(2 * self._rest, self._max_rest)
