"""Where confidences come from: the drafter's head, calibrated or not, a number, or a policy's own experience."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dspark.policy.bandit import Bandit
from dspark.policy.calibration import SequentialTemperatures
from dspark.policy.fixed import FixedK
from dspark.policy.gated import DraftGate
from dspark.policy.goodput import Goodput
from dspark.policy.oracle import DistributionOracle, Oracle
from dspark.policy.protocol import LearnsNothing, Outcome, Signals, VerifyPolicy

_BLIND = (Bandit, DistributionOracle, FixedK, Goodput, Oracle)


class ConfidenceProvider(Protocol):
    """Gives each draft's chance of acceptance, given that those before it were accepted.

    Entry (r, k) may depend on signals up to slot k and on finished rounds, as a policy may
    (:class:`~dspark.policy.VerifyPolicy`). Rounds are planned and observed in turn.
    """

    def confidence(self, signals: Signals) -> Tensor:
        """Return ``[R, G]`` float32 in [0, 1]."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished round; also called for rounds in which no confidence was asked for."""
        ...


class WithConfidence:
    """A policy that is shown a provider's confidences instead of the drafter's.

    Args:
        policy: one that looks at confidences.
        provider: where they come from.

    Raises:
        ValueError: ``policy`` is one that looks at none, on which the provider would have no effect, or a gate, which
            belongs outside (``Gated(WithConfidence(...), cost)``); or (when planning) the provider gives another shape.

    >>> from dspark.policy import ConfidenceThreshold
    >>> policy = WithConfidence(ConfidenceThreshold(0.5), ConstantConfidence((0.9, 0.8, 0.4)))
    >>> policy.plan(Signals((0,), torch.tensor([3]), 3, None)).tolist()
    [2]
    """

    def __init__(self, policy: VerifyPolicy, provider: ConfidenceProvider) -> None:
        if type(policy) in _BLIND:
            raise ValueError(f"policy: expected one that looks at confidences, got {policy}")
        if isinstance(policy, DraftGate):
            raise ValueError(f"policy: expected one without a gate, got {policy}; gate what this makes instead")
        self.policy, self.provider = policy, provider

    def __repr__(self) -> str:
        return f"WithConfidence({self.policy}, {self.provider})"

    def plan(self, signals: Signals) -> Tensor:
        confidence = self.provider.confidence(signals)
        shape = [len(signals.request_ids), signals.draft_len]
        if list(confidence.shape) != shape:
            raise ValueError(f'provider: expected shape "R G" = {shape}, got {list(confidence.shape)}')
        return self.policy.plan(replace(signals, confidence=confidence))

    def observe(self, outcome: Outcome) -> None:
        self.provider.observe(outcome)
        self.policy.observe(outcome)


class TrainedHead(LearnsNothing):
    """The drafter's own confidences, as they are (paper, equation 7)."""

    def __repr__(self) -> str:
        return "TrainedHead()"

    def confidence(self, signals: Signals) -> Tensor:
        """Return ``signals.confidence``.

        Raises:
            ValueError: the drafter gives none.
        """
        return signals.confidence_for(self)


class Tempered:
    """Another provider's confidences after sequential temperature scaling, with temperatures that were fitted before.

    Args:
        temperatures: from :func:`~dspark.policy.calibration.fit_sts`; those of a class of its own, if it has one, hold
            for requests of that class.
        provider: whose confidences; the trained head's by default.
    """

    def __init__(self, temperatures: SequentialTemperatures, provider: ConfidenceProvider | None = None) -> None:
        self.temperatures = temperatures
        self.provider: ConfidenceProvider = TrainedHead() if provider is None else provider

    def __repr__(self) -> str:
        return f"Tempered({self.provider})"

    def confidence(self, signals: Signals) -> Tensor:
        """The provider's, tempered.

        Raises:
            ValueError: there are fewer temperatures than drafts.
        """
        return self.temperatures.apply(self.provider.confidence(signals), signals.classes)

    def observe(self, outcome: Outcome) -> None:
        self.provider.observe(outcome)


class ConstantConfidence(LearnsNothing):
    """The same in every round: for experiments, and for drafters of known quality.

    Args:
        value: one number, or one for each position.

    Raises:
        ValueError: a number is not in [0, 1], or (when asked) there is another number of them than drafts.
    """

    def __init__(self, value: float | Sequence[float]) -> None:
        self.value = tuple(value) if isinstance(value, Sequence) else value
        if not all(0 <= v <= 1 for v in (self.value if isinstance(self.value, tuple) else [self.value])):
            raise ValueError(f"value: expected numbers in [0, 1], got {value}")

    def __repr__(self) -> str:
        return f"ConstantConfidence({self.value})"

    def confidence(self, signals: Signals) -> Tensor:
        device = signals.max_lengths.device
        values = torch.tensor(self.value, dtype=torch.float32, device=device)
        if values.ndim and len(values) != signals.draft_len:
            raise ValueError(f'value: expected shape "G" = [{signals.draft_len}], got {list(values.shape)}')
        return values.expand(len(signals.request_ids), signals.draft_len)
