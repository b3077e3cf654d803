"""Acceptance of bad numbers, bad ids and bad arguments: the fault stays where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.ops.accept import accept
from dspark.ops.philox import uniform
from dspark.ops.sample import inverse_cdf, sample, transform
from dspark.ops.types import Rule, Status, Stream, Verdict
from tests.ops.chains import (
    RULES,
    assert_same,
    assert_well_formed,
    make_batch,
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
        rows[..., 2] = BAD_VALUES[kind]


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_target_row(rule: Rule, kind: str, temperature: float) -> None:
    sampling = make_sampling([temperature] * 3, 6, 0.9, seed=[1, 2, 3])
    batch = make_batch([5, 5, 5], sampling, rule=rule)
    # Request 1's drafts are certain to be accepted: copies of what is drawn, from the same distribution.
    middle = batch.rows(1)
    drawn = sample(
        batch.logits[middle], sampling, batch.position[1] + 1 + torch.arange(5), request=torch.ones(5).long()
    )
    batch.tokens[middle][1:] = drawn[:-1]
    batch.draft_logits[1] = transform(batch.logits[middle], sampling, torch.ones(5).long())
    clean = batch.accept(rule)
    assert clean.num_emitted[1] == 5
    for bad_node in range(5):
        logits = batch.logits.clone()
        spoil(logits[middle][bad_node], kind)
        verdict = replace(batch, logits=logits).accept(rule)
        assert_well_formed(verdict, batch)
        assert verdict.status.tolist() == [Status.OK, Status.BAD_LOGITS, Status.OK]
        assert verdict.num_emitted[1] == bad_node
        assert verdict.tokens[1, :bad_node].tolist() == clean.tokens[1, :bad_node].tolist()
        for r in (0, 2):
            assert rows_of(verdict, r) == rows_of(clean, r)


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("rule", RULES)
def test_p05_bad_target_row_past_the_first_rejection_has_no_effect(rule: Rule, kind: str) -> None:
    batch = make_batch([6] * 20, make_sampling([1.0] * 20, seed=list(range(20))), agree=False, rule=rule)
    clean = batch.accept(rule)
    logits = batch.logits.clone()
    for r in range(20):
        spoil(logits[batch.rows(r)][int(clean.num_emitted[r]) :], kind)
    assert (clean.num_emitted < 6).any()
    assert_same(replace(batch, logits=logits).accept(rule), clean)


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_draft_row_is_rejected_and_replaced_from_p(kind: str, temperature: float) -> None:
    sampling = make_sampling([temperature] * 3, 6, 0.9, seed=[1, 2, 3])
    batch = make_batch([4, 4, 4], sampling)
    clean = batch.accept("ratio")
    for bad_slot in range(3):
        draft_logits = batch.draft_logits.clone()
        spoil(draft_logits[1, bad_slot], kind)
        verdict = batch.accept("ratio", draft_logits=draft_logits)
        assert_well_formed(verdict, batch)
        assert verdict.status.tolist() == [Status.OK] * 3
        for r in (0, 2):
            assert rows_of(verdict, r) == rows_of(clean, r)
        if clean.num_emitted[1] <= bad_slot:
            assert rows_of(verdict, 1) == rows_of(clean, 1)
            continue
        assert verdict.num_emitted[1] == bad_slot + 1
        row = batch.rows(1).start + bad_slot
        p = transform(batch.logits[row : row + 1], sampling, torch.tensor([1])).double().softmax(-1)
        u = uniform(sampling.seed[1:2], batch.position[1:2] + bad_slot + 1, Stream.RESIDUAL)
        assert verdict.tokens[1, bad_slot] == inverse_cdf(p, u)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("placeholder", [-1, 11, 2**40, -(2**40)])
def test_p07_ids_outside_the_vocabulary_are_rejected(rule: Rule, placeholder: int) -> None:
    batch = make_batch([4, 4], make_sampling([1.0, 0.0], seed=[3, 4]), rule=rule)
    same = batch.accept(rule)
    for slot in range(3):
        tokens = batch.tokens.clone()
        tokens[[0, 4]] = placeholder  # anchors are not read
        tokens[1 + slot] = placeholder
        verdict = replace(batch, tokens=tokens).accept(rule)
        assert_well_formed(verdict, batch)
        assert verdict.status.tolist() == [Status.OK] * 2
        assert verdict.num_emitted[0] == min(int(same.num_emitted[0]), slot + 1)
        assert rows_of(verdict, 1) == rows_of(same, 1)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "rule: expected one of 'coupled', 'ratio', got 'block'", {"rule": "block"}),
        (ValueError, "max_query_len: expected at least 1, got 0", {"max_query_len": 0}),
        (ValueError, "draft_logits: rule 'ratio' needs the draft's scores \"R G V\", got None", {"draft_logits": None}),
        (ValueError, "draft_logits: rule 'coupled' does not use", {"rule": "coupled"}),
        (
            ValueError,
            r'draft_logits: expected shape "R G V" with V = 11, got \[2, 3, 10\]',
            {"draft_logits": torch.zeros(2, 3, 10)},
        ),
        (ValueError, 'draft_logits: expected shape "R G V" with R = 2', {"draft_logits": torch.zeros(3, 3, 11)}),
        (ValueError, "G >= max_query_len - 1 = 2", {"draft_logits": torch.zeros(2, 1, 11)}),
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
        (ValueError, "backend: accept has no Triton kernel", {"backend": "triton"}),
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
        "draft_logits": batch.draft_logits,
    }
    tensors = ("target_logits", "tokens", "query_start")

    def call(given: dict[str, Any]) -> Verdict:
        return accept(*(given[t] for t in tensors), **{k: v for k, v in given.items() if k not in tensors})

    call(arguments)
    with pytest.raises(error, match=message):
        call(arguments | changes)
