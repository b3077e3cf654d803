"""Argument checks of trees."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.checks import check_dtype, check_shape, fits
from dspark.ops.types import DenseQ, DraftDistribution, Rule, Tree

RULES_OF_TREES: tuple[Rule, ...] = ("coupled", "match", "recursive")
"""Rules that verify trees."""


def num_words(num_nodes: int) -> int:
    """Words of 64 bits that a node's ancestors take."""
    return -(-num_nodes // 64)


def tree_fits(
    tree: Tree | None,
    max_branching: int | None,
    rule: Rule,
    position: Tensor,
    num_nodes: int,
    q: DraftDistribution | None,
) -> bool:
    """Whether :func:`check_tree` would pass; the cheap question."""
    if tree is None or rule not in RULES_OF_TREES:
        return tree is None and max_branching is None
    shape = (position.shape[0], num_nodes)
    words = num_words(num_nodes)
    return (
        isinstance(tree, Tree)
        and fits(tree.tokens, shape, torch.int64)
        and fits(tree.parents, shape, torch.int64)
        and fits(tree.ancestors, shape if words == 1 else (*shape, words), torch.int64)
        and fits(tree.depth, shape, torch.int64)
        and fits(tree.num_nodes, shape[:1], torch.int64)
        and (q is None or isinstance(q, DenseQ))
        and (isinstance(max_branching, int) and max_branching >= 1 if rule == "recursive" else max_branching is None)
    )


def check_tree(
    tree: Tree | None,
    max_branching: int | None,
    rule: Rule,
    position: Tensor,
    num_nodes: int,
    q: DraftDistribution | None,
) -> None:
    """Check a tree to verify against the sizes of its batch.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape, is missing or useless.
    """
    if tree is None:
        if max_branching is not None:
            raise ValueError(f"max_branching: a chain has none; pass None without a tree, got {max_branching}")
        return
    if not isinstance(tree, Tree):
        raise TypeError(f"tree: expected a Tree or None, got {type(tree).__name__}")
    if rule not in RULES_OF_TREES:
        words = ", ".join(map(repr, RULES_OF_TREES))
        raise ValueError(f"tree: rule {rule!r} verifies chains; trees need one of {words}")
    sizes = {"R": position.shape[0], "N": num_nodes, "W": num_words(num_nodes)}
    for field, pattern in (
        ("tokens", "R N"),
        ("parents", "R N"),
        ("ancestors", "R N" if sizes["W"] == 1 else "R N W"),
        ("depth", "R N"),
        ("num_nodes", "R"),
    ):
        check_shape(f"tree.{field}", getattr(tree, field), pattern, sizes)
        check_dtype(f"tree.{field}", getattr(tree, field), (torch.int64,))
    if rule != "recursive":
        if max_branching is not None:
            raise ValueError(f"max_branching: rule {rule!r} does not use it; pass None, got {max_branching}")
        return
    if not isinstance(max_branching, int) or max_branching < 1:
        raise ValueError(f"max_branching: rule 'recursive' needs the most children of a node, got {max_branching!r}")
    if q is not None and not isinstance(q, DenseQ):
        raise TypeError(f"q: rule 'recursive' on a tree needs a DenseQ, got {type(q).__name__}")
