"""The rules over trees emit exactly what plain decoding would, in law; and the biased forms are seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dspark.testing import (
    ToyRequest,
    drawn_tree_law,
    plain_law,
    recursive_tree_law,
    total_variation,
    without_replacement,
)
from dspark.testing.rules import Law, Tokens
from dspark.testing.trees import recursive_judge
from tests.laws.toys import SAMPLINGS, constant, toy
from tests.tolerances import LAW

SHAPES = {
    "chain": (-1, 0, 1),
    "star of two": (-1, 0, 0),
    "star of three": (-1, 0, 0, 0),
    "two levels": (-1, 0, 0, 1, 1, 2),
    "deeper on the left": (-1, 0, 0, 1, 1),
    "deeper on the right": (-1, 0, 0, 2, 2),
}


def off(law: dict[tuple[Tokens, ...], float], request: ToyRequest) -> float:
    """How far a law is from that of plain decoding."""
    return total_variation(law, plain_law([request], length=len(next(iter(law))[0])))


@pytest.mark.parametrize("shared_noise", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_recursive_is_lossless_on_every_shape(shape: str, shared_noise: bool) -> None:
    """With nodes of one depth drawing by one number too: on the path that is judged it is used once."""
    for seed in (1, 2):
        request = toy(seed, vocab_size=3, max_tokens=4)
        assert off(recursive_tree_law(request, SHAPES[shape], shared_noise=shared_noise), request) < LAW


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_recursive_is_lossless_under_every_warper(sampling: str) -> None:
    request = toy(2, vocab_size=3, max_tokens=4, sampling=sampling)
    assert off(recursive_tree_law(request, SHAPES["two levels"]), request) < LAW


@pytest.mark.parametrize("rule", ["coupled", "match"])
@pytest.mark.parametrize("sampling", ["plain", "greedy", "all", "greedy drafter", "two of their own"])
def test_what_the_target_draws_is_emitted(rule: str, sampling: str) -> None:
    request = toy(3, vocab_size=3, max_tokens=4, sampling=sampling)
    for shape in ("star of two", "deeper on the left", "deeper on the right"):
        assert off(drawn_tree_law(request, SHAPES[shape], rule), request) < LAW  # type: ignore[arg-type]


P, Q = (0.5, 0.4, 0.1), (0.28, 0.12, 0.6)
"""After the likely rejection, of token 2, two tokens are left that q does not find equally likely."""


def test_more_siblings_accept_more_of_them() -> None:
    """One is accepted as a chain's draft is, and of three siblings, all tokens, one surely."""
    accepted = []
    for count in (1, 2, 3):
        kept = 0.0
        for siblings, weight in without_replacement(Q, count):
            reached = weight
            for chance in recursive_judge(P, Q, siblings)[0]:
                kept += reached * chance
                reached *= 1 - chance
        accepted.append(kept)
    assert accepted[0] == pytest.approx(sum(map(min, P, Q)), abs=LAW)
    assert accepted[0] < accepted[1] <= accepted[2] + LAW
    assert accepted[2] == pytest.approx(1, abs=LAW)


def residual(p: Sequence[float], q: Sequence[float]) -> Law:
    excess = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return tuple(x / sum(excess) for x in excess) if sum(excess) > 1e-12 else tuple(p)


def removed(q: Sequence[float], token: int, normalise: bool = True) -> Law:
    rest = [0.0 if i == token else x for i, x in enumerate(q)]
    return tuple(x / sum(rest) for x in rest) if normalise and sum(rest) > 0 else tuple(rest)


def judge_with(normalise: bool, q_first: bool) -> object:
    """The rule in plain Python: q may stay unnormalised, or lose the child before the residual is taken."""

    def judge(p: Law, q: Law, siblings: Tokens) -> tuple[list[float], list[float]]:
        chances = []
        for x in siblings:
            chances.append(min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0)
            after = removed(q, x, normalise)
            p, q = residual(p, after if q_first else q), after
        return chances, list(p)

    return judge


def test_the_rule_in_plain_python_agrees() -> None:
    judge = judge_with(normalise=True, q_first=False)
    for siblings, _ in without_replacement(Q, 3):
        chances, last = judge(P, Q, siblings)  # type: ignore[operator]
        expected, expected_last = recursive_judge(P, Q, siblings)
        reached = 1.0
        for a, b in zip(chances, expected, strict=True):
            if reached > LAW:
                assert a == pytest.approx(b, abs=LAW)
            reached *= 1 - b
        if reached > LAW:
            assert last == pytest.approx(expected_last, abs=LAW)


@pytest.mark.parametrize(
    "judge",
    [judge_with(normalise=False, q_first=False), judge_with(normalise=True, q_first=True)],
    ids=["q not normalised after a rejection", "residual of q without the child"],
)
def test_a_wrong_recursion_is_lossy(judge: object) -> None:
    request = constant(P, Q, 2)
    law = recursive_tree_law(request, SHAPES["star of two"], judge=judge)  # type: ignore[arg-type]
    assert off(law, request) > 0.01


def test_siblings_drawn_with_replacement_are_lossy_under_this_rule() -> None:
    def with_replacement(q: Sequence[float], count: int) -> list[tuple[Tokens, float]]:
        cases: list[tuple[Tokens, float]] = [((), 1.0)]
        for _ in range(count):
            cases = [((*own, x), weight * p) for own, weight in cases for x, p in enumerate(q)]
        return cases

    request = constant(P, Q, 2)
    assert off(recursive_tree_law(request, SHAPES["star of two"], draw=with_replacement), request) > 0.01


def test_p02_children_that_were_not_drawn_from_q_are_lossy() -> None:
    """The most likely tokens instead of a sample."""

    def most_likely(q: Sequence[float], count: int) -> list[tuple[Tokens, float]]:
        return [(tuple(sorted(range(len(q)), key=lambda x: -q[x])[:count]), 1.0)]

    request = constant(P, Q, 2)
    assert off(recursive_tree_law(request, SHAPES["star of two"], draw=most_likely), request) > 0.05


def test_a_shape_won_by_the_tokens_drawn_in_it_is_lossy() -> None:
    """Best-first by the realised q: of two places for a second node, the one whose token has more of q is kept."""
    request = constant(P, Q, 3)

    def best_first(prefix: Tokens, tokens: Tokens) -> list[bool]:
        sibling, child = tokens[2], tokens[3]
        takes_sibling = Q[sibling] >= Q[tokens[1]] * Q[child]
        return [True, True, takes_sibling, not takes_sibling]

    assert off(recursive_tree_law(request, (-1, 0, 0, 1), keep=best_first), request) > 0.005
    assert off(recursive_tree_law(request, (-1, 0, 0, 1)), request) < LAW

    def gated(prefix: Tokens, tokens: Tokens) -> list[bool]:
        return [True, Q[tokens[1]] > 0.25]

    assert off(recursive_tree_law(request, (-1, 0), keep=gated), request) > 0.05


def test_a_shape_that_follows_earlier_draws_alone_is_lossless() -> None:
    """Whether there is a second sibling may depend on the first: it is judged before."""
    request = constant(P, Q, 2)

    def after_the_first(prefix: Tokens, tokens: Tokens) -> list[bool]:
        return [True, True, tokens[1] == 2]

    assert off(recursive_tree_law(request, SHAPES["star of two"], keep=after_the_first), request) < LAW
