"""The torch reference of the logits processors."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.ragged import row_index
from dspark.ops.types import Processors, Rows


def process_logits(logits: Tensor, rows: Rows, p: Processors) -> Tensor:
    """:func:`~dspark.ops.process_logits` of at least one row."""
    if rows.position.shape[0] == 0:
        return logits.to(torch.float32, copy=True)
    logits = x = logits.float()
    num_rows, vocab_size = x.shape
    request, index = row_index(rows.query_start, num_rows)  # [T] each
    row = torch.arange(num_rows, device=x.device)
    vocab = torch.arange(vocab_size, device=x.device)

    if p.output_counts is not None and p.penalises:
        counts = p.output_counts[request]  # [T, V]
        drafts = torch.arange(1, rows.max_query_len, device=x.device)  # [N - 1]
        before = (row - index).unsqueeze(1) + drafts  # [T, N - 1]
        count_tokens(counts, rows.tokens[before.clamp(0, num_rows - 1)], index)
        if p.repetition_penalty is not None:
            penalty = p.repetition_penalty[request].unsqueeze(1)
            seen = counts > 0 if p.prompt_mask is None else (counts > 0) | p.prompt_mask[request]
            x = torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x)
        if p.frequency_penalty is not None:
            x = x - p.frequency_penalty[request].unsqueeze(1) * counts.float()
        if p.presence_penalty is not None:
            x = torch.where(counts > 0, x - p.presence_penalty[request].unsqueeze(1), x)

    if p.min_new_tokens is not None and p.num_emitted is not None and p.eos_tokens is not None:
        too_short = p.num_emitted[request] + index < p.min_new_tokens[request]  # [T]
        x = x.masked_fill(too_short.unsqueeze(1) & _listed(p.eos_tokens, vocab_size)[request], -torch.inf)
    if p.banned_tokens is not None:
        x = x.masked_fill(_listed(p.banned_tokens, vocab_size)[request], -torch.inf)
    if p.allowed_mask is not None:
        allowed = (p.allowed_mask[:, vocab // 32] >> (vocab % 32)) & 1  # [T, V]
        x = x.masked_fill(allowed == 0, -torch.inf)

    owned = (index >= 0) & (index < rows.max_query_len) & (row < rows.query_start[-1])
    return torch.where(owned.unsqueeze(1), x, logits)


def count_tokens(output_counts: Tensor, tokens: Tensor, num: Tensor) -> None:
    """:func:`~dspark.ops.count_tokens`."""
    emitted = torch.arange(tokens.shape[1], device=tokens.device) < num.unsqueeze(1)
    emitted &= (tokens >= 0) & (tokens < output_counts.shape[1])
    output_counts.scatter_add_(1, tokens.where(emitted, 0), emitted.int())


def _listed(tokens: Tensor, vocab_size: int) -> Tensor:
    """``[R, K]`` token ids -> ``[R, V]`` bool, those in the list; ids outside ``[0, V)`` are in none."""
    counts = torch.zeros(tokens.shape[0], vocab_size, dtype=torch.int32, device=tokens.device)
    count_tokens(counts, tokens, tokens.new_full((tokens.shape[0],), tokens.shape[1]))
    return counts > 0
