"""The torch references of plain sampling: temperature, top-k, top-p, min-p (contract C5), then one token per row.

Truncation is one threshold per row: a token is kept when its scaled score reaches it. So *tokens that tie with the last
kept token are all kept*, and the support never depends on the order of a sort. For top-k and min-p that is the rule of
transformers' warpers too; for top-p they keep whichever of the tied tokens their sort happens to put last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.philox import gumbel
from dspark.ops.types import Sampling, Stream


def sample(
    logits: Tensor, sampling: Sampling, position: Tensor, request: Tensor | None, stream: int, salt: Tensor | None
) -> Tensor:
    """:func:`~dspark.ops.sample`."""
    if sampling.all_greedy:
        tokens = perturbed_argmax(_scale(logits, sampling, request)[0])
    else:
        seed = _per_row(sampling.seed, request).squeeze(-1)
        noise = gumbel(seed, position, logits.shape[-1], Stream(stream), salt=salt)
        tokens = perturbed_argmax(transform(logits, sampling, request), noise)
    return tokens if request is None else torch.where(request < 0, -1, tokens)


def transform(logits: Tensor, sampling: Sampling, request: Tensor | None = None) -> Tensor:
    """The scores that are sampled from: ``softmax`` of them is p (or q, for a drafter's logits).

    Args:
        logits: ``[T, V]`` of any float dtype.
        sampling: parameters of ``R`` requests.
        request: ``[T]`` int64, each row's request (a padded row's result means nothing); None: row ``t`` is request
            ``t``.

    Returns:
        ``[T, V]`` float32: ``logits * (1 / temperature)`` with cut tokens -inf. A row at temperature 0 is -inf but for
        a 0 at its first largest logit. A bad row stays bad: its largest score is not finite, and its softmax is NaN.

    Graph-safe.
    """
    scaled, sampled = _scale(logits, sampling, request)
    if sampling.truncates:
        scaled = scaled.masked_fill(scaled < _threshold(scaled, sampled, sampling, request), -torch.inf)
    # The host does not know which rows are greedy, so every row gets both forms.
    best = scaled.argmax(-1, keepdim=True)  # [T, 1]
    top = scaled.gather(-1, best)
    # top - top is 0, or NaN where the row is bad.
    one_hot = torch.full_like(scaled, -torch.inf).scatter_(-1, best, top - top)
    return one_hot if sampling.all_greedy else torch.where(sampled, scaled, one_hot)


def truncate(logits: Tensor, sampling: Sampling, request: Tensor | None) -> Tensor:
    """:func:`~dspark.ops.truncate`."""
    scaled, sampled = _scale(logits, sampling, request)
    if not sampling.truncates:
        return scaled.new_full(scaled.shape[:1], -torch.inf)
    return _threshold(scaled, sampled, sampling, request).squeeze(-1)


def perturbed_argmax(scores: Tensor, noise: Tensor | None = None) -> Tensor:
    """First index of the largest ``scores + noise``, or -1 where that is not finite (a bad row).

    Args:
        scores: ``[..., V]`` float32.
        noise: ``[..., V]`` float32, finite; None is no noise.

    Returns:
        ``[...]`` int64.

    Graph-safe.
    """
    perturbed = scores if noise is None else scores + noise
    best = perturbed.argmax(-1, keepdim=True)  # a NaN counts as the largest
    return torch.where(perturbed.gather(-1, best).isfinite(), best, -1).squeeze(-1)


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Draw by inverse transform: the first token whose cumulative probability exceeds ``u``.

    Args:
        probs: ``[..., V]`` float64, non-negative; the sum need not be 1.
        u: ``[...]`` float64 in (0, 1).

    Returns:
        ``[...]`` int64, a token of positive probability; -1 where ``probs`` holds NaN or nothing positive.

    Graph-safe.
    """
    return _first_beyond(probs, probs.cumsum(-1), u)


def _first_beyond(probs: Tensor, cumulative: Tensor, u: Tensor) -> Tensor:
    """The search of :func:`inverse_cdf` in a given running sum, which a parallel scan may leave slightly unordered."""
    total = cumulative[..., -1:]
    positive = probs > 0
    beyond = (cumulative > u.unsqueeze(-1) * total) & positive
    last = torch.where(positive, torch.arange(probs.shape[-1], device=probs.device), -1).amax(-1)
    token = torch.where(beyond.any(-1), beyond.int().argmax(-1), last)
    return torch.where(total.squeeze(-1) > 0, token, -1)


def _per_row(values: Tensor, request: Tensor | None) -> Tensor:
    """``[R]`` parameters -> ``[T, 1]``, one per row; a padded row takes request 0's."""
    return (values if request is None else values[request.clamp(min=0)]).unsqueeze(-1)


def _scale(logits: Tensor, sampling: Sampling, request: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores ``[T, V]`` times 1 / temperature (times 1 in greedy rows), and which rows are sampled ``[T, 1]``.

    One division per row; each score is rounded once more.
    """
    temperature = _per_row(sampling.temperature, request)
    sampled = temperature > 0
    return logits.float() * torch.where(sampled, temperature, 1.0).reciprocal(), sampled


def _threshold(scaled: Tensor, sampled: Tensor, sampling: Sampling, request: Tensor | None) -> Tensor:
    """Thresholds ``[T, 1]`` of sampled rows, -inf in the others."""
    vocab_size = scaled.shape[-1]
    top_k, top_p, min_p = (_per_row(v, request) for v in (sampling.top_k, sampling.top_p, sampling.min_p))
    descending = scaled.sort(-1, descending=True).values  # [T, V]

    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size) - 1
    kept = descending >= descending.gather(-1, last)
    # top-p over what top-k left: a token is kept while the mass of the tokens before it is below top_p.
    mass = descending.masked_fill(~kept, -torch.inf).softmax(-1).cumsum(-1)
    kept &= (F.pad(mass[..., :-1], (1, 0)) < top_p) | (top_p >= 1)
    count = kept.sum(-1, keepdim=True).clamp(min=1)
    threshold = torch.where(count < vocab_size, descending.gather(-1, count - 1), -torch.inf)

    # min-p compares with the largest probability, and that ratio does not depend on what was cut before.
    top = descending[..., :1]
    threshold = torch.maximum(threshold, top + min_p.log()).minimum(top)
    return torch.where(sampled, threshold, -torch.inf)
