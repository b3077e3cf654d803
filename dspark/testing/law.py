"""The exact law of what a whole decoding process emits, by enumeration in float64.

The process is the decoder's: requests draft, a policy plans from :class:`~dspark.policy.protocol.Signals`, the drafts
that it chose are verified, and so on over rounds until every request has ended; requests leave when they are done and
others take their place. Every case is followed with its probability and with its own copy of the policy, memory
included. A rule and a policy are lossless when the law found is that of plain decoding:

>>> from dspark.policy import FixedK
>>> from dspark.testing import RatioToy, ToyRequest
>>> toy = ToyRequest(target=lambda tokens: (0.7, 0.3), drafter=lambda tokens: (0.5, 0.5), max_tokens=3)
>>> law = exact_law([toy], RatioToy(), FixedK(2), draft_len=2)
>>> total_variation(law, plain_law([toy])) < 1e-12
True
>>> round(law[((0, 0, 1),)], 6)
0.147
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from dspark.policy.protocol import VerifyPolicy
from dspark.testing.branches import Replay, Seen, copied, replayed
from dspark.testing.rules import Noise, Tokens, ToyRequest, ToyRule

JointLaw = dict[tuple[Tokens, ...], float]
"""Emitted tokens of each request -> probability."""


_Cases = dict[tuple[tuple[float, ...] | None, int], list[dict[tuple[Tokens, Noise], float]]]
"""One round of one request: by the confidences that it shows, and the accepted length if that is foreseen (else 0), for
each number of drafts verified the probability of what is emitted and then known of the noise."""


class _State(NamedTuple):
    """Between rounds: what each request has emitted, what is known of its noise, and the policy's key."""

    emitted: tuple[Tokens, ...]
    noise: tuple[Noise, ...]
    policy: Hashable


def exact_law(
    requests: Sequence[ToyRequest],
    rule: ToyRule,
    policy: VerifyPolicy | None = None,
    *,
    draft_len: int,
    replay: Replay | None = None,
    length: int | None = None,
    max_batch: int | None = None,
) -> JointLaw:
    """The joint law of what the requests emit, each with random numbers of its own (as under different seeds).

    Args:
        requests: one or a few; their models' vocabulary and ``draft_len`` should be tiny (4 and 3, say).
        rule: :class:`~dspark.testing.rules.RatioToy`, :class:`~dspark.testing.rules.CoupledToy` or another.
        policy: as handed to the decoder. It is copied, and the original left alone. A request's id is its index.
        draft_len: drafts per round, G.
        replay: instead of ``policy``: makes one from the accepted lengths that full verification would give under the
            same random numbers, the current round's included. ``Oracle`` is such a maker. It has to be deterministic.
        length: keep the first so many tokens of each request only, and stop when they are there; None keeps all.
        max_batch: most requests that run at once, the first unfinished ones; None is all.

    Raises:
        ValueError: not exactly one of ``policy`` and ``replay``; the policy plans a length outside 0..max_lengths; or
            some but not all requests have a confidence.
    """
    if len({toy.confidence is None for toy in requests}) > 1:
        raise ValueError("requests: expected all or none with a confidence")
    if policy is not None and replay is None:
        branches = copied(policy)
    elif replay is not None and policy is None:
        branches = replayed(replay)
    else:
        raise ValueError("policy, replay: expected exactly one of them")
    foreseen = replay is not None

    @cache
    def cases(i: int, emitted: Tokens, noise: Noise, drafted: int, cap: int) -> _Cases:
        """What a round of request i may show the policy, and what it then emits for each number of drafts verified."""
        toy = requests[i]
        prefix = toy.prompt + emitted
        found: _Cases = defaultdict(lambda: [defaultdict(float) for _ in range(cap + 1)])
        for case in rule.realise(toy, prefix, noise, drafted, cap):
            confidence = tuple(toy.confidence(prefix, case.draft)) if toy.confidence and drafted else None
            signal = confidence, case.accepted if foreseen else 0
            for mixed, emissions in zip(found[signal], case.emissions, strict=True):
                for tokens, p, known in emissions:
                    mixed[tokens, known] += case.probability * p
        return found

    def outcomes(state: _State) -> Iterator[tuple[_State, float]]:
        """Every state that one round can lead to, with its probability; a state may come up more than once."""
        unfinished = [i for i, toy in enumerate(requests) if not _done(toy, state.emitted[i])]
        running = tuple(unfinished[:max_batch])
        caps = tuple(min(draft_len, requests[i].max_tokens - len(state.emitted[i]) - 1) for i in running)
        drafted = draft_len if any(caps) else 0
        choices = [
            cases(i, state.emitted[i], state.noise[i], drafted, cap) for i, cap in zip(running, caps, strict=True)
        ]
        for signals in itertools.product(*choices):
            confidence = tuple(c for c, _ in signals if c is not None) or None
            seen = Seen(running, caps, draft_len, confidence, tuple(n for _, n in signals) if foreseen else None)
            lengths, planned = branches.plan(state.policy, seen)
            mixed = [choice[own][n] for choice, own, n in zip(choices, signals, lengths, strict=True)]
            for outcome in itertools.product(*(own.items() for own in mixed)):
                emitted, noise = list(state.emitted), list(state.noise)
                for i, ((tokens, known), _) in zip(running, outcome, strict=True):
                    emitted[i] += _until_stop(requests[i], tokens)
                    noise[i] = known
                accepted = tuple(len(tokens) - 1 for (tokens, _), _ in outcome)
                key = branches.observe(planned, running, lengths, accepted)
                yield _State(tuple(emitted), tuple(noise), key), prod(p for _, p in outcome)

    law: JointLaw = defaultdict(float)
    states = {_State(((),) * len(requests), (Noise(),) * len(requests), branches.start): 1.0}
    while states:
        successors: dict[_State, float] = defaultdict(float)
        for state, weight in states.items():
            if all(_done(toy, own, length) for toy, own in zip(requests, state.emitted, strict=True)):
                law[tuple(own[:length] for own in state.emitted)] += weight
                continue
            for successor, chance in outcomes(state):
                successors[successor] += weight * chance
        states = successors
    return dict(law)


def plain_law(requests: Sequence[ToyRequest], length: int | None = None) -> JointLaw:
    """The joint law of plain decoding: each request on its own, one draw from the target after another."""
    law: JointLaw = {(): 1.0}
    for toy in requests:
        alone = list(completed(toy, (), 1.0, length))
        law = {(*rest, own): a * b for rest, a in law.items() for own, b in alone}
    return law


def completed(toy: ToyRequest, emitted: Tokens, weight: float, length: int | None) -> Iterator[tuple[Tokens, float]]:
    """Every way in which plain decoding goes on after ``emitted``, with its share of ``weight``."""
    if _done(toy, emitted, length):
        yield emitted, weight
        return
    for token, p in enumerate(toy.target(toy.prompt + emitted)):
        if p > 0:
            yield from completed(toy, (*emitted, token), weight * p, length)


def marginal(law: Mapping[tuple[Tokens, ...], float], request: int, length: int | None = None) -> JointLaw:
    """The law of one request's first ``length`` tokens."""
    one: JointLaw = defaultdict(float)
    for emitted, p in law.items():
        one[(emitted[request][:length],)] += p
    return dict(one)


def total_variation(a: Mapping[tuple[Tokens, ...], float], b: Mapping[tuple[Tokens, ...], float]) -> float:
    """Half the sum of absolute differences of two laws; 0 when equal, 1 when they have nothing in common."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def _done(toy: ToyRequest, emitted: Tokens, length: int | None = None) -> bool:
    limit = toy.max_tokens if length is None else min(length, toy.max_tokens)
    return len(emitted) >= limit or bool(toy.stop.intersection(emitted))


def _until_stop(toy: ToyRequest, tokens: Tokens) -> Tokens:
    end = next((n for n, token in enumerate(tokens) if token in toy.stop), len(tokens))
    return tokens[: end + 1]
