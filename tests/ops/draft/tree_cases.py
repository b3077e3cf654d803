"""Calls of ``draft_tree``, small and as a server makes them: trees of 32 nodes, a vocabulary of 151,936, bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark.ops.types import GatedHead, MarkovHead, RNNHead, Rule, Sampling, SequentialHead
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets
from tests.ops.case import Case

DRAFTS = 7
"""Levels of the shipped calls' trees."""


def call(
    requests: int, draft_len: int, vocab_size: int, rank: int, num_nodes: int, branching: int, rule: Rule, head: str,
    device: str,
) -> tuple[Any, ...]:  # fmt: skip
    """Scores that differ from each other, a budget, and chances of the places where the rule uses them."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)

    hidden, w = None, tensor(vocab_size, rank)
    heads: dict[str, SequentialHead | None] = {"none": None, "markov": MarkovHead(w, w)}
    if head in ("gated", "rnn"):
        hidden = tensor(requests, draft_len, 3)
        heads["gated"] = GatedHead(w, w, tensor(rank, 3 + rank), tensor(rank))
        heads["rnn"] = RNNHead(w, w, tensor(3 * rank, 2 * rank + 3), tensor(3 * rank))
    number = torch.ones(requests, device=device)
    integer = torch.ones(requests, dtype=torch.int64, device=device)
    sampling = Sampling(number, integer * 0, number, number * 0, integer, any_truncation=False)
    acceptance = torch.full((draft_len, branching), 0.3, device=device) if rule == "recursive" and rank < 16 else None
    block = (tensor(requests, draft_len, vocab_size), integer, heads[head], hidden, sampling, integer * 5)
    shape = (rule, num_nodes, branching, integer * num_nodes, max(num_nodes - 1, 1), acceptance)
    return (*block, *shape, None, None)


def small(words: str, rule: Rule, head: str, num_nodes: int = 6) -> Case:
    return Case("draft_tree", words, partial(call, 2, 2, 19, 4, num_nodes, 2, rule, head))


def shipped(words: str, rule: Rule, head: str) -> Case:
    return Case("draft_tree", words, partial(call, 64, DRAFTS, 151_936, 256, 32, 4, rule, head))


SMALL = [
    small("coupled", "coupled", "markov"),
    small("recursive", "recursive", "markov"),
    small("no head, 70 places", "match", "none", num_nodes=70),
]
REFERENCED = [small("gated", "coupled", "gated"), small("rnn", "recursive", "rnn")]
"""Small calls that the kernels do not serve."""
SHIPPED = [
    shipped("coupled", "coupled", "markov"),
    shipped("recursive", "recursive", "markov"),
    shipped("no head", "coupled", "none"),
]
"""Calls that between them launch every kernel in every configuration of note."""

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
CLAIMS: dict[str, dict[str, tuple[str, ...]]] = {
    "tree_level_kernel": _PRODUCT,
    "tree_scores_kernel": _PRODUCT,
    "draft_tree, no head: tree_level_kernel": {},
}
"""What a kernel is meant to compile to: W2 is read 16 bytes at a time, and products go through the matrix units."""
