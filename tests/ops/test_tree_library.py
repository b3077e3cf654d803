"""``torch.ops.dspark.accept_tree``, and the guards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops import Rule, Verdict, accept
from dspark.ops.accept.tree_launch import accept_tree_triton, workspace_bytes
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
