"""Logits processors of bad numbers, bad arguments and empty batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops import Processors, Status, process_logits
from tests.ops.helpers import make_sampling, verify
from tests.ops.sample.test_process import ALL, BACKENDS, INF, NAN, REQUESTS, VOCAB, pack, randn, rows_of, same_bits


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
    result = process_logits(
        logits, torch.tensor([0]), torch.tensor([0, 1]), processors=processors, max_query_len=1, backend=backend
    )
    assert same_bits(result, torch.tensor([[NAN, INF, -INF, -0.25, -INF, -INF]]))


def test_p05_a_row_with_nothing_allowed_ends_its_request() -> None:
    tokens, query_start = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4])
    mask = pack([{2}, {5}, {3}, set()])
    scores = process_logits(
        randn(4, VOCAB), tokens[[0, 1, 0, 3]], query_start, processors=Processors(allowed_mask=mask), max_query_len=2
    )
    assert (scores[3] == -INF).all()
    verdict = verify(
        scores,
        torch.tensor([1, 2, 1, 3]),
        query_start,
        rule="coupled",
        sampling=make_sampling([1.0, 1.0]),
        position=torch.tensor([4, 4]),
        max_query_len=2,
    )
    assert verdict.tokens.tolist() == [[2, 5], [3, -1]]
    assert verdict.status.tolist() == [Status.OK, Status.BAD_LOGITS]


@pytest.mark.parametrize(("num_rows", "num_requests"), [(0, 0), (0, 2), (3, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batches(num_rows: int, num_requests: int, backend: Any) -> None:
    logits = randn(num_rows, VOCAB)
    result = process_logits(
        logits,
        torch.zeros(num_rows, dtype=torch.int64),
        torch.zeros(num_requests + 1, dtype=torch.int64),
        processors=Processors(banned_tokens=torch.zeros(num_requests, 1, dtype=torch.int64)),
        max_query_len=3,
        backend=backend,
    )
    assert torch.equal(result, logits)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": torch.zeros(14, VOCAB, dtype=torch.float64)}, TypeError, "logits: expected dtype float32 or"),
        (
            {"logits": torch.zeros(VOCAB, 16).T},
            ValueError,
            "logits: the kernels need a contiguous last axis, got strides",
        ),
        ({"tokens": torch.zeros(13, dtype=torch.int64)}, ValueError, 'tokens: expected shape "T" with T = 16'),
        ({"tokens": torch.zeros(16)}, TypeError, "tokens: expected dtype int64, got float32"),
        ({"query_start": torch.zeros(0, dtype=torch.int64)}, ValueError, r'query_start: expected shape "R\+1"'),
        ({"query_start": None}, TypeError, 'query_start: expected a tensor "R\\+1", got NoneType'),
        ({"max_query_len": 0}, ValueError, "max_query_len: expected at least 1, got 0"),
        ({"processors": None}, TypeError, "processors: expected Processors, got NoneType"),
        ({"out": torch.zeros(16, VOCAB, dtype=torch.float16)}, TypeError, "out: expected dtype float32, got float16"),
        ({"out": torch.zeros(15, VOCAB)}, ValueError, 'out: expected shape "T V" with T = 16'),
        ({"backend": "cuda"}, ValueError, "backend: expected one of"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    tokens, query_start, longest = rows_of(REQUESTS)
    arguments: dict[str, Any] = {
        "logits": randn(len(tokens), VOCAB),
        "tokens": tokens,
        "query_start": query_start,
        "processors": ALL,
        "max_query_len": longest,
    }
    with pytest.raises(error, match=message):
        process_logits(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"output_counts": None}, ValueError, "processors.output_counts: repetition_penalty needs it, got None"),
        ({"num_emitted": None}, ValueError, "processors.num_emitted: min_new_tokens needs it, got None"),
        ({"eos_tokens": None}, ValueError, "processors.eos_tokens: min_new_tokens needs it, got None"),
        ({"output_counts": torch.zeros(5, VOCAB)}, TypeError, "processors.output_counts: expected dtype int32"),
        ({"prompt_mask": torch.zeros(5, 9, dtype=torch.bool)}, ValueError, 'processors.prompt_mask: .* "R V" with V'),
        (
            {"presence_penalty": torch.zeros(4)},
            ValueError,
            'processors.presence_penalty: expected shape "R" with R = 5',
        ),
        ({"banned_tokens": torch.zeros(5)}, ValueError, 'processors.banned_tokens: expected shape "R K"'),
        ({"allowed_mask": torch.zeros(16, 3).int()}, ValueError, 'allowed_mask: expected shape "T W" with W = 2'),
        ({"allowed_mask": torch.zeros(5, 2).int()}, ValueError, 'allowed_mask: expected shape "T W" with T = 16'),
        ({"eos_tokens": torch.zeros(2, 5).long().T}, ValueError, "eos_tokens: the kernels need a contiguous last axis"),
    ],
)
def test_bad_processors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    tokens, query_start, longest = rows_of(REQUESTS)
    with pytest.raises(error, match=message):
        process_logits(
            randn(len(tokens), VOCAB),
            tokens,
            query_start,
            processors=ALL._replace(**changes),
            max_query_len=longest,
        )
