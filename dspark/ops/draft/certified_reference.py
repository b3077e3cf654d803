"""The torch reference of the certified walk: which steps are proven, and the exact walk's tokens in the others."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.draft.certified_table import BiasTable
from dspark.ops.draft.walk_reference import WalkInputs, walk, walk_noise
from dspark.ops.types import ConfidenceHead, MarkovHead, Sampling, Stream

ULPS = 2.0**-20
"""What the roundings of a score amount to, of the sizes of its parts."""


def slack_of(rank: int) -> float:
    """What two dot products of ``rank`` terms may differ by, over the product of the norms."""
    return (2 * rank + 32) * 2.0**-22


def walk_certified(
    base_logits: Tensor,
    anchor: Tensor,
    head: MarkovHead,
    table: BiasTable,
    hidden: Tensor | None,
    confidence_head: ConfidenceHead | None,
    confidence_hidden: Tensor | None,
    sampling: Sampling,
    position: Tensor,
    stream: Stream,
    top_k: int,
    fallback: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Tokens, confidences, their logits, and leading certified steps ``[R]``, of arguments that the op has checked.

    Graph-safe.
    """
    inputs = WalkInputs(
        base_logits, anchor, head, hidden, confidence_head, confidence_hidden, sampling, position, stream
    )  # fmt: skip
    tokens, certified = certified_steps(inputs, table, top_k)
    draft = walk(*inputs)
    proven = torch.arange(tokens.shape[1], device=tokens.device) < certified[:, None]  # [R, G]
    if fallback:
        return torch.where(proven, tokens, draft.tokens), draft.confidence, draft.confidence_logits, certified
    logits = draft.confidence_logits
    if logits is not None:
        logits = logits.masked_fill(~proven, -torch.inf)
    return tokens.masked_fill(~proven, -1), None if logits is None else logits.sigmoid(), logits, certified


def certified_steps(inputs: WalkInputs, table: BiasTable, top_k: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[R, G]`` of the walk over candidates, and the leading steps ``[R]`` of them that are certified."""
    base, sampling, head = inputs.base_logits.float(), inputs.sampling, inputs.head
    assert head is not None
    vocab_size = base.shape[2]
    sampled = (sampling.temperature > 0)[:, None]  # [R, 1]
    inverse_t = torch.where(sampled, sampling.temperature[:, None], 1.0).reciprocal()
    noise = torch.zeros_like(base)
    if not sampling.all_greedy:
        noise = torch.where(sampled[..., None], walk_noise(inputs), 0.0)
    perturbed = base * inverse_t[..., None] + noise  # [R, G, V]
    perturbed = torch.where(perturbed < torch.inf, perturbed, torch.inf)  # NaN too: nothing is proven of such a step
    kept = min(top_k, vocab_size)
    top = perturbed.topk(min(kept + 1, vocab_size), dim=-1)
    values, candidates = top.values[..., :kept], top.indices[..., :kept]
    left_out = top.values[..., kept] if kept < vocab_size else perturbed.new_full(base.shape[:2], -torch.inf)

    proven = (inputs.anchor >= 0) & (inputs.anchor < vocab_size)
    previous = torch.where(proven, inputs.anchor, 0)
    margin_of_bias = slack_of(head.w1.shape[1]) * inverse_t.squeeze(1)
    tokens, certified = [], torch.zeros_like(previous)
    for k in range(base.shape[1]):
        x, w2 = head.w1[previous].float(), head.w2[candidates[:, k]].float()  # [R, r], [R, K, r]
        first = values[:, k] + (w2 * x[:, None]).sum(-1) * inverse_t
        listed = table.tokens[previous].long()  # [R, M]
        second = (base[:, k].gather(-1, listed) + table.biases[previous]) * inverse_t + noise[:, k].gather(-1, listed)
        token = torch.cat([candidates[:, k], listed], dim=-1)
        score = torch.cat([first, second], dim=-1)  # [R, K + M]
        score = torch.where(score < torch.inf, score, torch.inf)
        best, at = score.max(dim=-1)
        winner = token.gather(-1, at[:, None])
        rival = score.masked_fill(token == winner, -torch.inf).amax(-1)
        bound = left_out[:, k] + table.bound[previous] * inverse_t.squeeze(1)
        size = best.abs() + torch.where(bound > -torch.inf, bound.abs(), 0.0) + 32
        margin = margin_of_bias * table.norm[previous] + ULPS * size
        proven = proven & best.isfinite() & (best - margin > bound) & (best - margin > rival)
        previous = torch.where(proven, winner.squeeze(-1), 0)
        tokens.append(previous)
        certified = certified + proven
    return torch.stack(tokens, dim=1), certified
