"""The torch reference of :func:`dspark.ops.accept.accept` over trees: the executable specification.

It computes in float64. :func:`recursive_verdict` gives its rule as distributions, before any random number, so that the
law of what is emitted can be enumerated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.accept.reference import draft_probs, no_verdict, normalised, token_ratio
from dspark.ops.philox import gumbel, uniform
from dspark.ops.ragged import row_index
from dspark.ops.sample.reference import inverse_cdf, perturbed_argmax, transform
from dspark.ops.types import DraftDistribution, Logprobs, Rows, Rule, Sampling, Status, Stream, Tree, Verdict


def accept_tree_reference(
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    tree: Tree,
    max_branching: int | None,
) -> Verdict:
    """Verify a ragged batch of drafted trees; arguments, checked before, and result as in ``accept``.

    Graph-safe.
    """
    tokens, query_start, position, max_query_len = rows
    max_branching = max_branching or 1
    num_rows, vocab_size = target_logits.shape
    num_requests, device = position.shape[0], target_logits.device
    if num_rows == 0 or num_requests == 0:
        return no_verdict(num_requests, max_query_len, device)

    node = torch.arange(max_query_len, device=device)  # [N]
    request, offset = row_index(query_start, num_rows)  # [T] each
    length = query_start.diff().clamp(max=max_query_len).unsqueeze(1)  # [R, 1]
    row = (query_start[:-1, None] + node).clamp(max=num_rows - 1)  # [R, N], of the batch; past the length: any
    token = torch.where(node < length, tokens[row], -1)  # [R, N]
    is_child = (tree.parents >= 0) & (tree.parents < node) & (token >= 0) & (token < vocab_size)  # [R, N]
    parent = torch.where(is_child, tree.parents, 0)
    drawn_at = position.unsqueeze(1) + tree.depth.clamp(min=0) + 1  # [R, N]
    seed = sampling.seed.unsqueeze(1)  # [R, 1]

    scores = transform(target_logits, sampling, request)  # [T, V]
    if rule == "coupled":
        noise = None
        if not sampling.all_greedy:
            at = drawn_at[request, offset.clamp(max=max_query_len - 1)]  # [T]
            noise = gumbel(sampling.seed[request], at, vocab_size, Stream.TARGET)  # [T, V]
        drawn = perturbed_argmax(scores, noise)[row]  # [R, N]
        kept = token == drawn.gather(1, parent)
    else:
        p = scores.double().softmax(-1)[row]  # [R, N, V]
        residual_u = uniform(seed, drawn_at, Stream.RESIDUAL)  # [R, N]
        if rule == "match" or q is None:
            drawn = inverse_cdf(p, residual_u)
            kept = token == drawn.gather(1, parent)
        else:
            children = siblings(parent, is_child, max_branching)  # [R, N, K]
            siblings_drawn = _at(token, children)  # [R, N, K]
            chance, residual = recursive_verdict(p, draft_probs(q, token, vocab_size), siblings_drawn)
            rank = torch.arange(max_branching, device=device)
            u = uniform(seed.unsqueeze(2), drawn_at.unsqueeze(2), Stream.ACCEPT, block=rank)  # [R, N, K]
            first = torch.where(u < chance, rank, max_branching).amin(-1, keepdim=True)  # [R, N, 1]
            goes_on = first < max_branching
            chosen = children.gather(2, first.clamp(max=max_branching - 1))
            chosen = torch.where(goes_on, chosen, -1).squeeze(2)  # [R, N]: the child that is accepted, or -1
            drawn = torch.where(goes_on.squeeze(2), _at(token, chosen), inverse_cdf(residual, residual_u))
            kept = chosen.gather(1, parent) == node

    kept = torch.where(node == 0, length > 0, kept & is_child)  # [R, N], given that the parent is
    above = ancestor_mask(tree.ancestors, max_query_len) | (node == 0)  # [R, N, N], itself included
    accepted = kept & ~(above & ~kept.unsqueeze(1)).any(-1)
    deepest = torch.where(accepted, tree.depth.clamp(min=0), -1).argmax(1)  # [R]
    on_path = above.gather(1, deepest[:, None, None].expand(-1, 1, max_query_len)).squeeze(1)  # [R, N]
    path = torch.where(on_path, node, max_query_len).sort(1).values  # [R, N]
    ends_well = drawn.gather(1, deepest.unsqueeze(1)) >= 0  # [R, 1]
    num_emitted = torch.where(length > 0, on_path.sum(1, keepdim=True) - 1 + ends_well, 0)  # [R, 1]

    emitted = node < num_emitted  # [R, N], by place in the output
    path = torch.where(emitted, path, 0)
    chosen = torch.where(emitted, drawn.gather(1, path), -1)
    weights = target_logits.float() if logprobs == "raw" else scores.double()
    logprob = weights.log_softmax(-1)[row.gather(1, path), chosen.clamp(min=0)].float()  # [R, N]
    status = torch.where((length > 0) & ~ends_well, int(Status.BAD_LOGITS), int(Status.OK))
    return Verdict(
        tokens=chosen,
        num_emitted=num_emitted.squeeze(1),
        path=torch.where(emitted, path, -1),
        logprobs=torch.where(emitted, logprob, 0.0),
        status=status.squeeze(1),
    )


def recursive_verdict(p: Tensor, q: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Recursive rejection sampling as distributions: what happens to the children of one node, before any number.

    The children are judged in the order in which they were drawn from q without replacement (SpecInfer, Miao et al.,
    arXiv 2305.09781, algorithm 2, with the draws without replacement of Sequoia, Chen et al., arXiv 2402.12374). Child
    ``x`` is accepted with probability ``min(1, p(x) / q(x))``; otherwise ``p`` becomes ``(p - q)+`` normalised, ``q``
    becomes itself without ``x`` normalised, and the next child is judged by these.

    Args:
        p: ``[..., V]`` target probabilities, float64 for an exact law.
        q: ``[..., V]`` draft probabilities, of p's dtype; a row with NaN is a bad row.
        token: ``[..., K]`` int64, the siblings in order; an id outside ``[0, V)`` stands for no child.

    Returns:
        The probabilities ``[..., K]`` that a child is accepted given that those before it are not, 0 where there is no
        child or the row of q is bad; and the distribution ``[..., V]`` of the token that is drawn if none is accepted.
        A degenerate residual (p = q up to rounding) becomes the p that was given. NaN where p is. With one child
        these are :func:`~dspark.ops.accept.reference.ratio_verdict`'s.

    Graph-safe.
    """
    left, chances = p, []
    for k in range(token.shape[-1]):
        x = token[..., k]
        known, ratio = token_ratio(left, q, x)  # 0 instead of q where there is no child to judge
        excess = (left - known).clamp(min=0.0)
        is_judged = (x >= 0) & (x < p.shape[-1]) & q.sum(-1).isfinite()
        residual = normalised(excess, excess.sum(-1, keepdim=True), p)
        left = torch.where(is_judged.unsqueeze(-1), residual, left)
        q = torch.where(is_judged.unsqueeze(-1), without(q, x), q)
        chances.append(ratio.clamp(max=1.0))
    return torch.stack(chances, -1), left


def without(q: Tensor, token: Tensor) -> Tensor:
    """``q [..., V]`` without one token of each row, normalised; 0 where nothing is left of it.

    ``token`` is ``[...]`` int64; an id out of range stands for its nearest one.
    """
    rest = q.scatter(-1, token.clamp(0, q.shape[-1] - 1).unsqueeze(-1), 0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, 0.0)


def siblings(parent: Tensor, is_child: Tensor, max_branching: int) -> Tensor:
    """The children of each node in order, ``[R, N, K]`` int64, -1 where it has fewer.

    ``parent`` and ``is_child`` are ``[R, N]``; what is no child has any parent.
    """
    node = torch.arange(parent.shape[1], device=parent.device)
    together = (parent.unsqueeze(2) == parent.unsqueeze(1)) & is_child.unsqueeze(1) & (node < node.unsqueeze(1))
    rank = together.sum(2)  # [R, N], among its siblings
    of_node = (parent.unsqueeze(1) == node.unsqueeze(1)) & is_child.unsqueeze(1)  # [R, N, N]: by node, then child
    places = torch.arange(max_branching, device=parent.device).unsqueeze(1)
    of_rank = of_node.unsqueeze(2) & (rank[:, None, None, :] == places)  # [R, N, K, N]
    return torch.where(of_rank, node, -1).amax(-1)


def ancestor_mask(ancestors: Tensor, num_nodes: int) -> Tensor:
    """Ancestor words ``[R, N]`` or ``[R, N, W]`` int64 -> ``[R, N, N]`` bool, of node ``i`` bit ``j``.

    >>> ancestor_mask(torch.tensor([[1, 3]]), 2).tolist()
    [[[True, False], [True, True]]]
    """
    words = ancestors.unsqueeze(-1) if ancestors.ndim == 2 else ancestors
    bit = torch.arange(num_nodes, device=ancestors.device)
    return (words[..., bit // 64] >> (bit % 64)) & 1 == 1


def _at(values: Tensor, nodes: Tensor) -> Tensor:
    """``values [R, N]`` at the nodes ``[R, ...]``, -1 where those are."""
    found = values.gather(1, nodes.flatten(1).clamp(min=0)).view_as(nodes)
    return torch.where(nodes >= 0, found, -1)
