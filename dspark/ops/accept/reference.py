"""The torch reference of :func:`dspark.ops.accept.accept`: the executable specification of each acceptance rule.

It computes in float64. :func:`ratio_verdict` and :func:`block_verdict` give their rules as distributions, before any
random number, so that the law of what is emitted can be enumerated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.philox import gumbel, uniform
from dspark.ops.ragged import row_index
from dspark.ops.sample.reference import inverse_cdf, perturbed_argmax, transform
from dspark.ops.types import (
    DraftDistribution,
    Logprobs,
    PointMass,
    Rows,
    Rule,
    Sampling,
    SparseQ,
    Status,
    Stream,
    Verdict,
)

_DEGENERATE_MASS = 1e-12
"""A residual lighter than this is rounding (p = q); drawing from p instead moves the law by no more than this."""


def accept_reference(
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None,
    logprobs: Logprobs,
) -> Verdict:
    """Verify a ragged batch of drafted chains; arguments, checked before, and result as in ``accept``.

    Graph-safe.
    """
    tokens, query_start, position, max_query_len = rows
    num_rows, vocab_size = target_logits.shape
    num_requests, device = position.shape[0], target_logits.device
    node = torch.arange(max_query_len, device=device)  # [N]
    if num_rows == 0 or num_requests == 0:
        return no_verdict(num_requests, max_query_len, device)

    request, offset = row_index(query_start, num_rows)  # [T] each
    length = query_start.diff().clamp(max=max_query_len).unsqueeze(1)  # [R, 1]
    row = (query_start[:-1, None] + node).clamp(max=num_rows - 1)  # [R, N], of the batch; past the length: any
    next_draft = torch.where(node + 1 < length, tokens[(row + 1).clamp(max=num_rows - 1)], -1)  # [R, N]
    drawn_at = position.unsqueeze(1) + node + 1  # [R, N]
    seed = sampling.seed.unsqueeze(1)  # [R, 1]

    scores = transform(target_logits, sampling, request)  # [T, V]
    if rule == "coupled":
        noise = None
        if not sampling.all_greedy:
            noise = gumbel(sampling.seed[request], position[request] + offset + 1, vocab_size, Stream.TARGET)  # [T, V]
        accepted, last = _match(perturbed_argmax(scores, noise)[row], next_draft)
    else:
        p = scores.double().softmax(-1)[row]  # [R, N, V]
        residual_u = uniform(seed, drawn_at, Stream.RESIDUAL)  # [R, N]
        if rule == "match":
            accepted, last = _match(inverse_cdf(p, residual_u), next_draft)
        else:
            dense = torch.zeros_like(p) if q is None else draft_probs(q, next_draft, vocab_size)  # [R, N, V]
            if rule != "block":  # on a chain, "recursive" is "ratio"
                accept_prob, residual = ratio_verdict(p, dense, next_draft)
                accepted = _leading(uniform(seed, drawn_at, Stream.ACCEPT) < accept_prob)
            else:
                accept_prob, residual = block_verdict(p, dense, next_draft)
                # Numbers past the last accepted draft are looked at too, and the next round verifies drafts at the
                # same positions, so the anchor's position is part of the address.
                salt = position.unsqueeze(1)
                kept = uniform(seed, drawn_at, Stream.ACCEPT, salt=salt) < accept_prob
                accepted = torch.where(kept, node + 1, 0).amax(1, keepdim=True)
            at_last = accepted.unsqueeze(-1).expand(-1, 1, vocab_size)  # [R, 1, V]
            last = inverse_cdf(residual.gather(1, at_last), residual_u.gather(1, accepted))  # [R, 1]

    drawn_ok = last >= 0  # [R, 1]
    num_emitted = torch.where(length > 0, accepted + drawn_ok, 0)  # [R, 1]
    emitted = node < num_emitted  # [R, N]
    chosen = torch.where(node < accepted, next_draft, last)  # [R, N]
    weights = target_logits.float() if logprobs == "raw" else scores.double()
    logprob = weights.log_softmax(-1)[row, chosen.clamp(min=0)].float()  # [R, N]
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
    q, ratio = token_ratio(p, q, token)
    excess = (p - q).clamp(min=0.0)
    return ratio.clamp(max=1.0), normalised(excess, excess.sum(-1, keepdim=True), p)


def block_verdict(p: Tensor, q: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification as distributions (Sun et al., arXiv 2403.10444, algorithm 2), before any random number.

    With ``w_0 = 1`` and ``w_i = min(w_{i-1} p_i(X_i) / q_i(X_i), 1)``, the first ``i`` drafts are kept if
    ``eta_i < h_i``, and the largest such ``i`` counts. Here ``h_i = S_i / (S_i + 1 - w_i)`` with ``S_i`` the sum over
    ``x`` of ``(w_i p_{i+1}(x) - q_{i+1}(x))+``. Where no draft follows, ``q_{i+1}`` is 0, so that ``h_i = w_i`` and the
    residual is ``p_{i+1}``: the last draft and the bonus are no special cases.

    Args:
        p: ``[..., N, V]`` target probabilities of the rows of a chain, float64 for an exact law. A chain with a row
            that is not finite ends before the draft of that row.
        q: ``[..., N, V]`` draft probabilities, of p's dtype. A chain ends before the draft of a row with NaN.
        token: ``[..., N]`` int64, the draft drawn from each row of q; an id outside ``[0, V)`` stands for no draft,
            and the chain ends there.

    Returns:
        ``h [..., N]``, where entry ``i`` is for keeping the drafts of rows ``0..i`` and is 0 where the chain has ended;
        and the distributions ``[..., N, V]`` of the token that row ``i`` gives if it is the first not to keep its
        draft, ``(w_i p - q)+`` normalised, p where that is degenerate. NaN where p is.

    Graph-safe.
    """
    q, ratio = token_ratio(p, q, token)
    p_fine = p.sum(-1).isfinite()  # [..., N]
    ratio = torch.where(p_fine, ratio, 0.0)
    running, before = torch.ones_like(ratio[..., 0]), []
    for i in range(p.shape[-2]):
        before.append(running)
        running = (running * ratio[..., i]).clamp(max=1.0)
    weight = torch.stack(before, -1)  # [..., N], w before each row's draft

    excess = (weight.unsqueeze(-1) * p - q).clamp(min=0.0)
    mass = excess.sum(-1)  # [..., N]
    seen = torch.where(p_fine, mass, weight)  # a bad row rejects nothing: nothing can be drawn from it either
    kept, beyond = weight[..., 1:], seen[..., 1:]  # of drafts 0..N-2
    chance = torch.where(kept < 1, beyond / (beyond + (1 - kept)), 1.0)
    return F.pad(chance, (0, 1)), normalised(excess, mass.unsqueeze(-1), p)


def draft_probs(q: DraftDistribution, next_draft: Tensor, vocab_size: int) -> Tensor:
    """q over the target's vocabulary, for the draft that follows each row.

    Args:
        q: in any of its forms, over at least ``N - 1`` drafts.
        next_draft: ``[R, N]`` int64; no draft follows the last row.
        vocab_size: ``V``.

    Returns:
        ``[R, N, V]`` float64, 0 in the last row. A bad row of a :class:`DenseQ` holds NaN; one of a :class:`SparseQ`
        holds NaN or +inf or is all 0.

    Graph-safe.
    """
    draft_len = next_draft.shape[1] - 1
    if isinstance(q, PointMass):
        return (next_draft.unsqueeze(-1) == torch.arange(vocab_size, device=next_draft.device)).double()
    if isinstance(q, SparseQ):
        ids, logprobs = q.tokens[:, :draft_len], q.logprobs[:, :draft_len]  # [R, N - 1, K] each
        known = (ids >= 0) & (ids < vocab_size)
        mass = torch.where(known, logprobs.double().exp(), 0.0)
        probs = mass.new_zeros(*ids.shape[:2], vocab_size).scatter_add(-1, ids.clamp(0, vocab_size - 1), mass)
    else:
        probs = q.logits[:, :draft_len].double().softmax(-1)  # [R, N - 1, Vd]
        if q.draft_ids is not None:
            known = (q.draft_ids >= 0) & (q.draft_ids < probs.shape[-1])
            column = q.draft_ids.long().clamp(0, probs.shape[-1] - 1)
            probs = torch.where(known, probs[..., column], 0.0)
    return F.pad(probs, (0, 0, 0, 1))


def token_ratio(p: Tensor, q: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """q with 0 in the rows that have no draft or are bad, and p(x) / q(x) of the drafts: 0 where q(x) is."""
    drafted = (token >= 0) & (token < p.shape[-1]) & q.sum(-1).isfinite()
    q = torch.where(drafted.unsqueeze(-1), q, 0.0)
    index = token.clamp(0, p.shape[-1] - 1).unsqueeze(-1)
    p_token, q_token = p.gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1)
    # A quotient may overflow, and the product of an infinite one with 0 would be NaN.
    return q, torch.where(q_token > 0, (p_token / q_token).clamp(max=torch.finfo(p.dtype).max), 0.0)


def normalised(excess: Tensor, mass: Tensor, p: Tensor) -> Tensor:
    """A residual divided by its mass ``[..., 1]``, or p where there is next to none."""
    return torch.where(mass > _DEGENERATE_MASS, excess / mass, p)


def _match(drawn: Tensor, next_draft: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts accepted while they are what was drawn, and the first token drawn after them, ``[R, 1]`` each."""
    accepted = _leading((drawn == next_draft) & (drawn >= 0))
    return accepted, drawn.gather(1, accepted)


def _leading(kept: Tensor) -> Tensor:
    """How many leading entries of each row hold: ``[R, N]`` bool -> ``[R, 1]`` int64."""
    return kept.long().cumprod(1).sum(1, keepdim=True)


def no_verdict(num_requests: int, max_query_len: int, device: torch.device) -> Verdict:
    """The verdict over no rows at all."""
    tokens = torch.full((num_requests, max_query_len), -1, device=device)
    num_emitted = torch.zeros(num_requests, dtype=torch.int64, device=device)
    logprobs = torch.zeros(tokens.shape, device=device)
    return Verdict(tokens, num_emitted, tokens.clone(), logprobs, torch.full_like(num_emitted, int(Status.OK)))
