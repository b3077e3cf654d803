"""What temperatures did to a drafter's confidences, by position: as numbers, as text, as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.policy.calibration import SequentialTemperatures, rounds_of
from dspark.policy.output import markdown_table, picture
from dspark.policy.reliability import Reliability
from dspark.policy.traces import Trace


@dataclass(frozen=True)
class Comparison:
    """The same predictions before and after."""

    before: Reliability
    after: Reliability


@dataclass(frozen=True)
class PositionReport:
    """One position of the block, counted from 1.

    Attributes:
        position: which.
        temperature: of requests whose class has none of its own.
        draft: confidence of this draft, over the rounds in which those before it were accepted.
        survival: running product of the confidences up to this one, over all rounds: are all these drafts accepted?
    """

    position: int
    temperature: float
    draft: Comparison
    survival: Comparison


@dataclass(frozen=True)
class CalibrationReport:
    """Confidences of a trace before and after temperatures.

    Attributes:
        requests, rounds: what it is about.
        tau: mean of accepted + 1.
        draft, survival: as of :class:`PositionReport`, of all positions together.
        positions: one each.
    """

    requests: int
    rounds: int
    tau: float
    draft: Comparison
    survival: Comparison
    positions: tuple[PositionReport, ...]

    @property
    def survival_ece(self) -> tuple[float, float]:
        """Calibration error of the running product before and after: the mean over positions, which the temperatures
        are to lower."""
        count = len(self.positions)
        return (
            sum(p.survival.before.ece for p in self.positions) / count,
            sum(p.survival.after.ece for p in self.positions) / count,
        )

    @property
    def survival_floor(self) -> float:
        """What that error would be, by chance, if the product after were exactly right."""
        return sum(p.survival.after.floor for p in self.positions) / len(self.positions)

    def markdown(self) -> str:
        """A summary and a table, errors in percent."""
        before, after = self.survival_ece
        draft, auc = self.draft, self.draft.before.auc
        head = (
            f"{self.rounds} rounds of {self.requests} requests, τ = {self.tau:.2f}. "
            f"AUC of the confidences: {'unknown' if auc is None else f'{auc:.3f}'}.\n\n"
            f"Calibration error of the running product, mean over positions: {100 * before:.1f} % before, "
            f"{100 * after:.1f} % after, of which chance gives {100 * self.survival_floor:.1f} %. "
            f"Of single drafts, all positions together: {100 * draft.before.ece:.1f} % before, "
            f"{100 * draft.after.ece:.1f} % after, chance {100 * draft.after.floor:.1f} %.\n\n"
        )
        names = ["position", "T", "drafts", "accepted", "confidence", "after", "AUC", "ECE", "after", "chance"]
        names += ["product ECE", "after", "chance"]
        rows = []
        for row in self.positions:
            draft, raw = row.draft, row.draft.before
            numbers = [raw.observed, raw.predicted, draft.after.predicted, raw.auc]
            errors = [e for pair in (draft, row.survival) for e in (pair.before.ece, pair.after.ece, pair.after.floor)]
            cells = [str(row.position), f"{row.temperature:.2f}", str(raw.count)]
            cells += ["" if v is None else f"{v:.3f}" for v in numbers]
            rows.append(cells + [f"{100 * e:.1f}" for e in errors])
        return head + markdown_table(names, rows)

    def save(self, path: str | Path) -> None:
        """Write everything as JSON, the bins of the reliability diagrams included."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def calibration_report(trace: Trace, temperatures: SequentialTemperatures) -> CalibrationReport:
    """Compare a trace's confidences, as they are and tempered, with what was accepted.

    Args:
        trace: rounds in which all drafts were verified; of other requests than those that were fitted on, see
            :func:`~dspark.policy.calibration.split_by_request`. Domains are the classes of the temperatures.
        temperatures: to judge, by calibration errors and diagrams of as many bins as they were fitted with.

    Raises:
        ValueError: the trace has no rows or no confidences, or there are fewer temperatures than drafts.
    """
    raw, accepted = rounds_of(trace)
    tempered = temperatures.apply(raw, [trace.domains[d] for d in trace.domain.tolist()])
    slot = torch.arange(trace.draft_len)
    survived = slot < accepted[:, None]  # [n, G]
    reached = slot <= accepted[:, None]

    def compare(mask: torch.Tensor) -> tuple[Comparison, Comparison]:
        """Of the slots in ``mask [n, G]``: the drafts reached, and the running products."""
        drafts = [
            Reliability.of(c[mask & reached], survived[mask & reached], temperatures.bins) for c in (raw, tempered)
        ]
        products = [Reliability.of(c.cumprod(1)[mask], survived[mask], temperatures.bins) for c in (raw, tempered)]
        return Comparison(*drafts), Comparison(*products)

    positions = [
        PositionReport(k + 1, temperatures.temperatures[k], *compare((slot == k).expand_as(reached)))
        for k in range(trace.draft_len)
    ]
    draft, survival = compare(torch.ones_like(reached))
    tau = float(accepted.double().mean()) + 1
    return CalibrationReport(trace.num_requests, len(trace), tau, draft, survival, tuple(positions))


def write_reliability_diagram(path: str | Path, report: CalibrationReport) -> None:
    """Draw what was observed against what was predicted, for single drafts and for running products (PNG).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    with picture(path, 2, (10, 4.8)) as (left, right):
        _diagram(left, report.draft, "one draft, given those before it")
        _diagram(right, report.survival, "all drafts up to one")


def _diagram(axes: Any, pair: Comparison, title: str) -> None:
    axes.plot([0, 1], [0, 1], color="black", linewidth=1)
    for name, own in (("before", pair.before), ("after", pair.after)):
        x, y = [b.predicted for b in own.bins], [b.observed for b in own.bins]
        most = max((b.count for b in own.bins), default=1)
        axes.plot(x, y, "-", linewidth=1)
        axes.scatter(x, y, s=[10 + 90 * b.count / most for b in own.bins], label=f"{name}: ECE {100 * own.ece:.1f} %")
    axes.set(xlabel="predicted chance", ylabel="share accepted", title=title, xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
