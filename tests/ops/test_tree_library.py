"""``torch.ops.dspark.draft_tree``, and what calls over trees are said to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.ops import Rule, TreeDraft, draft_tree
from dspark.ops.cost.draft_tree import DraftTreeCall, draft_tree_cost
from dspark.ops.cost.tree import NodeOutcome, TreeCall, accept_tree_cost
from dspark.ops.draft.tree_inputs import empty_tree_draft
from dspark.ops.draft.tree_plan import levels_of
from dspark.ops.library.tree import flat_tree, flat_tree_inputs
from tests.ops.accept.triton_trees import assert_same_bits, inputs_of
from tests.ops.draft.walks import make_case


def test_opcheck_draft_tree() -> None:
    case = make_case("gated", "none", draft_len=2)
    inputs = inputs_of(case, "recursive", 6, 2, hidden=case.hidden, budget=torch.tensor([6, 2, 9]))
    out = empty_tree_draft(case.base_logits, case.anchor, "recursive", 6)
    for tensor in (*flat_tree(out.tree), out.logits):
        assert tensor is not None
        tensor.zero_()
    arguments = (*flat_tree_inputs(inputs), *flat_tree(out.tree), out.logits, None, "reference")
    results = torch.library.opcheck(torch.ops.dspark.draft_tree.default, arguments, raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


def test_draft_tree_compiles_as_one_graph() -> None:
    case = make_case("markov", "none", draft_len=2)

    def step(base: torch.Tensor) -> TreeDraft:
        return draft_tree(
            base,
            case.anchor,
            head=case.head,
            hidden=None,
            sampling=case.sampling,
            position=case.position,
            rule="recursive",
            num_nodes=6,
            branching=2,
        )

    torch._dynamo.reset()
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(case.base_logits), step(case.base_logits))


def test_what_a_drafted_tree_is_said_to_cost() -> None:
    """One node per level is within 2 % of the bound. Of many, W1's rows are read once per tile and base logits once per
    16 nodes, which the caches serve, and the largest scores of each tile are written and read."""
    chain = DraftTreeCall([range(8)], 7, 151_936, 8, 1)
    cost = draft_tree_cost(chain)
    assert cost.lower_bound <= cost.total <= cost.lower_bound * 1.02
    assert cost.launches == 3 * 7 + 1
    levels = levels_of(7, 32, 4, 31)
    depths = [0, *[1] * 4, *[2] * 16, *[3] * 11]
    server = replace(chain, depths=[depths] * 64, num_nodes=32, branching=4)
    cost, tiles, nodes = draft_tree_cost(server), -(-151_936 // 128), 64 * sum(level.nodes for level in levels)
    rows, scores = nodes * tiles * 256 * 2, nodes * tiles * (8 * 4 + 4 + 8)
    again = 64 * 4 * 151_936 * 2  # base logits of 31 nodes, read for 16 of them at a time
    assert cost.lower_bound < cost.total - rows - scores - again < cost.lower_bound * 1.25
    recursive = draft_tree_cost(replace(server, rule="recursive"))
    assert recursive.lower_bound - cost.lower_bound == 64 * 32 * 151_936 * 4


@pytest.mark.parametrize("rule", ["coupled", "match"])
@pytest.mark.parametrize("emitted", [1, 4])
def test_the_model_is_within_two_per_cent_of_the_lower_bound(rule: Rule, emitted: int) -> None:
    parents = (-1, 0, 1, 0, 2, 0, 1, 3, 4, 0, 1, 2, 3, 4, 5, 8)
    call = TreeCall(parents=[parents], nodes=16, emitted=[emitted], ends=[emitted - 1], rule=rule, vocab_size=151_936)
    cost = accept_tree_cost(call)
    assert cost.lower_bound <= cost.total <= cost.lower_bound * 1.02


def test_the_model_of_a_recursion_is_within_two_per_cent_too() -> None:
    parents = (-1, 0, 0, 0, 1, 1, 2)
    for outcome in (NodeOutcome(chosen=0), NodeOutcome(rejected=2, weighed=2, chosen=2), NodeOutcome(3, 3)):
        call = TreeCall(
            parents=[parents],
            nodes=7,
            emitted=[1 if outcome.chosen < 0 else 2],
            ends=[0 if outcome.chosen < 0 else 1 + outcome.chosen],
            rule="recursive",
            vocab_size=151_936,
            max_branching=3,
            outcomes=[[outcome, *[NodeOutcome()] * 6]],
        )
        cost = accept_tree_cost(call)
        assert cost.lower_bound <= cost.total <= cost.lower_bound * 1.02
        assert cost.launches == 10
