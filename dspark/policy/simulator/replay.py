"""What the drafter would say and the target accept at each position that a simulated request reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.policy.traces import Trace

Ints = NDArray[np.int64]
BySlot = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Between = Literal["nearest", "tokens"]
"""What stands in at a position that was not recorded."""


class Replay:
    """A trace made addressable: the positions of all its requests, end to end, each with the round that begins there.

    A simulated request walks along a recorded one. A policy that verifies less than the recorded run emits less per
    round, so its rounds begin at positions where the run had none, and something has to stand in there:

    * ``"nearest"``: the row nearest in position, the earlier of two. A draft that was rejected far from its anchor is
      forgotten when a round begins nearer to it.
    * ``"tokens"``: a round put together token by token. What the run said of a token (its confidence and margin, and
      whether it was accepted) holds for it wherever the round begins. Of the token after a fully accepted block it said
      nothing: that one has the confidence of the block's last draft, and is accepted with that chance.

    A dense trace needs neither: where the trace has a row, the row is replayed.

    At the end of the recorded request, the simulated one goes on with another of the same domain, drawn from (seed,
    request, how many it had) alone, so that all policies see the same text.

    Args:
        trace: rows to replay.
        seed: of the order of requests, of what follows when one ends, and of the tokens that nothing is known of.
        between: what stands in where the trace has no row.

    Raises:
        ValueError: the trace has no rows, or ``between`` is neither of the two.
    """

    def __init__(self, trace: Trace, seed: int = 0, between: Between = "nearest") -> None:
        if between not in get_args(Between):
            raise ValueError(f"between: expected one of {', '.join(get_args(Between))}, got {between!r}")
        if not len(trace):
            raise ValueError("trace: expected at least one row, got none")
        first = np.flatnonzero(np.diff(trace.request, prepend=trace.request[0] - 1))  # [Q], each request's first row
        last = np.append(first[1:], len(trace)) - 1
        span = trace.position[last] + trace.accepted[last] + 1 - trace.position[first]
        self.end: Ints = span.cumsum()  # [Q], past the last place of each recorded request
        self.begin: Ints = self.end - span
        self.domains = trace.domains
        self.domain: Ints = trace.domain[first].astype(np.int64)
        self.draft_len = trace.draft_len
        owner = np.repeat(np.arange(len(first)), last - first + 1)
        rows = self.begin[owner] + trace.position - trace.position[first][owner]  # [n], the place of each row
        if between == "nearest":
            self.accepted, by_slot = _nearest_rows(trace, rows, owner, int(self.end[-1]))
        else:
            self.accepted, by_slot = _by_token(trace, rows, np.repeat(self.end, span), seed)
        self.confidence = None if trace.confidence is None else torch.from_numpy(by_slot(trace.confidence))
        self.margin = None if trace.margin is None else torch.from_numpy(by_slot(trace.margin))
        self._seed = seed
        self._by_domain: Ints = np.argsort(self.domain, kind="stable")
        self._count = np.bincount(self.domain, minlength=len(trace.domains))
        self._start = self._count.cumsum() - self._count

    def order(self, requests: int) -> Ints:
        """``[requests]``: which recorded request each simulated one begins with; all once before any twice."""
        rng = np.random.default_rng(self._seed)
        rounds = -(-requests // len(self.begin))
        return np.concatenate([rng.permutation(len(self.begin)) for _ in range(rounds)])[:requests]

    def follow(self, recorded: Ints, request: Ints, turn: Ints) -> Ints:
        """``[m]``: the recorded request that follows ``recorded`` for simulated request ``request`` on that turn."""
        domain = self.domain[recorded]
        draw = _mix(_mix(_mix(np.uint64(self._seed), request), turn), np.zeros_like(turn))
        pick = (draw % self._count[domain].astype(np.uint64)).astype(np.int64)
        following: Ints = self._by_domain[self._start[domain] + pick]
        return following


def _nearest_rows(trace: Trace, rows: Ints, owner: Ints, places: int) -> tuple[Ints, BySlot]:
    """For each place, the row whose place is nearest among those of the same request.

    Args:
        trace: the rows.
        rows: ``[n]``, the place of each row, increasing.
        owner: ``[n]``, the request of each row.
        places: how many there are.

    Returns:
        ``[places]``, the drafts accepted in a round that begins there; and what turns a recorded quantity ``[n, G]``
        into ``[places, G]``, that of a round that begins there.
    """
    place = np.arange(places)
    before = np.searchsorted(rows, place, side="right") - 1  # a request's first row is at its first place
    after = np.minimum(before + 1, len(rows) - 1)
    closer = (owner[after] == owner[before]) & (rows[after] - place < place - rows[before])
    row = np.where(closer, after, before)
    return trace.accepted[row].astype(np.int64), lambda recorded: recorded[row].astype(np.float32)


def _by_token(trace: Trace, rows: Ints, end: Ints, seed: int) -> tuple[Ints, BySlot]:
    """A trace's rows taken apart into tokens, one a place, and put together to the round that begins at each.

    Args:
        trace: the rows.
        rows: ``[n]``, the place of each row's first draft.
        end: ``[places]``, past the last place of the request that each belongs to.
        seed: for the tokens that no row tells of.

    Returns:
        As :func:`_nearest_rows`.
    """
    place = np.arange(len(end))
    row = np.searchsorted(rows, place, side="right") - 1  # the last that began at or before it
    slot = place - rows[row]
    accepted = trace.accepted[row]
    shown = np.minimum(slot, trace.draft_len - 1)
    fate = slot < accepted
    unknown = slot > np.minimum(accepted, trace.draft_len - 1)
    if trace.confidence is None:
        chance = np.full(len(place), np.nan_to_num(trace.summary().acceptance_by_position[-1]))
    else:
        chance = trace.confidence[row, shown].astype(np.float64)
    fate[unknown] = np.random.default_rng([seed, 1]).random(int(unknown.sum())) < chance[unknown]
    # [places, G], the token that each slot of a round drafts; past the end, the last one stands in
    drafts = np.minimum(place[:, None] + np.arange(trace.draft_len), end[:, None] - 1)
    counts: Ints = fate[drafts].cumprod(1).sum(1)
    counts[rows] = trace.accepted

    def by_slot(recorded: NDArray[np.float32]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = recorded[row, shown].astype(np.float32)[drafts]
        values[rows] = recorded
        return values

    return counts, by_slot


def _mix(state: NDArray[np.uint64] | np.uint64, value: Ints) -> NDArray[np.uint64]:
    """One step of SplitMix64 over whole arrays (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = (state ^ value.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
        return mixed
