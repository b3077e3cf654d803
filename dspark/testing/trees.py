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

import torch

from dspark.ops.accept import accept
from dspark.ops.accept.tree_reference import recursive_verdict
from dspark.ops.draft.tree_reference import ancestor_words
from dspark.ops.types import Rows, Rule, Sampling, Tree
from dspark.testing.law import JointLaw
from dspark.testing.rules import Law, Tokens, ToyRequest

Options = Sequence[Sequence[tuple[Tokens, float]]]
"""Of each draw, what may come out and with which probability."""
Draw = Callable[[Sequence[float], int], list[tuple[Tokens, float]]]
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
            rest = sum(p for token, p in enumerate(q) if token not in tokens)
            if rest <= 0:
                longer.append(((*tokens, -1), weight))
                continue
            longer += [
                ((*tokens, token), weight * p / rest) for token, p in enumerate(q) if p > 0 and token not in tokens
            ]
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
    verdicts: dict[tuple[Law, Law, Tokens], tuple[list[float], list[float]]] = {}

    def emissions(tokens: Tokens, node: int, emitted: Tokens, kept: Sequence[bool]) -> Iterator[tuple[Tokens, float]]:
        prefix = toy.prompt + emitted
        children = [i for i, parent in enumerate(parents) if parent == node and kept[i] and tokens[i] >= 0]
        p = tuple(toy.target(prefix))
        chances: list[float] = []
        residual = list(p)
        if children:
            case = p, tuple(toy.drafter(prefix)), tuple(tokens[i] for i in children)
            if case not in verdicts:
                verdicts[case] = judge(*case)
            chances, residual = verdicts[case]
        reached = 1.0
        for child, chance in zip(children, chances, strict=True):
            if reached * chance > 0:
                for rest, p_rest in emissions(tokens, child, (*emitted, tokens[child]), kept):
                    yield rest, reached * chance * p_rest
            reached *= 1 - chance
        yield from (((*emitted, token), reached * p_last) for token, p_last in enumerate(residual) if p_last > 0)

    law: JointLaw = defaultdict(float)
    for tokens, weight in _drafted(toy, parents, draw, shared_noise):
        kept = [True] * len(parents) if keep is None else keep(toy.prompt, tokens)
        for emitted, chance in emissions(tokens, 0, (), kept):
            _add_completed(law, toy, emitted, weight * chance, length)
    return dict(law)


def drawn_tree_law(toy: ToyRequest, parents: Sequence[int], rule: Rule) -> JointLaw:
    """The law of a request's first tokens under ``coupled`` or ``match``, decided by :func:`dspark.ops.accept` itself.

    The target's draws at the nodes of one depth come from one number, and under ``coupled`` the drafts do too.
    """
    depths = _depths(parents)
    length = max(depths) + 1
    cases: list[tuple[Tokens, Tokens, float]] = [((-1,) * len(parents), (-1,) * len(parents), 1.0)]
    for depth in range(length):
        nodes = [i for i, d in enumerate(depths) if d == depth]
        longer: dict[tuple[Tokens, Tokens], float] = defaultdict(float)
        for tokens, draws, weight in cases:
            prefixes = [toy.prompt + _path(parents, tokens, i) for i in nodes]
            target = [[((token,), p) for token, p in enumerate(toy.target(prefix))] for prefix in prefixes]
            drafts = [
                without_replacement(toy.drafter(prefix), sum(p == i for p in parents))
                for prefix, i in zip(prefixes, nodes, strict=True)
            ]
            groups: list[Options] = [[*target, *drafts]] if rule == "coupled" else [target, drafts]
            for parts in itertools.product(*(_refined(group) for group in groups)):
                outcome = [item for part, _ in parts for item in part]
                new_tokens, new_draws = list(tokens), list(draws)
                for j, i in enumerate(nodes):
                    new_draws[i] = outcome[j][0]
                    children = [c for c, parent in enumerate(parents) if parent == i]
                    for c, token in zip(children, outcome[len(nodes) + j], strict=True):
                        new_tokens[c] = token
                chance = weight
                for _, p in parts:
                    chance *= p
                longer[tuple(new_tokens), tuple(new_draws)] += chance
        cases = [(*key, weight) for key, weight in longer.items()]
    law: JointLaw = defaultdict(float)
    emitted = _emitted(parents, [(tokens, draws) for tokens, draws, _ in cases], rule, len(toy.target(toy.prompt)))
    for (_, _, weight), tokens in zip(cases, emitted, strict=True):
        _add_completed(law, toy, tokens, weight, length)
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


def _drafted(toy: ToyRequest, parents: Sequence[int], draw: Draw, shared_noise: bool) -> Iterator[tuple[Tokens, float]]:
    """Every way to fill the places of a tree, node 0 with -1, and its probability."""
    depths = _depths(parents)
    cases: dict[Tokens, float] = {(-1,) * len(parents): 1.0}
    for depth in range(max(depths)):
        nodes = [i for i, d in enumerate(depths) if d == depth]
        longer: dict[Tokens, float] = defaultdict(float)
        for tokens, weight in cases.items():
            options = []
            for i in nodes:
                count = sum(parent == i for parent in parents)
                absent = i > 0 and tokens[i] < 0
                prefix = toy.prompt + _path(parents, tokens, i)
                options.append([((-1,) * count, 1.0)] if absent else draw(toy.drafter(prefix), count))
            joint = _refined(options) if shared_noise else _independent(options)
            for lists, p in joint:
                filled = list(tokens)
                for i, own in zip(nodes, lists, strict=True):
                    for child, token in zip([c for c, parent in enumerate(parents) if parent == i], own, strict=True):
                        filled[child] = token
                longer[tuple(filled)] += weight * p
        cases = longer
    yield from cases.items()


def _independent(options: Options) -> Iterator[tuple[tuple[Tokens, ...], float]]:
    for choice in itertools.product(*options):
        weight = 1.0
        for _, p in choice:
            weight *= p
        yield tuple(tokens for tokens, _ in choice), weight


def _refined(options: Options) -> Iterator[tuple[tuple[Tokens, ...], float]]:
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


def _path(parents: Sequence[int], tokens: Tokens, node: int) -> Tokens:
    """Tokens from below node 0 down to a node."""
    path: list[int] = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return tuple(path)


def _add_completed(law: JointLaw, toy: ToyRequest, emitted: Tokens, weight: float, length: int) -> None:
    """Add an emission, completed by plain decoding to so many tokens."""
    if len(emitted) >= length:
        law[(emitted[:length],)] += weight
        return
    for token, p in enumerate(toy.target(toy.prompt + emitted)):
        if p > 0:
            _add_completed(law, toy, (*emitted, token), weight * p, length)
