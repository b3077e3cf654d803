"""The upper bound: a policy that knows how many drafts will be accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals


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
