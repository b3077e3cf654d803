"""What a round costs on this machine."""

from __future__ import annotations

import torch

from dspark.batch import Batch, DrafterContext
from dspark.models.cache import pages_for
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.policy.cost import CostProfile
from dspark.requests import SamplingParams, batch_sampling


def measure_cost(
    target: Target,
    drafter: Drafter | None = None,
    *,
    max_rows: int = 64,
    max_requests: int = 8,
    context_len: int | None = None,
    repeats: int = 5,
) -> CostProfile:
    """Measure what a round costs on this machine, by a warm-up on scratch caches.

    Timed are verifications of 1, 2, 4, ... up to ``max_rows`` rows of one request, with what the drafter takes in of
    them, and drafts for 1, 2, 4, ... up to ``max_requests`` requests, behind ``context_len`` tokens each (256, or fewer
    in a model with a short context).

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
    drafting = None if drafter is None else DrafterContext(drafter, drafter.new_cache(pages, page_size))
    layers = drafter.feature_layers if drafter is not None else ()

    def batch_of(requests: int) -> Batch:
        """Requests that share their pages: what is in them costs nothing."""
        return Batch(
            requests=[],
            sampling=batch_sampling([SamplingParams(temperature=0)] * requests, [0] * requests, target.device),
            block_table=torch.arange(pages, device=target.device).expand(requests, -1),
            context_len=torch.full((requests,), context_len, device=target.device),
            anchor=torch.zeros(requests, dtype=torch.int64, device=target.device),
        )

    one = batch_of(1)

    @torch.inference_mode()
    def verify(n: int) -> None:
        rows = one.rows([n], page_size)
        hidden, features = target.forward(torch.zeros_like(rows.slots), rows, cache, layers)
        target.logits(hidden)
        if drafting is not None:
            drafting.extend(features, rows)
        _wait(target.device)

    @torch.inference_mode()
    def draft(n: int) -> None:
        if drafting is not None:
            drafting.propose(batch_of(n), drafting.drafter.block_size, "coupled")
        _wait(target.device)

    def sizes(most: int) -> list[int]:
        return [2**i for i in range(most.bit_length())]

    return CostProfile.measure(
        verify,
        sizes(max_rows),
        repeats,
        run_draft=None if drafting is None else draft,
        requests=[] if drafting is None else sizes(max_requests),
        context_tokens=context_len,
        device=str(target.device),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
