"""The policy that every engine starts with: always verify k drafts."""

from __future__ import annotations

from torch import Tensor

from dspark.policy.protocol import Outcome, Signals


class FixedK:
    """Verify the first ``k`` drafts of every request, whatever the load.

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

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""
