"""Acceptance of bad numbers, bad ids and bad arguments: the fault stays where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.types import Backend, DenseQ, DraftDistribution, PointMass, Rule, SparseQ, Status, Verdict
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


def verdict(**changes: Any) -> Verdict:
    """One for two requests of up to three tokens, with fields of other shapes, or others altogether."""
    shapes: dict[str, Any] = {"tokens": (2, 3), "num_emitted": (2,), "path": (2, 3), "logprobs": (2, 3), "status": (2,)}
    fields = {
        name: given
        if isinstance(given, Tensor)
        else torch.zeros(given, dtype=torch.float32 if name == "logprobs" else torch.int64)
        for name, given in (shapes | changes).items()
    }
    return Verdict(**fields)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (
            ValueError,
            "rule: expected one of 'coupled', 'ratio', 'block', 'match', 'recursive', got 'tree'",
            {"rule": "tree"},
        ),
        (ValueError, "logprobs: expected one of 'raw', 'processed', got 'none'", {"logprobs": "none"}),
        (ValueError, "max_query_len: expected at least 1, got 0", {"max_query_len": 0}),
        (ValueError, "q: rule 'ratio' needs the draft's distribution .*, got None", {"q": None}),
        (ValueError, "q: rule 'block' needs the draft's distribution .*, got None", {"q": None, "rule": "block"}),
        (ValueError, "q: rule 'coupled' does not use", {"rule": "coupled"}),
        (ValueError, "q: rule 'match' does not use", {"rule": "match"}),
        (ValueError, "q: rule 'match' does not use", {"rule": "match", "q": PointMass()}),
        (TypeError, "q: expected DenseQ, SparseQ, PointMass or None, got Tensor", {"q": torch.zeros(2, 3, 11)}),
        (
            ValueError,
            r'q.logits: expected shape "R G V" with V = 11, got \[2, 3, 10\]',
            {"q": DenseQ(torch.zeros(2, 3, 10))},
        ),
        (ValueError, 'q.logits: expected shape "R G V" with R = 2', {"q": DenseQ(torch.zeros(3, 3, 11))}),
        (ValueError, "q: expected G >= max_query_len - 1 = 2 drafts .* got 1", {"q": DenseQ(torch.zeros(2, 1, 11))}),
        (TypeError, "q.logits: expected dtype float32 or float16", {"q": DenseQ(torch.zeros(2, 2, 11).double())}),
        (
            ValueError,
            'q.draft_ids: expected shape "V" with V = 11',
            {"q": DenseQ(torch.zeros(2, 2, 9), torch.zeros(9, dtype=torch.int32))},
        ),
        (
            TypeError,
            "q.draft_ids: expected dtype int32, got int64",
            {"q": DenseQ(torch.zeros(2, 2, 9), torch.zeros(11, dtype=torch.int64))},
        ),
        (
            TypeError,
            "q.tokens: expected dtype int64, got int32",
            {"q": SparseQ(torch.zeros(2, 2, 3).int(), torch.zeros(2, 2, 3))},
        ),
        (
            ValueError,
            r'q.logprobs: expected shape "R G K" with K = 3, got \[2, 2, 4\]',
            {"q": SparseQ(torch.zeros(2, 2, 3).long(), torch.zeros(2, 2, 4))},
        ),
        (
            TypeError,
            "q.logprobs: expected dtype float32",
            {"q": SparseQ(torch.zeros(2, 2, 3).long(), torch.zeros(2, 2, 3).half())},
        ),
        (ValueError, "got 1", {"q": SparseQ(torch.zeros(2, 1, 3).long(), torch.zeros(2, 1, 3))}),
        (TypeError, "out: expected a Verdict, got Tensor", {"out": torch.zeros(2, 3)}),
        (ValueError, r'out.path: expected shape "R N" with N = 3, got \[2, 4\]', {"out": verdict(path=(2, 4))}),
        (ValueError, r'out.status: expected shape "R" with R = 2, got \[3\]', {"out": verdict(status=(3,))}),
        (TypeError, "out.logprobs: expected dtype float32", {"out": verdict(logprobs=torch.zeros(2, 3).double())}),
        (TypeError, "out.tokens: expected dtype int64", {"out": verdict(tokens=torch.zeros(2, 3).int())}),
        (TypeError, "workspace: expected dtype uint8", {"workspace": torch.zeros(8)}),
        (ValueError, 'workspace: expected shape "bytes"', {"workspace": torch.zeros(2, 8, dtype=torch.uint8)}),
        (ValueError, r'target_logits: expected shape "T V" \(2 dimensions\)', {"target_logits": torch.zeros(5)}),
        (TypeError, "target_logits: expected dtype float32 or", {"target_logits": torch.zeros(5, 11).double()}),
        (ValueError, r'tokens: expected shape "T" with T = 5, got \[4\]', {"tokens": torch.zeros(4).long()}),
        (TypeError, "tokens: expected dtype int64, got int32", {"tokens": torch.zeros(5).int()}),
        (
            ValueError,
            r'query_start: expected shape "R\+1" with R\+1 = 3, got \[2\]',
            {"query_start": torch.tensor([0, 5])},
        ),
        (TypeError, "query_start: expected dtype int64, got int32", {"query_start": torch.tensor([0, 3, 5]).int()}),
        (TypeError, "position: expected dtype int64", {"position": torch.zeros(2)}),
        (ValueError, 'sampling.temperature: expected shape "R" with R = 2', {"sampling": make_sampling([1.0] * 3)}),
        (ValueError, "backend: expected one of 'auto', 'triton', 'reference', got 'cuda'", {"backend": "cuda"}),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    batch = make_batch([3, 2], make_sampling([1.0, 0.0]))
    arguments: dict[str, Any] = {
        "target_logits": batch.logits,
        "tokens": batch.tokens,
        "query_start": batch.query_start,
        "rule": "ratio",
        "sampling": batch.sampling,
        "position": batch.position,
        "max_query_len": 3,
        "q": batch.q(),
    }
    tensors = ("target_logits", "tokens", "query_start")

    def call(given: dict[str, Any]) -> Verdict:
        return accept(*(given[t] for t in tensors), **{k: v for k, v in given.items() if k not in tensors})

    call(arguments)
    with pytest.raises(error, match=message):
        call(arguments | changes)
