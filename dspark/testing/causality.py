"""Whether a policy keeps to what may be known when it decides (contract C9).

``confidence[r, k]`` is a function of the tokens before slot k, so it tells of the drafts in slots 0..k-1. Two
conditions follow, and under the ``ratio`` rule losing either can bias the output:

* a request's admission of its first k slots does not change with its confidences from entry k on;
* the lengths n of all requests together do not change with the confidences past entry n of each. (The first condition
  keeps each request's own law; without the second, two requests' outputs can depend on each other.)

Both are about the signals that a policy is shown. A policy that learns of the draws in some other way, such as a gate
on a draft's own probability or the record of an earlier pass, needs :func:`dspark.testing.law.exact_law`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals, VerifyPolicy


@dataclass(frozen=True)
class Turn:
    """One round to put a policy through.

    Attributes:
        signals: what the policy sees.
        other: ``[R, G]``, confidences that later slots might have had instead.
        accepted: ``[R]`` int64, drafts that full verification would accept.
    """

    signals: Signals
    other: Tensor
    accepted: Tensor


def assert_non_anticipating(
    policy_factory: Callable[[], VerifyPolicy], histories: Iterable[Sequence[Turn]] | None = None
) -> None:
    """Check a policy in each round of each history, with the memory that the rounds before gave it.

    Args:
        policy_factory: makes a fresh policy; it has to allow ``copy.deepcopy``.
        histories: sequences of rounds; None is 50 of :func:`random_history`.

    Raises:
        AssertionError: a later confidence changed an earlier admission, or one state planned two ways; the message
            says where.
    """
    for history in (random_history(seed) for seed in range(50)) if histories is None else histories:
        policy = policy_factory()
        for number, turn in enumerate(history):
            fault = find_anticipation(policy, turn)
            if fault is not None:
                raise AssertionError(f"{policy}, round {number}: {fault}")
            lengths = policy.plan(turn.signals)
            policy.observe(Outcome(turn.signals.request_ids, lengths, torch.minimum(lengths, turn.accepted)))


def find_anticipation(policy: VerifyPolicy, turn: Turn) -> str | None:
    """Describe a later confidence that ``policy``, left as it is, would let change an earlier admission; else None."""
    signals, confidence = turn.signals, turn.signals.confidence

    def plan(changed: Tensor | None) -> list[int]:
        lengths: list[int] = copy.deepcopy(policy).plan(replace(signals, confidence=changed)).tolist()
        return lengths

    lengths, again = plan(confidence), plan(confidence)
    if again != lengths:
        return f"planning twice from one state gave {lengths} and {again}"
    if confidence is None:
        return None
    requests, draft_len = confidence.shape
    for r in range(requests):
        for k in range(1, draft_len):
            changed = confidence.clone()
            changed[r, k:] = turn.other[r, k:]
            after = plan(changed)
            if min(after[r], k) != min(lengths[r], k):
                return (
                    f"request {r} verifies {lengths[r]} drafts, and {after[r]} after a change of its confidences from "
                    f"entry {k} on: {confidence[r].tolist()} to {changed[r].tolist()}"
                )
    past = torch.arange(draft_len) > torch.tensor(lengths).unsqueeze(1)  # [R, G]
    changed = torch.where(past, turn.other, confidence)
    after = plan(changed)
    if after != lengths:
        return (
            f"lengths {lengths} become {after} after a change of confidences past those entries: "
            f"{confidence.tolist()} to {changed.tolist()}"
        )
    return None


def random_history(seed: int, *, requests: int = 3, draft_len: int = 4, rounds: int = 4) -> list[Turn]:
    """Rounds with random caps, and confidences from a coarse grid (which brings ties, 0 and 1) or all of [0, 1]."""
    generator = torch.Generator().manual_seed(seed)

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
        signals = Signals(tuple(range(requests)), caps, draft_len, confidences())
        history.append(Turn(signals, confidences(), counts()))
    return history
