"""``draft_tree``: the tree against its definition, and chains against ``draft_walk``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.ops.draft import sequential_step
from dspark.ops.draft.tree import draft_tree
from dspark.ops.draft.tree_reference import draft_tree_reference
from dspark.ops.philox import gumbel
from dspark.ops.sample.reference import transform
from dspark.ops.types import RNNHead, Rule, Stream, TreeDraft
from tests.ops.draft.walks import HEADS, Case, V, make_case
from tests.ops.trees import TREE_RULES
from tests.strategies import ancestor_words
from tests.tolerances import LOGITS

on_rules = pytest.mark.parametrize("rule", TREE_RULES)


def draft(case: Case, rule: Rule, num_nodes: int, branching: int, **options: Any) -> TreeDraft:
    return draft_tree(
        case.base_logits,
        case.anchor,
        head=case.head,
        hidden=case.hidden,
        sampling=case.sampling,
        position=case.position,
        rule=rule,
        num_nodes=num_nodes,
        branching=branching,
        **options,
    )


def by_hand(case: Case, rule: Rule, r: int, num_nodes: int, branching: int, table: Any) -> list[tuple[int, int, int]]:
    """One request's nodes (token, parent, depth), best first, out of all nodes of the full tree, made one by one."""
    one = case.take([r], case.base_logits.shape[1])
    greedy = float(one.sampling.temperature) == 0
    nodes: list[tuple[float, int, int, int, int, Any]] = [
        (0.0, 0, 0, int(one.anchor), -1, None)
    ]  # log worth, depth, number, token, parent, state
    for worth, depth, number, token, _, state in nodes:
        if depth == case.base_logits.shape[1] or token < 0:
            continue
        hidden = None if one.hidden is None else one.hidden[:, depth]
        scores = one.base_logits[:, depth].float()
        after = None
        if one.head is not None:
            bias, after = sequential_step(one.head, torch.tensor([token]), hidden, state)
            scores = scores + bias
        keys = scores if greedy else transform(scores, one.sampling)
        if not greedy and rule != "match":
            stream = Stream.TARGET if rule == "coupled" else Stream.DRAFT
            salt = None if rule == "coupled" else one.position
            keys = keys + gumbel(one.sampling.seed, one.position + depth + 1, V, stream, salt=salt)
        chances = keys.log_softmax(-1)[0]
        order = keys[0].argsort(descending=True, stable=True)[:branching].tolist()
        for rank, x in enumerate(order):
            if rule == "recursive":
                nodes.append((worth + table[depth][rank], depth + 1, len(nodes), x, number, after))
            else:
                nodes.append((worth + float(chances[x]), depth + 1, len(nodes), x, number, after))
    best = sorted(nodes, key=lambda node: (-node[0], node[1], node[2]))[:num_nodes]
    place = {node[2]: i for i, node in enumerate(best)}
    return [(token, place.get(parent, -1), depth) for _, depth, _, token, parent, _ in best]


@on_rules
@pytest.mark.parametrize("head", HEADS)
def test_the_best_nodes_of_the_full_tree(head: str, rule: Rule) -> None:
    """A node's children are drawn after its own token, and with the recurrent state of its own path."""
    case = make_case(head, draft_len=3, temperature=(1.0, 0.0, 0.7))
    acceptance = torch.tensor([[0.8, 0.15, 0.02], [0.6, 0.3, 0.05], [0.7, 0.2, 0.09]])
    options = {"acceptance": acceptance} if rule == "recursive" else {}
    tree = draft(case, rule, 12, 3, **options).tree
    for r in range(3):
        expected = by_hand(case, rule, r, 12, 3, acceptance.log().tolist())
        assert list(zip(*(x[r].tolist() for x in (tree.tokens, tree.parents, tree.depth)), strict=True)) == expected
        assert ancestor_words(tree.parents[r].tolist()) == tree.ancestors[r].tolist()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("rule", "stream"), [("coupled", Stream.TARGET), ("recursive", Stream.DRAFT)])
def test_one_child_per_node_is_the_walk(head: str, rule: Rule, stream: Stream) -> None:
    case = make_case(head, draft_len=4, temperature=(1.0, 0.7))
    block, drafted = case.walk(stream=stream), draft(case, rule, 5, 1)
    assert torch.equal(drafted.tree.tokens[:, 1:], block.tokens)
    assert drafted.tree.parents[0].tolist() == [-1, 0, 1, 2, 3]
    if drafted.logits is not None and block.logits is not None:
        assert (drafted.logits[:, :4] - block.logits).abs().max() < LOGITS


@on_rules
@settings(max_examples=8)
@given(
    num_nodes=st.integers(1, 20),
    branching=st.integers(1, 5),
    beam=st.integers(1, 20),
    budget=st.lists(st.integers(-1, 25), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
    top_k=st.integers(0, 4),
)
def test_every_tree_is_well_formed(
    rule: Rule, num_nodes: int, branching: int, beam: int, budget: list[int], seed: int, top_k: int
) -> None:
    case = make_case("markov", temperature=(1.0, 0.0, 0.7), draft_len=3, seed=seed, top_k=top_k)
    case = replace(case, anchor=case.anchor.clone().index_fill(0, torch.tensor([2]), -1 if seed % 2 else 3))
    tree = draft(case, rule, num_nodes, branching, beam=beam, budget=torch.tensor(budget)).tree
    for r in range(3):
        n, parents, tokens = int(tree.num_nodes[r]), tree.parents[r].tolist(), tree.tokens[r].tolist()
        if case.anchor[r] < 0:
            assert n == 0
        else:
            assert 1 <= n <= max(1, min(num_nodes, budget[r]))
            assert (tokens[0], parents[0], int(tree.depth[r, 0])) == (int(case.anchor[r]), -1, 0)
        assert all(0 <= parent < node for node, parent in enumerate(parents[:n]) if node)
        assert all(0 <= token < V for token in tokens[:n])
        assert len({(parent, token) for parent, token in zip(parents[:n], tokens[:n], strict=True)}) == n
        assert all(parents[:n].count(node) <= branching for node in range(n))
        depth = tree.depth[r].tolist()
        assert all(depth[node] == depth[parents[node]] + 1 <= 3 for node in range(1, n))
        assert tree.ancestors[r].tolist() == ancestor_words(parents[:n]) + [0] * (num_nodes - n)
        assert tokens[n:] == parents[n:] == depth[n:] == [-1] * (num_nodes - n)


@on_rules
def test_a_smaller_budget_gives_the_first_nodes(rule: Rule) -> None:
    case = make_case("gated", draft_len=3)
    whole, part = draft(case, rule, 14, 3).tree, draft(case, rule, 14, 3, budget=torch.tensor([5, 1, 9])).tree
    for r, n in enumerate((5, 1, 9)):
        assert part.num_nodes[r] == n
        assert torch.equal(part.tokens[r, :n], whole.tokens[r, :n])
        assert torch.equal(part.parents[r, :n], whole.parents[r, :n])


@on_rules
def test_a_request_is_the_same_alone(rule: Rule) -> None:
    case = make_case("rnn", draft_len=3)
    together = draft(case, rule, 10, 3)
    for r in range(3):
        alone = draft(case.take([r], 3), rule, 10, 3)
        assert torch.equal(alone.tree.tokens[0], together.tree.tokens[r])
        assert torch.equal(alone.tree.parents[0], together.tree.parents[r])


@on_rules
def test_a_beam_wider_than_the_tree_changes_nothing(rule: Rule) -> None:
    """So the op narrows it: what is not among the best ``N - 1`` of its level is no node, nor is anything below it."""
    case = make_case("markov", draft_len=3, temperature=(1.0, 0.0, 0.7))
    acceptance = torch.rand(3, 3, 4).mul(4).round().div(4) if rule == "recursive" else None  # many ties
    arguments = (case.base_logits, case.anchor, case.head, None, case.sampling, case.position, rule, 7, 4, None)
    narrow, wide = (draft_tree_reference(*arguments, beam, acceptance) for beam in (6, 60))
    assert torch.equal(narrow.tree.tokens, wide.tree.tokens)
    assert torch.equal(narrow.tree.parents, wide.tree.parents)
    assert narrow.logits is None or (wide.logits is not None and torch.equal(narrow.logits, wide.logits))


def test_the_shape_of_a_recursive_tree_is_known_before_its_tokens() -> None:
    """Other seeds and other models give other tokens in the same places, whatever their probabilities."""
    shapes = set()
    for seed in range(6):
        case = make_case(HEADS[seed % 4], draft_len=3, seed=seed, temperature=(1.0, 0.5, 1.6))
        shapes |= {tuple(parents) for parents in draft(case, "recursive", 12, 3).tree.parents.tolist()}
    assert len(shapes) == 1
    coupled = draft(make_case("markov", draft_len=3, temperature=(1.0, 0.5, 1.6)), "coupled", 12, 3).tree.parents
    assert len({tuple(parents) for parents in coupled.tolist()}) > 1


def test_recursive_places_without_a_token_are_not_given_to_others() -> None:
    """q has two tokens; the places of third children, and what hangs below them, stay empty."""
    case = make_case("markov", draft_len=2, temperature=(1.0,), top_k=2)
    acceptance = torch.full((2, 3), 0.5)
    tree = draft(case, "recursive", 13, 3, acceptance=acceptance).tree
    assert tree.num_nodes.tolist() == [7]
    assert tree.parents[0, :7].tolist() == [-1, 0, 0, 1, 1, 2, 2]


def test_p03_recursive_returns_the_scores_that_children_were_sampled_from() -> None:
    """Largest score plus noise first; at temperature 0 each child was certain once those before it are gone."""
    case = make_case("markov", draft_len=2, temperature=(1.0, 0.0, 0.7), top_k=[0, 0, 5])
    drafted = draft(case, "recursive", 9, 3)
    tree, logits = drafted.tree, drafted.logits
    assert logits is not None
    for r in range(3):
        for node in range(9):
            children = [c for c in range(9) if tree.parents[r, c] == node]
            if not children:
                continue
            tokens = tree.tokens[r, children]
            at = case.position[r] + tree.depth[r, node] + 1
            noise = gumbel(case.sampling.seed[r], at, V, Stream.DRAFT, salt=case.position[r])
            if case.sampling.temperature[r] == 0:
                left = logits[r, node].double().softmax(-1)
                for token in tokens:
                    assert left[token] / left.sum() == pytest.approx(1)
                    left[token] = 0
            else:
                assert (logits[r, node] + noise).topk(len(children)).indices.tolist() == tokens.tolist()


@on_rules
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_p05_a_bad_slot_ends_the_tree_above_it(rule: Rule, value: float) -> None:
    case = make_case("markov", draft_len=3)
    base = case.base_logits.clone()
    base[0, 1] = value
    base[1, 0, 3] = value if value != -float("inf") else base[1, 0, 3]
    tree = draft(replace(case, base_logits=base), rule, 9, 2).tree
    assert tree.depth[0].max() == 1
    assert tree.num_nodes[1] == 1 or value == -float("inf")
    assert torch.equal(tree.tokens[2], draft(case, rule, 9, 2).tree.tokens[2])


def test_trees_of_more_than_64_nodes() -> None:
    case = make_case("none", draft_len=4, temperature=(1.0,))
    tree = draft(case, "coupled", 100, 4).tree
    assert tree.ancestors.shape == (1, 100, 2)
    for node in (0, 63, 64, 99):
        path, at = set(), node
        while at >= 0:
            path.add(at)
            at = int(tree.parents[0, at])
        words = tree.ancestors[0, node].tolist()
        assert {bit for bit in range(128) if words[bit // 64] >> (bit % 64) & 1} == path


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_nodes": 257}, ValueError, "num_nodes: expected 1 to 256, got 257"),
        ({"branching": 17}, ValueError, "branching: expected 1 to 16, got 17"),
        ({"acceptance": torch.ones(3, 2)}, ValueError, "acceptance: rule 'coupled' does not use it"),
        ({"backend": "triton"}, ValueError, "backend: the kernels of draft_tree do not serve a RNNHead"),
        ({"workspace": torch.ones(4)}, TypeError, "workspace: expected dtype uint8, got float32"),
        ({"out": torch.ones(4)}, TypeError, "out: expected a TreeDraft, got Tensor"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    case = make_case("rnn", draft_len=3)
    assert isinstance(case.head, RNNHead)
    options: dict[str, Any] = {"rule": "coupled", "num_nodes": 5, "branching": 2}
    with pytest.raises(error, match=message):
        draft(case, **(options | changes))


def test_hidden_states_are_needed_by_some_heads() -> None:
    case = replace(make_case("gated", draft_len=2, confidence="none"), hidden=None)
    with pytest.raises(ValueError, match="hidden: GatedHead needs"):
        draft(case, "coupled", 4, 2)
