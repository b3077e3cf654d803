"""What policies and confidence providers keep by class of request, and the shares of drafts that they learn."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

PRIOR = 0.8
"""The chance of acceptance of drafts that nothing is known of."""


class ByClass:
    """Tensors with a row for each class of request, which it gets when it is first seen."""

    def __init__(self) -> None:
        self._classes: dict[Hashable, int] = {}
        self._state: dict[str, Tensor] = {}

    def _rows_of(self, classes: tuple[Hashable, ...] | None, requests: int, fresh: dict[str, Tensor]) -> Tensor:
        """The row of each request's class, ``[R]`` int64.

        Args:
            classes: of the requests; None is one class for all.
            requests: R.
            fresh: what each tensor of the state begins with, ``[G, ...]``; a first row is made where there is none.

        Raises:
            ValueError: the state has another draft length.
        """
        names = {None: None} if classes is None else dict.fromkeys(classes)
        for name in names:
            self._classes.setdefault(name, len(self._classes))
        for key, one in fresh.items():
            have = self._state.get(key)
            if have is None:
                have = self._state[key] = one[None][:0]
            if have.shape[1:] != one.shape:
                raise ValueError(f"signals: expected draft length {have.shape[1]} as before, got {len(one)}")
            if missing := len(self._classes) - len(have):
                self._state[key] = torch.cat([have, one.expand(missing, *one.shape)])
        device = next(iter(fresh.values())).device
        if classes is None:
            return torch.full((requests,), self._classes[None], device=device)
        return torch.tensor([self._classes[name] for name in classes], dtype=torch.int64, device=device)


def no_shares(draft_len: int, device: torch.device) -> dict[str, Tensor]:
    """What :func:`shares_accepted` begins with: no draft seen at any position."""
    none = torch.zeros(draft_len, dtype=torch.float64, device=device)
    return {"seen": none, "accepted": none}


def shares_accepted(state: dict[str, Tensor], shrinkage: float) -> Tensor:
    """``[classes, G]`` chance that each position is accepted given that those before it were.

    Little seen positions lean on their class's mean over all positions, which ``shrinkage`` observations outweigh; and
    a new class on :data:`PRIOR`.
    """
    seen, accepted = state["seen"], state["accepted"]
    level = (accepted.sum(1, keepdim=True) + PRIOR * shrinkage) / (seen.sum(1, keepdim=True) + shrinkage)
    return (accepted + level * shrinkage) / (seen + shrinkage)
