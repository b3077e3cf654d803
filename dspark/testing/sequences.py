"""How often short sequences came up, against how often they should: a chi-square test of their joint law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

Tokens = tuple[int, ...]

LEAST_EXPECTED = 10.0
"""Counts that a cell has to expect for the chi-square law to hold out into its tail."""

_OTHER = -1


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
    table = [(mass * len(outputs), float(counts[cell]), str(list(cell))) for cell, mass in cells.items()]
    table = _pooled(table)
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
            child = ((*prefix, token), mass * float(chances[token]))
            if len(child[0]) == length or token in stop:
                cells[child[0]] = child[1]
            else:
                open_prefixes.append(child)
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
