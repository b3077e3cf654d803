"""Logits processors of speculative decoding: functions of the emitted prefix, row by row.

Row ``i`` of a request gives the token after its anchor and ``i`` drafts, and is only used when all of these were
accepted. So it is processed as plain decoding would after having emitted exactly them: what was committed before, plus
``i`` drafts. Later drafts, the other requests and the number of rounds so far have no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, check_dtype, check_shape
from dspark.ops.launch import check_unit_stride
from dspark.ops.library import rows as library
from dspark.ops.ragged import row_index
from dspark.ops.sample.process_launch import process_config, process_triton
from dspark.ops.types import Backend, Processors

_FIELDS = {
    "output_counts": ("R V", torch.int32),
    "prompt_mask": ("R V", torch.bool),
    "repetition_penalty": ("R", torch.float32),
    "presence_penalty": ("R", torch.float32),
    "frequency_penalty": ("R", torch.float32),
    "min_new_tokens": ("R", torch.int64),
    "num_emitted": ("R", torch.int64),
    "eos_tokens": ("R E", torch.int64),
    "banned_tokens": ("R K", torch.int64),
    "allowed_mask": ("T W", torch.int32),
}
_NEEDS = {
    "repetition_penalty": ("output_counts",),
    "presence_penalty": ("output_counts",),
    "frequency_penalty": ("output_counts",),
    "min_new_tokens": ("num_emitted", "eos_tokens"),
}


def process_logits(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    *,
    processors: Processors,
    max_query_len: int,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Apply penalties, bans and masks to the target's logits of a verify batch, before ``accept``.

    Of token ``v`` in row ``i`` of a request, with ``c`` = how often ``v`` was emitted, the ``i`` drafts before the row
    included, in this order:

    1. repetition: ``x < 0 ? x * penalty : x / penalty`` where ``c > 0`` or ``v`` is in the prompt
       (``RepetitionPenaltyLogitsProcessor`` of transformers);
    2. frequency: ``x - frequency * c``; presence: ``x - presence`` where ``c > 0`` (OpenAI's API reference; vLLM);
    3. -inf where ``v`` is an end token and fewer than ``min_new_tokens`` tokens are emitted, where it is banned, and
       where the row's mask does not allow it.

    Args:
        logits: ``[T, V]`` float32, float16 or bfloat16, the target's logits at each row.
        tokens: ``[T]`` int64: of each request its anchor, then its drafts. The anchor is part of the request's state
            and is not counted again. An id outside ``[0, V)``, such as -1, is never counted.
        query_start: ``[R + 1]`` int64, first row of each request; equal neighbours mean no rows.
        processors: what to apply, see :class:`Processors`.
        max_query_len: ``N``, the most rows that a request has; further rows are no request's.
        out: ``[T, V]`` float32 for the result. It may be ``logits`` itself when that is float32, and must not
            overlap another tensor.

    Returns:
        ``[T, V]`` float32, whatever the dtype of the logits: penalised scores rounded to 16 bits would tie where they
        did not, and the draw would depend on it. A row that belongs to no request (past ``query_start[R]``, or past its
        request's first ``N``) is its logits, unchanged. NaN and infinities pass through the penalties, so that
        ``accept`` sees them; -inf is written over whatever stood there, NaN and +inf included. A row of which nothing
        is allowed is all -inf, and ``accept`` answers ``Status.BAD_LOGITS``.

    Raises:
        TypeError: an argument has another dtype, or is not a tensor.
        ValueError: an argument has another shape, a last axis is not contiguous, ``max_query_len`` is below 1, a field
            of ``processors`` lacks another that it needs, or the backend is not at hand.

    Computed in float32. Graph-safe; a row depends on the inputs of its own request and its own mask only.
    """
    _check(logits, tokens, query_start, processors, max_query_len, out)
    taken = resolve("process_logits", backend, logits)
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if torch.compiler.is_compiling():
        library.process_logits_op(logits, tokens, query_start, processors, max_query_len, out, taken)
        return out
    if logits.numel() == 0 or query_start.shape[0] == 1:
        return out.copy_(logits)
    if taken == "triton":
        config = process_config(logits.shape[1])
        process_triton(logits, tokens, query_start, processors, max_query_len, out, config)
        return out
    return out.copy_(_reference(logits.float(), tokens, query_start, processors, max_query_len))


def count_tokens(output_counts: Tensor, tokens: Tensor, num: Tensor) -> None:
    """Count emitted tokens, in place.

    Args:
        output_counts: ``[R, V]`` int32, added to.
        tokens: ``[R, N]`` int64, as in :class:`Verdict`. An id outside ``[0, V)``, such as -1, is not counted.
        num: ``[R]`` int64, how many leading tokens of each request were emitted.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape.

    Graph-safe.

    >>> counts = torch.zeros(1, 4, dtype=torch.int32)
    >>> count_tokens(counts, torch.tensor([[2, 2, 3]]), torch.tensor([2]))
    >>> counts.tolist()
    [[0, 0, 2, 0]]
    """
    sizes: dict[str, int] = {}
    check_shape("output_counts", output_counts, "R V", sizes)
    check_shape("tokens", tokens, "R N", sizes)
    check_shape("num", num, "R", sizes)
    check_dtype("output_counts", output_counts, (torch.int32,))
    check_dtype("tokens", tokens, (torch.int64,))
    check_dtype("num", num, (torch.int64,))
    emitted = torch.arange(tokens.shape[1], device=tokens.device) < num.unsqueeze(1)
    emitted &= (tokens >= 0) & (tokens < output_counts.shape[1])
    output_counts.scatter_add_(1, tokens.where(emitted, 0), emitted.int())


def _reference(logits: Tensor, tokens: Tensor, query_start: Tensor, p: Processors, max_query_len: int) -> Tensor:
    """The op in torch, on float32 logits ``[T, V]``."""
    x = logits
    num_rows, vocab_size = x.shape
    request, index = row_index(query_start, num_rows)  # [T] each
    row = torch.arange(num_rows, device=x.device)
    vocab = torch.arange(vocab_size, device=x.device)

    if p.output_counts is not None and p.penalises:
        counts = p.output_counts[request]  # [T, V]
        before = row.unsqueeze(1) - index.unsqueeze(1) + torch.arange(1, max_query_len, device=x.device)  # [T, N - 1]
        count_tokens(counts, tokens[before.clamp(0, num_rows - 1)], index)
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

    owned = (index >= 0) & (index < max_query_len) & (row < query_start[-1])
    return torch.where(owned.unsqueeze(1), x, logits)


def _listed(tokens: Tensor, vocab_size: int) -> Tensor:
    """``[R, K]`` token ids -> ``[R, V]`` bool, those in the list; ids outside ``[0, V)`` are in none."""
    counts = torch.zeros(tokens.shape[0], vocab_size, dtype=torch.int32, device=tokens.device)
    count_tokens(counts, tokens, tokens.new_full((tokens.shape[0],), tokens.shape[1]))
    return counts > 0


def _check(
    logits: Tensor, tokens: Tensor, query_start: Tensor, processors: Processors, max_query_len: int, out: Tensor | None
) -> None:
    if max_query_len < 1:
        raise ValueError(f"max_query_len: expected at least 1, got {max_query_len}")
    if not isinstance(processors, Processors):
        raise TypeError(f"processors: expected Processors, got {type(processors).__name__}")
    sizes: dict[str, int] = {}
    _check_tensor("logits", logits, "T V", FLOAT_DTYPES, sizes)
    _check_tensor("tokens", tokens, "T", (torch.int64,), sizes)
    one_dimensional = isinstance(query_start, Tensor) and query_start.ndim == 1
    sizes["R"] = max(query_start.shape[0] - 1, 0) if one_dimensional else 0
    _check_tensor("query_start", query_start, "R+1", (torch.int64,), sizes)
    sizes["W"] = -(-sizes["V"] // 32)
    for field, (shape, dtype) in _FIELDS.items():
        tensor = getattr(processors, field)
        if tensor is None:
            continue
        _check_tensor(f"processors.{field}", tensor, shape, (dtype,), sizes)
        for other in _NEEDS.get(field, ()):
            if getattr(processors, other) is None:
                raise ValueError(f"processors.{other}: {field} needs it, got None")
    if out is not None:
        _check_tensor("out", out, "T V", (torch.float32,), sizes)


def _check_tensor(name: str, tensor: Tensor, shape: str, dtypes: Sequence[torch.dtype], sizes: dict[str, int]) -> None:
    check_shape(name, tensor, shape, sizes)
    check_dtype(name, tensor, dtypes)
    check_unit_stride(name, tensor)
