"""Verify batches of drafted chains, and what every verdict over one must look like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dspark.ops.accept import accept
from dspark.ops.sample import sample, transform
from dspark.ops.types import Rule, Sampling, Status, Stream, Verdict
from tests.ops.helpers import make_sampling, select

RULES: tuple[Rule, ...] = ("coupled", "ratio")


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass(frozen=True)
class Batch:
    """A verify batch by request: ``lengths`` rows each (the anchor's included)."""

    logits: Tensor  # [T, V]
    tokens: Tensor  # [T]
    lengths: list[int]
    position: Tensor  # [R]
    sampling: Sampling
    draft_logits: Tensor  # [R, G, V]

    @property
    def query_start(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def max_query_len(self) -> int:
        return max(1, *self.lengths)

    def rows(self, request: int) -> slice:
        start = self.query_start[request].item()
        return slice(int(start), int(start) + self.lengths[request])

    def accept(self, rule: Rule, **changes: Any) -> Verdict:
        arguments: dict[str, Any] = {
            "rule": rule,
            "sampling": self.sampling,
            "position": self.position,
            "max_query_len": self.max_query_len,
            "draft_logits": self.draft_logits if rule == "ratio" else None,
        }
        return accept(self.logits, self.tokens, self.query_start, **(arguments | changes))

    def take(self, order: list[int]) -> Batch:
        """The requests of ``order``, in that order."""
        index = torch.tensor(order, dtype=torch.int64)
        return Batch(
            torch.cat([self.logits[self.rows(r)] for r in order]),
            torch.cat([self.tokens[self.rows(r)] for r in order]),
            [self.lengths[r] for r in order],
            self.position[index],
            select(self.sampling, index),
            self.draft_logits[index],
        )


def make_batch(
    lengths: list[int],
    sampling: Sampling,
    *,
    rule: Rule = "ratio",
    vocab_size: int = 11,
    seed: int = 0,
    agree: bool = True,
) -> Batch:
    """Random logits, and drafts sampled as the rule wants from draft logits that resemble the target's or do not."""
    num_requests, num_rows, num_drafts = len(lengths), sum(lengths), max(1, *lengths)
    logits = randn(num_rows, vocab_size, seed=seed)
    position = torch.arange(num_requests) * 13 + 5
    draft_logits = randn(num_requests, num_drafts, vocab_size, seed=seed + 1, scale=0.5 if agree else 2.0)
    batch = Batch(logits, torch.zeros(num_rows, dtype=torch.int64), lengths, position, sampling, draft_logits)
    request = torch.arange(num_requests).repeat_interleave(num_drafts)
    for r in range(num_requests):
        drafted = logits[batch.rows(r)][:num_drafts]
        if agree:
            draft_logits[r, : len(drafted)] += drafted
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
    return {name: getattr(verdict, name)[request].tolist() for name in vars(verdict)}


def assert_same(a: Verdict, b: Verdict, width: int | None = None) -> None:
    for name in ("tokens", "path", "logprobs"):
        assert torch.equal(getattr(a, name)[:, :width], getattr(b, name)[:, :width]), name
    assert torch.equal(a.num_emitted, b.num_emitted)
    assert torch.equal(a.status, b.status)


def assert_well_formed(verdict: Verdict, batch: Batch) -> None:
    """P8: the counts are consistent, padding is -1, and accepted tokens are the drafts."""
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
