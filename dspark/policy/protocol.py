"""What a verification policy sees, decides and learns from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Signals:
    """What is known before a round's verify lengths are decided.

    It carries no draft token and no draft probability, so that a decision about slot k cannot depend on the token in
    it (contract C9): ``confidence[r, k]`` is a function of the tokens *before* slot k.

    Attributes:
        request_ids: the ``R`` running requests, in batch order.
        max_lengths: ``[R]`` int64, most drafts that each may verify (block size, tokens left to emit).
        draft_len: G, drafts proposed per request.
        confidence: ``[R, G]`` float32 in [0, 1], or None when the drafter has no confidence head.
        margin: ``[R, G]`` float32, how far the drafter's best token leads its second best at each slot; like
            ``confidence`` a function of the tokens before the slot, and None when nobody computed it.
        weights: ``[R]`` float32, how much a token of each request counts in a round's worth, set by the caller (a
            request with a deadline may weigh more); None is 1 for all.
        classes: what kind of request each is (a tenant, a language, a temperature), for policies that keep statistics
            by kind; None is one kind.
        context_tokens: tokens of context over all running requests, as the engine knows it on the host; None when it
            does not say.
    """

    request_ids: tuple[int, ...]
    max_lengths: Tensor
    draft_len: int
    confidence: Tensor | None
    margin: Tensor | None = None
    weights: Tensor | None = None
    classes: tuple[Hashable, ...] | None = None
    context_tokens: int | None = None

    def confidence_for(self, who: object) -> Tensor:
        """The confidences, for a policy or provider that cannot do without.

        Raises:
            ValueError: the drafter gives none.
        """
        if self.confidence is None:
            raise ValueError(f"confidence: {type(who).__name__} needs a drafter with a confidence head, got None")
        return self.confidence


@dataclass(frozen=True)
class Outcome:
    """What a round did.

    Attributes:
        request_ids: as in the round's :class:`Signals`.
        lengths: ``[R]`` int64, drafts verified.
        accepted: ``[R]`` int64, drafts accepted.
        seconds: how long the round took, or None when it was not timed.
        classes: as in the round's :class:`Signals`.
        context_tokens: as in the round's :class:`Signals`.
    """

    request_ids: tuple[int, ...]
    lengths: Tensor
    accepted: Tensor
    seconds: float | None = None
    classes: tuple[Hashable, ...] | None = None
    context_tokens: int | None = None

    def judged(self, draft_len: int) -> tuple[Tensor, Tensor]:
        """``[R, G]`` float64: which drafts were judged (accepted, or the one rejected after them), and the accepted."""
        slot = torch.arange(draft_len, device=self.lengths.device)
        accepted = slot < self.accepted[:, None]
        judged = accepted | ((slot == self.accepted[:, None]) & (slot < self.lengths[:, None]))
        return judged.double(), accepted.double()


class VerifyPolicy(Protocol):
    """How many of its drafts each request sends to the target.

    Any policy is lossless under the ``coupled`` rule. Under ``ratio`` it must be non-anticipating: whether slot k is
    verified may depend on signals up to slot k, on load and on earlier rounds, never on what was drawn in slot k or
    after it.
    """

    def plan(self, signals: Signals) -> Tensor:
        """Return ``[R]`` int64 lengths, each between 0 and ``signals.max_lengths``."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished round.

        Also called, without a :meth:`plan` before it, for a round in which no request had room for a draft.
        """
        ...


class LearnsNothing:
    """Base of the policies and the confidence providers that are the same in every round."""

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""
