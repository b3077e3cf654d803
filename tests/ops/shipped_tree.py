"""Calls of the ops over trees, as a server makes them: 32 nodes each, a vocabulary of 151,936, bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.draft.tree import draft_tree
from dspark.ops.types import MarkovHead, Rule, Sampling
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets, meta

VOCAB_SIZE, NODES, BRANCHING = 151_936, 32, 4
DRAFTED, DRAFTS, RANK = 64, 7, 256
"""Requests that trees are drafted for, their depth, and the head's rank."""

BUDGETS = {
    "tree_build_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "tree_level_kernel": budgets(Budget(128, 81_920), amd=Budget(128, 65_536)),
    "tree_merge_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "tree_scores_kernel": budgets(Budget(128, 81_920), amd=Budget(128, 65_536)),
    "tree_select_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_WIDE = dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
_MATRIX = {
    "sm_80": (r"^HMMA\.16816\.F32\.BF16",),
    "sm_90": (r"^HGMMA\.64x16x16\.F32\.BF16",),
    "sm_100": (r"^UTCHMMA",),
    "gfx942": (r"^v_mfma_f32_16x16x16_bf16",),
}
_PRODUCT = {target: (*_WIDE[target], *matrix) for target, matrix in _MATRIX.items()}
CLAIMS = {
    "tree_level_kernel": _PRODUCT,
    "tree_scores_kernel": _PRODUCT,
    "draft_tree, no head: tree_level_kernel": {},
}
"""What a kernel is meant to compile to: those that stream W2 read 16 bytes at a time, and products go
through the matrix units."""


def _draft(rule: Rule, head: bool = True) -> None:
    number, integer = meta(DRAFTED, dtype=torch.float32), meta(DRAFTED)
    w = meta(VOCAB_SIZE, RANK, dtype=torch.bfloat16)
    draft_tree(
        meta(DRAFTED, DRAFTS, VOCAB_SIZE, dtype=torch.bfloat16),
        integer,
        head=MarkovHead(w, w) if head else None,
        hidden=None,
        sampling=Sampling(number, integer, number, number, integer, any_truncation=False),
        position=integer,
        rule=rule,
        num_nodes=NODES,
        branching=BRANCHING,
        budget=integer,
        backend="triton",
    )


CALLS: dict[str, Callable[[], None]] = {
    "draft_tree, coupled": lambda: _draft("coupled"),
    "draft_tree, recursive": lambda: _draft("recursive"),
    "draft_tree, no head": lambda: _draft("coupled", head=False),
}
"""Calls that between them launch every kernel in every configuration of note."""
