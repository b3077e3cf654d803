"""A line of the ablation's table, and the statistics in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.requests import Round

PLAIN = "plain"
"""The name of decoding without drafts."""

_RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One policy under one rule at one temperature and draft length, over the prompts of one domain.

    Attributes:
        draft_len: drafts per round (levels of a tree).
        domain: kind of text, or ``"all"``.
        tokens_per_s: emitted tokens over seconds, prompt processing included; median over repeats.
        speedup: plain decoding's time per token over this policy's, measured next to it on the same prompt; median
            over prompts and repeats, with its 95 % bootstrap interval in ``speedup_ci``.
        tau: tokens emitted per round, the bonus included.
        verified_per_round: drafts sent to the target per round.
        accept_by_position: of the drafts verified at each position whose predecessors were accepted, the fraction
            accepted; None where there was none. Of a tree: of the rounds that reached a depth, those that got beyond.
        lossless: at temperature 0 and under ``coupled``, the tokens equal plain decoding's; otherwise, the tokens fit
            the target's own distributions (chi-square, p > 1e-4); None where they are too few to tell.
        near_ties: prompts whose output left plain decoding's at two scores within rounding of each other; they count
            as lossless.
    """

    policy: str
    rule: str
    temperature: float
    draft_len: int
    domain: str
    tokens_per_s: float
    speedup: float
    speedup_ci: tuple[float, float]
    tau: float
    verified_per_round: float
    accept_by_position: list[float | None]
    lossless: bool | None
    prompts: int
    tokens: int
    near_ties: int

    @property
    def key(self) -> tuple[str, str, float, int, str]:
        """What it is a measurement of."""
        return self.policy, self.rule, self.temperature, self.draft_len, self.domain


@dataclass(frozen=True)
class Interval:
    """A median and the ends of its 95 % interval."""

    median: float
    low: float
    high: float


def speedups(own: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> Interval:
    """The median ratio of plain seconds to own ones, paired by prompt and repeat.

    The interval is a bootstrap over prompts (their repeats go with them, since they are not independent), seeded.

    >>> speedups([[1.0, 1.0], [2.0, 2.0]], [[2.0, 2.0], [4.0, 4.0]])
    Interval(median=2.0, low=2.0, high=2.0)
    """
    ratios = torch.tensor(plain, dtype=torch.float64) / torch.tensor(own, dtype=torch.float64)  # [prompts, repeats]
    generator = torch.Generator().manual_seed(0)
    resampled = torch.randint(len(ratios), (_RESAMPLES, len(ratios)), generator=generator)
    medians = ratios[resampled].flatten(1).quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(ratios.quantile(0.5).item(), low, high)


def acceptance_by_position(rounds: Sequence[Round]) -> list[float | None]:
    """Conditional acceptance at each draft position that any round reached.

    >>> acceptance_by_position([Round(2, 2, 2, 3), Round(2, 2, 0, 1)])
    [0.5, 1.0]
    """
    positions = range(1, max((r.proposed for r in rounds), default=0) + 1)
    reached = [sum(r.verified >= k and r.accepted >= k - 1 for r in rounds) for k in positions]
    passed = [sum(r.accepted >= k for r in rounds) for k in positions]
    return [p / n if n else None for p, n in zip(passed, reached, strict=True)]
