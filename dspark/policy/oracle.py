"""Upper bounds: policies that know how many drafts will be accepted, and one that knows how likely each one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals
from dspark.policy.scheduled import ConfidenceScheduled
from dspark.policy.tracked import AnyProfile


class Oracle:
    """Verify through the first rejected draft, known from an earlier pass with the same seeds.

    Verifying ``accepted + 1`` drafts shows the same rejection to the same random numbers, so the output is the earlier
    pass's, token for token, and the time it takes is a real measurement. (Verifying ``accepted`` drafts only would draw
    a bonus where a rejection belongs, which is biased; contract C9.) That holds for rules that judge a draft by it and
    those before it. ``block`` looks at the ones after it as well: fewer of them may show another decision, which is
    biased, and :class:`~dspark.decode.Decoder` refuses the pair.

    Fewer rows may round differently, and a request that leaves its recorded path at a near tie (its accepted count
    differs) is no longer known; from then on all its drafts are verified. ``diverged`` holds the ids of such requests.

    Args:
        accepted: for each request id, the accepted drafts of each of its rounds in a pass that verified everything.

    Raises:
        ValueError: (when planning) a request has no recorded round left, so this is not the recorded run.
    """

    def __init__(self, accepted: Mapping[int, Sequence[int]]) -> None:
        self._accepted = {request: list(counts) for request, counts in accepted.items()}
        self._round: dict[int, int] = {}
        self.diverged: set[int] = set()

    def __repr__(self) -> str:
        return "Oracle()"

    def plan(self, signals: Signals) -> Tensor:
        counts = []
        for request in signals.request_ids:
            if request in self.diverged:
                counts.append(signals.draft_len)
                continue
            recorded, index = self._accepted.get(request, []), self._round.get(request, 0)
            if index >= len(recorded):
                raise ValueError(
                    f"request {request}: no accepted length recorded for round {index}; record a pass first"
                )
            counts.append(recorded[index] + 1)
        return torch.minimum(torch.tensor(counts, device=signals.max_lengths.device), signals.max_lengths)

    def observe(self, outcome: Outcome) -> None:
        for request, accepted in zip(outcome.request_ids, outcome.accepted.tolist(), strict=True):
            recorded, index = self._accepted.get(request, []), self._round.get(request, 0)
            if recorded[index : index + 1] != [accepted]:
                self.diverged.add(request)
            self._round[request] = index + 1


class KnownAcceptance:
    """An upper bound: the drafts that will be accepted are verified, and no other.

    It could not be run outside a simulator, and under the ratio rule it would be biased (contract C9). It has no say in
    whether to draft; :class:`~dspark.policy.Gated` around it has.

    Args:
        through_rejected: verify the first rejected draft as well, as :class:`~dspark.policy.Oracle` does to be sound.
    """

    def __init__(self, *, through_rejected: bool = False) -> None:
        self.through_rejected = through_rejected
        self._accepted: Tensor | None = None

    def __repr__(self) -> str:
        return f"KnownAcceptance(through_rejected={self.through_rejected})"

    def reveal(self, accepted: Tensor) -> None:
        self._accepted = accepted

    def plan(self, signals: Signals) -> Tensor:
        if self._accepted is None:
            raise ValueError("reveal: expected what will be accepted before each plan, as the simulator gives it")
        return torch.minimum(self._accepted + self.through_rejected, signals.max_lengths)

    def observe(self, outcome: Outcome) -> None:
        self._accepted = None


class DistributionOracle:
    """Schedule by the true acceptance probabilities: what a perfect confidence head would allow, and no more.

    Unlike :class:`Oracle` it does not know the draws. It is non-anticipating, and lossless under every rule, as long as
    ``acceptance`` is: entry (r, k) is the chance that draft k of request r is accepted given that those before it were,
    1 - TV(p, q) at that slot, and may depend on what request r has emitted, on its drafts *before* slot k, on the load
    and on earlier rounds; never on draft k or a later one, nor on whether any draft of this round will be accepted.

    Args:
        profile: what a round costs at each number of verified rows.
        acceptance: ``[G]`` or ``[R, G]`` float in [0, 1], the same in every round; or a function of the round's signals
            that returns ``[R, G]``.
        lag: as of :class:`ConfidenceScheduled`.

    Raises:
        TypeError: ``profile`` is no profile.
        ValueError: ``lag`` is neither 0 nor 2, or (when planning) the rates have another shape.
    """

    def __init__(
        self, profile: AnyProfile, acceptance: Tensor | Callable[[Signals], Tensor], lag: Literal[0, 2] = 0
    ) -> None:
        self._scheduled = ConfidenceScheduled(profile, lag)
        self._acceptance = acceptance

    def __repr__(self) -> str:
        return f"DistributionOracle(lag={self._scheduled.lag})"

    def plan(self, signals: Signals) -> Tensor:
        given = self._acceptance
        rates = given if isinstance(given, Tensor) else given(signals)
        shape = (len(signals.request_ids), signals.draft_len)
        if rates.shape not in (shape, shape[1:]):
            raise ValueError(f'acceptance: expected shape "G" or "R G" with R, G = {shape}, got {list(rates.shape)}')
        return self._scheduled.plan(replace(signals, confidence=rates.expand(shape)))

    def observe(self, outcome: Outcome) -> None:
        """Let a tracked profile learn from a timed round."""
        self._scheduled.observe(outcome)
