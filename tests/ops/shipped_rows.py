"""Calls of the ops over rows of logits, as a server makes them: a vocabulary of 151,936, bfloat16, 8 rows each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.accept import accept
from dspark.ops.sample import sample, truncate
from dspark.ops.sample.process import process_logits
from dspark.ops.types import DenseQ, DraftDistribution, Processors, Rule, Sampling, SparseQ
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets, meta

VOCAB_SIZE, DRAFTS, REQUESTS = 151_936, 7, 64
NODES = DRAFTS + 1
ROWS = REQUESTS * NODES

BUDGETS = {
    "chain_verdict_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "process_logits_kernel": budgets(Budget(144, 16_384), amd=Budget(128, 16_384)),
    "ratio_kernel": budgets(Budget(255, 65_536), amd=Budget(256, 65_536)),
    "ratio_verdict_kernel": budgets(Budget(255, 65_536), amd=Budget(256, 65_536)),
    "residual_mass_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "row_statistics_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "sample_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "threshold_kernel": budgets(Budget(176, 16_384), amd=Budget(128, 16_384)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_WIDE_LOADS = dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
CLAIMS = dict.fromkeys(("process_logits_kernel", "residual_mass_kernel", "row_statistics_kernel"), _WIDE_LOADS)
"""What a kernel is meant to compile to; those that stream rows of logits read 16 bytes at a time."""


def _sampling(requests: int = REQUESTS, truncated: bool = False) -> Sampling:
    number = meta(requests, dtype=torch.float32)
    return Sampling(number, meta(requests), number, number, meta(requests), any_truncation=truncated)


def _accept(
    rule: Rule, q: DraftDistribution | None = None, truncated: bool = False, vocab_size: int = VOCAB_SIZE
) -> None:
    accept(
        meta(ROWS, vocab_size, dtype=torch.bfloat16),
        meta(ROWS),
        meta(REQUESTS + 1),
        rule=rule,
        sampling=_sampling(truncated=truncated),
        position=meta(REQUESTS),
        max_query_len=NODES,
        q=q,
        backend="triton",
    )


def _accept_dense(rule: Rule) -> None:
    _accept(rule, DenseQ(meta(REQUESTS, DRAFTS, VOCAB_SIZE, dtype=torch.bfloat16)))


def _accept_sparse() -> None:
    tokens = meta(REQUESTS, DRAFTS, 32)
    _accept("ratio", SparseQ(tokens, meta(REQUESTS, DRAFTS, 32, dtype=torch.float32)), truncated=True)


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
    "coupled": lambda: _accept("coupled"),
    "coupled, 50257": lambda: _accept("coupled", vocab_size=50_257),
    "coupled, truncated": lambda: _accept("coupled", truncated=True),
    "match": lambda: _accept("match"),
    "ratio": lambda: _accept_dense("ratio"),
    "block": lambda: _accept_dense("block"),
    "ratio, sparse and truncated": _accept_sparse,
    "sample": _sample,
    "truncate": _truncate,
    "process_logits": _process,
}
"""Calls that between them launch every kernel in every configuration of note."""
