"""Toy requests, and every way one round of theirs can go, each with its probability.

Vocabularies of a few tokens and drafts as short leave few enough cases to list. A rule lists them for one
request: which tokens are drafted, how many of them full verification would accept, and, for each number of drafts that
a policy may choose to verify, what is then emitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from dspark.ops.accept import accept
from dspark.ops.accept.reference import block_verdict, ratio_verdict
from dspark.ops.types import Rows, Rule, Sampling

Tokens = tuple[int, ...]
Law = tuple[float, ...]
Address = tuple[int, ...]
"""What a uniform number is for; the position of the token that it decides comes first."""

_SLIVER = 1e-14  # narrower intervals are rounding, not cases


@dataclass(frozen=True)
class ToyRequest:
    """A request whose models are plain functions of the tokens so far (prompt included, anchor last).

    Attributes:
        target: tokens so far -> p, the law of the next token after all sampling transforms.
        drafter: tokens so far -> q, the law that the next draft is sampled from.
        max_tokens: tokens to emit.
        confidence: (tokens so far, the block drafted after them) -> one confidence per draft, or None. An honest one
            looks at ``draft[:k]`` for its entry k; see :func:`stepwise`.
        prompt: at least one token.
        stop: emitting one of these ends the request.
    """

    target: Callable[[Tokens], Sequence[float]]
    drafter: Callable[[Tokens], Sequence[float]]
    max_tokens: int
    confidence: Callable[[Tokens, Tokens], Sequence[float]] | None = None
    prompt: Tokens = (0,)
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if not self.prompt:
            raise ValueError("prompt: expected at least one token, got none")


def stepwise(confidence: Callable[[Tokens], float]) -> Callable[[Tokens, Tokens], list[float]]:
    """Make a request's confidence from a function of the tokens before a draft, which is what a drafter's head sees."""
    return lambda prefix, draft: [confidence(prefix + draft[:k]) for k in range(len(draft))]


@dataclass(frozen=True)
class Noise:
    """What past draws have shown of the uniform numbers that later draws may use again.

    Attributes:
        known: (address, low, high): the number at the address lies, uniformly, between the two. Others are unseen.
    """

    known: tuple[tuple[Address, float, float], ...] = ()

    def draw(self, address: Address, probabilities: Sequence[float], *, backwards: bool = False) -> Draws:
        """Draw a token by inverse CDF from the number at ``address``: each token, its probability, what is then known.

        ``backwards`` runs through the tokens from the last to the first, which is another coupling of two draws.
        """
        others = tuple(item for item in self.known if item[0] != address)
        low, high = next(((a, b) for name, a, b in self.known if name == address), (0.0, 1.0))
        left = 0.0
        for token in reversed(range(len(probabilities))) if backwards else range(len(probabilities)):
            right = left + probabilities[token]
            a, b = max(low, left), min(high, right)
            left = right
            if b - a > _SLIVER:
                yield token, (b - a) / (high - low), Noise(tuple(sorted((*others, (address, a, b)))))

    def after(self, position: int) -> Noise:
        """Forget the numbers of tokens before ``position``, which are settled."""
        return Noise(tuple(item for item in self.known if item[0][0] >= position))


Draws = Iterator[tuple[int, float, Noise]]
"""What may be drawn, its probability, and what is then known of the noise."""
Emission = tuple[Tokens, float, Noise]
"""Tokens emitted, their probability, and what is then known of the noise."""


@dataclass(frozen=True)
class Realisation:
    """One way that a request's drafting and verification can go.

    Attributes:
        draft: the block drafted.
        probability: of this realisation.
        accepted: drafts that verifying all of them (up to the request's cap) accepts.
        emissions: entry n lists what can be emitted if n drafts are verified; its probabilities sum to 1.
    """

    draft: Tokens
    probability: float
    accepted: int
    emissions: tuple[tuple[Emission, ...], ...]


class ToyRule(Protocol):
    """An acceptance rule as a list of cases."""

    def realise(self, toy: ToyRequest, prefix: Tokens, noise: Noise, draft_len: int, cap: int) -> Iterator[Realisation]:
        """List a round's realisations after ``prefix``, ``draft_len`` tokens drafted and at most ``cap`` verified."""
        ...


class RatioToy:
    """The ``ratio`` rule, its probabilities and residuals from ``ratio_verdict`` of :mod:`dspark.ops.accept.reference`.

    Drafts are drawn afresh in every round, as the drafter's noise is: its address holds the anchor's position, and no
    two rounds of a request have the same anchor.
    """

    def realise(self, toy: ToyRequest, prefix: Tokens, noise: Noise, draft_len: int, cap: int) -> Iterator[Realisation]:
        for draft, alive, seen in _drafts(self.draw_draft, toy, prefix, noise, draft_len):
            bonus = [toy.target(prefix + draft[:n]) for n in range(cap + 1)]
            for accepted in range(cap + 1):
                chance, residual = 0.0, bonus[accepted]
                if accepted < cap:
                    chance, residual = self.verdict(toy, prefix + draft[:accepted], draft[accepted])
                if alive * (1 - chance) > 0:
                    kept = [min(verified, accepted) for verified in range(cap + 1)]
                    last = [*bonus[: accepted + 1], *[residual] * (cap - accepted)]
                    yield _realisation(prefix, draft, alive * (1 - chance), seen, kept, last)
                alive *= chance

    def draw_draft(self, noise: Noise, position: int, anchor: int, q: Sequence[float]) -> Draws:
        """Draw the draft at ``position`` in the round whose anchor is at ``anchor``."""
        return _afresh(noise, q)

    def verdict(self, toy: ToyRequest, prefix: Tokens, token: int) -> tuple[float, list[float]]:
        """The chance that ``token``, drafted after ``prefix``, is accepted, and the law of what replaces it if not."""
        chances, residuals = _ratio_verdicts(tuple(toy.target(prefix)), tuple(toy.drafter(prefix)))
        return chances[token], residuals[token]


@cache
def _ratio_verdicts(p: Law, q: Law) -> tuple[list[float], list[list[float]]]:
    """Of each token that may be drafted."""
    rows = [torch.tensor(law, dtype=torch.float64).expand(len(p), len(p)) for law in (p, q)]
    chance, residual = ratio_verdict(rows[0], rows[1], torch.arange(len(p)))
    return chance.tolist(), residual.tolist()


class BlockToy:
    """The ``block`` rule, its thresholds and residuals from ``block_verdict`` of :mod:`dspark.ops.accept.reference`.

    The rule compares one number with a threshold for each draft, and looks at the numbers past the last draft that it
    keeps. They are drawn afresh in every round, as the drafts are: their addresses hold the anchor's position.
    """

    def realise(self, toy: ToyRequest, prefix: Tokens, noise: Noise, draft_len: int, cap: int) -> Iterator[Realisation]:
        blocks = _drafts(lambda seen, position, anchor, q: _afresh(seen, q), toy, prefix, noise, draft_len)
        drafts = [draft for draft, _, _ in blocks]
        judged = [self.verdict(toy, prefix, drafts, n) for n in range(cap + 1)]
        for d, (draft, weight, seen) in enumerate(blocks):
            chances = [own[d] for own, _ in judged]  # by how many are verified, of each draft
            for ends, part, known in self._numbers(chances, prefix, seen):
                kept = [max((i + 1 for i in range(n) if ends[i] <= own[i]), default=0) for n, own in enumerate(chances)]
                last = [judged[n][1][d][accepted] for n, accepted in enumerate(kept)]
                yield _realisation(prefix, draft, weight * part, known, kept, last)

    def draw_number(self, noise: Noise, position: int, anchor: int, parts: Sequence[float]) -> Draws:
        """Find which part of [0, 1] the number of the draft at ``position`` lies in, in the round of ``anchor``."""
        return _afresh(noise, parts)

    def verdict(
        self, toy: ToyRequest, prefix: Tokens, drafts: Sequence[Tokens], verified: int
    ) -> tuple[list[list[float]], list[list[list[float]]]]:
        """For each block whose first ``verified`` drafts are verified: their thresholds, and the last token's laws."""
        p = [[toy.target(prefix + draft[:n]) for n in range(verified + 1)] for draft in drafts]
        q = [[toy.drafter(prefix + draft[:n]) for n in range(verified)] for draft in drafts]
        tokens = torch.tensor([[*draft[:verified], -1] for draft in drafts])  # [blocks, verified + 1]
        target = torch.tensor(p, dtype=torch.float64)  # [blocks, verified + 1, V]
        drafter = torch.zeros_like(target)
        if verified:
            drafter[:, :-1] = torch.tensor(q, dtype=torch.float64)
        chance, residual = block_verdict(target, drafter, tokens)
        return chance.tolist(), residual.tolist()

    def _numbers(
        self, chances: Sequence[Sequence[float]], prefix: Tokens, noise: Noise
    ) -> list[tuple[tuple[float, ...], float, Noise]]:
        """Every way that the numbers can lie between the thresholds: the upper end of each one's part of [0, 1]."""
        cases: list[tuple[tuple[float, ...], float, Noise]] = [((), 1.0, noise)]
        for i in range(len(chances) - 1):
            edges = sorted({0.0, 1.0, *(own[i] for own in chances[i + 1 :])})
            parts = [high - low for low, high in itertools.pairwise(edges)]
            cases = [
                ((*ends, edges[part + 1]), weight * p, known)
                for ends, weight, seen in cases
                for part, p, known in self.draw_number(seen, len(prefix) + i, len(prefix) - 1, parts)
            ]
        return cases


Coupling = Literal["forwards", "backwards", "independent"]


class CoupledToy:
    """The ``coupled`` rule, its decisions from :func:`dspark.ops.accept.accept` itself.

    Noise belongs to a position and is the same in every round, for the draft and for the target's own sample: an
    earlier, rejected round may have shown something of it. The rule's promise rests on the target's samples alone, so
    any joint law of the two draws serves.

    Args:
        coupling: inverse CDF of one number through the same order of tokens, through opposite orders, or of two
            numbers.
    """

    _rule: Rule = "coupled"

    def __init__(self, coupling: Coupling = "forwards") -> None:
        if coupling not in ("forwards", "backwards", "independent"):
            raise ValueError(f"coupling: expected forwards, backwards or independent, got {coupling!r}")
        self._coupling = coupling

    def realise(self, toy: ToyRequest, prefix: Tokens, noise: Noise, draft_len: int, cap: int) -> Iterator[Realisation]:
        vocab_size = len(toy.target(prefix))
        for draft, weight, seen in _drafts(self._draw_draft, toy, prefix, noise, draft_len):
            for samples, chance, known in self._samples(toy, prefix, draft[:cap], seen):
                rows = samples + (0,) * (cap + 1 - len(samples))
                tables = [emission_table(self._rule, vocab_size, n) for n in range(cap + 1)]
                emitted = [table[draft[:n] + rows[: n + 1]] for n, table in enumerate(tables)]
                emissions = tuple(((tokens, 1.0, known.after(len(prefix) + len(tokens))),) for tokens in emitted)
                yield Realisation(draft, weight * chance, len(emitted[cap]) - 1, emissions)

    def _draw_draft(self, noise: Noise, position: int, anchor: int, q: Sequence[float]) -> Draws:
        return noise.draw((position, 0), q)

    def _samples(self, toy: ToyRequest, prefix: Tokens, draft: Tokens, noise: Noise) -> Iterator[Emission]:
        """The target's sample in each row down to the first that differs from the draft; no later one can matter."""
        part = 1 if self._coupling == "independent" else 0
        frontier: list[Emission] = [((), 1.0, noise)]
        while frontier:
            samples, weight, seen = frontier.pop()
            n = len(samples)
            if n > len(draft) or samples != draft[:n]:
                yield samples, weight, seen
                continue
            cases = seen.draw(
                (len(prefix) + n, part), toy.target(prefix + draft[:n]), backwards=self._coupling == "backwards"
            )
            frontier += [((*samples, token), weight * p, known) for token, p, known in cases]


class MatchToy(CoupledToy):
    """The ``match`` rule, its decisions from :func:`dspark.ops.accept.accept` itself.

    The target draws with one number for each position, the same in every round; drafts are drawn afresh.
    """

    _rule: Rule = "match"

    def __init__(self) -> None:
        super().__init__("independent")

    def _draw_draft(self, noise: Noise, position: int, anchor: int, q: Sequence[float]) -> Draws:
        return _afresh(noise, q)


@cache
def emission_table(rule: Rule, vocab_size: int, draft_len: int) -> dict[Tokens, Tokens]:
    """What ``accept`` under ``coupled`` or ``match`` emits, by a block's drafts followed by the samples of rows 0..G.

    One batch holds all ``V^(2G + 1)`` cases. A target row has all its mass on its sample.
    """
    width = 2 * draft_len + 1
    cases = torch.cartesian_prod(*[torch.arange(vocab_size)] * width).reshape(-1, width)
    count = len(cases)
    drafts, samples = cases[:, :draft_len], cases[:, draft_len:]
    tokens = torch.cat([torch.zeros(count, 1, dtype=torch.long), drafts], dim=1)  # [cases, 1 + G]
    mass = torch.nn.functional.one_hot(samples.flatten(), vocab_size).float()  # [cases * (1 + G), V]
    verdict = accept(
        mass.log(),
        Rows(
            tokens=tokens.flatten(),
            query_start=torch.arange(count + 1) * (draft_len + 1),
            position=torch.zeros(count, dtype=torch.long),
            max_query_len=draft_len + 1,
        ),
        rule=rule,
        sampling=_plain_sampling(count),
    )
    emitted, lengths = verdict.tokens.tolist(), verdict.num_emitted.tolist()
    return {tuple(c): tuple(row[:n]) for c, row, n in zip(cases.tolist(), emitted, lengths, strict=True)}


def _plain_sampling(requests: int) -> Sampling:
    off: Tensor = torch.zeros(requests)
    whole = torch.zeros(requests, dtype=torch.long)
    return Sampling(off + 1, whole, off + 1, off, torch.arange(requests), any_truncation=False)


def _afresh(noise: Noise, probabilities: Sequence[float]) -> Draws:
    """Draw with a number that no other draw has seen or will see."""
    return ((case, p, noise) for case, p in enumerate(probabilities) if p > 0)


_Draw = Callable[[Noise, int, int, Sequence[float]], Draws]


def _drafts(draw: _Draw, toy: ToyRequest, prefix: Tokens, noise: Noise, draft_len: int) -> list[Emission]:
    """Every block of drafts after ``prefix``, its probability, and what is known of the noise after drawing it."""
    blocks: list[Emission] = [((), 1.0, noise)]
    for k in range(draft_len):
        blocks = [
            ((*block, token), weight * p, known)
            for block, weight, seen in blocks
            for token, p, known in draw(seen, len(prefix) + k, len(prefix) - 1, toy.drafter(prefix + block))
        ]
    return blocks


def _realisation(
    prefix: Tokens, draft: Tokens, probability: float, noise: Noise, kept: list[int], last: Sequence[Sequence[float]]
) -> Realisation:
    """A case where, for each number of drafts verified, so many are kept and one more token follows its law."""
    emissions = []
    for count, law in zip(kept, last, strict=True):
        known = noise.after(len(prefix) + count + 1)
        emissions.append(tuple(((*draft[:count], token), p, known) for token, p in enumerate(law) if p > 0))
    return Realisation(draft, probability, kept[-1], tuple(emissions))
