"""Scores of a target's and of a draft's rows: one loader of each serves every rule, over chains and over trees.

Groups are those of :mod:`dspark.ops.accept.launch`: ``target`` (KernelTarget), ``q`` (KernelQ; None is a point mass, or
no draft at all). Tokens are ``[rows]``, one of each row, or ``[rows, n]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.sample.rows import inverse_temperature


@triton.jit
def beside(x, token):
    """``x [rows]`` (or a scalar) as it stands beside the tokens."""
    if len(token.shape) == 2:
        x = x[:, None]
    return x


@triton.jit
def load_target(target, row, line, token, mask, inside, temperature):
    """``x / T`` float32 of the tokens of a target's row; -inf where truncation cuts them or they are not ``inside``.

    ``row`` is the batch's, ``mask`` says which rows are there.
    """
    x = tl.load(target.logits + beside(row * target.stride, token) + token, mask=inside, other=float("-inf"))
    scores = x.to(tl.float32) * beside(inverse_temperature(temperature), token)
    if target.threshold is not None:
        least = tl.load(target.threshold + line, mask=mask, other=float("-inf"))
        scores = tl.where(scores >= beside(least, token), scores, float("-inf"))
    return scores


@triton.jit
def load_draft(q, request, node, token, inside):
    """Scores float32 of the tokens of a dense q's row, -inf where it has no column for them."""
    column = token.to(tl.int64)
    if q.draft_ids is not None:
        column = tl.load(q.draft_ids + token, mask=inside, other=-1).to(tl.int64)
    known = inside & (column >= 0) & (column < q.width)
    first = beside(request * q.stride_request + node * q.stride_row, token)
    return tl.load(q.scores + first + column, mask=known, other=float("-inf")).to(tl.float32)


@triton.jit
def weigh(scores, offset, factor):
    """``exp(score - offset) * factor`` of rows ``[rows, n]``."""
    return tl.exp(scores - offset[:, None]) * factor[:, None]
