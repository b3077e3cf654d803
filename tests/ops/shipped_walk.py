"""Calls of the sequential walk: a vocabulary of 151,936, rank 256, bfloat16, blocks of 7, 8 requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dspark.ops.draft.certified import draft_walk_certified
from dspark.ops.draft.certified_table import BiasTable
from dspark.ops.draft.walk import draft_walk
from dspark.ops.draft.walk_inputs import DraftVocabulary, WalkTables
from dspark.ops.types import ConfidenceHead, GatedHead, MarkovHead, RNNHead, Sampling, SequentialHead, Stream
from dspark.testing.registry import Budget, budgets, meta

VOCAB_SIZE, DRAFTS, REQUESTS, RANK, HIDDEN = 151_936, 7, 8, 256, 2560
DRAFT_VOCAB = 32_000

BUDGETS = {
    "walk_begin_kernel": budgets(Budget(128, 49_152), amd=Budget(128, 49_152)),
    "walk_step_kernel": budgets(Budget(255, 98_304), amd=Budget(256, 65_536)),
    "walk_draw_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "walk_state_kernel": budgets(Budget(255, 65_536), amd=Budget(256, 65_536)),
    "walk_candidates_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "walk_select_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "walk_certify_kernel": budgets(Budget(255, 32_768), amd=Budget(256, 32_768)),
    "walk_finish_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_MATRIX: dict[str, tuple[str, ...]] = {
    "sm_80": (r"^HMMA\.16816\.F32\.BF16",),
    "sm_90": (r"^HGMMA\.64x16x16\.F32\.BF16",),
    "sm_100": (r"^UTCHMMA",),
    "gfx942": (r"^v_mfma_f32_16x16x16_bf16",),
}
CLAIMS: dict[str, dict[str, tuple[str, ...]]] = {
    "walk_step_kernel": _MATRIX,
    "walk, no head: walk_step_kernel": {},
    "walk, markov in float32: walk_step_kernel": {"gfx942": (r"^v_mfma_f32_16x16x4_f32",)},
}
"""What a kernel is meant to compile to, or one of its calls: half-precision weights go through the matrix units."""


def walk_call(
    head: SequentialHead | None,
    *,
    requests: int = REQUESTS,
    vocab_size: int = VOCAB_SIZE,
    dtype: torch.dtype = torch.bfloat16,
    greedy: bool = False,
    truncated: bool = False,
    **options: Any,
) -> None:
    """One call of ``draft_walk`` on tensors that hold nothing."""
    number = meta(requests, dtype=torch.float32)
    sampling = Sampling(
        number, meta(requests), number, number, meta(requests), all_greedy=greedy, any_truncation=truncated
    )
    w1 = None if head is None else head.w1
    confidence = ConfidenceHead(meta(HIDDEN + RANK, dtype=dtype), meta(dtype=dtype), w1)
    if w1 is None:
        confidence = ConfidenceHead(meta(HIDDEN, dtype=dtype), meta(dtype=dtype), None)
    draft_walk(
        meta(requests, DRAFTS, vocab_size, dtype=dtype),
        meta(requests),
        head=head,
        hidden=meta(requests, DRAFTS, HIDDEN, dtype=dtype),
        confidence_head=confidence,
        sampling=sampling,
        position=meta(requests),
        backend="triton",
        **{"stream": Stream.DRAFT, "return_logits": False, **options},
    )


def _weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return meta(*shape, dtype=dtype)


def _markov(rank: int = RANK, dtype: torch.dtype = torch.bfloat16, rows: int = VOCAB_SIZE) -> MarkovHead:
    return MarkovHead(_weights(VOCAB_SIZE, rank, dtype=dtype), _weights(rows, rank, dtype=dtype))


def _gated() -> GatedHead:
    w = _weights(VOCAB_SIZE, RANK)
    return GatedHead(w, w, _weights(RANK, HIDDEN + RANK), _weights(RANK))


def _rnn() -> RNNHead:
    w = _weights(VOCAB_SIZE, RANK)
    return RNNHead(w, w, _weights(3 * RANK, 2 * RANK + HIDDEN), _weights(3 * RANK))


def _table(width: int) -> WalkTables:
    return WalkTables(meta(VOCAB_SIZE, width, dtype=torch.float32), meta(VOCAB_SIZE, dtype=torch.float32))


def _reduced() -> None:
    vocabulary = DraftVocabulary(meta(DRAFT_VOCAB), meta(VOCAB_SIZE, dtype=torch.int32), "target")
    walk_call(_markov(rows=DRAFT_VOCAB), vocab_size=DRAFT_VOCAB, vocabulary=vocabulary)


def _wide_rank() -> None:
    head = _markov(512)
    number = meta(REQUESTS, dtype=torch.float32)
    draft_walk(
        meta(REQUESTS, DRAFTS, VOCAB_SIZE, dtype=torch.bfloat16),
        meta(REQUESTS),
        head=head,
        hidden=None,
        confidence_head=None,
        sampling=Sampling(number, meta(REQUESTS), number, number, meta(REQUESTS), any_truncation=False),
        position=meta(REQUESTS),
        stream=Stream.TARGET,
        return_logits=False,
        backend="triton",
    )


def _certified(fallback: bool) -> None:
    number, per_token = meta(REQUESTS, dtype=torch.float32), meta(VOCAB_SIZE, dtype=torch.float32)
    head = _markov()
    draft_walk_certified(
        _weights(REQUESTS, DRAFTS, VOCAB_SIZE),
        meta(REQUESTS),
        head=head,
        table=BiasTable(
            meta(VOCAB_SIZE, 64, dtype=torch.int32), meta(VOCAB_SIZE, 64, dtype=torch.float32), per_token, per_token
        ),
        hidden=_weights(REQUESTS, DRAFTS, HIDDEN),
        confidence_head=ConfidenceHead(_weights(HIDDEN + RANK), _weights(), head.w1),
        sampling=Sampling(number, meta(REQUESTS), number, number, meta(REQUESTS), any_truncation=False),
        position=meta(REQUESTS),
        stream=Stream.TARGET,
        fallback=fallback,
        backend="triton",
    )


CALLS: dict[str, Callable[[], None]] = {
    "walk, markov": lambda: walk_call(_markov()),
    "walk, markov greedy": lambda: walk_call(_markov(), greedy=True, stream=Stream.TARGET),
    "walk, markov with q": lambda: walk_call(
        _markov(), return_logits=True, logits_dtype=torch.bfloat16, return_margin=True, return_lse=True
    ),
    "walk, markov of 64 requests": lambda: walk_call(_markov(), requests=64),
    "walk, markov truncated": lambda: walk_call(_markov(), truncated=True, return_logits=True),
    "walk, markov of rank 512": _wide_rank,
    "walk, markov with a draft vocabulary": _reduced,
    "walk, gated": lambda: walk_call(_gated()),
    "walk, gated with tables": lambda: walk_call(_gated(), tables=_table(RANK)),
    "walk, rnn": lambda: walk_call(_rnn()),
    "walk, rnn with tables": lambda: walk_call(_rnn(), tables=_table(3 * RANK)),
    "walk, markov in float32": lambda: walk_call(_markov(dtype=torch.float32), dtype=torch.float32, greedy=True),
    "walk, certified": lambda: _certified(fallback=False),
    "walk, certified with fallback": lambda: _certified(fallback=True),
    "walk, no head": lambda: walk_call(None),
}
"""Calls that between them launch every kernel in every configuration of note."""
