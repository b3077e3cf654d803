"""The exact law of one round over a drafted tree, by enumeration in float64.

A tree of a few nodes over a vocabulary of two or three tokens has few enough cases to list: what is drawn at every
node, what each verdict may be, and, where the round emits less, what plain decoding adds. A rule over trees is lossless
when the law found is that of plain decoding:

>>> from dspark.testing import ToyRequest, plain_law, total_variation
>>> toy = ToyRequest(target=lambda tokens: (0.7, 0.2, 0.1), drafter=lambda tokens: (0.4, 0.4, 0.2), max_tokens=3)
>>> law = recursive_tree_law(toy, parents=(-1, 0, 0, 1))
>>> total_variation(law, plain_law([toy], length=3)) < 1e-12
True
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod

import torch

from dspark.ops.accept import accept
from dspark.ops.accept.tree_reference import recursive_verdict
from dspark.ops.draft.tree_reference import ancestor_words
from dspark.ops.types import Rows, Rule, Sampling, Tree
from dspark.testing.law import JointLaw, completed
from dspark.testing.rules import Law, Tokens, ToyRequest

Options = Sequence[tuple[Tokens, float]]
"""What may come out of a draw, and with which probability."""
Draw = Callable[[Sequence[float], int], Options]
"""(q, how many) -> every list of siblings with its probability; -1 where a place stays empty."""
Judge = Callable[[Law, Law, Tokens], tuple[list[float], list[float]]]
"""(p, q, siblings) -> the chance of each, those before it rejected, and the law of what is drawn if all are."""
Keep = Callable[[Tokens, Tokens], Sequence[bool]]
"""(prefix, token of every node) -> which places the tree has."""


def without_replacement(q: Sequence[float], count: int) -> list[tuple[Tokens, float]]:
    """Siblings drawn from q one after another, each without those before it.

    >>> without_replacement((0.5, 0.25, 0.25), 2)[:2]
    [((0, 1), 0.25), ((0, 2), 0.25)]
    """
    cases: list[tuple[Tokens, float]] = [((), 1.0)]
    for _ in range(count):
        longer = []
        for tokens, weight in cases:
            left = [(token, p) for token, p in enumerate(q) if p > 0 and token not in tokens]
            rest = sum(p for _, p in left)
            longer += [((*tokens, token), weight * p / rest) for token, p in left] or [((*tokens, -1), weight)]
        cases = longer
    return cases


def recursive_judge(p: Law, q: Law, siblings: Tokens) -> tuple[list[float], list[float]]:
    """:func:`~dspark.ops.accept.tree_reference.recursive_verdict` of one node."""
    rows = [torch.tensor(law, dtype=torch.float64) for law in (p, q)]
    chance, residual = recursive_verdict(rows[0], rows[1], torch.tensor(siblings))
    return chance.tolist(), residual.tolist()


def recursive_tree_law(
    toy: ToyRequest,
    parents: Sequence[int],
    *,
    draw: Draw = without_replacement,
    judge: Judge = recursive_judge,
    keep: Keep | None = None,
    shared_noise: bool = True,
) -> JointLaw:
    """The law of a request's first tokens, one more than the tree is deep, under the ``recursive`` rule.

    Args:
        toy: its models; ``max_tokens`` should be at least that many.
        parents: of each node, -1 for node 0; a parent comes before its children.
        draw: how siblings are drawn.
        judge: how they are judged.
        keep: which places are kept once all tokens are drawn; None is all, which is what the rule asks for.
        shared_noise: nodes of one depth draw by one number, as :func:`dspark.ops.draft_tree` does, and not each by its
            own.
    """
    length = max(_depths(parents)) + 1
    judged = cache(judge)

    def emissions(tokens: Tokens, node: int, emitted: Tokens, kept: Sequence[bool]) -> Iterator[tuple[Tokens, float]]:
        prefix = toy.prompt + emitted
        children = [i for i in _children(parents, node) if kept[i] and tokens[i] >= 0]
        chances: list[float] = []
        residual = toy.target(prefix)
        if children:
            siblings = tuple(tokens[i] for i in children)
            chances, residual = judged(tuple(residual), tuple(toy.drafter(prefix)), siblings)
        reached = 1.0
        for child, chance in zip(children, chances, strict=True):
            if reached * chance > 0:
                for rest, p_rest in emissions(tokens, child, (*emitted, tokens[child]), kept):
                    yield rest, reached * chance * p_rest
            reached *= 1 - chance
        yield from (((*emitted, token), reached * p_last) for token, p_last in enumerate(residual) if p_last > 0)

    def groups(prefixes: list[Tokens], drafts: list[Options]) -> list[list[Options]]:
        return [drafts] if shared_noise else [[own] for own in drafts]

    law: JointLaw = defaultdict(float)
    for (tokens, _), weight in _drawn(toy, parents, draw, groups).items():
        kept = [True] * len(parents) if keep is None else keep(toy.prompt, tokens)
        for emitted, chance in emissions(tokens, 0, (), kept):
            for whole, p in completed(toy, emitted, weight * chance, length):
                law[(whole,)] += p
    return dict(law)


def drawn_tree_law(toy: ToyRequest, parents: Sequence[int], rule: Rule) -> JointLaw:
    """The law of a request's first tokens under ``coupled`` or ``match``, decided by :func:`dspark.ops.accept` itself.

    The target's draws at the nodes of one depth come from one number, and under ``coupled`` the drafts do too.
    """

    def groups(prefixes: list[Tokens], drafts: list[Options]) -> list[list[Options]]:
        target: list[Options] = [[((x,), p) for x, p in enumerate(toy.target(prefix))] for prefix in prefixes]
        return [[*drafts, *target]] if rule == "coupled" else [drafts, target]

    cases = _drawn(toy, parents, without_replacement, groups)
    law: JointLaw = defaultdict(float)
    emitted = _emitted(parents, list(cases), rule, len(toy.target(toy.prompt)))
    for weight, tokens in zip(cases.values(), emitted, strict=True):
        for whole, p in completed(toy, tokens, weight, max(_depths(parents)) + 1):
            law[(whole,)] += p
    return dict(law)


def _emitted(
    parents: Sequence[int], cases: Sequence[tuple[Tokens, Tokens]], rule: Rule, vocab_size: int
) -> list[Tokens]:
    """What ``accept`` emits where the target's row at each node has all its mass on a given token."""
    count, width = len(cases), len(parents)
    tokens = torch.tensor([tokens for tokens, _ in cases])  # [R, N]
    draws = torch.tensor([draws for _, draws in cases])
    shape = torch.tensor(parents).expand(count, -1).contiguous()
    depth = torch.tensor(_depths(parents)).expand(count, -1).contiguous()
    num_nodes = torch.full((count,), width)
    tree = Tree(tokens, shape, ancestor_words(shape, num_nodes, width), depth, num_nodes)
    number = torch.ones(count)
    whole = torch.zeros(count, dtype=torch.long)
    verdict = accept(
        torch.nn.functional.one_hot(draws.flatten(), vocab_size).float().log(),
        Rows(tokens.flatten(), torch.arange(count + 1) * width, whole, width),
        rule=rule,
        sampling=Sampling(number, whole, number, number * 0, torch.arange(count), any_truncation=False),
        tree=tree,
    )
    return [tuple(row[:n]) for row, n in zip(verdict.tokens.tolist(), verdict.num_emitted.tolist(), strict=True)]


def _drawn(
    toy: ToyRequest,
    parents: Sequence[int],
    draw: Draw,
    groups: Callable[[list[Tokens], list[Options]], list[list[Options]]],
) -> dict[tuple[Tokens, Tokens], float]:
    """Draw for the nodes of one depth after another: every (token of each node, target's draw at each) and its chance.

    A token or draw that there is not is -1. ``groups`` is given the tokens before each node of a depth and what its
    children may be, and says which draws come from one number: the children's first, then the target's, if any.
    """
    depths, none = _depths(parents), (-1,) * len(parents)
    cases = {(none, none): 1.0}
    for depth in range(max(depths) + 1):
        nodes = [i for i, d in enumerate(depths) if d == depth]
        children = [_children(parents, i) for i in nodes]
        longer: dict[tuple[Tokens, Tokens], float] = defaultdict(float)
        for (tokens, draws), weight in cases.items():
            prefixes = [toy.prompt + _path(parents, tokens, i) for i in nodes]
            drafts: list[Options] = []
            for i, own, prefix in zip(nodes, children, prefixes, strict=True):
                absent = i > 0 and tokens[i] < 0
                drafts.append([((-1,) * len(own), 1.0)] if absent else draw(toy.drafter(prefix), len(own)))
            for parts in itertools.product(*map(_refined, groups(prefixes, drafts))):
                outcome = [item for part, _ in parts for item in part]
                new_tokens, new_draws = list(tokens), list(draws)
                for own, siblings in zip(children, outcome, strict=False):
                    for child, token in zip(own, siblings, strict=True):
                        new_tokens[child] = token
                for i, (token,) in zip(nodes, outcome[len(nodes) :], strict=False):
                    new_draws[i] = token
                longer[tuple(new_tokens), tuple(new_draws)] += weight * prod(p for _, p in parts)
        cases = longer
    return cases


def _refined(options: Sequence[Options]) -> Iterator[tuple[tuple[Tokens, ...], float]]:
    """Draws by inverse CDF from one number: the pieces of [0, 1] on which all of them are constant."""
    ends = [list(itertools.accumulate(p for _, p in own)) for own in options]
    edges = sorted({0.0, 1.0, *(min(end, 1.0) for own in ends for end in own)})
    for low, high in itertools.pairwise(edges):
        if high - low > 1e-14:  # narrower ones are rounding
            middle = (low + high) / 2
            places = [next((i for i, end in enumerate(own) if end > middle), len(own) - 1) for own in ends]
            yield tuple(own[i][0] for own, i in zip(options, places, strict=True)), high - low


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _children(parents: Sequence[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents) if parent == node]


def _path(parents: Sequence[int], tokens: Tokens, node: int) -> Tokens:
    """Tokens from below node 0 down to a node."""
    path: list[int] = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return tuple(path)
