"""Tests of a sampler's output against the distributions that it claims to have drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tokens = tuple[int, ...]

LEAST_EXPECTED = 10.0
"""Counts that a cell has to expect for the chi-square law to hold out into its tail."""

_OTHER = -1


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


@dataclass(frozen=True)
class JointFit:
    """A comparison of counts.

    Attributes:
        statistic: Pearson's, over ``degrees + 1`` cells.
        worst: the cell that contributes most, in words.
    """

    statistic: float
    degrees: int
    worst: str


def joint_fit(
    outputs: Sequence[Sequence[int]], law: Callable[[Tokens], Tensor], length: int, stop: Iterable[int] = ()
) -> JointFit:
    """Compare the first tokens of independent outputs with their joint law.

    A cell is a sequence, where enough of it are expected; tokens that are too rare after a prefix to have a cell each
    share one, and cells that are still too small are put together. So the vocabulary may be wide, but what is compared
    sequence by sequence is what comes up often: narrow vocabularies, or sharp distributions, show most.

    Args:
        outputs: tokens of each output.
        law: tokens before -> ``[V]`` float64, the probabilities of the next one.
        length: tokens of each output to look at.
        stop: tokens that end an output.
    """
    cells = _cells(law, length, frozenset(stop), LEAST_EXPECTED / len(outputs))
    counts = Counter(_cell_of(tuple(own[:length]), cells) for own in outputs)
    table = _pooled([(mass * len(outputs), float(counts[cell]), str(list(cell))) for cell, mass in cells.items()])
    parts = [((seen - expected) ** 2 / expected, expected, seen, name) for expected, seen, name in table]
    _, expected, seen, name = max(parts)
    return JointFit(
        statistic=sum(part[0] for part in parts),
        degrees=len(parts) - 1,
        worst=f"{name} came {seen:g} times where {expected:.1f} were expected ({_OTHER}: any other token)",
    )


def _cells(law: Callable[[Tokens], Tensor], length: int, stop: frozenset[int], least: float) -> dict[Tokens, float]:
    """Cell -> its probability. One that ends in :data:`_OTHER` is of any token without a cell after that prefix."""
    cells: dict[Tokens, float] = {}
    open_prefixes: list[tuple[Tokens, float]] = [((), 1.0)]
    while open_prefixes:
        prefix, mass = open_prefixes.pop()
        chances = law(prefix)
        enough = chances * mass >= least
        for token in enough.nonzero().flatten().tolist():
            child, its_mass = (*prefix, token), mass * float(chances[token])
            if len(child) == length or token in stop:
                cells[child] = its_mass
            else:
                open_prefixes.append((child, its_mass))
        other, rest = (*prefix, _OTHER), mass * float(chances[~enough].sum())
        if rest > 0:
            cells[other] = rest
    return cells


def _cell_of(tokens: Tokens, cells: dict[Tokens, float]) -> Tokens:
    """The cell of a sequence: its own, or that of any other token after the longest prefix that has one."""
    if tokens in cells:
        return tokens
    return next(cell for n in reversed(range(len(tokens))) if (cell := (*tokens[:n], _OTHER)) in cells)


def _pooled(table: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Put the smallest cells together until each expects enough, or one is left."""
    table = sorted(table)
    while len(table) > 1 and table[0][0] < LEAST_EXPECTED:
        (a, m, first), (b, n, second), *others = table
        name = first if first.startswith("rare") else f"rare ({first}, {second}, ...)"
        table = sorted([(a + b, m + n, name), *others])
    return table
