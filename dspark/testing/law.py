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
from dataclasses import dataclass

from dspark.policy.protocol import VerifyPolicy
from dspark.testing.branches import Branches, CopiedPolicy, Replay, ReplayedPolicy, Seen
from dspark.testing.rules import Noise, Realisation, Tokens, ToyRequest, ToyRule

JointLaw = dict[tuple[Tokens, ...], float]
"""Emitted tokens of each request -> probability."""


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
    branches: Branches
    if policy is not None and replay is None:
        branches = CopiedPolicy(policy)
    elif replay is not None and policy is None:
        branches = ReplayedPolicy(replay)
    else:
        raise ValueError("policy, replay: expected exactly one of them")
    process = _Process(requests, rule, branches, draft_len, replay is not None)
    law: JointLaw = defaultdict(float)
    states = {_State(((),) * len(requests), (Noise(),) * len(requests), branches.start): 1.0}
    while states:
        successors: dict[_State, float] = defaultdict(float)
        for state, weight in states.items():
            if all(_done(toy, own, length) for toy, own in zip(requests, state.emitted, strict=True)):
                law[tuple(own[:length] for own in state.emitted)] += weight
                continue
            for successor, chance in process.round(state, max_batch):
                successors[successor] += weight * chance
        states = successors
    return dict(law)


def plain_law(requests: Sequence[ToyRequest], length: int | None = None) -> JointLaw:
    """The joint law of plain decoding: each request on its own, one draw from the target after another."""
    law: JointLaw = {(): 1.0}
    for toy in requests:
        unfinished: dict[Tokens, float] = {(): 1.0}
        alone: dict[Tokens, float] = {}
        while unfinished:
            prefix, weight = unfinished.popitem()
            if _done(toy, prefix, length):
                alone[prefix] = weight
                continue
            probabilities = toy.target(toy.prompt + prefix)
            unfinished.update({(*prefix, token): weight * p for token, p in enumerate(probabilities) if p > 0})
        law = {(*rest, own): a * b for rest, a in law.items() for own, b in alone.items()}
    return law


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


@dataclass(frozen=True)
class _State:
    """Between rounds: what each request has emitted, what is known of its noise, and the policy's key."""

    emitted: tuple[Tokens, ...]
    noise: tuple[Noise, ...]
    policy: Hashable


class _Cases:
    """One request's realisations of one round that look alike to the policy."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._members: list[Realisation] = []
        self._emissions: dict[int, dict[tuple[Tokens, Noise], float]] = {}

    def add(self, case: Realisation) -> None:
        self.weight += case.probability
        self._members.append(case)

    def emissions(self, length: int) -> dict[tuple[Tokens, Noise], float]:
        """The law, given these cases, of the tokens emitted (and what is then known of the noise)."""
        if length not in self._emissions:
            mixed: dict[tuple[Tokens, Noise], float] = defaultdict(float)
            for case in self._members:
                for tokens, chance, noise in case.emissions[length]:
                    mixed[tokens, noise] += case.probability / self.weight * chance
            self._emissions[length] = mixed
        return self._emissions[length]


_Signal = tuple[tuple[float, ...] | None, int]
"""What a request shows the policy: its confidences, and the accepted length if that is foreseen (else 0)."""


class _Process:
    """The decoder's round over toy requests, as a list of what it may lead to."""

    def __init__(
        self, requests: Sequence[ToyRequest], rule: ToyRule, branches: Branches, draft_len: int, foreseen: bool
    ) -> None:
        self._requests, self._rule, self._branches = requests, rule, branches
        self._draft_len, self._foreseen = draft_len, foreseen
        self._memo: dict[tuple[int, Tokens, Noise, int, int], dict[_Signal, _Cases]] = {}

    def round(self, state: _State, max_batch: int | None) -> Iterator[tuple[_State, float]]:
        """Every state that one round can lead to, with its probability; a state may come up more than once."""
        unfinished = [i for i, toy in enumerate(self._requests) if not _done(toy, state.emitted[i])]
        running = tuple(unfinished[:max_batch])
        caps = tuple(min(self._draft_len, self._requests[i].max_tokens - len(state.emitted[i]) - 1) for i in running)
        drafted = self._draft_len if any(caps) else 0
        choices = [
            self._cases(i, state.emitted[i], state.noise[i], drafted, cap) for i, cap in zip(running, caps, strict=True)
        ]
        for signals in itertools.product(*choices):
            cases = [choice[signal] for choice, signal in zip(choices, signals, strict=True)]
            confidence = tuple(c for c, _ in signals if c is not None) or None
            foreseen = tuple(n for _, n in signals) if self._foreseen else None
            seen = Seen(running, caps, self._draft_len, confidence, foreseen)
            lengths, planned = self._branches.plan(state.policy, seen)
            outcomes = [case.emissions(n).items() for case, n in zip(cases, lengths, strict=True)]
            for outcome in itertools.product(*outcomes):
                chance = 1.0
                for case, (_, p) in zip(cases, outcome, strict=True):
                    chance *= case.weight * p
                emitted, noise = list(state.emitted), list(state.noise)
                for i, ((tokens, known), _) in zip(running, outcome, strict=True):
                    emitted[i] += self._until_stop(i, tokens)
                    noise[i] = known
                accepted = tuple(len(tokens) - 1 for (tokens, _), _ in outcome)
                key = self._branches.observe(planned, seen, lengths, accepted)
                yield _State(tuple(emitted), tuple(noise), key), chance

    def _cases(self, index: int, emitted: Tokens, noise: Noise, drafted: int, cap: int) -> dict[_Signal, _Cases]:
        key = (index, emitted, noise, drafted, cap)
        if key not in self._memo:
            toy = self._requests[index]
            prefix = toy.prompt + emitted
            found: dict[_Signal, _Cases] = defaultdict(_Cases)
            for case in self._rule.realise(toy, prefix, noise, drafted, cap):
                confidence = tuple(toy.confidence(prefix, case.draft)) if toy.confidence and drafted else None
                found[confidence, case.accepted if self._foreseen else 0].add(case)
            self._memo[key] = dict(found)
        return self._memo[key]

    def _until_stop(self, index: int, tokens: Tokens) -> Tokens:
        stop = self._requests[index].stop
        end = next((n for n, token in enumerate(tokens) if token in stop), len(tokens))
        return tokens[: end + 1]
