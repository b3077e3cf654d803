"""Launch of the logits processors' kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dspark.ops.launch import launch
from dspark.ops.types import Processors


@dataclass(frozen=True)
class ProcessConfig:
    """Tile of the vocabulary that one program takes, and its warps."""

    block_v: int
    num_warps: int


def process_config(vocab_size: int) -> ProcessConfig:
    """Configuration for a vocabulary; of nothing else, so that a row's result does not depend on its batch."""
    block_v = 128
    while block_v < min(vocab_size, 2048):
        block_v *= 2
    return ProcessConfig(block_v=block_v, num_warps=max(1, block_v // 512))


def process_triton(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    processors: Processors,
    max_query_len: int,
    out: Tensor,
    config: ProcessConfig,
) -> None:
    """Fill ``out``; arguments as checked by :func:`dspark.ops.process_logits`, with at least one row and request."""
    from dspark.kernels.sample.process import process_logits_kernel

    num_rows, vocab_size = logits.shape
    num_requests = query_start.shape[0] - 1
    p = processors
    num_tiles = -(-vocab_size // config.block_v)
    launch(
        process_logits_kernel,
        (num_rows, num_tiles),
        {
            "logits_ptr": logits,
            "tokens_ptr": tokens,
            "query_start_ptr": query_start,
            "output_counts_ptr": p.output_counts,
            "prompt_mask_ptr": p.prompt_mask,
            "repetition_penalty_ptr": p.repetition_penalty,
            "presence_penalty_ptr": p.presence_penalty,
            "frequency_penalty_ptr": p.frequency_penalty,
            "min_new_tokens_ptr": p.min_new_tokens,
            "num_emitted_ptr": p.num_emitted,
            "eos_tokens_ptr": p.eos_tokens,
            "banned_tokens_ptr": p.banned_tokens,
            "allowed_mask_ptr": p.allowed_mask,
            "out_ptr": out,
            "stride_logits_row": logits.stride(0),
            "stride_counts_request": _row_stride(p.output_counts),
            "stride_prompt_request": _row_stride(p.prompt_mask),
            "stride_eos_request": _row_stride(p.eos_tokens),
            "stride_banned_request": _row_stride(p.banned_tokens),
            "stride_allowed_row": _row_stride(p.allowed_mask),
            "stride_out_row": out.stride(0),
            "vocab_size": vocab_size,
            "num_requests": num_requests,
            "search_steps": (num_requests - 1).bit_length(),
            "max_query_len": max_query_len,
            "num_eos": 0 if p.eos_tokens is None else p.eos_tokens.shape[1],
            "num_banned": 0 if p.banned_tokens is None else p.banned_tokens.shape[1],
            "HAS_COUNTS": p.penalises,
            "HAS_PROMPT": p.prompt_mask is not None,
            "HAS_REPETITION": p.repetition_penalty is not None,
            "HAS_PRESENCE": p.presence_penalty is not None,
            "HAS_FREQUENCY": p.frequency_penalty is not None,
            "HAS_MIN_NEW_TOKENS": p.min_new_tokens is not None,
            "HAS_BANNED": p.banned_tokens is not None,
            "HAS_ALLOWED": p.allowed_mask is not None,
            "BLOCK_V": config.block_v,
            "num_warps": config.num_warps,
        },
    )


def _row_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)
