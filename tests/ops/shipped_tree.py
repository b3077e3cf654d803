"""Calls of the ops over trees, as a server makes them: 32 nodes each, a vocabulary of 151,936, bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.ops.accept import accept
from dspark.ops.types import DenseQ, Rule, Sampling, Tree
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets, meta

VOCAB_SIZE, NODES, BRANCHING, REQUESTS = 151_936, 32, 4, 16
ROWS = REQUESTS * NODES

BUDGETS = {
    "judge_kernel": budgets(Budget(96, 16_384), amd=Budget(96, 16_384)),
    "left_over_kernel": budgets(Budget(168, 16_384), amd=Budget(128, 16_384)),
    "node_lines_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "recursive_verdict_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "tree_verdict_kernel": budgets(Budget(64, 4_096), amd=Budget(72, 4_096)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_WIDE = dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
CLAIMS = {"left_over_kernel": _WIDE}
"""What a kernel is meant to compile to: those that stream rows of logits read 16 bytes at a time."""


def _accept(rule: Rule, nodes: int = NODES) -> None:
    number, integer, rows = meta(REQUESTS, dtype=torch.float32), meta(REQUESTS), REQUESTS * nodes
    places = meta(REQUESTS, nodes)
    ancestors = places if nodes <= 64 else meta(REQUESTS, nodes, -(-nodes // 64))
    recursive = rule == "recursive"
    accept(
        meta(rows, VOCAB_SIZE, dtype=torch.bfloat16),
        meta(rows),
        meta(REQUESTS + 1),
        rule=rule,
        sampling=Sampling(number, integer, number, number, integer, any_truncation=False),
        position=integer,
        max_query_len=nodes,
        q=DenseQ(meta(REQUESTS, nodes, VOCAB_SIZE, dtype=torch.float32)) if recursive else None,
        tree=Tree(places, places, ancestors, places, integer),
        max_branching=BRANCHING if recursive else None,
        backend="triton",
    )


CALLS: dict[str, Callable[[], None]] = {
    "coupled, tree": lambda: _accept("coupled"),
    "coupled, tree of 256": lambda: _accept("coupled", nodes=256),
    "match, tree": lambda: _accept("match"),
    "recursive": lambda: _accept("recursive"),
}
"""Calls that between them launch every kernel in every configuration of note."""
