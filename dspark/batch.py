"""The running requests as tensors, and what a drafter knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.models.cache import PagedCache, pages_for, query_batch
from dspark.models.drafter import Drafter
from dspark.ops.accept import RULES_OF_Q
from dspark.ops.draft.tree import MAX_BRANCHING, MAX_NODES
from dspark.ops.ragged import row_index
from dspark.ops.types import DenseQ, QueryBatch, Rule, Sampling, Stream, Tree
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

    @property
    def classes(self) -> tuple[float, ...]:
        """Requests that sample alike are of one kind: how many drafts are accepted depends on the temperature."""
        return tuple(r.params.temperature for r in self.requests)

    @property
    def context_tokens(self) -> int:
        """Committed tokens of all requests."""
        return sum(r.context_len for r in self.requests)

    def rows(self, lengths: Sequence[int], page_size: int, bidirectional: bool = False) -> QueryBatch:
        """Rows after each request's committed tokens, over the columns of the block table that they can reach."""
        after = [r.context_len + max(lengths) for r in self.requests]
        table = self.block_table[:, : pages_for(max(after), page_size)] if after else self.block_table
        return query_batch(table, self.context_len, lengths, page_size, bidirectional=bidirectional)


@dataclass(frozen=True)
class TreeShape:
    """How large the drafted trees are.

    Attributes:
        nodes: most drafts of a round, the anchor not counted.
        branching: most children of a node.
    """

    nodes: int
    branching: int = 4

    def __post_init__(self) -> None:
        for name, value, most in (("nodes", self.nodes, MAX_NODES - 1), ("branching", self.branching, MAX_BRANCHING)):
            if not 1 <= value <= most:
                raise ValueError(f"{name}: expected 1 to {most}, got {value}")


@dataclass(frozen=True)
class Proposal:
    """A round's drafts, chains or trees.

    Attributes:
        tokens: ``[R, N]`` int64, each request's anchor and then its drafts.
        confidence: ``[R, N - 1]`` or None, see :class:`~dspark.ops.types.Draft`.
        q: what the drafts were sampled from, for the rules that divide by it.
        tree: None for chains.
        margin: ``[R, N - 1]`` or None, likewise.
    """

    tokens: Tensor
    confidence: Tensor | None = None
    q: DenseQ | None = None
    tree: Tree | None = None
    margin: Tensor | None = None

    def logprobs(self) -> Tensor | None:
        """``[R, N - 1]`` log-probabilities of drafted chains, where q is known; the least float where none was."""
        if self.q is None:
            return None
        drafts = self.tokens[:, 1:]
        found = self.q.logits.float().log_softmax(-1).gather(2, drafts.clamp(min=0)[..., None]).squeeze(2)
        return found.masked_fill(drafts < 0, torch.finfo(torch.float32).min)

    def verified(self, rows: QueryBatch) -> tuple[Tensor, QueryBatch, Tree | None]:
        """The tokens ``[T]`` of ``rows``, the rows as nodes of their trees, and the trees as far as they are verified.

        ``rows`` follow the committed tokens as those of chains do.
        """
        request, node = row_index(rows.query_start, rows.positions.shape[0])
        tokens = self.tokens[request, node]
        if self.tree is None:
            return tokens, rows, None
        tree = self.tree.first(rows.max_query_len)
        rows = rows._replace(
            positions=rows.context_len[request] + tree.depth[request, node].clamp(min=0),
            slots=torch.where(tokens >= 0, rows.slots, -1),
            ancestors=tree.ancestors[request, node],
        )
        return tokens, rows, tree


@dataclass(frozen=True)
class DrafterContext:
    """A drafter with the cache of what it knows of each request."""

    drafter: Drafter
    cache: PagedCache

    def extend(self, features: Tensor, rows: QueryBatch) -> None:
        """Take in the target's features of committed rows; those of others have slot -1."""
        self.drafter.extend(features, rows, self.cache)

    def propose(
        self, batch: Batch, draft_len: int, rule: Rule, shape: TreeShape | None = None, margins: bool = False
    ) -> Proposal:
        """Draft ``draft_len`` tokens after each anchor, or a tree of so many levels."""
        # A whole block, of which draft_len rows are used: fewer rows would be another input than the trained one.
        rows = batch.rows([self.drafter.block_size] * len(batch.anchor), self.cache.page_size, bidirectional=True)
        if shape is not None:
            drafted = self.drafter.propose_tree(
                batch.anchor,
                rows,
                self.cache,
                draft_len=draft_len,
                sampling=batch.sampling,
                position=batch.context_len,
                rule=rule,
                num_nodes=1 + shape.nodes,
                branching=shape.branching,
            )
            q = None if drafted.logits is None else DenseQ(drafted.logits)
            return Proposal(drafted.tree.tokens, q=q, tree=drafted.tree)
        draft = self.drafter.propose(
            batch.anchor,
            rows,
            self.cache,
            draft_len=draft_len,
            sampling=batch.sampling,
            position=batch.context_len,
            stream=Stream.TARGET if rule == "coupled" else Stream.DRAFT,
            return_logits=rule in RULES_OF_Q,
            return_margin=margins,
        )
        tokens = torch.cat([batch.anchor[:, None], draft.tokens], dim=1)
        q = None if draft.logits is None else DenseQ(draft.logits)
        return Proposal(tokens, draft.confidence, q, margin=draft.margin)
