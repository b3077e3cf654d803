"""Drafting: blocks drawn token by token, the same where steps can be proven, and trees."""

from dspark.ops.draft.certified import CertifiedDraft, draft_walk_certified, draft_walk_certified_workspace
from dspark.ops.draft.certified_table import BiasTable, build_bias_table, cached_bias_table
from dspark.ops.draft.tree import draft_tree, draft_tree_workspace
from dspark.ops.draft.walk import draft_walk, draft_walk_workspace
from dspark.ops.draft.walk_reference import sequential_step
from dspark.ops.draft.walk_tables import WalkTables, build_walk_tables

__all__ = [
    "BiasTable",
    "CertifiedDraft",
    "WalkTables",
    "build_bias_table",
    "build_walk_tables",
    "cached_bias_table",
    "draft_tree",
    "draft_tree_workspace",
    "draft_walk",
    "draft_walk_certified",
    "draft_walk_certified_workspace",
    "draft_walk_workspace",
    "sequential_step",
]
