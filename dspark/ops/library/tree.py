"""A tree as the library's ops take it."""

from __future__ import annotations

from torch import Tensor

from dspark.ops.types import Tree


def flat_tree(tree: Tree) -> list[Tensor]:
    """The fields of a tree in order."""
    return [tree.tokens, tree.parents, tree.ancestors, tree.depth, tree.num_nodes]
