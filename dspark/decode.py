"""The round: draft, plan, verify, accept, commit, over a batch of requests that join and leave between rounds.

Plain decoding is the same code with no drafter: a round then verifies the anchor alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from dspark.admission import Admission
from dspark.batch import Batch, DrafterContext
from dspark.models.cache import PagePool, query_batch
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.ragged import row_index
from dspark.ops.types import DenseQ, Draft, Rule, Status, Verdict
from dspark.policy.fixed import FixedK
from dspark.policy.oracle import Oracle
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy
from dspark.requests import Completion, Output, Request, Round, SamplingParams, mean_emitted

__all__ = ["Completion", "Decoder", "Output", "Round", "SamplingParams", "mean_emitted"]


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
        self.page_size = page_size
        self._cache = target.new_cache(num_pages, page_size)
        self._context = None if drafter is None else DrafterContext(drafter, drafter.new_cache(num_pages, page_size))
        self._batch: Batch | None = None
        self._admission = Admission(
            pool=PagePool(num_pages),
            page_size=page_size,
            max_batch=max_batch,
            look_ahead=block_size,
            vocab_size=target.vocab_size,
            max_context=target.config.max_position_embeddings,
            unique_seeds=drafter is not None and rule in RULES_OF_Q,
        )

    # Requests

    def add_request(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Queue a request.

        Returns:
            Its result, which fills up as rounds go by; its ``request_id`` counts from 0 in order of adding.

        Raises:
            ValueError: an empty prompt, a token id outside the vocabulary, a request that could never fit into the
                model's context or into the cache, or (rules ``"ratio"``, ``"block"``) a seed used before.
        """
        return self._admission.add([(prompt, sampling or SamplingParams())])[0]

    @property
    def unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return self._admission.waiting > 0 or self._batch is not None

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no running request holds."""
        return self._admission.pool.num_free

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
        completions = self._admission.add(list(zip(prompts, each, strict=True)))
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
        running = [] if self._batch is None else self._batch.requests
        admitted = self._admission.admit(len(running))
        if not admitted:
            return []
        outputs = self._prefill(admitted)
        self._rebuild(running + admitted)
        return outputs

    def _prefill(self, requests: list[Request]) -> list[Output]:
        batch = Batch.of(requests, self.target.vocab_size, self.target.device)
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
    def _round(self, batch: Batch) -> list[Output]:
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
            self.policy.observe(Outcome(batch.ids, lengths, (verdict.num_emitted - 1).clamp(min=0)))
        batch.context_len = batch.context_len + verdict.num_emitted
        batch.anchor = verdict.tokens.gather(1, (verdict.num_emitted - 1).clamp(min=0)[:, None]).squeeze(1)

        outputs = self._record(batch.requests, verdict, lengths, 0 if draft is None else self.draft_len)
        if any(o.finish_reason for o in outputs):
            self._rebuild(batch.requests)
        return outputs

    def _draft(self, batch: Batch) -> tuple[Draft | None, Tensor]:
        """Propose a block for every request, unless none may verify any; with the cap on each one's verify length."""
        longest = [min(self.draft_len, r.remaining - 1) for r in batch.requests]
        caps = torch.tensor(longest, device=self.target.device)
        if self._context is None or max(longest) == 0:
            return None, caps
        return self._context.propose(batch, self.draft_len, self.rule), caps

    def _plan(self, batch: Batch, draft: Draft | None, caps: Tensor) -> Tensor:
        if draft is None:
            return torch.zeros_like(caps)
        lengths = self.policy.plan(Signals(batch.ids, caps, self.draft_len, draft.confidence))
        if lengths.shape != caps.shape or bool(((lengths < 0) | (lengths > caps)).any()):
            raise ValueError(
                f"policy: expected lengths from 0 to {caps.tolist()}, got {lengths.tolist()} from {self.policy}"
            )
        return lengths

    def _accept(
        self, batch: Batch, hidden: Tensor, tokens: Tensor, query_start: Tensor, width: int, draft: Draft | None = None
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

    def _rebuild(self, requests: list[Request]) -> None:
        """Let finished requests go, and their pages; make the tensors of those that run on."""
        running = self._admission.release(requests)
        self._batch = Batch.of(running, self.target.vocab_size, self.target.device) if running else None
