"""Whether a policy keeps to what may be known when it decides (contract C9).

``confidence[r, k]`` is a function of the tokens before draft k, so it tells of drafts 0..k-1; so does ``margin[r, k]``.
Two conditions follow, and under the ``ratio`` rule losing either can bias the output:

* a request's admission of its first k drafts does not change with its confidences and margins from entry k on;
* the lengths n of all requests together do not change with those past entry n of each. (The first condition keeps each
  request's own law; without the second, two requests' outputs can depend on each other.)

Both are about the signals that a policy is shown. A policy that learns of the draws in some other way, such as a gate
on a draft's own probability or the record of an earlier pass, needs :func:`dspark.testing.law.exact_law`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals, VerifyPolicy


@dataclass(frozen=True)
class Turn:
    """One round to put a policy through.

    Attributes:
        signals: what the policy sees.
        other: ``[R, G]``, confidences that later drafts might have had instead.
        accepted: ``[R]`` int64, drafts that full verification would accept.
        other_margin: ``[R, G]``, the same of margins; None where the signals have none.
    """

    signals: Signals
    other: Tensor
    accepted: Tensor
    other_margin: Tensor | None = None


PolicyOrFactory = VerifyPolicy | Callable[[], VerifyPolicy]


def fresh_policy(policy: PolicyOrFactory) -> VerifyPolicy:
    """A policy that the caller's own is not touched by: a copy, or a new one from a class or function."""
    if isinstance(policy, type) or not hasattr(policy, "plan"):
        return cast(Callable[[], VerifyPolicy], policy)()
    return copy.deepcopy(cast(VerifyPolicy, policy))


def assert_non_anticipating(policy: PolicyOrFactory, histories: Iterable[Sequence[Turn]] | None = None) -> None:
    """Check a policy in each round of each history, with the memory that the rounds before gave it.

    Args:
        policy: one, which is left as it is, or what makes a fresh one. It has to allow ``copy.deepcopy``.
        histories: sequences of rounds; None is 50 of :func:`random_history`.

    Raises:
        AssertionError: a later confidence changed an earlier admission, or one state planned two ways; the message
            says where.
    """
    for history in (random_history(seed) for seed in range(50)) if histories is None else histories:
        own = fresh_policy(policy)
        for number, turn in enumerate(history):
            fault = find_anticipation(own, turn)
            if fault is not None:
                raise AssertionError(f"{own}, round {number}: {fault}")
            lengths, signals = own.plan(turn.signals), turn.signals
            accepted = torch.minimum(lengths, turn.accepted)
            own.observe(Outcome(signals.request_ids, lengths, accepted, classes=signals.classes))


def find_anticipation(policy: VerifyPolicy, turn: Turn) -> str | None:
    """Describe a later signal that ``policy``, left as it is, would let change an earlier admission; else None."""
    signals = turn.signals
    shown = {"margin": (signals.margin, turn.other_margin), "confidence": (signals.confidence, turn.other)}
    pairs = {name: (a, b) for name, (a, b) in shown.items() if a is not None and b is not None}

    def plan(changed: Tensor | None = None) -> list[int]:
        """Lengths, with the other signals where ``changed [R, G]`` holds."""
        values: dict[str, Any] = {}
        if changed is not None:
            values = {name: torch.where(changed, b, a) for name, (a, b) in pairs.items()}
        lengths: list[int] = copy.deepcopy(policy).plan(replace(signals, **values)).tolist()
        return lengths

    def change(changed: Tensor, rows: int | slice) -> str:
        return " and ".join(
            f"{name} {a[rows].tolist()} to {torch.where(changed, b, a)[rows].tolist()}"
            for name, (a, b) in pairs.items()
        )

    lengths, again = plan(), plan()
    if again != lengths:
        return f"planning twice from one state gave {lengths} and {again}"
    if not pairs:
        return None
    names = " and ".join({"margin": "margins", "confidence": "confidences"}[name] for name in pairs)
    requests, draft_len = len(signals.request_ids), signals.draft_len
    place = torch.arange(draft_len)
    for r in range(requests):
        for k in range(1, draft_len):
            changed = (torch.arange(requests) == r)[:, None] & (place >= k)  # [R, G]
            after = plan(changed)
            if min(after[r], k) != min(lengths[r], k):
                return (
                    f"request {r} verifies {lengths[r]} drafts, and {after[r]} after a change of its {names} from "
                    f"entry {k} on: {change(changed, r)}"
                )
    past = place > torch.tensor(lengths).unsqueeze(1)  # [R, G]
    after = plan(past)
    if after != lengths:
        return (
            f"lengths {lengths} become {after} after a change of {names} past those entries: "
            f"{change(past, slice(None))}"
        )
    return None


def random_history(seed: int, *, requests: int = 3, draft_len: int = 4, rounds: int = 4) -> list[Turn]:
    """Rounds with random caps and margins, and confidences from a coarse grid (which brings ties, 0 and 1) or all of
    [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    margins = torch.Generator().manual_seed(seed)

    def confidences() -> Tensor:
        fine = torch.rand(requests, draft_len, generator=generator)
        coarse = torch.tensor([0.0, 0.3, 0.6, 0.8, 0.9, 1.0])
        grid = coarse[torch.randint(len(coarse), fine.shape, generator=generator)]
        return fine if bool(torch.rand((), generator=generator) < 0.3) else grid

    def counts() -> Tensor:
        return torch.randint(draft_len + 1, (requests,), generator=generator)

    history = []
    for _ in range(rounds):
        # Caps are mostly the whole block, as they are until a request's last tokens.
        caps = torch.maximum(counts(), counts())
        margin, other_margin = 8 * torch.rand(2, requests, draft_len, generator=margins)
        signals = Signals(tuple(range(requests)), caps, draft_len, confidences(), margin)
        history.append(Turn(signals, confidences(), counts(), other_margin))
    return history
