"""``torch.ops.dspark.draft_walk``: opcheck, and a graph that ``torch.compile`` does not break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.ops.draft.walk_inputs import DraftVocabulary, WalkOutputs, WalkTables, build_walk_tables, empty_draft
from dspark.ops.library.walk import flat_draft, flat_inputs
from dspark.ops.types import Draft
from tests.ops.draft.triton_walks import inputs_of
from tests.ops.draft.walks import V, make_case


@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_opcheck(head: str) -> None:
    case = make_case(head, draft_len=2)
    inputs = inputs_of(case, tables=build_walk_tables(case.head, case.confidence_head))
    if head == "markov":
        ids = torch.arange(V)
        inputs = replace(inputs, vocabulary=DraftVocabulary(ids, ids.int(), "target"), tables=WalkTables())
    out = empty_draft(inputs, WalkOutputs(True, torch.float16, margin=head == "rnn", lse=True))
    for field in Draft._fields:
        tensor = getattr(out, field)
        if tensor is not None:
            tensor.zero_()
    arguments = (*flat_inputs(inputs), *flat_draft(out), None, "reference")
    results = torch.library.opcheck(torch.ops.dspark.draft_walk.default, arguments, raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("head", ["none", "gated"])
def test_compiles_as_one_graph(head: str) -> None:
    case = make_case(head, draft_len=2)

    def step(base_logits: torch.Tensor) -> Draft:
        return case.walk(base_logits=base_logits * 2, return_margin=True)

    torch._dynamo.reset()
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine, theirs = compiled(case.base_logits), step(case.base_logits)
    for field in Draft._fields:
        a, b = getattr(mine, field), getattr(theirs, field)
        assert (a is None) == (b is None), field
        if a is not None:
            assert torch.equal(a, b), field
