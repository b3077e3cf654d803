"""Logits processors: one pass over a ragged batch of rows, logits in, processed float32 logits out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def process_logits_kernel(
    logits,  # [rows, vocab_size]
    rows,  # Rows
    processors,  # Processors; output_counts only where there is a penalty
    out,  # [rows, vocab_size] float32, written; it may be the logits
    stride_logits,
    stride_out,
    stride,  # ProcessorStrides
    vocab_size,
    num_requests,
    search_steps,  # enough to halve num_requests down to one
    max_query_len,
    num_eos,
    num_banned,
    BLOCK_V: tl.constexpr,
) -> None:
    """One tile of a row's processed scores: penalties of the counts ``c`` that the row's prefix gives, then -inf.

    ``x < 0 ? x * repetition : x / repetition`` where ``c > 0`` or in the prompt (Keskar et al., arXiv 1909.05858,
    section 4.1), ``- frequency * c``, ``- presence`` where ``c > 0`` (OpenAI's API reference). Of row ``i`` of a
    request ``c`` includes the ``i`` drafts before it.

    Grid: (rows, vocabulary tiles). The output may be the logits: a program reads its own tile before it writes it, and
    nobody else's.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    mask_v = offs_v < vocab_size
    scores = tl.load(logits + row * stride_logits + offs_v, mask=mask_v, other=0.0).to(tl.float32)  # [BLOCK_V]

    # The row's request is the last one that starts at it or before: a binary search between request and later.
    request = row * 0
    later = request + num_requests
    for _ in range(search_steps):
        middle = (request + later) // 2
        starts_later = tl.load(rows.query_start + middle) > row
        request = tl.where(starts_later, request, middle)
        later = tl.where(starts_later, middle, later)
    start = tl.load(rows.query_start + request)
    index = row - start
    # A row of no request is copied.
    owned = (index >= 0) & (index < max_query_len) & (row < tl.load(rows.query_start + request + 1))

    if owned:
        if processors.output_counts is not None:
            counts = tl.load(processors.output_counts + request * stride.counts + offs_v, mask=mask_v, other=0)
            for i in range(1, index + 1):
                draft = tl.load(rows.tokens + start + i)
                draft = tl.where((draft >= 0) & (draft < vocab_size), draft, -1).to(tl.int32)
                counts += (offs_v == draft).to(tl.int32)
            if processors.repetition_penalty is not None:
                penalty = tl.load(processors.repetition_penalty + request)
                seen = counts > 0  # [BLOCK_V]
                if processors.prompt_mask is not None:
                    prompt = tl.load(processors.prompt_mask + request * stride.prompt + offs_v, mask=mask_v, other=0)
                    seen = seen | (prompt != 0)
                penalised = tl.where(scores < 0, scores * penalty, tl.div_rn(scores, penalty))
                scores = tl.where(seen, penalised, scores)
            if processors.frequency_penalty is not None:
                scores = scores - tl.load(processors.frequency_penalty + request) * counts.to(tl.float32)
            if processors.presence_penalty is not None:
                scores = tl.where(counts > 0, scores - tl.load(processors.presence_penalty + request), scores)
        if processors.min_new_tokens is not None:
            too_short = tl.load(processors.num_emitted + request) + index < tl.load(processors.min_new_tokens + request)
            if too_short:
                for k in range(num_eos):
                    eos = tl.load(processors.eos_tokens + request * stride.eos + k)
                    scores = tl.where(offs_v == eos, float("-inf"), scores)
        if processors.banned_tokens is not None:
            for k in range(num_banned):
                banned = tl.load(processors.banned_tokens + request * stride.banned + k)
                scores = tl.where(offs_v == banned, float("-inf"), scores)
        if processors.allowed_mask is not None:
            words = tl.load(processors.allowed_mask + row * stride.allowed + (offs_v >> 5), mask=mask_v, other=0)
            scores = tl.where((words >> (offs_v & 31)) & 1 != 0, scores, float("-inf"))

    tl.store(out + row * stride_out + offs_v, scores, mask=mask_v)
