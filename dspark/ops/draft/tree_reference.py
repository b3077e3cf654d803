"""The torch reference of :func:`dspark.ops.draft.tree.draft_tree`: levels of candidates, then the best of all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.draft.walk_reference import sequential_step
from dspark.ops.groups import num_words
from dspark.ops.philox import gumbel
from dspark.ops.sample.reference import transform
from dspark.ops.types import Rule, Sampling, SequentialHead, Stream, Tree, TreeDraft

GREEDY_STEP = 64.0
"""Between the scores of a greedy node's children: q of the first is 1, and of the next 1 without that one."""


LOG_UNITS = 65536.0
"""The logarithm of a chance is a multiple of ``1 / LOG_UNITS``, so that sums along paths are exact: places whose
chances have one product tie, in whatever order their factors come."""


@dataclass(frozen=True)
class Level:
    """Candidates of one depth, ``[R, C]`` each, by parent and then by rank.

    Attributes:
        token: -1 where there is none, though it has a place.
        worth: logarithm of the product along its path; -inf is worth nothing.
        parent: index among the candidates of all depths.
    """

    token: Tensor
    worth: Tensor
    parent: Tensor


def draft_tree_reference(
    base_logits: Tensor,
    anchor: Tensor,
    head: SequentialHead | None,
    hidden: Tensor | None,
    sampling: Sampling,
    position: Tensor,
    rule: Rule,
    num_nodes: int,
    branching: int,
    budget: Tensor | None,
    beam: int,
    acceptance: Tensor | None,
) -> TreeDraft:
    """Draft trees; arguments, checked before, and result as in ``draft_tree``.

    Graph-safe.
    """
    num_requests, depth, _ = base_logits.shape
    if head is not None:
        head = head._replace(w2=head.w2.float())  # once, not at every depth
    log_acceptance = None
    if rule == "recursive":
        log_acceptance = log_chance(acceptance_table(acceptance, base_logits, branching))  # [R or 1, G, K]

    anchor = torch.where(anchor < base_logits.shape[2], anchor, -1)
    origin = torch.zeros_like(anchor).unsqueeze(1)  # [R, 1]
    levels = [Level(anchor.unsqueeze(1), origin.float(), origin - 1)]
    expanded, index, state = levels[0], origin, None  # the nodes that get children, and where they are
    first, row_of, scores = 1, [origin], []
    for d in range(depth):
        width = index.shape[1]
        after = expanded.token if head is not None else origin  # without a head, all nodes of a depth are scored alike
        row, state = _scores(base_logits[:, d], after, head, hidden, d, state)  # [R, B or 1, V]
        row, chosen_by = _chosen_by(row, sampling, position, d, rule)
        token, worth = (x.expand(-1, width, -1) for x in successive_maxima(chosen_by, branching))  # [R, B, K] each
        token = torch.where((expanded.token >= 0).unsqueeze(2), token, -1)
        if log_acceptance is None:
            worth = torch.where(token >= 0, worth, -torch.inf)
        else:
            scores.append(_without_noise(row.expand(-1, width, -1), token, sampling))
            worth = log_acceptance[:, d].unsqueeze(1).expand_as(worth)
        level = Level(
            token=token.flatten(1),
            worth=(expanded.worth.unsqueeze(2) + worth).flatten(1),
            parent=index.unsqueeze(2).expand_as(token).flatten(1),
        )
        best = level.worth.sort(dim=1, descending=True, stable=True).indices[:, :beam]  # [R, B']
        expanded = Level(*(field.gather(1, best) for field in (level.token, level.worth, level.parent)))
        index = first + best
        if state is not None:
            state = state.view(num_requests, width, -1).gather(1, _columns(best // branching, state.shape[-1]))
        levels.append(level)
        row_of.append(index)
        first += level.token.shape[1]
    tree, chosen = _tree_of(levels, anchor, num_nodes, budget)
    if log_acceptance is None:
        return TreeDraft(tree, None)
    return TreeDraft(tree, _rows_of(torch.cat(scores, 1), torch.cat(row_of[:-1], 1), chosen, first))


def acceptance_table(acceptance: Tensor | None, base_logits: Tensor, branching: int) -> Tensor:
    """What a place is worth to its parent, ``[R or 1, G, K]`` float32, non-increasing in the rank."""
    if acceptance is None:
        rank = torch.arange(branching, device=base_logits.device)
        return (0.7 * 0.3**rank).float().expand(1, base_logits.shape[1], branching)
    return acceptance.view(-1, *acceptance.shape[-2:]).clamp(0, 1).cummin(-1).values


def log_chance(chance: Tensor) -> Tensor:
    """Logarithms of chances in [0, 1], in whole units of ``1 / LOG_UNITS``."""
    return (chance.log() * LOG_UNITS + 0.5).floor() / LOG_UNITS


def successive_maxima(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest entries of each row, the first of equal ones first, and what they are worth.

    Args:
        values: ``[..., V]`` float32.
        count: ``K``.

    Returns:
        Indices ``[..., K]`` int64, -1 where the row is bad (its largest entry is not finite) or has no finite entries
        left; and the logarithms ``[..., K]`` of their softmax over the row.

    Graph-safe.
    """
    total = values.logsumexp(-1)  # [...]
    left, found, worth = values, [], []
    good = torch.ones_like(total, dtype=torch.bool)
    for _ in range(count):
        top, index = left.max(-1)
        good = good & top.isfinite()
        found.append(torch.where(good, index, -1))
        worth.append((top - total).clamp(max=0.0))
        left = left.scatter(-1, index.unsqueeze(-1), -torch.inf)
    return torch.stack(found, -1), torch.stack(worth, -1)


def ancestor_words(parents: Tensor, num_nodes: Tensor, depth: int) -> Tensor:
    """Words ``[R, N]`` (``[R, N, W]`` for more than 64 nodes) of trees of at most ``depth`` edges from the anchor.

    ``parents`` is ``[R, N]``, ``num_nodes`` ``[R]``.
    """
    width = parents.shape[1]
    word = torch.arange(num_words(width), device=parents.device)
    node = torch.arange(width, device=parents.device).expand_as(parents)
    node = torch.where(node < num_nodes.unsqueeze(1), node, -1)
    words = torch.zeros(*parents.shape, len(word), dtype=torch.int64, device=parents.device)
    for _ in range(depth + 1):
        above = node.clamp(min=0)
        bit = torch.ones_like(above) << (above % 64)
        here = (node >= 0).unsqueeze(2) & (word == (above // 64).unsqueeze(2))
        words = words | torch.where(here, bit.unsqueeze(2), 0)
        node = torch.where(node >= 0, parents.gather(1, above), -1)
    return words.squeeze(2) if len(word) == 1 else words


def _scores(
    base: Tensor, token: Tensor, head: SequentialHead | None, hidden: Tensor | None, d: int, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[R, B, V]`` of what follows ``token [R, B]``, and the recurrent state ``[R * B, r]`` after it."""
    scores = base.float().unsqueeze(1).expand(*token.shape, -1)
    if head is None:
        return scores, None
    rows = None
    if hidden is not None:
        rows = hidden[:, d].unsqueeze(1).expand(*token.shape, -1).flatten(0, 1)
    state = None if state is None else state.flatten(0, 1)
    bias, state = sequential_step(head, token.clamp(min=0).flatten(), rows, state)
    return scores + bias.view_as(scores), state


def _chosen_by(row: Tensor, sampling: Sampling, position: Tensor, d: int, rule: Rule) -> tuple[Tensor, Tensor]:
    """Scores ``[R, B, V]`` -> the same after the transforms, and what children are chosen by.

    Requests at temperature 0 choose by the scores as they are.
    """
    num_requests, width, vocab_size = row.shape
    if sampling.all_greedy:
        return row, row
    request = torch.arange(num_requests, device=row.device).repeat_interleave(width)
    warped = transform(row.flatten(0, 1), sampling, request).view_as(row)
    sampled = (sampling.temperature > 0)[:, None, None]
    row = torch.where(sampled, warped, row)
    if rule == "match":
        return row, row
    stream = Stream.TARGET if rule == "coupled" else Stream.DRAFT
    salt = None if rule == "coupled" else position
    noise = gumbel(sampling.seed, position + d + 1, vocab_size, stream, salt=salt)  # [R, V], of every node alike
    return row, torch.where(sampled, row + noise.unsqueeze(1), row)


def _without_noise(row: Tensor, token: Tensor, sampling: Sampling) -> Tensor:
    """Scores ``[R, B, V]`` whose softmax, with each child removed in turn, is what the next one was sampled from.

    At temperature 0 every child was certain.
    """
    rank = torch.arange(token.shape[2], device=row.device)
    ladder = torch.where(token >= 0, -GREEDY_STEP * rank, -torch.inf)
    certain = torch.full_like(row, -torch.inf).scatter_reduce(2, token.clamp(min=0), ladder, "amax")
    return torch.where((sampling.temperature > 0)[:, None, None], row, certain)


def _tree_of(levels: list[Level], anchor: Tensor, num_nodes: int, budget: Tensor | None) -> tuple[Tree, Tensor]:
    """The best of all candidates as a tree; and which of them its nodes are, ``[R, N]``, -1 where there is no node."""
    device, num_requests = anchor.device, anchor.shape[0]
    token = torch.cat([level.token for level in levels], 1)  # [R, C]
    worth = torch.cat([level.worth for level in levels], 1)
    parent = torch.cat([level.parent for level in levels], 1)
    depth = torch.cat([torch.full_like(level.token, d) for d, level in enumerate(levels)], 1)
    count = token.shape[1]

    best = worth.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]  # [R, n], parents first
    place = torch.arange(best.shape[1], device=device)
    allowed = place + 1 if budget is None else budget.clamp(min=1).unsqueeze(1)
    exists = token.gather(1, best) >= 0
    exists &= (place < allowed) & (anchor >= 0).unsqueeze(1) & (worth.gather(1, best) > -torch.inf)
    order = torch.where(exists, place, count).argsort(1)  # [R, n]: existing nodes first, as they were
    total = exists.sum(1)  # [R]

    chosen = torch.full((num_requests, num_nodes), -1, device=device)
    chosen[:, : best.shape[1]] = torch.where(place < total.unsqueeze(1), best.gather(1, order), -1)
    node = torch.arange(num_nodes, device=device).expand_as(chosen)
    # Candidates that are no nodes point to nothing; the last column takes the places without a node.
    number = torch.full((num_requests, count + 1), -1, device=device)
    number = number.scatter(1, torch.where(chosen >= 0, chosen, count), node)
    at = chosen.clamp(min=0)
    above = parent.gather(1, at)
    parents = torch.where((chosen >= 0) & (above >= 0), number.gather(1, above.clamp(min=0)), -1)
    return Tree(
        tokens=torch.where(chosen >= 0, token.gather(1, at), -1),
        parents=parents,
        ancestors=ancestor_words(parents, total, len(levels) - 1),
        depth=torch.where(chosen >= 0, depth.gather(1, at), -1),
        num_nodes=total,
    ), chosen


def _rows_of(scores: Tensor, candidates: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Scores ``[R, E, V]`` of the candidates ``[R, E]`` -> those of the nodes, ``[R, N, V]``; -inf where none were."""
    place = torch.arange(candidates.shape[1], device=scores.device).expand_as(candidates)
    row = torch.full((scores.shape[0], count), -1, device=scores.device).scatter(1, candidates, place)
    row = torch.where(chosen >= 0, row.gather(1, chosen.clamp(min=0)), -1)
    rows = scores.gather(1, _columns(row.clamp(min=0), scores.shape[2]))
    return torch.where((row >= 0).unsqueeze(2), rows, -torch.inf)


def _columns(index: Tensor, width: int) -> Tensor:
    return index.unsqueeze(2).expand(-1, -1, width)
