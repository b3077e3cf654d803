"""Acceptance of bad numbers, bad ids and bad arguments: the fault stays where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.ops.accept import RULES_OF_Q
from dspark.ops.types import Backend, DenseQ, DraftDistribution, PointMass, Rule, SparseQ, Status
from tests.ops.chains import (
    MISSING,
    Batch,
    Form,
    assert_same,
    assert_well_formed,
    make_batch,
    on_backends,
    on_cases,
    rows_of,
)
from tests.ops.helpers import make_sampling

INF = float("inf")
NAN = float("nan")


BAD_VALUES = {"nan": NAN, "inf": INF, "all -inf": -INF}


def spoil(rows: Tensor, kind: str) -> None:
    """Make a row (any leading shape) bad, in place."""
    if kind == "all -inf":
        rows[:] = -INF
    else:
        rows[..., 0] = BAD_VALUES[kind]


def spoil_q(q: DraftDistribution, request: int, slot: int, kind: str) -> DraftDistribution:
    """The same with a bad row."""
    assert not isinstance(q, PointMass), "has no rows"
    field = "logits" if isinstance(q, DenseQ) else "logprobs"
    values = getattr(q, field).clone()
    spoil(values[request, slot], kind)
    return q._replace(**{field: values})


def drafted(rule: Rule, form: Form, temperature: float, backend: Backend) -> Batch:
    """Twelve requests of four drafts, many of which are accepted and some not."""
    sampling = make_sampling([temperature] * 12, 6, 0.95, seed=list(range(12)))
    batch = make_batch([5] * 12, sampling, rule=rule, form=form, backend=backend)
    if rule == "match":  # else few are accepted
        samples = batch.plain(rule).tokens[:, 0]
        for r in range(0, 12, 2):
            batch.tokens[batch.rows(r)][1:] = samples[batch.rows(r)][:-1]
    return batch


@on_backends
@pytest.mark.parametrize("kind", BAD_VALUES)
@on_cases
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_target_row(rule: Rule, form: Form, kind: str, temperature: float, backend: Backend) -> None:
    """The request goes as if its bad row were its last, except that nothing is drawn from that; others do not change.

    So a bad row past the first rejection has no effect; ``block`` looks at rows past it, and may reach a bad one.
    """
    batch = drafted(rule, form, temperature, backend)
    clean = batch.accept(rule)
    reached = 0
    for r in clean.num_emitted.argsort()[[0, 6, 11]].tolist():
        for node in range(5):
            logits = batch.logits.clone()
            spoil(logits[batch.rows(r)][node:], kind)
            verdict = replace(batch, logits=logits).accept(rule)
            assert_well_formed(verdict, batch)
            short = rows_of(batch.cut(r, node + 1).accept(rule), r)
            expected = dict(short)
            if short["num_emitted"] == node + 1:
                reached += 1
                expected = {
                    "tokens": [*short["tokens"][:node], -1, *short["tokens"][node + 1 :]],
                    "path": [*short["path"][:node], -1, *short["path"][node + 1 :]],
                    "logprobs": [*short["logprobs"][:node], 0.0, *short["logprobs"][node + 1 :]],
                    "num_emitted": node,
                    "status": Status.BAD_LOGITS,
                }
            assert rows_of(verdict, r) == expected
            for other in set(range(12)) - {r}:
                assert rows_of(verdict, other) == rows_of(clean, other)
            if rule != "block" and node >= int(clean.num_emitted[r]):
                assert_same(verdict, clean)
    assert reached > 3, "of each request the first row, and some further ones"


@on_backends
@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("rule", RULES_OF_Q)
@pytest.mark.parametrize("form", ["dense", "mapped", "sparse"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_draft_row_is_rejected_and_replaced_from_p(
    rule: Rule, form: Form, kind: str, temperature: float, backend: Backend
) -> None:
    """The request goes as if its drafts ended before that one: the bonus there is the replacement drawn from p."""
    batch = drafted(rule, form, temperature, backend)
    clean = batch.accept(rule)
    for r in range(3):
        for slot in range(4):
            verdict = batch.accept(rule, q=spoil_q(batch.q(), r, slot, kind))
            assert_well_formed(verdict, batch)
            assert verdict.status.tolist() == [Status.OK] * 12
            assert rows_of(verdict, r) == rows_of(batch.cut(r, slot + 1).accept(rule), r)
            for other in set(range(12)) - {r}:
                assert rows_of(verdict, other) == rows_of(clean, other)


@on_backends
@on_cases
@pytest.mark.parametrize("placeholder", [-1, 11, 2**40, -(2**40)])
def test_p07_ids_outside_the_vocabulary_are_rejected(
    rule: Rule, form: Form, placeholder: int, backend: Backend
) -> None:
    batch = drafted(rule, form, 1.0, backend)
    clean = batch.accept(rule)
    for r in range(3):
        for slot in range(4):
            tokens = batch.tokens.clone()
            tokens[batch.query_start[:-1]] = placeholder  # anchors are not read
            tokens[batch.rows(r)][slot + 1] = placeholder
            verdict = replace(batch, tokens=tokens).accept(rule)
            assert_well_formed(verdict, batch)
            assert verdict.status.tolist() == [Status.OK] * 12
            assert rows_of(verdict, r) == rows_of(batch.cut(r, slot + 1).accept(rule), r)
            for other in set(range(12)) - {r}:
                assert rows_of(verdict, other) == rows_of(clean, other)


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
def test_p07_padding_in_a_sparse_q_is_no_index(rule: Rule, backend: Backend) -> None:
    """Whatever stands beside it, and wherever it is."""
    batch = drafted(rule, "sparse", 1.0, backend)
    q = batch.q()
    assert isinstance(q, SparseQ)
    assert (q.tokens == -1).any()
    clean = batch.accept(rule)
    assert torch.equal(clean.tokens, replace(batch, form="dense").accept(rule).tokens)
    pad = torch.full_like(q.tokens[..., :2], -1)
    for value in (NAN, INF, 0.0):
        beside = torch.full_like(q.logprobs[..., :2], value)
        padded = SparseQ(torch.cat([pad, q.tokens, pad], -1), torch.cat([beside, q.logprobs, beside], -1))
        assert_same(batch.accept(rule, q=padded), clean)


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
def test_p07_a_token_that_the_drafters_vocabulary_lacks_has_no_column(rule: Rule, backend: Backend) -> None:
    """Its q is 0, also where it was drafted nonetheless, which is never accepted."""
    batch = drafted(rule, "mapped", 1.0, backend)
    q = batch.q()
    assert isinstance(q, DenseQ)
    assert q.draft_ids is not None
    assert q.draft_ids[list(MISSING)].tolist() == [-1, -1]
    first_drafts = batch.query_start[:-1] + 1
    tokens = batch.tokens.clone()
    tokens[first_drafts] = torch.tensor(MISSING).repeat(6)
    changed = replace(batch, tokens=tokens)
    for mapped in (batch, changed):
        dense = replace(mapped, form="dense").accept(rule)
        assert torch.equal(mapped.accept(rule).tokens, dense.tokens)
    # Under block a later draft cannot save it either: its weight is 0.
    assert (changed.accept(rule).num_emitted == 1).all()


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "q: rule 'ratio' needs the draft's distribution .*, got None", {"q": None}),
        (ValueError, "q: rule 'block' needs the draft's distribution .*, got None", {"q": None, "rule": "block"}),
        (ValueError, "q: rule 'coupled' does not use", {"rule": "coupled"}),
        (ValueError, "q: rule 'match' does not use", {"rule": "match"}),
        (ValueError, "q: rule 'match' does not use", {"rule": "match", "q": PointMass()}),
        (
            ValueError,
            r'q.logits: expected shape "R G V" with V = 11 without draft_ids, got \[2, 3, 10\]',
            {"q": DenseQ(torch.zeros(2, 3, 10))},
        ),
        (ValueError, "q: expected G >= max_query_len - 1 = 2 drafts .* got 1", {"q": DenseQ(torch.zeros(2, 1, 11))}),
        (ValueError, "got 1", {"q": SparseQ(torch.zeros(2, 1, 3).long(), torch.zeros(2, 1, 3))}),
        (ValueError, "max_branching: a chain has none", {"max_branching": 2}),
        (TypeError, "workspace: expected dtype uint8", {"workspace": torch.zeros(8)}),
        (ValueError, 'workspace: expected shape "bytes"', {"workspace": torch.zeros(2, 8, dtype=torch.uint8)}),
        (ValueError, "backend: expected one of 'auto', 'triton', 'reference', got 'cuda'", {"backend": "cuda"}),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    batch = make_batch([3, 2], make_sampling([1.0, 0.0]))
    batch.accept("ratio")
    with pytest.raises(error, match=message):
        batch.accept("ratio", **changes)
