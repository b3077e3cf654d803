"""One length for all, chosen by how often drafts were accepted lately (SmartSpec, arXiv 2406.14066; TurboSpec)."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.policy.by_class import ByClass, no_shares, shares_accepted
from dspark.policy.protocol import Outcome, Signals
from dspark.policy.tracked import AnyProfile, check_profile, learn_cost, speeds


class Goodput(ByClass):
    """Verify K drafts of every request, the K with the best expected tokens per second.

    The chance that position k is accepted given that those before it were is a moving average over past rounds, by
    class of request (``Signals.classes``), since one class's sampling parameters say nothing of another's. Little seen
    positions lean on their class's average over all positions, and a new class on 0.8. It needs no confidence, and
    nothing of the round itself but its size, so it is non-anticipating.

    A position that is not verified is not learned about: what is known of it fades, and every ``explore``-th round
    verifies one draft more than seems best.

    Args:
        profile: what a round costs at each number of verified rows.
        decay: what a round's evidence is worth one round later.
        shrinkage: how many observations the average over positions is worth.
        explore: rounds between two that try one draft more; 0 never tries.

    Raises:
        TypeError: ``profile`` is no profile.
        ValueError: ``decay`` is not in (0, 1], or another number is out of range.
    """

    def __init__(self, profile: AnyProfile, *, decay: float = 0.98, shrinkage: float = 4.0, explore: int = 32) -> None:
        super().__init__()
        if not 0 < decay <= 1:
            raise ValueError(f"decay: expected a number in (0, 1], got {decay}")
        if not shrinkage > 0 or explore < 0:
            raise ValueError(f"shrinkage, explore: expected above 0 and at least 0, got {shrinkage} and {explore}")
        self.profile = check_profile(profile)
        self.decay, self.shrinkage, self.explore = decay, shrinkage, explore
        self._rounds = 0

    def __repr__(self) -> str:
        return f"Goodput(decay={self.decay:g})"

    def plan(self, signals: Signals) -> Tensor:
        requests, draft_len = len(signals.request_ids), signals.draft_len
        device = signals.max_lengths.device
        classes = self._rows_of(signals.classes, requests, no_shares(draft_len, device))
        survival = shares_accepted(self._state, self.shrinkage).cumprod(1)[classes]  # [R, G]
        within = torch.arange(draft_len, device=device) < signals.max_lengths[:, None]
        gains = torch.cat([survival.new_full((1,), requests), survival.where(within, 0).sum(0)])  # [1 + G]
        rows = torch.cat([within.new_full((1,), requests, dtype=torch.int64), within.sum(0)]).cumsum(0)
        best = (gains.cumsum(0) * speeds(self.profile, signals)[rows]).argmax()
        self._rounds += 1
        if self.explore and self._rounds % self.explore == 0:
            best = best + 1
        return torch.minimum(signals.max_lengths, best)

    def observe(self, outcome: Outcome) -> None:
        """Count what was judged: of a request, the drafts accepted and the one rejected after them, if any."""
        learn_cost(self.profile, outcome)
        if not self._state:
            return
        draft_len = self._state["seen"].shape[1]
        fresh = no_shares(draft_len, outcome.lengths.device)
        classes = self._rows_of(outcome.classes, len(outcome.request_ids), fresh)
        for name, count in zip(("seen", "accepted"), outcome.judged(draft_len), strict=True):  # [R, G] each
            self._state[name] = (self._state[name] * self.decay).index_add(0, classes, count)
