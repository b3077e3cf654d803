"""The round: draft, plan, verify, accept, commit, over a batch of requests that join and leave between rounds.

Plain decoding is the same code with no drafter: a round then verifies the anchor alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from dspark.models.cache import PagedCache, PagePool, pages_for, query_batch
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.ragged import row_index
from dspark.ops.types import DenseQ, Draft, QueryBatch, Rule, Sampling, Status, Stream, Verdict
from dspark.policy.cost import CostProfile
from dspark.policy.fixed import FixedK
from dspark.policy.oracle import Oracle
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy
from dspark.processing import Processing
from dspark.requests import Completion, Output, Request, Round, SamplingParams, batch_sampling, mean_emitted

__all__ = ["Completion", "Decoder", "Output", "Round", "SamplingParams", "mean_emitted", "measure_cost"]


@dataclass
class _Batch:
    """The running requests' state as tensors; rebuilt when a request joins or leaves, else updated in place."""

    requests: list[Request]
    sampling: Sampling
    block_table: Tensor  # [R, B]
    context_len: Tensor  # [R], also the anchor's position
    anchor: Tensor  # [R]
    processing: Processing | None = None  # when some request asks for logits processors

    def rows(self, lengths: Sequence[int], page_size: int, bidirectional: bool = False) -> QueryBatch:
        """Rows after each request's committed tokens, over the columns of the block table that they can reach."""
        after = [len(r.prompt) + len(r.completion.token_ids) - 1 + max(lengths) for r in self.requests]
        table = self.block_table[:, : pages_for(max(after), page_size)] if after else self.block_table
        return query_batch(table, self.context_len, lengths, page_size, bidirectional=bidirectional)


@dataclass(frozen=True)
class _Context:
    """A drafter with the cache of what it knows of each request."""

    drafter: Drafter
    cache: PagedCache

    def extend(self, features: Tensor, rows: QueryBatch) -> None:
        self.drafter.extend(features, rows, self.cache)

    def propose(self, batch: _Batch, draft_len: int, rule: Rule) -> Draft:
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


class Decoder:
    """Speculative decoding of a batch of requests.

    Args:
        target: the model whose output counts.
        drafter: proposes tokens; None is plain decoding.
        policy: decides how many drafts to verify; all of them by default.
        rule: ``"coupled"`` (output bitwise equal to plain sampling with the same seed), ``"match"``, ``"ratio"``
            (Leviathan/Chen; same law, other draws) or ``"block"``; see :func:`~dspark.ops.accept.accept`.
        draft_len: drafts per round (γ), at most the drafter's block size, which is the default.
        num_pages, page_size: size of the key/value cache, shared by all requests.
        max_batch: most requests running at once.

    Requests wait, in order, until the cache has room for all they may ever need, so a running request never runs out.

    Raises:
        ValueError: an unknown rule, a draft length above the block size, a policy without a drafter, or an oracle
            under ``"block"``.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: VerifyPolicy | None = None,
        rule: Rule = "coupled",
        *,
        draft_len: int | None = None,
        num_pages: int = 256,
        page_size: int = 16,
        max_batch: int = 8,
    ) -> None:
        if rule not in get_args(Rule):
            raise ValueError(f"rule: expected one of {', '.join(get_args(Rule))}, got {rule!r}")
        if drafter is None and (policy is not None or draft_len is not None):
            raise ValueError("drafter: a policy or a draft_len needs a drafter, got None")
        block_size = drafter.block_size if drafter is not None else 0
        self.draft_len = block_size if draft_len is None else draft_len
        if not 0 <= self.draft_len <= block_size:
            raise ValueError(f"draft_len: expected 0 to the drafter's block size {block_size}, got {draft_len}")
        if max_batch < 1:
            raise ValueError(f"max_batch: expected at least 1, got {max_batch}")
        if rule == "block" and isinstance(policy, Oracle):
            raise ValueError("policy: Oracle under rule 'block' would bias the output (see Oracle); take another")
        self.target, self.drafter, self.rule = target, drafter, rule
        self.policy: VerifyPolicy = policy if policy is not None else FixedK(self.draft_len)
        self.max_batch, self.page_size = max_batch, page_size
        self._pool = PagePool(num_pages)
        self._cache = target.new_cache(num_pages, page_size)
        self._context = None if drafter is None else _Context(drafter, drafter.new_cache(num_pages, page_size))
        self._waiting: deque[Request] = deque()
        self._batch: _Batch | None = None
        self._seeds: set[int] = set()  # that requests had so far, under ratio and block
        self._next_id = 0

    # Requests

    def add_request(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Queue a request.

        Returns:
            Its result, which fills up as rounds go by; its ``request_id`` counts from 0 in order of adding.

        Raises:
            ValueError: an empty prompt, a token id outside the vocabulary, a request that could never fit into the
                model's context or into the cache, or (rules ``"ratio"``, ``"block"``) a seed used before.
        """
        return self._queue([(prompt, sampling or SamplingParams())])[0]

    def _queue(self, asked: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Queue all of these requests, or none when one of them is at fault."""
        requests: list[Request] = []
        seeds = set(self._seeds)
        for prompt, params in asked:
            request = self._checked(prompt, params, self._next_id + len(requests))
            if self.rule in RULES_OF_Q and self.drafter is not None:
                if request.seed in seeds:
                    raise ValueError(
                        f"seed: {request.seed} was used before; under rule {self.rule!r} every request of a decoder "
                        "needs its own (leave seed None to get one), or a policy could know a draft before it is made"
                    )
                seeds.add(request.seed)
            requests.append(request)
        self._next_id += len(requests)
        self._seeds = seeds
        self._waiting += requests
        return [request.completion for request in requests]

    def _checked(self, prompt: Sequence[int], params: SamplingParams, request_id: int) -> Request:
        limit = self.target.config.max_position_embeddings
        request = Request.checked(prompt, params, request_id, self.target.vocab_size, limit)
        needed = self._pages_needed(request)
        if needed > self._pool.num_pages:
            raise ValueError(
                f"prompt: {len(prompt)} tokens and {request.max_tokens} to emit need {needed} pages of "
                f"{self.page_size}, and the cache has {self._pool.num_pages}"
            )
        return request

    def _pages_needed(self, request: Request) -> int:
        look_ahead = self.drafter.block_size if self.drafter is not None else 0
        return pages_for(len(request.prompt) + request.max_tokens + look_ahead, self.page_size)

    @property
    def unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._waiting) or self._batch is not None

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no running request holds."""
        return self._pool.num_free

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Decode prompts to their end; one :class:`SamplingParams` for all, or one for each.

        Raises:
            ValueError: as :meth:`add_request`; or the two lists differ in length.
        """
        each = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"sampling: expected one for each of {len(prompts)} prompts, got {len(each)}")
        completions = self._queue(list(zip(prompts, each, strict=True)))
        while any(c.finish_reason is None for c in completions):
            self.step()
        return completions

    def stream(self) -> Iterator[Output]:
        """Yield each request's new tokens as rounds finish, until nothing is left to do."""
        while self.unfinished:
            yield from self.step()

    # The round

    def step(self) -> list[Output]:
        """Admit waiting requests while there is room, which gives their first token, then run one round."""
        outputs = self._admit()
        if self._batch is not None:
            outputs += self._round(self._batch)
        return outputs

    @torch.inference_mode()
    def _admit(self) -> list[Output]:
        running = list(self._batch.requests) if self._batch is not None else []
        admitted: list[Request] = []
        while self._waiting and len(running) + len(admitted) < self.max_batch:
            pages = self._pool.allocate(self._pages_needed(self._waiting[0]))
            if pages is None:
                break
            admitted.append(self._waiting.popleft())
            admitted[-1].pages = pages
        outputs = self._prefill(admitted) if admitted else []
        if admitted:
            self._rebuild(running + admitted)
        return outputs

    def _prefill(self, requests: list[Request]) -> list[Output]:
        batch = self._tensors(requests)
        start, lengths = torch.zeros_like(batch.context_len), [len(r.prompt) for r in requests]
        rows = query_batch(batch.block_table, start, lengths, self.page_size)
        tokens = torch.tensor([t for r in requests for t in r.prompt], device=self.target.device)
        hidden, features = self.target.forward(tokens, rows, self._cache, self._feature_layers)
        if self._context is not None:
            self._context.extend(features, rows)
        last = rows.query_start[1:] - 1
        one_each = torch.arange(len(requests) + 1, device=self.target.device)
        # The last prompt token is the anchor of what follows.
        verdict = self._accept(batch, hidden[last], tokens[last], one_each, 1)
        return self._record(requests, verdict)

    @torch.inference_mode()
    def _round(self, batch: _Batch) -> list[Output]:
        draft, caps = self._draft(batch)
        lengths = self._plan(batch, draft, caps)
        counts = [n + 1 for n in lengths.tolist()]
        rows = batch.rows(counts, self.page_size)
        proposed = batch.anchor[:, None] if draft is None else torch.cat([batch.anchor[:, None], draft.tokens], dim=1)
        request, offset = row_index(rows.query_start, sum(counts))
        tokens = proposed[request, offset]  # [T]

        hidden, features = self.target.forward(tokens, rows, self._cache, self._feature_layers)
        verdict = self._accept(batch, hidden, tokens, rows.query_start, rows.max_query_len, draft)

        if self._context is not None:
            committed = torch.where(offset < verdict.num_emitted[request], rows.slots, -1)
            self._context.extend(features, replace(rows, slots=committed))
            self.policy.observe(Outcome(_ids(batch), lengths, (verdict.num_emitted - 1).clamp(min=0)))
        batch.context_len = batch.context_len + verdict.num_emitted
        batch.anchor = verdict.tokens.gather(1, (verdict.num_emitted - 1).clamp(min=0)[:, None]).squeeze(1)

        outputs = self._record(batch.requests, verdict, lengths, 0 if draft is None else self.draft_len)
        if any(o.finish_reason for o in outputs):
            self._rebuild(batch.requests)
        return outputs

    def _draft(self, batch: _Batch) -> tuple[Draft | None, Tensor]:
        """Propose a block for every request, unless none may verify any; with the cap on each one's verify length."""
        longest = [min(self.draft_len, r.remaining - 1) for r in batch.requests]
        caps = torch.tensor(longest, device=self.target.device)
        if self._context is None or max(longest) == 0:
            return None, caps
        return self._context.propose(batch, self.draft_len, self.rule), caps

    def _plan(self, batch: _Batch, draft: Draft | None, caps: Tensor) -> Tensor:
        if draft is None:
            return torch.zeros_like(caps)
        lengths = self.policy.plan(Signals(_ids(batch), caps, self.draft_len, draft.confidence))
        if lengths.shape != caps.shape or bool(((lengths < 0) | (lengths > caps)).any()):
            raise ValueError(
                f"policy: expected lengths from 0 to {caps.tolist()}, got {lengths.tolist()} from {self.policy}"
            )
        return lengths

    def _accept(
        self, batch: _Batch, hidden: Tensor, tokens: Tensor, query_start: Tensor, width: int, draft: Draft | None = None
    ) -> Verdict:
        logits = self.target.logits(hidden)
        processing = batch.processing
        verdict = accept(
            logits if processing is None else processing.apply(logits, tokens, query_start, width),
            tokens,
            query_start,
            rule=self.rule,
            sampling=batch.sampling,
            position=batch.context_len,
            max_query_len=width,
            q=None if draft is None or draft.logits is None else DenseQ(draft.logits),
        )
        return verdict if processing is None else processing.commit(verdict, logits, query_start)

    # Host bookkeeping

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers if self.drafter is not None else ()

    @staticmethod
    def _record(
        requests: Sequence[Request], verdict: Verdict, lengths: Tensor | None = None, proposed: int = 0
    ) -> list[Output]:
        """Copy a verdict to the host and hand each request its part. ``lengths`` None is a prefill."""
        counts, ok = verdict.num_emitted.tolist(), (verdict.status == Status.OK).tolist()
        tokens, logprobs = verdict.tokens.tolist(), verdict.logprobs.tolist()
        verified = [None] * len(requests) if lengths is None else lengths.tolist()
        return [
            request.take(tokens[i][: counts[i]], logprobs[i][: counts[i]], ok[i], proposed, verified[i])
            for i, request in enumerate(requests)
        ]

    def _rebuild(self, requests: Iterable[Request]) -> None:
        """Let finished requests go, and their pages; make the tensors of those that run on."""
        running = []
        for request in requests:
            if request.completion.finish_reason is None:
                running.append(request)
            else:
                self._pool.free(request.pages)
        self._batch = self._tensors(running) if running else None

    def _tensors(self, requests: list[Request]) -> _Batch:
        device = self.target.device
        width = max(len(r.pages) for r in requests)
        table = [r.pages + [-1] * (width - len(r.pages)) for r in requests]
        context = [len(r.prompt) + len(r.completion.token_ids) - 1 for r in requests]
        last = [(r.completion.token_ids or r.prompt)[-1] for r in requests]
        return _Batch(
            requests=requests,
            sampling=batch_sampling([r.params for r in requests], [r.seed for r in requests], device),
            block_table=torch.tensor(table, device=device),
            context_len=torch.tensor(context, device=device),
            anchor=torch.tensor(last, device=device),
            processing=Processing.of(requests, self.target.vocab_size, device),
        )


def _ids(batch: _Batch) -> tuple[int, ...]:
    return tuple(r.completion.request_id for r in batch.requests)


def measure_cost(
    target: Target,
    drafter: Drafter | None = None,
    *,
    max_rows: int = 64,
    context_len: int | None = None,
    repeats: int = 5,
) -> CostProfile:
    """Measure what a round costs on this machine, by a warm-up on a scratch cache.

    A round of ``n`` rows is timed as one draft for one request and one verification of ``n`` rows behind
    ``context_len`` tokens (256, or fewer in a model with a short context), for n = 1, 2, 4, ... up to ``max_rows``.

    Raises:
        ValueError: ``context_len`` and ``max_rows`` together exceed the model's context.
    """
    limit = target.config.max_position_embeddings
    if context_len is None:
        context_len = max(0, min(256, limit - max_rows))
    if context_len + max_rows > limit:
        raise ValueError(f"context_len + max_rows: expected at most {limit}, got {context_len} + {max_rows}")
    page_size = 16
    pages = pages_for(context_len + max_rows, page_size)
    cache = target.new_cache(pages, page_size)
    drafting = None if drafter is None else _Context(drafter, drafter.new_cache(pages, page_size))
    layers = drafter.feature_layers if drafter is not None else ()
    batch = _Batch(
        requests=[],
        sampling=batch_sampling([SamplingParams(temperature=0)], [0], target.device),
        block_table=torch.arange(pages, device=target.device)[None],
        context_len=torch.tensor([context_len], device=target.device),
        anchor=torch.zeros(1, dtype=torch.int64, device=target.device),
    )

    @torch.inference_mode()
    def run_round(n: int) -> None:
        if drafting is not None:
            drafting.propose(batch, drafting.drafter.block_size, "coupled")
        rows = batch.rows([n], page_size)
        hidden, features = target.forward(torch.zeros_like(rows.slots), rows, cache, layers)
        target.logits(hidden)
        if drafting is not None:
            drafting.extend(features, rows)

    return CostProfile.measure(run_round, [2**i for i in range(max_rows.bit_length())], repeats)
