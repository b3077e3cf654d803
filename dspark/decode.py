"""The round: draft, plan, verify, accept, commit, over a batch of requests that join and leave between rounds.

Plain decoding is the same code with no drafter: a round then verifies the anchor alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

from dspark.admission import Admission
from dspark.batch import Batch, DrafterContext, Proposal, TreeShape
from dspark.models.block_table import BlockTables
from dspark.models.cache import query_batch
from dspark.models.drafter import Drafter
from dspark.models.pool import PagePool
from dspark.models.target import Target
from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.cache import commit_kv
from dspark.ops.types import RULES_OF_TREES, DenseQ, QueryBatch, Rows, Rule, Status, Tree, Verdict
from dspark.policy.fixed import FixedK
from dspark.policy.gated import DraftGate
from dspark.policy.oracle import Oracle
from dspark.policy.protocol import Outcome, Signals, VerifyPolicy
from dspark.policy.traces import TraceRecorder
from dspark.requests import Completion, Output, Request, Round, SamplingParams, mean_emitted

__all__ = ["Completion", "Decoder", "Output", "Round", "SamplingParams", "TreeShape", "mean_emitted"]


class Decoder:
    """Speculative decoding of a batch of requests.

    Args:
        target: the model whose output counts.
        drafter: proposes tokens; None is plain decoding.
        policy: decides how many drafts to verify; all of them by default.
        rule: ``"coupled"`` (output bitwise equal to plain sampling with the same seed), ``"match"``, ``"ratio"``
            (Leviathan/Chen; same law, other draws) or ``"block"``; see :func:`~dspark.ops.accept.accept`.
        draft_len: drafts per round (γ), at most the drafter's block size, which is the default; levels of a tree.
        tree: draft trees of this size instead of chains, under ``"coupled"``, ``"match"`` or ``"recursive"``. A policy
            then decides how many of the nodes to verify, and sees no confidence.
        num_pages, page_size: size of the key/value cache, shared by all requests.
        max_batch: most requests running at once.
        prefix_caching: keep full pages of finished and running requests, and start a prompt from those that it begins
            with. Their numbers were computed in other batches, so they may differ in the last bits.
        recorder: told of every round, for a :class:`~dspark.policy.traces.Trace`; with chains alone.
        margins: tell the policy and the recorder how far each draft's best token leads the second.

    Requests wait, in order, until the cache has room for all they may ever need, so a running request never runs out.

    Raises:
        ValueError: an unknown rule, a draft length above the block size, a policy or tree without a drafter, a tree
            under a rule of chains, or an oracle under ``"block"`` or with trees.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: VerifyPolicy | None = None,
        rule: Rule = "coupled",
        *,
        draft_len: int | None = None,
        tree: TreeShape | None = None,
        num_pages: int = 256,
        page_size: int = 16,
        max_batch: int = 8,
        prefix_caching: bool = True,
        recorder: TraceRecorder | None = None,
        margins: bool = False,
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
        if tree is not None:
            if drafter is None:
                raise ValueError("tree: needs a drafter, got None")
            if rule not in RULES_OF_TREES:
                raise ValueError(f"tree: expected a rule of {', '.join(RULES_OF_TREES)}, got {rule!r}")
            if recorder is not None:
                raise ValueError("recorder: a trace is of chains, and this decoder drafts trees")
            if isinstance(policy, Oracle):
                raise ValueError("policy: Oracle counts the drafts of a chain; take another with a tree")
        self.target, self.drafter, self.rule, self.tree = target, drafter, rule, tree
        self.num_drafts = self.draft_len if tree is None else tree.nodes
        self.policy: VerifyPolicy = policy if policy is not None else FixedK(self.num_drafts)
        self.page_size, self._recorder, self._margins = page_size, recorder, margins
        self._cache = target.new_cache(num_pages, page_size)
        self._context = None if drafter is None else DrafterContext(drafter, drafter.new_cache(num_pages, page_size))
        self._batch: Batch | None = None
        caches = ("target",) if drafter is None else ("target", "draft")
        self._admission = Admission(
            tables=BlockTables(PagePool(num_pages), page_size, caches, reuse=prefix_caching),
            max_batch=max_batch,
            look_ahead=max(block_size, self.num_drafts),
            vocab_size=target.vocab_size,
            max_context=target.config.max_position_embeddings,
            unique_seeds=drafter is not None and rule in RULES_OF_Q,
            processors=tree is None,
        )

    # Requests

    def add_request(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Queue a request.

        Returns:
            Its result, which fills up as rounds go by; its ``request_id`` counts from 0 in order of adding.

        Raises:
            ValueError: an empty prompt, a token id outside the vocabulary, a request that could never fit into the
                model's context or into the cache, logits processors where trees are drafted, or (rules ``"ratio"``,
                ``"block"``, ``"recursive"``) a seed used before.
        """
        return self._admission.add([(prompt, sampling or SamplingParams())])[0]

    @property
    def unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return self._admission.waiting > 0 or self._batch is not None

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no running request holds, those kept for their content included."""
        return self._admission.tables.pool.num_free

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
        start = torch.tensor([r.num_cached for r in requests], device=self.target.device)
        rows = query_batch(batch.block_table, start, [len(r.prompt) - r.num_cached for r in requests], self.page_size)
        tokens = torch.tensor([t for r in requests for t in r.prompt[r.num_cached :]], device=self.target.device)
        hidden, features = self.target.forward(tokens, rows, self._cache, self._feature_layers)
        if self._context is not None:
            self._context.extend(features, rows)
        last = rows.query_start[1:] - 1
        one_each = torch.arange(len(requests) + 1, device=self.target.device)
        # The last prompt token is the anchor of what follows.
        verdict = self._accept(batch, hidden[last], Rows(tokens[last], one_each, batch.context_len, 1))
        return self._record(requests, verdict)

    @torch.inference_mode()
    def _round(self, batch: Batch) -> list[Output]:
        began, context_len = time.perf_counter(), batch.context_len
        proposal, caps = self._draft(batch)
        signals = self._signals(batch, proposal, caps)
        lengths = torch.zeros_like(caps) if signals is None else self._plan(signals)
        rows = batch.rows([n + 1 for n in lengths.tolist()], self.page_size)
        tokens, rows, tree = proposal.verified(rows)

        hidden, features = self.target.forward(tokens, rows, self._cache, self._feature_layers)
        verified = Rows(tokens, rows.query_start, context_len, rows.max_query_len)
        verdict = self._accept(batch, hidden, verified, proposal.q, tree)

        if tree is not None:
            commit_kv(self._cache.stacked, verdict.path, verdict.num_emitted, verified, rows.slots)
        if self._context is not None:
            self._context.extend(features, rows._replace(slots=_committed_slots(verdict, rows)))
        accepted = (verdict.num_emitted - 1).clamp(min=0)
        batch.context_len = context_len + verdict.num_emitted
        batch.anchor = verdict.tokens.gather(1, accepted[:, None]).squeeze(1)

        context_tokens = batch.context_tokens
        outputs = self._record(batch.requests, verdict, lengths, proposal.tokens.shape[1] - 1)
        if self._context is not None:
            seconds = time.perf_counter() - began
            outcome = Outcome(batch.ids, lengths, accepted, seconds, batch.classes, context_tokens)
            self.policy.observe(outcome)
            if self._recorder is not None:
                self._recorder.record(signals, outcome, context=context_len, logprob=proposal.logprobs())
        if any(o.finish_reason for o in outputs):
            self._rebuild(batch.requests)
        return outputs

    def _draft(self, batch: Batch) -> tuple[Proposal, Tensor]:
        """Draft for every request, unless none may verify anything; with the cap on each one's verify length."""
        longest = [min(self.draft_len, r.remaining - 1) for r in batch.requests]
        most = longest if self.tree is None else [self.num_drafts * (n > 0) for n in longest]
        caps = torch.tensor(most, device=self.target.device)
        if self._context is None or max(longest) == 0 or not self._is_worth_drafting(batch):
            return Proposal(batch.anchor[:, None]), caps
        return self._context.propose(batch, self.draft_len, self.rule, self.tree, self._margins), caps

    def _is_worth_drafting(self, batch: Batch) -> bool:
        """Some policies are asked before drafts, and their cost, are made."""
        if not isinstance(self.policy, DraftGate):
            return True
        return self.policy.drafts(len(batch.requests), batch.context_tokens)

    def _signals(self, batch: Batch, proposal: Proposal, caps: Tensor) -> Signals | None:
        """What the policy sees; None where nothing was drafted."""
        if proposal.tokens.shape[1] == 1:
            return None
        return Signals(
            request_ids=batch.ids,
            max_lengths=caps,
            draft_len=self.num_drafts,
            confidence=proposal.confidence,
            margin=proposal.margin,
            classes=batch.classes,
            context_tokens=batch.context_tokens,
        )

    def _plan(self, signals: Signals) -> Tensor:
        lengths, caps = self.policy.plan(signals), signals.max_lengths
        if lengths.shape != caps.shape or bool(((lengths < 0) | (lengths > caps)).any()):
            raise ValueError(
                f"policy: expected lengths from 0 to {caps.tolist()}, got {lengths.tolist()} from {self.policy}"
            )
        return lengths

    def _accept(
        self, batch: Batch, hidden: Tensor, rows: Rows, q: DenseQ | None = None, tree: Tree | None = None
    ) -> Verdict:
        logits = self.target.logits(hidden)
        processing = batch.processing
        verdict = accept(
            logits if processing is None else processing.apply(logits, rows),
            rows,
            rule=self.rule,
            sampling=batch.sampling,
            q=q,
            tree=tree,
            max_branching=self.tree.branching if tree is not None and self.tree and q is not None else None,
        )
        return verdict if processing is None else processing.commit(verdict, logits, rows.query_start)

    # Host bookkeeping

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers if self.drafter is not None else ()

    def _record(
        self, requests: Sequence[Request], verdict: Verdict, lengths: Tensor | None = None, proposed: int = 0
    ) -> list[Output]:
        """Copy a verdict to the host and hand each request its part. ``lengths`` None is a prefill."""
        counts, ok = verdict.num_emitted.tolist(), (verdict.status == Status.OK).tolist()
        tokens, logprobs = verdict.tokens.tolist(), verdict.logprobs.tolist()
        verified = [None] * len(requests) if lengths is None else lengths.tolist()
        outputs = [
            request.take(tokens[i][: counts[i]], logprobs[i][: counts[i]], ok[i], proposed, verified[i])
            for i, request in enumerate(requests)
        ]
        self._admission.commit(requests, outputs)
        return outputs

    def _rebuild(self, requests: list[Request]) -> None:
        """Let finished requests go, and their pages; make the tensors of those that run on."""
        running = self._admission.release(requests)
        self._batch = Batch.of(running, self.target.vocab_size, self.target.device) if running else None


def _committed_slots(verdict: Verdict, rows: QueryBatch) -> Tensor:
    """``[T]``: of the rows on each request's path the slot of the place that they have on it; of the others -1."""
    num_rows = rows.slots.shape[0]
    first = rows.query_start[:-1, None]
    on_path = verdict.path >= 0  # [R, N]
    source = torch.where(on_path, first + verdict.path, num_rows)
    place = torch.where(on_path, first + torch.arange(verdict.path.shape[1], device=first.device), 0)
    slots = rows.slots.new_full((num_rows + 1,), -1)
    return slots.scatter(0, source.flatten(), rows.slots[place.flatten()])[:num_rows]
