"""Logits processors: one pass over a ragged batch of rows, logits in, processed float32 logits out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def process_logits_kernel(
    logits_ptr,
    tokens_ptr,
    query_start_ptr,
    output_counts_ptr,
    prompt_mask_ptr,
    repetition_penalty_ptr,
    presence_penalty_ptr,
    frequency_penalty_ptr,
    min_new_tokens_ptr,
    num_emitted_ptr,
    eos_tokens_ptr,
    banned_tokens_ptr,
    allowed_mask_ptr,
    out_ptr,
    stride_logits_row,
    stride_counts_request,
    stride_prompt_request,
    stride_eos_request,
    stride_banned_request,
    stride_allowed_row,
    stride_out_row,
    vocab_size,
    num_requests,
    search_steps,
    max_query_len,
    num_eos,
    num_banned,
    HAS_COUNTS: tl.constexpr,
    HAS_PROMPT: tl.constexpr,
    HAS_REPETITION: tl.constexpr,
    HAS_PRESENCE: tl.constexpr,
    HAS_FREQUENCY: tl.constexpr,
    HAS_MIN_NEW_TOKENS: tl.constexpr,
    HAS_BANNED: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid: (rows, vocabulary tiles). ``search_steps`` is enough to halve ``num_requests`` down to one.

    The output may be the logits: a program reads its own tile before it writes it, and nobody else's.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    mask_v = offs_v < vocab_size
    scores = tl.load(logits_ptr + row * stride_logits_row + offs_v, mask=mask_v, other=0.0).to(tl.float32)  # [BLOCK_V]

    # The row's request is the last one that starts at it or before: a binary search between request and later.
    request = row * 0
    later = request + num_requests
    for _ in range(search_steps):
        middle = (request + later) // 2
        starts_later = tl.load(query_start_ptr + middle) > row
        request = tl.where(starts_later, request, middle)
        later = tl.where(starts_later, middle, later)
    start = tl.load(query_start_ptr + request)
    index = row - start
    # A row of no request is copied.
    owned = (index >= 0) & (index < max_query_len) & (row < tl.load(query_start_ptr + request + 1))

    if owned:
        if HAS_COUNTS:
            counts = tl.load(output_counts_ptr + request * stride_counts_request + offs_v, mask=mask_v, other=0)
            for i in range(1, index + 1):
                draft = tl.load(tokens_ptr + start + i)
                draft = tl.where((draft >= 0) & (draft < vocab_size), draft, -1).to(tl.int32)
                counts += (offs_v == draft).to(tl.int32)
            if HAS_REPETITION:
                penalty = tl.load(repetition_penalty_ptr + request)
                seen = counts > 0  # [BLOCK_V]
                if HAS_PROMPT:
                    prompt = tl.load(prompt_mask_ptr + request * stride_prompt_request + offs_v, mask=mask_v, other=0)
                    seen = seen | (prompt != 0)
                penalised = tl.where(scores < 0, scores * penalty, tl.div_rn(scores, penalty))
                scores = tl.where(seen, penalised, scores)
            if HAS_FREQUENCY:
                scores = scores - tl.load(frequency_penalty_ptr + request) * counts.to(tl.float32)
            if HAS_PRESENCE:
                scores = tl.where(counts > 0, scores - tl.load(presence_penalty_ptr + request), scores)
        if HAS_MIN_NEW_TOKENS:
            too_short = tl.load(num_emitted_ptr + request) + index < tl.load(min_new_tokens_ptr + request)
            if too_short:
                for k in range(num_eos):
                    eos = tl.load(eos_tokens_ptr + request * stride_eos_request + k)
                    scores = tl.where(offs_v == eos, float("-inf"), scores)
        if HAS_BANNED:
            for k in range(num_banned):
                banned = tl.load(banned_tokens_ptr + request * stride_banned_request + k)
                scores = tl.where(offs_v == banned, float("-inf"), scores)
        if HAS_ALLOWED:
            words = tl.load(allowed_mask_ptr + row * stride_allowed_row + (offs_v >> 5), mask=mask_v, other=0)
            scores = tl.where((words >> (offs_v & 31)) & 1 != 0, scores, float("-inf"))

    tl.store(out_ptr + row * stride_out_row + offs_v, scores, mask=mask_v)
