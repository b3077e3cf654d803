"""Acceptance of a drafted chain: which drafts the target keeps, and the token it adds after them.

Two rules (contract C4), both lossless:

* ``coupled`` (Daliri, Musco, Suresh, arXiv 2408.07978): the target draws every row as plain sampling would, and a draft
  is accepted while it is what the target drew. The output is the plain sampled sequence of that seed, bit for bit.
* ``ratio`` (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): draft x is accepted with probability
  ``min(1, p(x) / q(x))``; the first rejected one is replaced by a draw from the residual ``(p - q)+``.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, check_dtype, check_sampling, check_shape
from dspark.ops.philox import uniform
from dspark.ops.ragged import row_index
from dspark.ops.sample import inverse_cdf, sample, transform
from dspark.ops.types import Backend, Rule, Sampling, Status, Stream, Verdict

_DEGENERATE_MASS = 1e-12
"""A residual lighter than this is rounding (p = q); drawing from p instead moves the law by no more than this."""


def accept(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    *,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
    draft_logits: Tensor | None = None,
    backend: Backend = "auto",
) -> Verdict:
    """Verify a ragged batch of drafted chains.

    Args:
        target_logits: ``[T, V]`` float32, float16 or bfloat16: the target's logits at each row.
        tokens: ``[T]`` int64: the verified tokens, of each request its anchor and then its drafts. An id outside
            ``[0, V)``, such as -1, is never accepted.
        query_start: ``[R + 1]`` int64, first row of each request. A request without rows is padding: it emits nothing
            and its status is OK. Rows past ``query_start[R]`` are padding too.
        rule: ``"coupled"`` or ``"ratio"``.
        sampling: parameters of the ``R`` requests, temperature 0 among them or not.
        position: ``[R]`` int64, absolute position of the anchor; the token that row ``i`` gives is at
            ``position + i + 1``, and that position is the address of its random numbers.
        max_query_len: ``N``, the most rows that a request has (1 is the anchor alone); further rows are ignored.
        draft_logits: ``[R, G, V]`` float32 with ``G >= N - 1``, ``Draft.logits``: the scores after all transforms that
            the drafts were sampled from. ``ratio`` needs it unless ``N`` is 1; ``coupled`` takes none.

    Returns:
        A verdict over ``[R, N]``: ``accepted + 1`` tokens per request that has rows, except where a target row that
        the request reached is bad (NaN, +inf, all -inf): nothing is drawn from it, the tokens before it stand, and the
        status is ``BAD_LOGITS``. A draft row that is bad means that its draft is rejected; the replacement is drawn
        from p.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape, the rule is unknown, or ``draft_logits`` is
            missing or useless.

    Graph-safe; a request's verdict depends on that request's inputs only.
    """
    _check(target_logits, tokens, query_start, rule, sampling, position, max_query_len, draft_logits)
    resolve("accept", backend, target_logits)

    num_rows, num_requests = tokens.shape[0], position.shape[0]
    device = target_logits.device
    node = torch.arange(max_query_len, device=device)  # [N]
    if num_rows == 0 or num_requests == 0:
        return _nothing(num_requests, max_query_len, device)

    request, offset = row_index(query_start, num_rows)  # [T] each
    length = query_start.diff().clamp(max=max_query_len).unsqueeze(1)  # [R, 1]
    rows = (query_start[:-1, None] + node).clamp(max=num_rows - 1)  # [R, N], of the batch; past the length: any
    next_draft = torch.where(node + 1 < length, tokens[(rows + 1).clamp(max=num_rows - 1)], -1)  # [R, N]

    if rule == "coupled":
        drawn_at = position[request] + offset + 1  # [T]
        drawn = sample(target_logits, sampling, drawn_at, request=request, backend="reference")[rows]  # [R, N]
        accepted = _leading((drawn == next_draft) & (drawn >= 0))
        last = drawn.gather(1, accepted)
    else:
        scores = transform(target_logits, sampling, request)  # [T, V]
        p = scores.double().softmax(-1)[rows]  # [R, N, V]
        q = torch.zeros_like(p) if draft_logits is None else _draft_probs(draft_logits, max_query_len)
        accept_prob, residual = ratio_verdict(p, q, next_draft)
        accept_u, residual_u = _uniforms(sampling.seed, position, node)
        accepted = _leading(accept_u < accept_prob)
        at_last = accepted.unsqueeze(-1).expand(-1, 1, p.shape[-1])  # [R, 1, V]
        last = inverse_cdf(residual.gather(1, at_last), residual_u.gather(1, accepted))

    drawn_ok = last >= 0  # [R, 1]
    num_emitted = torch.where(length > 0, accepted + drawn_ok, 0)  # [R, 1]
    emitted = node < num_emitted  # [R, N]
    chosen = torch.where(node < accepted, next_draft, last)
    logprob = target_logits.float().log_softmax(-1)[rows, chosen.clamp(min=0)]  # [R, N]
    status = torch.where((length > 0) & ~drawn_ok, int(Status.BAD_LOGITS), int(Status.OK))
    return Verdict(
        tokens=torch.where(emitted, chosen, -1),
        num_emitted=num_emitted.squeeze(1),
        path=torch.where(emitted, node, -1),
        logprobs=torch.where(emitted, logprob, 0.0),
        status=status.squeeze(1),
    )


def ratio_verdict(p: Tensor, q: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The ratio rule as distributions: what happens to one draft, before any random number.

    Args:
        p: ``[..., V]`` target probabilities, float64 for an exact law.
        q: ``[..., V]`` draft probabilities, of p's dtype; a row with NaN is a bad row.
        token: ``[...]`` int64, drawn from q; an id outside ``[0, V)`` stands for no draft.

    Returns:
        The probability ``[...]`` that the draft is accepted, ``min(1, p(x) / q(x))``, and the distribution ``[..., V]``
        of the token that replaces it otherwise, ``(p - q)+`` normalised. Where there is no draft or the row of q is
        bad, these are 0 and p; where the residual is degenerate (p = q up to rounding) it is p. NaN where p is.

    Graph-safe.
    """
    drafted = (token >= 0) & (token < p.shape[-1]) & q.sum(-1).isfinite()
    q = torch.where(drafted.unsqueeze(-1), q, 0.0)
    index = token.clamp(0, p.shape[-1] - 1).unsqueeze(-1)
    p_token, q_token = p.gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1)
    accept_prob = torch.where(q_token > 0, (p_token / q_token).clamp(max=1.0), 0.0)

    excess = (p - q).clamp(min=0.0)
    mass = excess.sum(-1, keepdim=True)
    return accept_prob, torch.where(mass > _DEGENERATE_MASS, excess / mass, p)


def _nothing(num_requests: int, max_query_len: int, device: torch.device) -> Verdict:
    """The verdict over no rows at all."""
    tokens = torch.full((num_requests, max_query_len), -1, device=device)
    num_emitted = torch.zeros(num_requests, dtype=torch.int64, device=device)
    logprobs = torch.zeros(tokens.shape, device=device)
    return Verdict(tokens, num_emitted, tokens.clone(), logprobs, torch.full_like(num_emitted, int(Status.OK)))


def _draft_probs(draft_logits: Tensor, max_query_len: int) -> Tensor:
    """q as ``[R, N, V]`` float64; no draft follows the last row, whose q is 0."""
    q = draft_logits[:, : max_query_len - 1].double().softmax(-1)  # [R, N - 1, V]
    return F.pad(q, (0, 0, 0, 1))


def _uniforms(seed: Tensor, position: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
    """The accept and the residual uniform ``[R, N]`` of the token that each row gives, from one Philox call."""
    drawn_at = position.unsqueeze(1) + node + 1
    streams = torch.stack([torch.full_like(drawn_at, int(s)) for s in (Stream.ACCEPT, Stream.RESIDUAL)])
    accept_u, residual_u = uniform(seed.unsqueeze(1), drawn_at, streams)
    return accept_u, residual_u


def _leading(kept: Tensor) -> Tensor:
    """How many leading entries of each row hold: ``[R, N]`` bool -> ``[R, 1]`` int64."""
    return kept.long().cumprod(1).sum(1, keepdim=True)


def _check(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
    draft_logits: Tensor | None,
) -> None:
    if rule not in get_args(Rule):
        raise ValueError(f"rule: expected one of {', '.join(map(repr, get_args(Rule)))}, got {rule!r}")
    if max_query_len < 1:
        raise ValueError(f"max_query_len: expected at least 1, got {max_query_len}")
    sizes: dict[str, int] = {}
    check_shape("target_logits", target_logits, "T V", sizes)
    check_dtype("target_logits", target_logits, FLOAT_DTYPES)
    check_shape("position", position, "R", sizes)
    check_shape("tokens", tokens, "T", sizes)
    check_shape("query_start", query_start, "R+1", sizes)
    for name, tensor in (("tokens", tokens), ("query_start", query_start), ("position", position)):
        check_dtype(name, tensor, (torch.int64,))
    check_sampling(sampling, sizes)
    if draft_logits is not None:
        if rule == "coupled":
            raise ValueError("draft_logits: rule 'coupled' does not use the draft's distribution; pass None")
        check_shape("draft_logits", draft_logits, "R G V", sizes)
        check_dtype("draft_logits", draft_logits, (torch.float32,))
        if sizes["G"] < max_query_len - 1:
            raise ValueError(
                f'draft_logits: expected shape "R G V" with G >= max_query_len - 1 = {max_query_len - 1}, '
                f"got {list(draft_logits.shape)}"
            )
    elif rule == "ratio" and max_query_len > 1:
        raise ValueError("draft_logits: rule 'ratio' needs the draft's scores \"R G V\", got None")
