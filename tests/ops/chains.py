"""Verify batches of drafted chains, and what every verdict over one must look like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dspark.ops.accept import RULES_OF_Q
from dspark.ops.sample import sample
from dspark.ops.sample.reference import transform
from dspark.ops.types import (
    Backend,
    DenseQ,
    DraftDistribution,
    PointMass,
    Rule,
    Sampling,
    SparseQ,
    Status,
    Stream,
    Verdict,
)
from tests.ops.helpers import make_sampling, select, verify

RULES: tuple[Rule, ...] = ("coupled", "ratio", "block", "match")
SEEDED: tuple[Rule, ...] = ("coupled", "match")
"""Rules whose output depends on the seed alone."""

Form = Literal["dense", "mapped", "sparse", "point"]
FORMS: tuple[Form, ...] = ("dense", "mapped", "sparse", "point")
"""How the draft distribution is given; ``mapped`` is dense over a smaller vocabulary in another order."""

CASES = [(rule, form) for rule in RULES for form in FORMS if rule in RULES_OF_Q or form == "dense"]
"""Every rule with every form of q that it takes."""

BACKENDS: tuple[Backend, ...] = ("reference",)
on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_rules = pytest.mark.parametrize("rule", RULES)
on_cases = pytest.mark.parametrize(("rule", "form"), CASES)

MISSING = (1, 4)
"""Tokens that the drafter's vocabulary lacks under ``mapped``."""


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass(frozen=True)
class Batch:
    """A verify batch by request: ``lengths`` rows each (the anchor's included).

    ``draft_logits`` are the scores that the drafts were sampled from, whatever the form in which q is handed over.
    """

    logits: Tensor  # [T, V]
    tokens: Tensor  # [T]
    lengths: list[int]
    position: Tensor  # [R]
    sampling: Sampling
    draft_logits: Tensor  # [R, G, V]
    form: Form = "dense"
    backend: Backend = "reference"

    @property
    def query_start(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def max_query_len(self) -> int:
        return max([1, *self.lengths])

    def rows(self, request: int) -> slice:
        start = self.query_start[request].item()
        return slice(int(start), int(start) + self.lengths[request])

    def accept(self, rule: Rule, /, **changes: Any) -> Verdict:
        arguments: dict[str, Any] = {
            "rule": rule,
            "sampling": self.sampling,
            "position": self.position,
            "max_query_len": self.max_query_len,
            "q": self.q() if rule in RULES_OF_Q else None,
            "backend": self.backend,
        }
        return verify(self.logits, self.tokens, self.query_start, **(arguments | changes))

    def q(self) -> DraftDistribution:
        if self.form == "dense":
            return DenseQ(self.draft_logits)
        if self.form == "mapped":
            # Backwards, and with a column that belongs to no token of the target.
            known = [v for v in reversed(range(self.draft_logits.shape[2])) if v not in MISSING]
            draft_ids = torch.full((self.draft_logits.shape[2],), -1, dtype=torch.int32)
            draft_ids[known] = torch.arange(len(known), dtype=torch.int32)
            extra = torch.full_like(self.draft_logits[..., :1], -torch.inf)
            return DenseQ(torch.cat([self.draft_logits[..., known], extra], -1), draft_ids)
        if self.form == "sparse":
            logprobs, tokens = self.draft_logits.double().log_softmax(-1).float().sort(-1, descending=True)
            cut = logprobs == -torch.inf
            return SparseQ(tokens.masked_fill(cut, -1), logprobs.masked_fill(cut, torch.nan))
        return PointMass()

    def q_row(self, request: int, slot: int) -> Tensor:
        """``[V]`` float64: what the draft in a slot was sampled from."""
        if self.form == "point":
            draft = self.tokens[self.rows(request)][slot + 1]
            return (torch.arange(self.logits.shape[1]) == draft).double()
        return self.draft_logits[request, slot].double().softmax(-1)

    def cut(self, request: int, length: int) -> Batch:
        """The same with the first ``length`` rows of one request only."""
        keep = torch.ones(len(self.tokens), dtype=torch.bool)
        keep[self.rows(request)][length:] = False
        lengths = [length if r == request else n for r, n in enumerate(self.lengths)]
        return replace(self, logits=self.logits[keep], tokens=self.tokens[keep], lengths=lengths)

    def plain(self, rule: Rule, **changes: Any) -> Verdict:
        """Plain decoding: the verdict over each row on its own, ``[T, 1]``."""
        request = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        offset = torch.arange(len(request)) - self.query_start[request]
        alone = replace(
            self,
            lengths=[1] * len(request),
            position=self.position[request] + offset,
            sampling=select(self.sampling, request),
        )
        return alone.accept(rule, q=None, **changes)

    def take(self, order: list[int]) -> Batch:
        """The requests of ``order``, in that order."""
        index = torch.tensor(order, dtype=torch.int64)
        return replace(
            self,
            logits=torch.cat([self.logits[self.rows(r)] for r in order]),
            tokens=torch.cat([self.tokens[self.rows(r)] for r in order]),
            lengths=[self.lengths[r] for r in order],
            position=self.position[index],
            sampling=select(self.sampling, index),
            draft_logits=self.draft_logits[index],
        )


def make_batch(
    lengths: list[int],
    sampling: Sampling,
    *,
    rule: Rule = "ratio",
    form: Form = "dense",
    backend: Backend = "reference",
    vocab_size: int = 11,
    seed: int = 0,
    agree: bool = True,
) -> Batch:
    """Random logits, and drafts sampled as the rule wants from draft logits that resemble the target's or do not."""
    num_requests, num_rows, num_drafts = len(lengths), sum(lengths), max([1, *lengths])
    logits = randn(num_rows, vocab_size, seed=seed)
    position = torch.arange(num_requests) * 13 + 5
    draft_logits = randn(num_requests, num_drafts, vocab_size, seed=seed + 1, scale=0.5 if agree else 2.0)
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    batch = Batch(logits, tokens, lengths, position, sampling, draft_logits, form, backend)
    request = torch.arange(num_requests).repeat_interleave(num_drafts)
    for r in range(num_requests):
        drafted = logits[batch.rows(r)][:num_drafts]
        if agree:
            draft_logits[r, : len(drafted)] += drafted
    if form == "mapped":
        draft_logits[..., MISSING] = -torch.inf
    scores = transform(draft_logits.flatten(0, 1), sampling, request)
    drawn_at = (position[:, None] + torch.arange(num_drafts) + 1).flatten()
    stream = Stream.TARGET if rule == "coupled" else Stream.DRAFT
    drafts = sample(draft_logits.flatten(0, 1), sampling, drawn_at, request=request, stream=stream)
    drafts = drafts.view(num_requests, num_drafts)
    for r in range(num_requests):
        batch.tokens[batch.rows(r)][1:] = drafts[r, : max(lengths[r] - 1, 0)]
    return replace(batch, draft_logits=scores.view_as(draft_logits))


MIXED_LENGTHS = [4, 1, 0, 6, 2, 0, 3, 6]


def mixed_sampling(**changes: Any) -> Sampling:
    parameters: dict[str, Any] = {"top_k": [0, 5, 0, 7, 0, 0, 3, 0], "top_p": 0.95, "seed": list(range(8))}
    return make_sampling([1.0, 0.0, 1.0, 0.7, 1.4, 0.0, 1.0, 0.0], **(parameters | changes))


def rows_of(verdict: Verdict, request: int) -> dict[str, list[float]]:
    return {name: getattr(verdict, name)[request].tolist() for name in verdict._fields}


def assert_same(a: Verdict, b: Verdict, width: int | None = None) -> None:
    for name in ("tokens", "path", "logprobs"):
        assert torch.equal(getattr(a, name)[:, :width], getattr(b, name)[:, :width]), name
    assert torch.equal(a.num_emitted, b.num_emitted)
    assert torch.equal(a.status, b.status)


def assert_well_formed(verdict: Verdict, batch: Batch) -> None:
    """The counts are consistent, padding is -1, and accepted tokens are the drafts."""
    num_requests, width = len(batch.lengths), batch.max_query_len
    assert verdict.tokens.shape == verdict.path.shape == verdict.logprobs.shape == (num_requests, width)
    assert (
        verdict.tokens.dtype == verdict.path.dtype == verdict.num_emitted.dtype == verdict.status.dtype == torch.int64
    )
    assert verdict.logprobs.dtype == torch.float32
    for r, length in enumerate(batch.lengths):
        n = int(verdict.num_emitted[r])
        tokens = verdict.tokens[r].tolist()
        if verdict.status[r] == Status.OK:
            assert min(length, 1) <= n <= length
        else:
            assert n < length
        assert tokens[n:] == [-1] * (width - n)
        assert all(0 <= t < batch.logits.shape[1] for t in tokens[:n])
        assert verdict.path[r].tolist() == list(range(n)) + [-1] * (width - n)
        assert tokens[: max(n - 1, 0)] == batch.tokens[batch.rows(r)][1:].tolist()[: max(n - 1, 0)]
        assert (verdict.logprobs[r, n:] == 0).all()
