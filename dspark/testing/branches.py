"""A policy followed along many branches of a process at once, each branch with its own memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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

    def tell(self, policy: VerifyPolicy, lengths: Lengths, accepted: Lengths) -> None:
        policy.observe(Outcome(self.request_ids, torch.tensor(lengths), torch.tensor(accepted)))


class Branches(Protocol):
    """Keys stand for a policy and all that it remembers; equal keys behave alike ever after."""

    start: Hashable

    def plan(self, key: Hashable, seen: Seen) -> tuple[Lengths, Hashable]:
        """The lengths planned, and the key from then on."""
        ...

    def observe(self, key: Hashable, seen: Seen, lengths: Lengths, accepted: Lengths) -> Hashable:
        """The key after the round's outcome."""
        ...


class CopiedPolicy:
    """A policy with a copy for each branch; copies that hold the same are one."""

    def __init__(self, policy: VerifyPolicy) -> None:
        self._uncompared: dict[Hashable, VerifyPolicy] = {}
        self._planned: dict[tuple[Hashable, Seen], tuple[Lengths, Hashable]] = {}
        self._observed: dict[tuple[Hashable, Lengths, Lengths, Lengths], Hashable] = {}
        self.start = self._keep(copy.deepcopy(policy))

    def plan(self, key: Hashable, seen: Seen) -> tuple[Lengths, Hashable]:
        if (key, seen) not in self._planned:
            policy = self._copy(key)
            self._planned[key, seen] = seen.ask(policy), self._keep(policy)
        return self._planned[key, seen]

    def observe(self, key: Hashable, seen: Seen, lengths: Lengths, accepted: Lengths) -> Hashable:
        case = (key, seen.request_ids, lengths, accepted)
        if case not in self._observed:
            policy = self._copy(key)
            seen.tell(policy, lengths, accepted)
            self._observed[case] = self._keep(policy)
        return self._observed[case]

    def _keep(self, policy: VerifyPolicy) -> Hashable:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer).dump(policy)
        except (pickle.PicklingError, TypeError, AttributeError):
            key = object()  # equal copies are then not found out: slower, and as right
            self._uncompared[key] = policy
            return key
        return buffer.getvalue()

    def _copy(self, key: Hashable) -> VerifyPolicy:
        policy: VerifyPolicy = pickle.loads(key) if isinstance(key, bytes) else copy.deepcopy(self._uncompared[key])
        return policy


class _Pickler(pickle.Pickler):
    """Writes tensors as numbers, which takes a fraction of the time that torch's own way takes."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Tensor):
            return _tensor, (obj.tolist(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(shape)


@dataclass(frozen=True)
class _PastRound:
    seen: Seen
    lengths: Lengths
    accepted: Lengths


class ReplayedPolicy:
    """A policy that knows what full verification accepts: made anew for each branch and led through its past."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._planned: dict[Hashable, Lengths] = {}
        self.start: Hashable = ()

    def plan(self, key: Hashable, seen: Seen) -> tuple[Lengths, Hashable]:
        if (key, seen) not in self._planned:
            self._planned[key, seen] = self._plan(key, seen)
        return self._planned[key, seen], key

    def observe(self, key: Hashable, seen: Seen, lengths: Lengths, accepted: Lengths) -> Hashable:
        return *_past(key), _PastRound(seen, lengths, accepted)

    def _plan(self, key: Hashable, seen: Seen) -> Lengths:
        record: dict[int, list[int]] = defaultdict(list)
        for view in (*(past.seen for past in _past(key)), seen):
            for request, count in zip(view.request_ids, view.accepted or (), strict=True):
                record[request].append(count)
        policy = self._replay(record)
        for past in _past(key):
            past.seen.ask(policy)
            past.seen.tell(policy, past.lengths, past.accepted)
        return seen.ask(policy)


def _past(key: Hashable) -> tuple[_PastRound, ...]:
    if not isinstance(key, tuple):
        raise TypeError(f"key: expected a tuple of past rounds, got {type(key).__name__}")
    return key
