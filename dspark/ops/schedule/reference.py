"""The torch reference of ``schedule_prefix``, and the numbers that it shares with the kernels.

Throughput is a product of a sum of survivals, and a sum of floats depends on its order. So survivals are cut to whole
multiples of 2^-30 and summed as integers: any order gives the same sum, and whoever follows the definition, sorted or
not, one by one or in chunks, reaches the same decision to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

ScheduleMode = Literal["early_stop", "global", "budget"]

UNIT_BITS = 30
"""A survival of 1 is 2^30 units; float32 tells two confidences apart by 2^-24 at best."""
MAX_ROWS = 2**20
"""Rows that a batch may verify: float64 holds all sums of so many survivals."""
MAX_SPEED = 1e280
"""Steps per second are clamped to this, so that no product overflows."""
_MANY = 8192
"""Drafts above which a CPU sorts them by numpy."""


@dataclass(frozen=True)
class _Pool:
    """What there is to choose from.

    Attributes:
        units: ``[R, G]`` int32, worth of each draft that may be chosen; 0 of one that may not.
        floors: ``[R]`` int64, drafts that are verified whatever they are worth; None is 0.
        base: ``[]`` int64, worth of the anchors and of what lies below the floors.
    """

    units: Tensor
    floors: Tensor | None
    base: Tensor

    @property
    def forced(self) -> Tensor | int:
        """Drafts below the floors, over all requests."""
        return 0 if self.floors is None else self.floors.sum()


def schedule(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: ScheduleMode,
    budget: Tensor | None,
    max_lengths: Tensor | None,
    min_lengths: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    """The lengths ``[R]`` int64; arguments as checked by :func:`dspark.ops.schedule_prefix`, with R above 0."""
    requests, draft_len = confidence.shape
    if draft_len == 0:
        return torch.zeros(requests, dtype=torch.int64, device=confidence.device)
    pool = _pool(confidence, max_lengths, min_lengths, weights)
    keys = (1 << UNIT_BITS) - pool.units  # [R, G], ascending from the draft worth most
    taken = (1 << UNIT_BITS) - _ascending(keys.view(-1))  # [R * G], units in order of rank
    if budget is not None:
        count = torch.minimum(budget - pool.forced, (taken > 0).sum())
    elif steps_per_second is not None:
        count = _count(mode, taken, pool, requests, steps_per_second)
    else:
        raise ValueError(f'steps_per_second: mode "{mode}" needs the speed curve "C", got None')
    lengths = _first(count, pool.units, taken)
    return lengths if pool.floors is None else lengths + pool.floors


def _ascending(keys: Tensor) -> Tensor:
    """Sorted integers; many of them numpy sorts several times as fast on a CPU, which no graph captures."""
    if keys.device.type == "cpu" and keys.shape[0] > _MANY:
        return torch.from_numpy(np.sort(keys.numpy()))
    return keys.sort().values


def _first(count: Tensor, units: Tensor, taken: Tensor) -> Tensor:
    """How many of the ``count`` drafts worth most each request has ``[R]``, ties by (request, k)."""
    least = taken.index_select(0, (count - 1).clamp(min=0).view(1))  # what the last of them is worth
    above, ties = units > least, units == least
    among_ties = ties.view(-1).cumsum(0, dtype=torch.int32).view_as(ties)  # place of each, from 1
    return (above | ties & (among_ties <= count - above.sum())).sum(1)


def survival_of(confidence: Tensor) -> Tensor:
    """Chance ``[G, R]`` float64 that all drafts up to each one survive, from confidences ``[R, G]``.

    NaN counts as 0, and others are clamped to [0, 1]. Along the first axis the product goes from draft to draft, one
    rounding each, on every device.
    """
    chances = torch.empty(confidence.t().shape, dtype=torch.float64, device=confidence.device).copy_(confidence.t())
    return chances.clamp_(0, 1).nan_to_num_(0.0).cumprod(0)


def _pool(confidence: Tensor, max_lengths: Tensor | None, min_lengths: Tensor | None, weights: Tensor | None) -> _Pool:
    requests, draft_len = confidence.shape
    worth = survival_of(confidence)
    if weights is None:
        base = torch.full((), requests << UNIT_BITS, device=confidence.device)
    else:
        weight = weights.double().nan_to_num(0.0).clamp(0, 1)
        worth *= weight
        base = (weight * 2.0**UNIT_BITS).long().sum()
    units = worth.mul_(2.0**UNIT_BITS).int()  # [G, R]
    draft = torch.arange(draft_len, device=confidence.device)[:, None]
    floors = None
    if min_lengths is not None:
        caps = min_lengths if max_lengths is None else torch.minimum(min_lengths.long(), max_lengths.long())
        floors = caps.long().clamp(0, draft_len)
        forced = draft < floors
        base = base + units.where(forced, 0).sum()
        units.masked_fill_(forced, 0)
    if max_lengths is not None:
        units.masked_fill_(draft >= max_lengths, 0)
    return _Pool(units.t().contiguous(), floors, base)


def _count(mode: ScheduleMode, taken: Tensor, pool: _Pool, requests: int, steps_per_second: Tensor) -> Tensor:
    """How many of the ranked drafts are taken, beyond the floors."""
    size = taken.shape[0]
    speed = steps_per_second[requests : requests + size + 1]
    if pool.floors is not None:
        rows = torch.arange(size + 1, device=taken.device) + pool.forced
        speed = speed.index_select(0, rows.clamp_(max=size))
    speed = speed.double().nan_to_num(0.0).clamp_(0, MAX_SPEED)  # [1 + R * G], after n drafts
    theta = torch.cat([pool.base.view(1), taken]).cumsum_(0) * speed  # [1 + R * G], of exact sums
    possible = taken > 0
    if mode == "early_stop":
        rises = (theta[1:] > theta[:-1]) & possible
        return torch.cat([rises, rises.new_zeros(1)]).byte().argmin()
    theta[1:].masked_fill_(~possible, -1.0)
    return theta.argmax()
