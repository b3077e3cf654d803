"""How well predicted chances fit what happened: ranking, calibration error, and how much of that error is chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bin:
    """The predictions in one part of [0, 1]: how many, their mean, and the share of them that came true."""

    count: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Reliability:
    """How well predictions fit.

    Attributes:
        count: predictions.
        predicted: their mean; None where there are none.
        observed: share that came true; None where there are none.
        auc: :func:`area_under_curve`; None where all or none came true.
        ece: :func:`expected_calibration_error`.
        floor: :func:`calibration_floor`; an ``ece`` near it tells of no miscalibration.
        bins: of equal width; empty ones are left out.
    """

    count: int
    predicted: float | None
    observed: float | None
    auc: float | None
    ece: float
    floor: float
    bins: tuple[Bin, ...]

    @classmethod
    def of(cls, predicted: Tensor, happened: Tensor, bins: int = 10) -> Reliability:
        """Compare predictions ``[n]`` in [0, 1] with ``[n]`` bools."""
        counts, sums, hits = _binned(predicted, happened, bins)
        mixed = bool(happened.any()) and not bool(happened.all())
        return cls(
            count=happened.numel(),
            predicted=float(predicted.double().mean()) if happened.numel() else None,
            observed=float(happened.double().mean()) if happened.numel() else None,
            auc=area_under_curve(predicted, happened) if mixed else None,
            ece=expected_calibration_error(predicted, happened, bins),
            floor=calibration_floor(predicted, bins),
            bins=tuple(
                Bin(int(n), p / n, y / n)
                for n, p, y in zip(counts.tolist(), sums.tolist(), hits.tolist(), strict=True)
                if n
            ),
        )


def area_under_curve(scores: Tensor, positive: Tensor) -> float:
    """Chance that a random positive scores above a random negative, ties counting half (the ROC's area).

    Args:
        scores: ``[n]`` floats.
        positive: ``[n]`` bools.

    Returns:
        From 0 to 1; NaN where there is no positive or no negative.

    >>> area_under_curve(torch.tensor([0.9, 0.8, 0.8, 0.1]), torch.tensor([True, True, False, False]))
    0.875
    """
    ordered, _ = scores[~positive].double().sort()
    values = scores[positive].double().contiguous()
    if not ordered.numel() or not values.numel():
        return math.nan
    below = torch.searchsorted(ordered, values).double()
    not_above = torch.searchsorted(ordered, values, right=True).double()
    return float(((below + not_above) / 2).mean() / len(ordered))


def expected_calibration_error(predicted: Tensor, happened: Tensor, bins: int = 10) -> float:
    """Mean distance between prediction and observed share over bins of equal width, weighted by their counts.

    Args:
        predicted: ``[n]`` in [0, 1].
        happened: ``[n]`` bools.
        bins: how many.

    >>> expected_calibration_error(torch.tensor([0.75, 0.75, 0.0, 0.0]), torch.tensor([True, False, False, False]))
    0.125
    """
    _, sums, hits = _binned(predicted, happened, bins)
    return float((sums - hits).abs().sum()) / max(predicted.numel(), 1)


def calibration_floor(predicted: Tensor, bins: int = 10) -> float:
    """The calibration error that chance alone gives: its expectation if each prediction were exactly right.

    From the normal law of a bin's hits, ``sum over bins of sqrt(2/π · Σ p (1 - p)) / n``, which takes them for
    independent. Calibration errors of few predictions are mostly this.

    >>> round(calibration_floor(torch.full((100,), 0.5)), 4)
    0.0399
    """
    p = predicted.double()
    variance = p.new_zeros(bins).index_add(0, _bin_of(p, bins), p * (1 - p))
    return float((variance * 2 / math.pi).sqrt().sum()) / max(p.numel(), 1)


def _bin_of(predicted: Tensor, bins: int) -> Tensor:
    return (predicted * bins).long().clamp(0, bins - 1)


def _binned(predicted: Tensor, happened: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """``[bins]`` float64 each: counts, sums of the predictions, and how many came true."""
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}")
    if predicted.ndim != 1 or predicted.shape != happened.shape:
        raise ValueError(
            f'predicted, happened: expected shape "n" of both, got {list(predicted.shape)} and {list(happened.shape)}'
        )
    p = predicted.double()
    index, empty = _bin_of(p, bins), p.new_zeros(bins)
    return (
        empty.index_add(0, index, torch.ones_like(p)),
        empty.index_add(0, index, p),
        empty.index_add(0, index, happened.double()),
    )
