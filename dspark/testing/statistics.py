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
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_degrees = torch.tensor((bins - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, statistic / 2))
