"""Calls of the sequential walk and its certified form, small and as a server makes them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dspark.ops.draft import BiasTable, WalkTables
from dspark.ops.draft.walk_reference import WalkInputs
from dspark.ops.types import (
    ConfidenceHead,
    Draft,
    DraftVocabulary,
    GatedHead,
    MarkovHead,
    RNNHead,
    Sampling,
    SequentialHead,
    Stream,
)
from dspark.testing.registry import Budget, budgets
from tests.ops.case import Case

DRAFTS = 7
HeadKind = Literal["none", "markov", "gated", "rnn"]


class WalkCase(Case):
    """A call, under the name that the datasheet has for it."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"walk, {self.words}"


class Sizes(NamedTuple):
    """Of a walk: ``R``, ``G``, ``V``, the drafter's where it has its own, ``r``, ``h``, and ``M`` of a table."""

    requests: int
    draft_len: int
    vocab_size: int
    draft_vocab: int
    rank: int
    hidden: int
    top_m: int

    def walk(
        self,
        device: str,
        kind: HeadKind = "markov",
        *,
        dtype: torch.dtype = torch.bfloat16,
        greedy: bool = False,
        truncated: bool = False,
        tables: bool = False,
        confidence: bool = True,
        confidence_hidden: bool = False,
        w1_rows: Literal["target", "draft"] | None = None,
        **options: Any,
    ) -> WalkInputs:
        requests, draft_len, hidden, rank = self.requests, self.draft_len, self.hidden, self.rank
        vocab_size = self.vocab_size if w1_rows is None else self.draft_vocab
        rows = self.draft_vocab if w1_rows == "draft" else self.vocab_size
        make = partial(_numbers, device, dtype=dtype)
        head = _head(kind, make(rows, rank), make(vocab_size, rank), hidden, make)
        number, integer = torch.ones(requests, device=device), torch.arange(requests, device=device)
        w1 = None if head is None else head.w1
        width = hidden + (0 if w1 is None else rank)
        states = make(requests, draft_len, hidden) if confidence or kind in ("gated", "rnn") else None
        return WalkInputs(
            base_logits=make(requests, draft_len, vocab_size),
            anchor=integer,
            head=head,
            hidden=states,
            confidence_head=ConfidenceHead(make(width), make(), w1) if confidence else None,
            confidence_hidden=make(requests, draft_len, hidden) if confidence_hidden else None,
            sampling=Sampling(
                number * 0.9, integer * 3, number, number * 0.01, integer, all_greedy=greedy, any_truncation=truncated
            ),
            position=integer,
            vocabulary=None if w1_rows is None else self.vocabulary(device, w1_rows),
            tables=self.tables(device, kind) if tables else None,
            **{"stream": Stream.DRAFT, **options},
        )

    def call(self, device: str, kind: HeadKind = "markov", *, out: bool = False, **options: Any) -> tuple[Any, ...]:
        """Arguments of ``draft_walk``."""
        inputs = self.walk(device, kind, **options)
        return *inputs, Draft(*_numbers_like(inputs)) if out else None

    def certified(self, device: str, *, top_k: int = 128, fallback: bool, **options: Any) -> tuple[Any, ...]:
        """Arguments of ``draft_walk_certified``."""
        inputs = self.walk(device, stream=Stream.TARGET, **options)
        base_logits, anchor, head, *block = inputs[:9]
        listed = torch.arange(self.top_m, dtype=torch.int32, device=device).expand(self.vocab_size, -1).contiguous()
        norm = torch.ones(self.vocab_size, device=device)
        table = BiasTable(listed, torch.zeros(listed.shape, device=device), norm, norm)
        return base_logits, anchor, head, table, *block, top_k, fallback, None, None, None, None

    def vocabulary(self, device: str, w1_rows: Literal["target", "draft"]) -> DraftVocabulary:
        target_ids = torch.arange(self.draft_vocab, device=device)
        draft_ids = torch.arange(self.vocab_size, dtype=torch.int32, device=device).clamp(max=self.draft_vocab) - 1
        return DraftVocabulary(target_ids, draft_ids, w1_rows)

    def tables(self, device: str, kind: HeadKind) -> WalkTables:
        gate = torch.zeros(self.vocab_size, self.rank * (3 if kind == "rnn" else 1), device=device)
        return WalkTables(None if kind == "markov" else gate, torch.zeros(self.vocab_size, device=device))


def _numbers(device: str, *shape: int, dtype: torch.dtype) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _head(kind: HeadKind, w1: Tensor, w2: Tensor, hidden: int, make: Any) -> SequentialHead | None:
    rank = w1.shape[1]
    if kind == "gated":
        return GatedHead(w1, w2, make(rank, hidden + rank), make(rank))
    if kind == "rnn":
        return RNNHead(w1, w2, make(3 * rank, 2 * rank + hidden), make(3 * rank))
    return MarkovHead(w1, w2) if kind == "markov" else None


def _numbers_like(inputs: WalkInputs) -> tuple[Tensor | None, ...]:
    """The fields of a draft that a call asks for."""
    shape, device = inputs.base_logits.shape, inputs.base_logits.device

    def number(wanted: bool) -> Tensor | None:
        return torch.zeros(shape[:2], device=device) if wanted else None

    confident = inputs.confidence_head is not None
    scores = torch.zeros(shape, dtype=inputs.logits_dtype, device=device) if inputs.return_logits else None
    tokens = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    return tokens, scores, *[number(confident)] * 2, number(inputs.return_margin), number(inputs.return_lse)


def walk(sizes: Sizes, words: str, kind: HeadKind, **options: Any) -> Case:
    return WalkCase("draft_walk", words, partial(sizes.call, kind=kind, **options))


def certified(sizes: Sizes, words: str, **options: Any) -> Case:
    return WalkCase("draft_walk_certified", words, partial(sizes.certified, **options))


_WITH_Q = {"return_logits": True, "return_margin": True, "return_lse": True}
_TINY = Sizes(requests=2, draft_len=2, vocab_size=12, draft_vocab=9, rank=4, hidden=6, top_m=3)
SMALL = [
    walk(_TINY, "markov", "markov", dtype=torch.float32, **_WITH_Q),
    walk(_TINY, "markov into out", "markov", dtype=torch.float32, out=True, **_WITH_Q, logits_dtype=torch.float16),
    walk(_TINY, "markov truncated", "markov", dtype=torch.float16, truncated=True),
    walk(_TINY, "markov with a draft vocabulary", "markov", dtype=torch.float32, w1_rows="target", tables=True),
    walk(_TINY, "markov with embeddings of draft ids", "markov", dtype=torch.float32, w1_rows="draft"),
    walk(_TINY, "gated", "gated", dtype=torch.float32, tables=True, confidence_hidden=True),
    walk(_TINY, "rnn", "rnn", dtype=torch.float32, greedy=True, tables=True),
    walk(_TINY, "no head", "none", dtype=torch.float32, confidence=False),
    certified(_TINY, "certified", dtype=torch.float32, top_k=4, fallback=False),
    certified(_TINY, "certified with fallback", dtype=torch.float32, top_k=4, fallback=True),
]
_SERVED = Sizes(
    requests=8, draft_len=DRAFTS, vocab_size=151_936, draft_vocab=32_000, rank=256, hidden=2560, top_m=64
)  # fmt: skip
SHIPPED = [
    walk(_SERVED, "markov", "markov"),
    walk(_SERVED, "markov greedy", "markov", greedy=True, stream=Stream.TARGET),
    walk(_SERVED, "markov with q", "markov", **_WITH_Q, logits_dtype=torch.bfloat16),
    walk(_SERVED._replace(requests=64), "markov of 64 requests", "markov"),
    walk(_SERVED, "markov truncated", "markov", truncated=True, return_logits=True),
    walk(_SERVED._replace(rank=512), "markov of rank 512", "markov", confidence=False, stream=Stream.TARGET),
    walk(_SERVED, "markov with a draft vocabulary", "markov", w1_rows="target"),
    walk(_SERVED, "gated", "gated"),
    walk(_SERVED, "gated with tables", "gated", tables=True),
    walk(_SERVED, "rnn", "rnn"),
    walk(_SERVED, "rnn with tables", "rnn", tables=True),
    walk(_SERVED, "markov in float32", "markov", dtype=torch.float32, greedy=True),
    certified(_SERVED, "certified", fallback=False),
    certified(_SERVED, "certified with fallback", fallback=True),
    walk(_SERVED, "no head", "none"),
]
"""Calls that between them launch every kernel in every configuration of note."""

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
