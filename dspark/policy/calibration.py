"""Sequential temperature scaling (paper, section 3.2): confidences whose running product means what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.policy.reliability import expected_calibration_error
from dspark.policy.traces import Trace

SCHEMA = 1
"""Version of the file format; :meth:`SequentialTemperatures.load` refuses any other."""

GRID = tuple(2 ** (i / 16) for i in sorted(range(-48, 49), key=abs))
"""Temperatures that are tried: 1/8 to 8 in steps of 4 %, the nearest to 1 first, which wins a tie."""


@dataclass(frozen=True)
class SequentialTemperatures:
    """One temperature per position, for all requests or by class of request.

    Attributes:
        temperatures: one for each position, above 0; more than 1 takes confidences towards one half.
        by_class: those of requests of a class that has its own (``Signals.classes``); others take ``temperatures``.
        bins: of the calibration error that they minimise.
        rows: rounds that they were fitted on; 0 when nobody says.

    Raises:
        ValueError: a temperature is not positive and finite, or a class has another number of them.

    >>> SequentialTemperatures((2.0, 1.0)).apply(torch.tensor([[0.9, 0.9]]))
    tensor([[0.7500, 0.9000]])
    """

    temperatures: tuple[float, ...]
    by_class: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bins: int = 10
    rows: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("temperatures: expected one for each position, got none")
        for name, own in {"temperatures": self.temperatures, **self.by_class}.items():
            if len(own) != len(self.temperatures) or not all(0 < t < math.inf for t in own):
                raise ValueError(f"{name}: expected {len(self.temperatures)} positive finite numbers, got {own}")

    @property
    def draft_len(self) -> int:
        """Positions that have a temperature."""
        return len(self.temperatures)

    def apply(self, confidence: Tensor, classes: Sequence[Hashable] | None = None) -> Tensor:
        """Divide the logits of confidences by their temperatures.

        Within a position the order stays; two values that were apart may come out equal in float32.

        Args:
            confidence: ``[R, G]`` float in [0, 1]; G may be less than ``draft_len``, not more.
            classes: of each request; None is those of no class.

        Returns:
            As ``confidence``.

        Raises:
            ValueError: the confidences have another shape, or there are more or fewer classes than requests.
        """
        if confidence.ndim != 2 or confidence.shape[1] > self.draft_len:
            raise ValueError(
                f'confidence: expected shape "R G" with G at most {self.draft_len}, got {list(confidence.shape)}'
            )
        requests, draft_len = confidence.shape
        if classes is not None and len(classes) != requests:
            raise ValueError(f"classes: expected one for each of {requests} requests, got {len(classes)}")
        rows = [self.temperatures] if not self.by_class or classes is None else [self._of(name) for name in classes]
        divisor = torch.tensor(rows, dtype=torch.float64, device=confidence.device)[:, :draft_len]
        return temper(confidence, divisor).to(confidence.dtype)

    def _of(self, name: Hashable) -> tuple[float, ...]:
        return self.by_class.get(name, self.temperatures) if isinstance(name, str) else self.temperatures

    def save(self, path: str | Path) -> None:
        """Write them as JSON."""
        content = {
            "schema": SCHEMA,
            "temperatures": self.temperatures,
            "by_class": dict(self.by_class),
            "bins": self.bins,
            "rows": self.rows,
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> SequentialTemperatures:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds something else, or is of another version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if (schema := data.pop("schema", None)) != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}, got {schema}")
            if unknown := data.keys() - {"temperatures", "by_class", "bins", "rows"}:
                raise ValueError(f"unknown fields {sorted(unknown)}")
            return cls(
                temperatures=tuple(map(float, data["temperatures"])),
                by_class={name: tuple(map(float, own)) for name, own in data.get("by_class", {}).items()},
                bins=int(data.get("bins", 10)),
                rows=int(data.get("rows", 0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a file of sequential temperatures: {error!r}") from error


def temper(confidence: Tensor, temperature: Tensor | float) -> Tensor:
    """``σ(logit(c) / T)`` in float64; 0 and 1 stay what they are.

    >>> temper(torch.tensor([0.0, 0.9, 1.0]), 2.0)
    tensor([0.0000, 0.7500, 1.0000], dtype=torch.float64)
    """
    return torch.sigmoid(torch.logit(confidence.double()) / temperature)


def fit_sts(trace: Trace, *, bins: int = 10, prior: float = 1.0, by_domain: bool = False) -> SequentialTemperatures:
    """Fit temperatures to recorded rounds: positions left to right, one search of :data:`GRID` each.

    Position k's temperature minimises the calibration error of the running product ``c_1 · ... · c_k``, those before it
    being fixed, over all rounds; what is predicted is that the first k drafts are *all* accepted. (The confidence of
    one position by itself predicts its draft given those before it, so only rounds where these were accepted tell of
    it.) Few rounds reach the last positions, where chance would set the temperature; ``prior`` keeps it near 1 there.

    The rule and the temperature of sampling matter: drafts are accepted less often under ``coupled`` than under
    ``ratio``. Fit to rounds of what will run.

    Args:
        trace: rounds in which all drafts were verified.
        bins: of the calibration error.
        prior: how many drafts' worth of error per unit of log-temperature a better fit has to make up for; 0 is the
            plain search.
        by_domain: fit each domain by itself, too, as the class of its name.

    Raises:
        ValueError: the trace has no rows or no confidences, or ``prior`` is negative.

    >>> from dspark.policy.simulator import synthetic_trace
    >>> rounds = synthetic_trace(requests=8, draft_len=2, temperature=0.5)  # over-confident: logits twice too large
    >>> [round(t) for t in fit_sts(rounds).temperatures]
    [2, 2]
    """
    if not prior >= 0:
        raise ValueError(f"prior: expected at least 0, got {prior}")
    every = _fit(trace, bins, prior)
    by_class = {name: _fit(trace.select(name), bins, prior) for name in trace.domains} if by_domain else {}
    return SequentialTemperatures(every, by_class, bins, len(trace))


def _fit(trace: Trace, bins: int, prior: float) -> tuple[float, ...]:
    confidence, accepted = rounds_of(trace)
    penalty = [prior * abs(math.log(t)) / len(trace) for t in GRID]
    survival = torch.ones(len(trace), dtype=torch.float64)
    chosen = []
    for k in range(trace.draft_len):
        survived = accepted > k
        candidates = [survival * temper(confidence[:, k], t) for t in GRID]
        errors = [expected_calibration_error(candidate, survived, bins) for candidate in candidates]
        costs = [error + extra for error, extra in zip(errors, penalty, strict=True)]
        best = costs.index(min(costs))
        chosen.append(GRID[best])
        survival = candidates[best]
    return tuple(chosen)


def rounds_of(trace: Trace) -> tuple[Tensor, Tensor]:
    """Confidences ``[n, G]`` float64 and accepted lengths ``[n]`` int64 of a trace.

    Raises:
        ValueError: the trace has no rows or no confidences.
    """
    if trace.confidence is None:
        raise ValueError("trace: expected confidences, got none; was the drafter one with a confidence head?")
    if not len(trace):
        raise ValueError("trace: expected at least one row, got none")
    return torch.from_numpy(trace.confidence).double(), torch.from_numpy(trace.accepted)


def split_by_request(trace: Trace, held_out: float = 0.5, seed: int = 0) -> tuple[Trace, Trace]:
    """Two parts of a trace with no request in common: to fit on, and to judge the fit by.

    Rounds of one request resemble each other, so a split by rows would judge a fit by what it has seen. Each domain is
    split by itself.

    Args:
        trace: of two requests or more.
        held_out: share of each domain's requests that goes to the second part, rounded.
        seed: of the choice.

    Raises:
        ValueError: ``held_out`` is not between 0 and 1, or a part would be empty.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out: expected a number between 0 and 1, got {held_out}")
    rng = np.random.default_rng(seed)
    later: list[int] = []
    for domain in range(len(trace.domains)):
        own = rng.permutation(np.unique(trace.request[trace.domain == domain]))
        later += own[: round(held_out * len(own))].tolist()
    apart = np.isin(trace.request, later)
    if apart.all() or not apart.any():
        raise ValueError(
            f"held_out: {held_out} of {trace.num_requests} requests in {len(trace.domains)} domains leaves a part empty"
        )
    return trace.take(~apart), trace.take(apart)
