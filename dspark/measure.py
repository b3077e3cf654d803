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
    drafting = None if drafter is None else DrafterContext(drafter, drafter.new_cache(pages, page_size))
    layers = drafter.feature_layers if drafter is not None else ()
    batch = Batch(
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
