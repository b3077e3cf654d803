"""Calls of the ops over rows of logits, as a server makes them: a vocabulary of 151,936, bfloat16, 8 rows each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.sample import sample, truncate
from dspark.ops.sample.process import process_logits
from dspark.ops.types import Processors, Sampling
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets, meta

VOCAB_SIZE, DRAFTS, REQUESTS = 151_936, 7, 64
NODES = DRAFTS + 1
ROWS = REQUESTS * NODES

BUDGETS = {
    "process_logits_kernel": budgets(Budget(144, 16_384), amd=Budget(128, 16_384)),
    "row_statistics_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "threshold_kernel": budgets(Budget(176, 16_384), amd=Budget(128, 16_384)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_WIDE_LOADS = dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
CLAIMS = dict.fromkeys(("process_logits_kernel", "row_statistics_kernel"), _WIDE_LOADS)
"""What a kernel is meant to compile to; those that stream rows of logits read 16 bytes at a time."""


def _sampling(requests: int = REQUESTS, truncated: bool = False) -> Sampling:
    number = meta(requests, dtype=torch.float32)
    return Sampling(number, meta(requests), number, number, meta(requests), any_truncation=truncated)


def _sample() -> None:
    logits = meta(REQUESTS, VOCAB_SIZE, dtype=torch.bfloat16)
    sample(logits, _sampling(), meta(REQUESTS), backend="triton")


def _truncate() -> None:
    truncate(meta(REQUESTS, VOCAB_SIZE, dtype=torch.bfloat16), _sampling(truncated=True), backend="triton")


def _process() -> None:
    number, integer = meta(REQUESTS, dtype=torch.float32), meta(REQUESTS)
    processors = Processors(
        output_counts=meta(REQUESTS, VOCAB_SIZE, dtype=torch.int32),
        prompt_mask=meta(REQUESTS, VOCAB_SIZE, dtype=torch.bool),
        repetition_penalty=number,
        presence_penalty=number,
        frequency_penalty=number,
        min_new_tokens=integer,
        num_emitted=integer,
        eos_tokens=meta(REQUESTS, 2),
        banned_tokens=meta(REQUESTS, 4),
        allowed_mask=meta(ROWS, VOCAB_SIZE // 32, dtype=torch.int32),
    )
    logits = meta(ROWS, VOCAB_SIZE, dtype=torch.bfloat16)
    process_logits(logits, meta(ROWS), meta(REQUESTS + 1), processors=processors, max_query_len=NODES, backend="triton")


CALLS: dict[str, Callable[[], None]] = {
    "sample": _sample,
    "truncate": _truncate,
    "process_logits": _process,
}
"""Calls that between them launch every kernel in every configuration of note."""
