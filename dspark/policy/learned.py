"""Confidence providers that learn while they run, each class of requests by itself.

What a round tells depends on how far it was verified. Draft k is *judged* if it was verified and those before it were
accepted: it was accepted or not. Whether the first k drafts are *all* accepted is known of every round that verified k
drafts; a shorter one that ended in a rejection would tell as well, but only of failures, and is left out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.policy.by_class import PRIOR, ByClass, no_shares, shares_accepted
from dspark.policy.calibration import GRID, temper
from dspark.policy.confidence import ConfidenceProvider, TrainedHead
from dspark.policy.protocol import Outcome, Signals

_LEAST_CURVATURE = 0.02  # p (1 - p) of a sure prediction would let one surprise undo everything learned
_LEAST_CHANCE = 1e-4  # heads that are surer than this say no more by it


class _Round(NamedTuple):
    """What was shown in the round that runs: each request's row of the state, and ``[R, G]`` numbers."""

    request_ids: tuple[int, ...]
    rows: Tensor
    shown: Tensor


class _Learner(ByClass, ABC):
    """State by class of request, which fades as that class's own evidence comes in: other classes do not touch it.

    ``decay`` is what a judged draft is worth one judged draft of its class and position later.
    """

    def __init__(self, decay: float) -> None:
        super().__init__()
        if not 0 < decay <= 1:
            raise ValueError(f"decay: expected a number in (0, 1], got {decay}")
        self.decay = decay
        self._round: _Round | None = None

    def observe(self, outcome: Outcome) -> None:
        """Learn from the round whose confidences were asked for last.

        Raises:
            ValueError: the outcome is about other requests.
        """
        known, self._round = self._round, None
        if known is None:
            return
        if known.request_ids != outcome.request_ids:
            raise ValueError(f"outcome: expected requests {known.request_ids}, got {outcome.request_ids}")
        self._learn(known, outcome)

    @abstractmethod
    def _learn(self, known: _Round, outcome: Outcome) -> None:
        """Take in what came of the round that was shown."""

    def _begin(self, signals: Signals, shown: Tensor, fresh: dict[str, Tensor]) -> Tensor:
        """Note a round, and make state for classes that are new; returns each request's row of the state."""
        rows = self._rows_of(signals.classes, len(signals.request_ids), fresh)
        self._round = _Round(signals.request_ids, rows, shown)
        return rows

    def _sum(self, rows: Tensor, values: Tensor) -> Tensor:
        """Sums ``[classes, ...]`` of ``values [R, ...]`` by class.

        A product of matrices and not a scatter, so that ranks that see the same outcomes get the same bits.
        """
        member = torch.arange(len(self._classes), device=values.device)[:, None] == rows  # [classes, R]
        return (member.to(values.dtype) @ values.flatten(1)).view(-1, *values.shape[1:])

    def _fade(self, name: str, rows: Tensor, evidence: Tensor, weight: Tensor) -> None:
        """Let the state fade by the judged drafts in ``weight [R, G]``, then add ``evidence [R, G, ...]``."""
        have = self._state[name]
        fade = self.decay ** self._sum(rows, weight)  # [classes, G]
        self._state[name] = have * fade.view(*fade.shape, *[1] * (have.ndim - 2)) + self._sum(rows, evidence)


class RunningMean(_Learner):
    """Per position, the share of drafts accepted lately: no head needed, and no difference between requests of a class.

    Little seen positions lean on their class's mean over all positions, and a new class on 0.8. Positions that are
    never verified are never learned about; a policy with a floor, or one that explores, keeps them fresh.

    Args:
        decay: what a judged draft is worth one judged draft of its class and position later.
        shrinkage: how many drafts the mean over positions is worth.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, *, decay: float = 0.99, shrinkage: float = 4.0) -> None:
        super().__init__(decay)
        if not shrinkage > 0:
            raise ValueError(f"shrinkage: expected above 0, got {shrinkage}")
        self.shrinkage = shrinkage

    def __repr__(self) -> str:
        return f"RunningMean(decay={self.decay:g})"

    def confidence(self, signals: Signals) -> Tensor:
        fresh = no_shares(signals.draft_len, signals.max_lengths.device)
        rows = self._begin(signals, fresh["seen"], fresh)
        return shares_accepted(self._state, self.shrinkage).float()[rows]

    def _learn(self, known: _Round, outcome: Outcome) -> None:
        judged, accepted = outcome.judged(len(known.shown))
        self._fade("seen", known.rows, judged, judged)
        self._fade("accepted", known.rows, accepted, judged)


class _Logistic(_Learner):
    """A logistic curve of what is known of a draft, for each class and position, fitted as rounds go by.

    After each round a curve moves by one Newton step on its judged drafts, the curvature being a fading sum over the
    past.

    Args:
        decay: what a judged draft is worth one judged draft of its class and position later.
        prior: curvature to begin with, in judged drafts; more learns more slowly.

    Raises:
        ValueError: a number is out of range, or (when asked) the drafter does not give what the curve is of.
    """

    start: tuple[float, ...]
    """Weights ``[F]`` that every curve begins with."""

    def __init__(self, *, decay: float = 0.999, prior: float = 2.0) -> None:
        super().__init__(decay)
        if not prior > 0:
            raise ValueError(f"prior: expected above 0, got {prior}")
        self.prior = prior

    def __repr__(self) -> str:
        return f"{type(self).__name__}(decay={self.decay:g})"

    @abstractmethod
    def features(self, signals: Signals) -> Tensor:
        """What is known of each draft, ``[R, G, F]`` float64."""

    def confidence(self, signals: Signals) -> Tensor:
        features = self.features(signals)
        shape = (signals.draft_len, len(self.start))
        fresh = {
            "curve": features.new_tensor(self.start).expand(shape),
            "curvature": features.new_zeros(*shape, len(self.start)),
        }
        rows = self._begin(signals, features, fresh)
        return torch.sigmoid(self._logits(rows, features)).float()

    def _logits(self, rows: Tensor, features: Tensor) -> Tensor:
        return (self._state["curve"][rows] * features).sum(-1)  # [R, G]

    def _learn(self, known: _Round, outcome: Outcome) -> None:
        features = known.shown
        judged, accepted = outcome.judged(features.shape[1])
        chance = torch.sigmoid(self._logits(known.rows, features))
        weight = judged * (chance * (1 - chance)).clamp(min=_LEAST_CURVATURE)
        outer = features[..., None] * features[..., None, :]  # [R, G, F, F]
        self._fade("curvature", known.rows, weight[..., None, None] * outer, judged)
        slope = self._sum(known.rows, (accepted - judged * chance)[..., None] * features)  # [classes, G, F]
        curvature = self._state["curvature"]
        ridge = self.prior * PRIOR * (1 - PRIOR) * torch.eye(curvature.shape[-1]).to(curvature)
        step = torch.linalg.solve(curvature + ridge, slope[..., None]).squeeze(-1)
        self._state["curve"] = self._state["curve"] + step


class MarginLogistic(_Logistic):
    """The lead of the drafter's best token over its second best, through a logistic curve fitted as rounds go by.

    The curve is ``σ(a + b log(1 + margin))`` and begins with 0.8 whatever the margin. A margin tells most at
    temperature 0. Arguments as of the base class: ``decay``, what a judged draft is worth one judged draft of its class
    and position later; ``prior``, curvature to begin with, in judged drafts.
    """

    start = (math.log(PRIOR / (1 - PRIOR)), 0.0)

    def features(self, signals: Signals) -> Tensor:
        lead = _lead(self, signals)
        return torch.stack([torch.ones_like(lead), lead], -1)


class HeadMarginLogistic(_Logistic):
    """The trained head's confidence and the margin, weighed against each other as rounds go by.

    The curve is ``σ(a logit(c) + b log(1 + margin) + d)`` and begins with the head's own confidence. At temperature 0
    the margin may tell more than the head, at 1 it tells nearly nothing; this learns which. Arguments as of
    :class:`MarginLogistic`.
    """

    start = (1.0, 0.0, 0.0)

    def features(self, signals: Signals) -> Tensor:
        sureness = signals.confidence_for(self).double().nan_to_num(0.0).logit(eps=_LEAST_CHANCE)
        lead = _lead(self, signals)
        return torch.stack([sureness, lead, torch.ones_like(lead)], -1)


def _lead(provider: object, signals: Signals) -> Tensor:
    """``log(1 + margin)``, ``[R, G]`` float64."""
    if signals.margin is None:
        raise ValueError(f"margin: {type(provider).__name__} needs the drafter's margins in the signals, got None")
    return signals.margin.double().nan_to_num(0.0).clamp(min=0).log1p()


class OnlineTempered(_Learner):
    """Sequential temperature scaling that is fitted as rounds go by, from exponentially weighted bins.

    For each class, position and temperature of :data:`~dspark.policy.calibration.GRID` it keeps, by bin of the running
    product, how far the predictions have exceeded what happened. A position's temperature is the one with the smallest
    calibration error, those before it being what they were when the round was planned; all begin with 1, and leave it
    as evidence comes in.

    Args:
        provider: whose confidences; the trained head's by default.
        decay: what a verified draft is worth one verified draft of its class and position later.
        prior: how many drafts' worth of error per unit of log-temperature a better fit has to make up for.
        bins: of equal width.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        provider: ConfidenceProvider | None = None,
        *,
        decay: float = 0.999,
        prior: float = 4.0,
        bins: int = 10,
    ) -> None:
        super().__init__(decay)
        if not prior > 0 or bins < 1:
            raise ValueError(f"prior, bins: expected above 0 and at least 1, got {prior} and {bins}")
        self.provider: ConfidenceProvider = TrainedHead() if provider is None else provider
        self.prior, self.bins = prior, bins

    def __repr__(self) -> str:
        return f"OnlineTempered({self.provider})"

    def temperatures(self, name: Hashable = None) -> list[float]:
        """Those of a class at present, which reads the device; all 1 for a class not seen yet.

        Raises:
            ValueError: no round was planned yet.
        """
        if not self._state:
            raise ValueError("temperatures: expected a round before, got none")
        present = self._temperatures()
        if name not in self._classes:
            return [1.0] * present.shape[1]
        values: list[float] = present[self._classes[name]].tolist()
        return values

    def confidence(self, signals: Signals) -> Tensor:
        raw = self.provider.confidence(signals).double().nan_to_num(0.0)
        rows = self._begin(signals, raw, {"excess": raw.new_zeros(signals.draft_len, len(GRID), self.bins)})
        return temper(raw, self._temperatures()[rows]).float()

    def _temperatures(self) -> Tensor:
        """``[classes, G]`` float64."""
        excess = self._state["excess"]
        grid = torch.tensor(GRID, dtype=excess.dtype, device=excess.device)
        cost = excess.abs().sum(-1) + self.prior * grid.log().abs()  # [classes, G, temperatures]
        return grid[cost.argmin(-1)]

    def observe(self, outcome: Outcome) -> None:
        self.provider.observe(outcome)
        super().observe(outcome)

    def _learn(self, known: _Round, outcome: Outcome) -> None:
        raw = known.shown
        slot = torch.arange(raw.shape[1], device=raw.device)
        judged = (slot < outcome.lengths[:, None]).double()  # of whether all drafts so far are accepted
        happened = (slot < outcome.accepted[:, None]).double()
        survival = temper(raw, self._temperatures()[known.rows]).cumprod(1)
        before = torch.cat([torch.ones_like(raw[:, :1]), survival[:, :-1]], 1)
        grid = torch.tensor(GRID, dtype=raw.dtype, device=raw.device)
        predicted = before[..., None] * temper(raw[..., None], grid)  # [R, G, temperatures]
        index = (predicted * self.bins).long().clamp(max=self.bins - 1)
        excess = (predicted - happened[..., None]) * judged[..., None]
        here = index[..., None] == torch.arange(self.bins, device=raw.device)
        binned = here * excess[..., None]  # [R, G, temperatures, bins]
        self._fade("excess", known.rows, binned, judged)
