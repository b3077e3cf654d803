"""``torch.ops.dspark.accept_tree``, the guards, and what calls over trees are said to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.ops import Rule, Verdict, accept
from dspark.ops.accept.tree_launch import accept_tree_triton, workspace_bytes
from dspark.ops.cost.draft_tree import DraftTreeCall, draft_tree_cost
from dspark.ops.cost.tree import NodeOutcome, TreeCall, accept_tree_cost
from dspark.ops.draft.tree_launch import levels_of
from dspark.ops.library import rows as library
from dspark.ops.library.accept import flat_q
from dspark.ops.library.tree import flat_tree
from dspark.ops.types import DenseQ
from dspark.testing.guards import guarded, poisoned_empty
from tests.ops.accept.test_triton_accept import empty_verdict
from tests.ops.accept.test_triton_tree import TINY
from tests.ops.helpers import make_sampling
from tests.ops.trees import tree_problem

SAMPLING = make_sampling([1.0, 0.0, 0.7], [0, 0, 3], seed=[1, 2, 3])


def test_opcheck_accept_tree() -> None:
    rule: Rule = "recursive"  # the one with every argument
    a = tree_problem(rule, SAMPLING, nodes=4, lengths=[4, 0, 3])
    out = empty_verdict(3, 4)
    out.logprobs.zero_()
    arguments = (
        a["target_logits"],
        a["tokens"],
        a["query_start"],
        rule,
        *library.flat(SAMPLING),
        a["position"],
        *flat_q(a["q"]),
        "raw",
        flat_tree(a["tree"]),
        a["max_branching"],
        out.tokens,
        out.num_emitted,
        out.path,
        out.logprobs,
        out.status,
        None,
        "reference",
    )
    results = torch.library.opcheck(torch.ops.dspark.accept_tree.default, arguments, raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


def test_accept_of_trees_compiles_as_one_graph() -> None:
    arguments = tree_problem("recursive", SAMPLING, nodes=4, lengths=[4, 0, 3])

    def step(arguments: dict[str, Any]) -> Verdict:
        return accept(**arguments)

    torch._dynamo.reset()
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected, verdict = step(arguments), compiled(arguments)
    for f in Verdict._fields:
        assert torch.equal(getattr(verdict, f), getattr(expected, f)), f


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


@pytest.mark.triton
@pytest.mark.parametrize("rule", ["coupled", "recursive"])
def test_all_of_the_verdict_and_nothing_else_is_written(rule: Rule) -> None:
    """Inputs are rows between canaries; the outputs and the workspace lie between canaries of their own."""
    arguments = tree_problem(rule, SAMPLING, nodes=5, vocab_size=20, lengths=[5, 0, 4])
    rows = guarded(arguments["target_logits"], row_gap=4)
    arguments["target_logits"] = rows.tensor
    bands = [rows]
    if rule == "recursive":
        bands.append(guarded(arguments["q"].logits, row_gap=4))
        arguments["q"] = DenseQ(bands[-1].tensor)
    branching = arguments["max_branching"] or 1
    with poisoned_empty():
        written = {
            f: guarded(
                torch.empty(
                    (3,) if f in ("num_emitted", "status") else (3, 5),
                    dtype=torch.float32 if f == "logprobs" else torch.int64,
                )
            )
            for f in Verdict._fields
        }
        workspace = guarded(torch.empty(workspace_bytes(3, 5, 20, 20, rule, branching, TINY), dtype=torch.uint8))
        out = Verdict(**{name: band.tensor for name, band in written.items()})
        accept_tree_triton(
            **(arguments | {"max_branching": branching}), out=out, workspace=workspace.tensor, config=TINY
        )
    for band in (*bands, workspace, *written.values()):
        band.check()
    expected = accept(**arguments, backend="reference")
    for name in ("tokens", "num_emitted", "path", "status"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    assert out.logprobs.isfinite().all()


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
