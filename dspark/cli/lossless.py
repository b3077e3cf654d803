"""Whether decoded text is what the target alone would have said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.models.cache import pages_for, query_batch
from dspark.models.target import Target
from dspark.ops.philox import gumbel
from dspark.ops.sample.reference import transform
from dspark.ops.types import Stream
from dspark.requests import Completion, SamplingParams, batch_sampling
from dspark.testing.statistics import probability_integral, uniformity_p_value

NEAR_TIE = 1e-4
"""Two fp32 scores this close may swap when a sum is taken in another order."""

_P_VALUE = 1e-4
_MIN_BINS = 4


@torch.inference_mode()
def replay_logits(target: Target, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """The target's logits ``[n, V]`` at each of the ``n`` emitted tokens, from one pass over the whole text."""
    page_size = 16
    text = [*prompt, *token_ids[:-1]]
    pages = pages_for(len(text), page_size)
    table = torch.arange(pages, device=target.device)[None]
    rows = query_batch(table, torch.zeros(1, dtype=torch.int64, device=target.device), [len(text)], page_size)
    tokens = torch.tensor(text, device=target.device)
    hidden, _ = target.forward(tokens, rows, target.new_cache(pages, page_size))
    return target.logits(hidden[len(prompt) - 1 :])


def is_lossless_by_tokens(
    target: Target,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Completion],
    plain: Sequence[Completion],
    params: Sequence[SamplingParams],
) -> tuple[bool, int]:
    """Whether outputs equal plain decoding's, token for token; and how many part from it at a near tie.

    Sums over different numbers of rows round differently, so two scores within rounding of each other may swap. An
    output that leaves the plain one passes, and is counted, if each of its tokens had the best score after those before
    it, or one within :data:`NEAR_TIE` of it.
    """
    near_ties = 0
    for prompt, output, reference, sampling in zip(prompts, outputs, plain, params, strict=True):
        if output.token_ids == reference.token_ids:
            continue
        ended = output.finish_reason == "stop" or len(output.token_ids) == len(reference.token_ids)
        if not ended or _worst_gap(target, prompt, output.token_ids, sampling) > NEAR_TIE:
            return False, near_ties
        near_ties += 1
    return True, near_ties


def _worst_gap(target: Target, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams) -> float:
    """How far any token's score fell short of the best: logits when greedy, else perturbed log-probabilities."""
    scores = replay_logits(target, prompt, token_ids).float()
    if sampling.temperature > 0:
        if sampling.seed is None:
            raise ValueError("params: expected a seed, got None")
        batch = batch_sampling([sampling], [sampling.seed], target.device)
        position = len(prompt) + torch.arange(len(token_ids), device=target.device)
        scores = transform(scores, batch, torch.zeros_like(position))
        scores = scores + gumbel(batch.seed.expand_as(position), position, scores.shape[1], Stream.TARGET)
    own = scores.gather(1, torch.tensor(token_ids, device=target.device)[:, None])
    return float((scores.amax(1, keepdim=True) - own).max())


def is_lossless_by_law(
    target: Target,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Completion],
    params: Sequence[SamplingParams],
) -> bool | None:
    """Whether outputs fit the target's own distributions: a chi-square test on their probability integrals.

    None where there are too few tokens to tell.
    """
    generator = torch.Generator().manual_seed(0)
    values = []
    for prompt, output, sampling in zip(prompts, outputs, params, strict=True):
        count = len(output.token_ids)
        logits = replay_logits(target, prompt, output.token_ids)
        request = torch.zeros(count, dtype=torch.int64, device=target.device)
        p = transform(logits, batch_sampling([sampling], [0], target.device), request).softmax(-1)
        uniforms = torch.rand(count, generator=generator).to(target.device)
        values.append(probability_integral(p, torch.tensor(output.token_ids, device=target.device), uniforms))
    integrals = torch.cat(values)
    bins = min(20, len(integrals) // 10)
    return uniformity_p_value(integrals, bins) > _P_VALUE if bins >= _MIN_BINS else None
