"""Logits processors of bad numbers, bad arguments and empty batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops import Processors, Status, accept, process_logits
from tests.ops.helpers import make_sampling
from tests.ops.sample.test_process import (
    ALL,
    BACKENDS,
    INF,
    NAN,
    REQUESTS,
    VOCAB,
    made_rows,
    pack,
    randn,
    rows_of,
    same_bits,
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_p05_bad_numbers_pass_and_masks_win(backend: Any) -> None:
    logits = torch.tensor([[NAN, INF, -INF, 1.0, NAN, INF]])
    processors = Processors(
        output_counts=torch.ones(1, 6, dtype=torch.int32),
        repetition_penalty=torch.tensor([2.0]),
        frequency_penalty=torch.tensor([0.25]),
        presence_penalty=torch.tensor([0.5]),
        banned_tokens=torch.tensor([[4, 5]]),
    )
    rows = made_rows(torch.tensor([0]), torch.tensor([0, 1]), 1)
    result = process_logits(logits, rows, processors=processors, backend=backend)
    assert same_bits(result, torch.tensor([[NAN, INF, -INF, -0.25, -INF, -INF]]))


def test_p05_a_row_with_nothing_allowed_ends_its_request() -> None:
    rows = made_rows(torch.tensor([1, 2, 1, 3]), torch.tensor([0, 2, 4]), 2)
    processors = Processors(allowed_mask=pack([{2}, {5}, {3}, set()]))
    scores = process_logits(randn(4, VOCAB), rows, processors=processors)
    assert (scores[3] == -INF).all()
    verdict = accept(scores, rows, rule="coupled", sampling=make_sampling([1.0, 1.0]))
    assert verdict.tokens.tolist() == [[2, 5], [3, -1]]
    assert verdict.status.tolist() == [Status.OK, Status.BAD_LOGITS]


@pytest.mark.parametrize(("num_rows", "num_requests"), [(0, 0), (0, 2), (3, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batches(num_rows: int, num_requests: int, backend: Any) -> None:
    logits = randn(num_rows, VOCAB)
    result = process_logits(
        logits,
        made_rows(torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_requests + 1, dtype=torch.int64), 3),
        processors=Processors(banned_tokens=torch.zeros(num_requests, 1, dtype=torch.int64)),
        backend=backend,
    )
    assert torch.equal(result, logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_counts": None}, "processors.output_counts: repetition_penalty needs it, got None"),
        ({"num_emitted": None}, "processors.num_emitted: min_new_tokens needs it, got None"),
        ({"eos_tokens": None}, "processors.eos_tokens: min_new_tokens needs it, got None"),
        (
            {"allowed_mask": torch.zeros(16, 3).int()},
            'processors.allowed_mask: expected shape "T W" with W = 2, got .16, 3.',
        ),
    ],
)
def test_fields_that_need_each_other(changes: dict[str, Any], message: str) -> None:
    rows = rows_of(REQUESTS)
    with pytest.raises(ValueError, match=message):
        process_logits(randn(len(rows.tokens), VOCAB), rows, processors=ALL._replace(**changes))


def test_a_request_has_rows() -> None:
    rows = rows_of(REQUESTS)._replace(max_query_len=0)
    with pytest.raises(ValueError, match=r"rows\.max_query_len: expected at least 1, got 0"):
        process_logits(randn(len(rows.tokens), VOCAB), rows, processors=ALL)
