"""What the layers of a network share: a plan gives what the ops give, and computes once what they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.ops.attention import AttentionPlan, reference, verify_attention
from dspark.ops.cache import AppendPlan, append_kv
from dspark.ops.cache import reference as cache_reference
from dspark.ops.types import Backend, PagedKV, QueryBatch
from tests.ops.attention.paged import Heads, make_paged, make_requests

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]
LAYERS = [(16, Heads(4, 2, 8), 0), (16, Heads(4, 2, 8), 5), (16, Heads(3, 1, 8), 0), (16, Heads(4, 2, 8), 0)]
"""Page size, heads and window of each."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_is_attended_as_by_the_op(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[Any] = []
    laid_out = reference.attention_layout
    cases = [make_paged(make_requests([20, 5], [3, 2], "tree", heads), size) for size, heads, _ in LAYERS]
    expected = [
        verify_attention(case.q, case.kv, case.batch, window=window, backend=backend)
        for case, (_, _, window) in zip(cases, LAYERS, strict=True)
    ]
    monkeypatch.setattr(reference, "attention_layout", lambda *given: layouts.append(given) or laid_out(*given))
    plan = AttentionPlan(cases[0].batch, backend=backend)
    for case, (_, _, window), out in zip(cases, LAYERS, expected, strict=True):
        assert torch.equal(plan.run(case.q, case.kv, window=window), out)
    assert len(layouts) == (3 if backend == "reference" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_is_written_as_by_the_op(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    slots, destinations = torch.tensor([5, -1, 11]), cache_reference.destinations
    monkeypatch.setattr(cache_reference, "destinations", lambda *given: found.append(given) or destinations(*given))
    plan = AppendPlan(slots, backend=backend)
    for layer, page_size in enumerate((4, 4, 6)):
        k, v = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(layer))
        written, expected = (PagedKV(*torch.zeros(2, 12 // page_size, page_size, 2, 8)) for _ in range(2))
        plan.run(k, v, written)
        before = len(found)
        append_kv(k, v, expected, slots, backend=backend)
        del found[before:]
        assert torch.equal(written.k, expected.k)
        assert torch.equal(written.v, expected.v)
        assert written.k.any()
    assert len(found) == (2 if backend == "reference" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: Backend) -> None:
    case = make_paged(make_requests([5], [2]))
    rows = {name: getattr(case.batch, name)[:0] for name in ("positions", "slots")}
    batch = case.batch._replace(**rows)
    assert AttentionPlan(batch, backend=backend).run(case.q[:0], case.kv).shape == (0, 4, 16)
    before = case.kv.k.clone()
    AppendPlan(batch.slots, backend=backend).run(case.q[:0, :2], case.q[:0, :2], case.kv)
    torch.testing.assert_close(case.kv.k, before, atol=0, rtol=0, equal_nan=True)


def test_what_does_not_fit_is_named() -> None:
    case = make_paged(make_requests([5, 3], [2, 1]))
    plan = AttentionPlan(case.batch._replace(query_start=case.batch.query_start[1:]))
    with pytest.raises(ValueError, match=r'batch.query_start: expected shape "R\+1"'):
        plan.run(case.q, case.kv)
    with pytest.raises(ValueError, match='slots: expected shape "T"'):
        AppendPlan(case.batch.slots[1:]).run(case.q[:, :2], case.q[:, :2], case.kv)
    with pytest.raises(ValueError, match="backend: expected one of"):
        AppendPlan(case.batch.slots, backend="cuda")  # type: ignore[arg-type]


def test_a_loop_over_layers_compiles_as_one_graph() -> None:
    case = make_paged(make_requests([5, 3], [2, 1]), poison=1.0)
    k = case.q[:, :2]

    def layers(q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, batch: QueryBatch) -> Tensor:
        append, attend = AppendPlan(batch.slots), AttentionPlan(batch)
        for window in (0, 4, 0):
            append.run(k, v, kv)
            q = attend.run(q, kv, window=window)
        return q

    torch._dynamo.reset()
    arguments = (case.q, k, k + 1, case.kv, case.batch)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), layers(*arguments), atol=0, rtol=0)
