"""A policy that knows what will be accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals


class KnownAcceptance:
    """An upper bound: the drafts that will be accepted are verified, and no other.

    It could not be run outside a simulator, and under the ratio rule it would be biased (contract C9). It has no say in
    whether to draft; :class:`~dspark.policy.Gated` around it has.

    Args:
        through_rejected: verify the first rejected draft as well, as :class:`~dspark.policy.Oracle` does to be sound.
    """

    def __init__(self, *, through_rejected: bool = False) -> None:
        self.through_rejected = through_rejected
        self._accepted: Tensor | None = None

    def __repr__(self) -> str:
        return f"KnownAcceptance(through_rejected={self.through_rejected})"

    def reveal(self, accepted: Tensor) -> None:
        self._accepted = accepted

    def plan(self, signals: Signals) -> Tensor:
        if self._accepted is None:
            raise ValueError("reveal: expected what will be accepted before each plan, as the simulator gives it")
        return torch.minimum(self._accepted + self.through_rejected, signals.max_lengths)

    def observe(self, outcome: Outcome) -> None:
        self._accepted = None
