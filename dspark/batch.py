"""The running requests as tensors, and what a drafter knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.models.cache import PagedCache, pages_for, query_batch
from dspark.models.drafter import Drafter
from dspark.ops.accept import RULES_OF_Q
from dspark.ops.types import Draft, QueryBatch, Rule, Sampling, Stream
from dspark.processing import Processing
from dspark.requests import Request, batch_sampling


@dataclass
class Batch:
    """The running requests' state as tensors; rebuilt when a request joins or leaves, else updated in place.

    Attributes:
        block_table: ``[R, B]`` int64.
        context_len: ``[R]`` int64 committed tokens, also the anchor's position.
        anchor: ``[R]`` int64.
        processing: when some request asks for logits processors.
    """

    requests: list[Request]
    sampling: Sampling
    block_table: Tensor
    context_len: Tensor
    anchor: Tensor
    processing: Processing | None = None

    @classmethod
    def of(cls, requests: list[Request], vocab_size: int, device: torch.device) -> Batch:
        """The state of requests as their completions leave it."""
        width = max(len(r.pages) for r in requests)
        table = [r.pages + [-1] * (width - len(r.pages)) for r in requests]
        last = [(r.completion.token_ids or r.prompt)[-1] for r in requests]
        return cls(
            requests=requests,
            sampling=batch_sampling([r.params for r in requests], [r.seed for r in requests], device),
            block_table=torch.tensor(table, device=device),
            context_len=torch.tensor([r.context_len for r in requests], device=device),
            anchor=torch.tensor(last, device=device),
            processing=Processing.of(requests, vocab_size, device),
        )

    @property
    def ids(self) -> tuple[int, ...]:
        """The requests, in batch order."""
        return tuple(r.completion.request_id for r in self.requests)

    def rows(self, lengths: Sequence[int], page_size: int, bidirectional: bool = False) -> QueryBatch:
        """Rows after each request's committed tokens, over the columns of the block table that they can reach."""
        after = [r.context_len + max(lengths) for r in self.requests]
        table = self.block_table[:, : pages_for(max(after), page_size)] if after else self.block_table
        return query_batch(table, self.context_len, lengths, page_size, bidirectional=bidirectional)


@dataclass(frozen=True)
class DrafterContext:
    """A drafter with the cache of what it knows of each request."""

    drafter: Drafter
    cache: PagedCache

    def extend(self, features: Tensor, rows: QueryBatch) -> None:
        """Take in the target's features of committed rows; those of others have slot -1."""
        self.drafter.extend(features, rows, self.cache)

    def propose(self, batch: Batch, draft_len: int, rule: Rule) -> Draft:
        """Draft ``draft_len`` tokens after each anchor."""
        # A whole block, of which draft_len slots are used: fewer rows would be another input than the trained one.
        rows = batch.rows([self.drafter.block_size] * len(batch.anchor), self.cache.page_size, bidirectional=True)
        return self.drafter.propose(
            batch.anchor,
            rows,
            self.cache,
            draft_len=draft_len,
            sampling=batch.sampling,
            position=batch.context_len,
            stream=Stream.TARGET if rule == "coupled" else Stream.DRAFT,
            return_logits=rule in RULES_OF_Q,
        )
