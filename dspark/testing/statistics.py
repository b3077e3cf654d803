"""Tests of a sampler's output against the distributions that it claims to have drawn from."""

from __future__ import annotations

import torch
from torch import Tensor


def probability_integral(probabilities: Tensor, tokens: Tensor, uniforms: Tensor) -> Tensor:
    """Map each drawn token to a number that is uniform on [0, 1] exactly if it was drawn from its distribution.

    Tokens are ranked from the most to the least likely; a token's value is the probability of all ranked before it plus
    a random fraction of its own (Rosenblatt's transform with randomisation for discrete laws). Values of one sequence
    are independent, whatever the tokens depended on.

    Args:
        probabilities: ``[n, V]`` the distribution of each draw, given everything drawn before.
        tokens: ``[n]`` int64 what was drawn.
        uniforms: ``[n]`` random numbers in [0, 1).

    Returns:
        ``[n]`` float64.
    """
    p = probabilities.double()
    own = p.gather(1, tokens[:, None])  # [n, 1]
    index = torch.arange(p.shape[1], device=p.device)
    before = (p > own) | ((p == own) & (index < tokens[:, None]))  # ties by id
    return (p * before).sum(1) + uniforms.double() * own.squeeze(1)


def uniformity_p_value(values: Tensor, bins: int = 20) -> float:
    """Chi-square test that ``values [n]`` in [0, 1] are uniform: the chance of a fit this bad if they are.

    Raises:
        ValueError: fewer than five values are expected in a bin, too few for the test to mean anything.

    >>> uniformity_p_value(torch.arange(1000) / 1000) > 0.99
    True
    >>> uniformity_p_value(torch.zeros(1000)) < 1e-9
    True
    """
    expected = values.numel() / bins
    if expected < 5:
        raise ValueError(f"values: expected at least {5 * bins} for {bins} bins, got {values.numel()}")
    counts = torch.histc(values.double(), bins=bins, min=0.0, max=1.0)
    return chi_square_p_value(float(((counts - expected) ** 2 / expected).sum()), bins - 1)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """The chance that a chi-square variable with so many degrees of freedom is at least ``statistic``.

    >>> round(chi_square_p_value(3.841, 1), 3)
    0.05
    """
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def detectable_variation(count: int, degrees: int, false_alarm: float, missed: float = 0.01) -> float:
    """The total variation that a chi-square test of ``count`` independent draws misses with a chance of ``missed``.

    Draws from a law at total variation d from the stated one have a noncentrality of at least ``4 d² count`` (by Cauchy
    and Schwarz), so this holds wherever in the cells the variation lies. The quantiles are normal approximations.

    >>> round(detectable_variation(1000, 1, 1e-4), 2), round(detectable_variation(100_000, 100, 1e-4), 3)
    (0.11, 0.018)
    """
    z = torch.special.ndtri(torch.tensor([1 - false_alarm, 1 - missed], dtype=torch.float64)).tolist()
    spread = 2 / (9 * degrees)
    limit = degrees * (1 - spread + z[0] * spread**0.5) ** 3  # Wilson and Hilferty
    root = 2**0.5 * z[1] + (2 * z[1] ** 2 + 2 * limit - degrees) ** 0.5
    noncentrality = (root**2 - degrees) / 2
    return float((noncentrality / (4 * count)) ** 0.5)
