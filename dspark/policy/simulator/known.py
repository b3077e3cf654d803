"""A policy that knows what will be accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals


class KnownAcceptance:
    """An upper bound: the drafts that will be accepted are verified, and no other.

    It could not be run outside a simulator, and under the ratio rule it would be biased (contract C9). It has no say in
    whether to draft; :class:`~dspark.policy.Gated` around it has.
    """

    def __init__(self) -> None:
        self._accepted: Tensor | None = None

    def __repr__(self) -> str:
        return "KnownAcceptance()"

    def reveal(self, accepted: Tensor) -> None:
        self._accepted = accepted

    def plan(self, signals: Signals) -> Tensor:
        if self._accepted is None:
            raise ValueError("reveal: expected what will be accepted before each plan, as the simulator gives it")
        return torch.minimum(self._accepted, signals.max_lengths)

    def observe(self, outcome: Outcome) -> None:
        self._accepted = None
