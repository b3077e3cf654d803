"""``torch.ops.dspark.verify_attention``: opcheck, and a graph that ``torch.compile`` does not break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.ops.attention import verify_attention
from dspark.ops.types import PagedKV, QueryBatch
from tests.ops.attention.paged import Kind, make_paged, make_requests


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_opcheck(kind: Kind) -> None:
    case = make_paged(make_requests([5, 20], [3, 2], kind), pad_rows=1, poison=1.0)
    b = case.batch
    out, lse = torch.zeros_like(case.q), torch.zeros(case.q.shape[:2])
    batch = (b.query_start, b.context_len, b.block_table, b.positions, b.ancestors, b.max_query_len)
    options = (0.25, 4, 2.0, torch.zeros(4), "fixed", None, 64, out, lse, None, "reference")
    arguments = (case.q, case.kv.k, case.kv.v, None, None, *batch, *options)
    results = torch.library.opcheck(torch.ops.dspark.verify_attention.default, arguments, raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("return_lse", [False, True])
def test_it_compiles_as_one_graph(return_lse: bool) -> None:
    case = make_paged(make_requests([5, 20], [3, 2], "tree"), pad_rows=1, poison=1.0)

    def step(q: Tensor, k: Tensor, v: Tensor, batch: QueryBatch) -> object:
        return verify_attention(q * 2, PagedKV(k, v), batch, window=4, return_lse=return_lse)  # type: ignore[call-overload]

    torch._dynamo.reset()
    arguments = (case.q, case.kv.k, case.kv.v, case.batch)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), step(*arguments), atol=0, rtol=0)
