"""Signals, outcomes and traces for the tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.policy import CostProfile, Outcome, Signals
from dspark.policy.traces import Trace

FLAT = CostProfile((1,), (1.0,))
BEND = CostProfile((1, 4, 32), (1.0, 1.4, 8.0))

Numbers = Tensor | Sequence[Sequence[float]]


def signals(
    confidence: Numbers | None = None,
    caps: Sequence[int] | None = None,
    *,
    margin: Numbers | None = None,
    requests: int = 1,
    draft_len: int = 3,
    **more: Any,
) -> Signals:
    """Of requests 0, 1, ..., as many as there are confidences or margins."""
    shown = [None if numbers is None else torch.as_tensor(numbers) for numbers in (confidence, margin)]
    for numbers in shown:
        if numbers is not None:
            requests, draft_len = numbers.shape
    lengths = torch.full((requests,), draft_len) if caps is None else torch.tensor(caps)
    return Signals(tuple(range(requests)), lengths, draft_len, *shown, **more)


def outcome(lengths: Sequence[int], accepted: Sequence[int], ids: tuple[int, ...] | None = None) -> Outcome:
    """Of requests 0, 1, ... unless others are named."""
    return Outcome(ids or tuple(range(len(lengths))), torch.tensor(lengths), torch.tensor(accepted))


def recorded(
    accepted: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]] | None = None,
    domains: Sequence[int] | None = None,
    draft_len: int = 3,
    **more: Any,
) -> Trace:
    """Rounds of requests 0, 1, ...: one after the other as if all was verified, or at the given positions."""
    if positions is None:
        positions = [np.cumsum([1, *(a + 1 for a in own[:-1])]).tolist() for own in accepted]
    kinds = domains or [0] * len(accepted)
    counts = [len(own) for own in accepted]
    return Trace(
        domains=tuple(f"d{i}" for i in range(max(kinds) + 1)),
        request=np.repeat(np.arange(len(accepted)), counts),
        round=np.concatenate([np.arange(n) for n in counts]),
        position=np.concatenate(positions),
        context=np.concatenate(positions),
        domain=np.repeat(kinds, counts),
        accepted=np.concatenate(accepted),
        draft_len=draft_len,
        **more,
    )
