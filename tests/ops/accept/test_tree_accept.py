"""``accept`` over trees: the reference against a plain walk, against chains, and on every kind of bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.ops.accept import accept
from dspark.ops.draft.tree import draft_tree
from dspark.ops.sample import sample
from dspark.ops.types import DenseQ, Rows, Rule, Status, Stream
from tests.ops.chains import assert_same, make_batch
from tests.ops.helpers import chi_square_pvalue, make_sampling, verify
from tests.ops.trees import TREE_RULES, tree_of, tree_problem, walk
from tests.tolerances import CHI_SQUARE

NAN, INF = float("nan"), float("inf")
on_rules = pytest.mark.parametrize("rule", TREE_RULES)


@on_rules
@settings(max_examples=15)
@given(
    nodes=st.integers(1, 12),
    vocab_size=st.integers(2, 14),
    branching=st.integers(1, 4),
    temperature=st.lists(st.sampled_from([0.0, 0.6, 1.0, 1.5]), min_size=3, max_size=3),
    short=st.integers(0, 12),
    seed=st.integers(0, 10_000),
)
def test_agrees_with_a_walk_over_nodes(
    rule: Rule, nodes: int, vocab_size: int, branching: int, temperature: list[float], short: int, seed: int
) -> None:
    sampling = make_sampling(temperature, [0, 3, 0], seed=[seed, seed + 1, 7])
    lengths = [nodes, min(short, nodes), nodes]
    arguments = tree_problem(
        rule, sampling, nodes=nodes, vocab_size=vocab_size, branching=branching, seed=seed, lengths=lengths
    )
    verdict = verify(**arguments)
    for r in range(3):
        tokens, path = walk(arguments, r)
        n = len(tokens)
        assert verdict.num_emitted[r] == n
        assert verdict.tokens[r].tolist() == tokens + [-1] * (nodes - n)
        assert verdict.path[r].tolist() == path + [-1] * (nodes - n)
        assert (verdict.logprobs[r, n:] == 0).all()


@pytest.mark.parametrize(("rule", "chain_rule"), [("coupled", "coupled"), ("match", "match"), ("recursive", "ratio")])
@pytest.mark.parametrize("logprobs", ["raw", "processed"])
def test_a_chain_shaped_tree_gives_the_chains_verdict(rule: Rule, chain_rule: Rule, logprobs: str) -> None:
    """Bit for bit; on a chain the recursion is the ratio rule."""
    for seed in range(6):
        sampling = make_sampling([1.0, 0.0, 0.7, 1.3], [0, 0, 4, 0], seed=[seed, 1, 2, 3])
        batch = make_batch([5, 5, 3, 0], sampling, rule=chain_rule, seed=seed)
        expected = batch.accept(chain_rule, logprobs=logprobs)
        tree = tree_of([[-1, 0, 1, 2, 3]] * 4)
        branching = 1 if rule == "recursive" else None
        assert_same(batch.accept(rule, logprobs=logprobs, tree=tree, max_branching=branching), expected)
        if rule == "recursive":
            assert_same(batch.accept(rule, logprobs=logprobs), expected)


@on_rules
def test_p08_at_least_one_and_at_most_depth_plus_one_tokens(rule: Rule) -> None:
    counts = set()
    for seed in range(20):
        arguments = tree_problem(rule, make_sampling([1.0] * 8, seed=list(range(8))), nodes=9, noise=0.3, seed=seed)
        verdict = verify(**arguments)
        depth = arguments["tree"].depth.amax(1)
        assert (verdict.num_emitted >= 1).all()
        assert (verdict.num_emitted <= depth + 1).all()
        counts |= set(verdict.num_emitted.tolist())
    assert max(counts) >= 3


@pytest.mark.parametrize("nodes", [64, 65, 130, 256])
def test_trees_of_many_words(nodes: int) -> None:
    arguments = tree_problem("coupled", make_sampling([0.0, 0.8], seed=[1, 2]), nodes=nodes, vocab_size=6, noise=0.2)
    verdict = verify(**arguments)
    for r in range(2):
        assert verdict.tokens[r, : verdict.num_emitted[r]].tolist() == walk(arguments, r)[0]
    assert verdict.num_emitted.max() > 2


@on_rules
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_a_bad_row_counts_where_the_path_reaches_it(rule: Rule, value: float, temperature: float) -> None:
    sampling = make_sampling([temperature] * 2, seed=[3, 4])
    arguments = tree_problem(rule, sampling, nodes=8, noise=0.2, seed=6)
    before = verify(**arguments)
    for node in range(8):
        logits = arguments["target_logits"].clone()
        logits[node] = value if value == -INF else logits[node]
        logits[node, 5] = value
        verdict = verify(**(arguments | {"target_logits": logits}))
        path = before.path[0].tolist()
        assert torch.equal(verdict.tokens[1], before.tokens[1])
        if node in path:
            assert verdict.status.tolist() == [Status.BAD_LOGITS, Status.OK]
            n = int(verdict.num_emitted[0])
            assert n == path.index(node)
            assert verdict.tokens[0, :n].tolist() == before.tokens[0, :n].tolist()
        else:
            assert_same(verdict, before)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_p05_bad_draft_rows_reject_the_children(value: float) -> None:
    arguments = tree_problem("recursive", make_sampling([1.0, 1.0], seed=[3, 4]), nodes=8, noise=0.2, seed=6)
    logits = arguments["q"].logits.clone()
    logits[0, 0] = value
    verdict = verify(**(arguments | {"q": DenseQ(logits)}))
    assert verdict.num_emitted[0] == 1
    assert verdict.status.tolist() == [Status.OK, Status.OK]


@on_rules
def test_p07_nodes_that_are_none_are_never_accepted(rule: Rule) -> None:
    """Ids out of the vocabulary, parents out of range, and what hangs below them."""
    arguments = tree_problem(rule, make_sampling([0.0] * 6, seed=1), parents=[-1, 0, 1, 2], vocab_size=9, noise=0.0)
    tree = arguments["tree"]
    tokens = arguments["target_logits"].argmax(-1).roll(1).view(6, 4)
    assert verify(**(arguments | {"tokens": tokens.flatten()})).num_emitted.tolist() == [4] * 6
    tokens = tokens.clone()
    tokens[:3, 1] = torch.tensor([-1, 9, 2**40])
    parents = tree.parents.clone()
    parents[3:, 2] = torch.tensor([-1, 2, 77])
    changes = {"tokens": tokens.flatten(), "tree": tree._replace(parents=parents)}
    assert verify(**(arguments | changes)).num_emitted.tolist() == [1, 1, 1, 2, 2, 2]


def test_a_degenerate_residual_draws_from_p() -> None:
    """p = q, and a child that q could not have given."""
    arguments = tree_problem("recursive", make_sampling([1.0], seed=[3]), parents=[-1, 0, 0], vocab_size=4)
    logits = torch.tensor([0.0, 0.0, 0.0, -INF]).expand(1, 3, 4)
    arguments |= {"q": DenseQ(logits), "target_logits": logits[0], "tokens": torch.tensor([0, 3, 2])}
    verdict = verify(**arguments)
    assert verdict.tokens[0, 0] == 2  # the second child is judged by p = q again
    verdict = verify(**(arguments | {"tokens": torch.tensor([0, 3, 3])}))
    assert verdict.num_emitted.tolist() == [1]
    assert 0 <= verdict.tokens[0, 0] < 3


def test_children_beyond_max_branching_are_not_judged() -> None:
    arguments = tree_problem("recursive", make_sampling([0.0], seed=[3]), parents=[-1, 0, 0, 0], vocab_size=6)
    best = int(arguments["target_logits"][0].argmax())
    others = [x for x in range(6) if x != best][:2]
    arguments["tokens"] = torch.tensor([0, *others, best])
    assert verify(**(arguments | {"max_branching": 2})).num_emitted.tolist() == [1]
    assert verify(**(arguments | {"max_branching": 3})).num_emitted.tolist() == [2]


def test_p01_recursive_verdicts_follow_the_target() -> None:
    """Narrow vocabulary, q far from p, trees from ``draft_tree``: what is emitted first and second has the law of p."""
    requests, vocab_size = 100_000, 8
    scores = torch.linspace(-1.5, 1.5, vocab_size)
    sampling = make_sampling([1.0] * requests, seed=list(range(requests)))
    sampling = sampling._replace(any_truncation=False)
    position = torch.full((requests,), 7)
    draft = draft_tree(
        -scores.expand(requests, 2, vocab_size),
        torch.zeros(requests, dtype=torch.int64),
        head=None,
        hidden=None,
        sampling=sampling,
        position=position,
        rule="recursive",
        num_nodes=5,
        branching=3,
    )
    assert draft.tree.parents[0].tolist() == [-1, 0, 1, 0, 1]
    verdict = accept(
        scores.expand(requests * 5, vocab_size),
        Rows(draft.tree.tokens.flatten(), torch.arange(requests + 1) * 5, position, 5),
        rule="recursive",
        sampling=sampling,
        q=DenseQ(draft.logits),  # type: ignore[arg-type]
        tree=draft.tree,
        max_branching=3,
    )
    p = scores.double().softmax(-1)
    assert chi_square_pvalue(verdict.tokens[:, 0], p) > CHI_SQUARE
    for count in (2, 3):
        seen = verdict.tokens[verdict.num_emitted >= count]
        assert len(seen) > 1000
        assert chi_square_pvalue(seen[:, count - 1], p) > CHI_SQUARE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_emits_the_plain_sampled_sequence(temperature: float) -> None:
    """Every emitted token is what ``sample`` draws from the row of its path, at its position."""
    arguments = tree_problem("coupled", make_sampling([temperature] * 6, seed=list(range(6))), nodes=12, noise=0.3)
    verdict = verify(**arguments)
    for r in range(6):
        for i in range(int(verdict.num_emitted[r])):
            row = arguments["target_logits"][r * 12 + int(verdict.path[r, i])]
            one = make_sampling([temperature], seed=[r])
            drawn = sample(row[None], one, arguments["position"][r : r + 1] + i + 1, stream=Stream.TARGET)
            assert drawn.item() == verdict.tokens[r, i]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "ratio"}, "rule: expected one of 'coupled', 'match', 'recursive', got 'ratio'"),
        ({"max_branching": None}, "max_branching: rule 'recursive' needs the most children of a node"),
        ({"rule": "match", "q": None}, "max_branching: rule 'match' does not use it"),
        ({"tree": None}, "max_branching: a chain has none"),
        ({"q": None}, "q: rule 'recursive' needs the draft's distribution"),
    ],
)
def test_useless_and_missing_arguments(changes: dict[str, Any], message: str) -> None:
    arguments = tree_problem("recursive", make_sampling([1.0], seed=[3]), nodes=4)
    with pytest.raises(ValueError, match=message):
        verify(**(arguments | changes))


@pytest.mark.parametrize("nodes", [4, 70])
def test_ancestors_take_as_many_words_as_there_are_nodes(nodes: int) -> None:
    arguments = tree_problem("coupled", make_sampling([1.0]), nodes=nodes)
    tree = arguments["tree"]
    for words in (torch.zeros(1, nodes, 3).long(), torch.zeros(1, nodes, 1).long()):
        with pytest.raises(ValueError, match=r'tree.ancestors: expected shape "R N'):
            verify(**(arguments | {"tree": tree._replace(ancestors=words)}))
