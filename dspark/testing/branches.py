"""A policy followed along many branches of a process at once, each branch with its own memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dspark.policy.protocol import Outcome, Signals, VerifyPolicy

Lengths = tuple[int, ...]
Replay = Callable[[Mapping[int, Sequence[int]]], VerifyPolicy]
"""Makes a policy from the accepted lengths, per request and round, that full verification gives."""


@dataclass(frozen=True)
class Seen:
    """A round's signals as plain numbers; ``accepted`` is for a policy that is told what full verification accepts."""

    request_ids: tuple[int, ...]
    max_lengths: Lengths
    draft_len: int
    confidence: tuple[tuple[float, ...], ...] | None
    accepted: Lengths | None = None

    def ask(self, policy: VerifyPolicy) -> Lengths:
        """Plan with ``policy``, unless nothing may be verified, when the decoder does not draft and does not ask."""
        if not any(self.max_lengths):
            return (0,) * len(self.max_lengths)
        confidence = None if self.confidence is None else torch.tensor(self.confidence, dtype=torch.float32)
        caps = torch.tensor(self.max_lengths)
        planned = policy.plan(Signals(self.request_ids, caps, self.draft_len, confidence))
        if planned.shape != caps.shape or bool(((planned < 0) | (planned > caps)).any()):
            expected = f"lengths from 0 to {list(self.max_lengths)}"
            raise ValueError(f"policy: expected {expected}, got {planned.tolist()} from {policy}")
        return tuple(planned.tolist())


class Branches(NamedTuple):
    """A policy in every state that a branch may find it in.

    Attributes:
        start: the key of its first state. Keys stand for all that the policy remembers: equal ones behave alike.
        plan: (key, signals) -> the lengths planned, and the key from then on.
        observe: (key, request ids, lengths verified, accepted) -> the key after the round's outcome.
    """

    start: Hashable
    plan: Callable[[Hashable, Seen], tuple[Lengths, Hashable]]
    observe: Callable[[Hashable, tuple[int, ...], Lengths, Lengths], Hashable]


def copied(policy: VerifyPolicy) -> Branches:
    """A policy with a copy for each branch; copies that hold the same are one."""
    uncompared: dict[Hashable, VerifyPolicy] = {}

    def key_of(policy: VerifyPolicy) -> Hashable:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer).dump(policy)
        except (pickle.PicklingError, TypeError, AttributeError):
            key = object()  # equal copies are then not found out: slower, and as right
            uncompared[key] = policy
            return key
        return buffer.getvalue()

    def copy_of(key: Hashable) -> VerifyPolicy:
        own = pickle.loads(key) if isinstance(key, bytes) else copy.deepcopy(uncompared[key])
        return cast(VerifyPolicy, own)

    @cache
    def plan(key: Hashable, seen: Seen) -> tuple[Lengths, Hashable]:
        own = copy_of(key)
        return seen.ask(own), key_of(own)

    @cache
    def observe(key: Hashable, request_ids: tuple[int, ...], lengths: Lengths, accepted: Lengths) -> Hashable:
        own = copy_of(key)
        _tell(own, request_ids, lengths, accepted)
        return key_of(own)

    return Branches(key_of(copy.deepcopy(policy)), plan, observe)


class _Pickler(pickle.Pickler):
    """Writes tensors as numbers, which takes a fraction of the time that torch's own way takes."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Tensor):
            return _tensor, (obj.tolist(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(shape)


def replayed(replay: Replay) -> Branches:
    """A policy that knows what full verification accepts: made anew for each branch and led through its past."""

    @cache
    def plan(key: Hashable, seen: Seen) -> tuple[Lengths, Hashable]:
        past = cast(tuple[tuple[Seen, Lengths, Lengths], ...], key)
        record: dict[int, list[int]] = defaultdict(list)
        for view in (*(view for view, _, _ in past), seen):
            for request, count in zip(view.request_ids, view.accepted or (), strict=True):
                record[request].append(count)
        policy = replay(record)
        for view, lengths, accepted in past:
            view.ask(policy)
            _tell(policy, view.request_ids, lengths, accepted)
        return seen.ask(policy), (past, seen)

    def observe(key: Hashable, request_ids: tuple[int, ...], lengths: Lengths, accepted: Lengths) -> Hashable:
        past, seen = cast(tuple[tuple[Any, ...], Seen], key)
        return *past, (seen, lengths, accepted)

    return Branches((), plan, observe)


def _tell(policy: VerifyPolicy, request_ids: tuple[int, ...], lengths: Lengths, accepted: Lengths) -> None:
    policy.observe(Outcome(request_ids, torch.tensor(lengths), torch.tensor(accepted)))
