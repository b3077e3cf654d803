"""Calls of ``accept`` over chains and trees, small and as a server makes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark.ops.types import DenseQ, DraftDistribution, PointMass, Rows, Rule, Sampling, SparseQ, Tree
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets
from tests.ops.case import Case

BRANCHING = 4


class RuleCase(Case):
    """A call that is named by its rule."""

    def __str__(self) -> str:
        return self.words


class Batch:
    """Sizes of a verified batch; calls of every rule on it."""

    def __init__(
        self, requests: int, nodes: int, vocab_size: int, num_sparse: int, dtype: torch.dtype, q_dtype: torch.dtype
    ) -> None:
        self.requests, self.nodes, self.vocab_size, self.num_sparse = requests, nodes, vocab_size, num_sparse
        self.dtype, self.q_dtype = dtype, q_dtype
        # Of a tree in which node i has parent (i - 1) // 2, by node.
        self.parents, self.depth = (torch.arange(nodes) - 1).div(2, rounding_mode="floor"), torch.zeros(nodes).long()
        self.ancestors = torch.zeros(nodes, -(-nodes // 64), dtype=torch.int64)
        for node in range(nodes):
            if node > 0:
                self.ancestors[node] = self.ancestors[self.parents[node]]
                self.depth[node] = self.depth[self.parents[node]] + 1
            self.ancestors[node, node // 64] |= torch.ones((), dtype=torch.int64) << node % 64

    def values(
        self, device: str, rule: Rule, q: str | None = None, truncated: bool = False, tree: bool = False
    ) -> tuple[Any, ...]:
        rows = self.requests * self.nodes
        target = random_or_meta(device, rows, self.vocab_size).to(self.dtype)
        verified = Rows(
            tokens=torch.arange(rows, device=device) % self.vocab_size,
            query_start=torch.arange(self.requests + 1, device=device) * self.nodes,
            position=torch.arange(self.requests, device=device),
            max_query_len=self.nodes,
        )
        number, integer = torch.ones(self.requests, device=device), torch.arange(self.requests, device=device)
        sampling = Sampling(number, integer * 3, number, number * 0.01, integer, any_truncation=truncated)
        given = (target, verified, rule, sampling, None if q is None else self.q(device, q), "raw")
        if not tree:
            return *given, None
        return *given, self.tree(device), BRANCHING if rule == "recursive" else None, None

    def q(self, device: str, kind: str) -> DraftDistribution:
        """For as many drafts as there are, and of a tree for every node."""
        shape = (self.requests, self.nodes - (kind != "tree"))
        if kind == "point":
            return PointMass()
        if kind == "sparse":
            tokens = torch.arange(self.num_sparse, device=device).expand(*shape, -1).contiguous()
            return SparseQ(tokens, random_or_meta(device, *shape, self.num_sparse).log_softmax(-1))
        width = self.vocab_size // 2 if kind == "mapped" else self.vocab_size
        ids = torch.arange(self.vocab_size, device=device, dtype=torch.int32) - width if kind == "mapped" else None
        return DenseQ(random_or_meta(device, *shape, width).to(self.q_dtype), ids)

    def tree(self, device: str) -> Tree:
        def each(x: Tensor) -> Tensor:
            return x.expand(self.requests, *x.shape).contiguous().to(device)

        tokens, num_nodes = self.parents % self.vocab_size, torch.full((self.requests,), self.nodes, device=device)
        words = self.ancestors if self.nodes > 64 else self.ancestors[:, 0]
        return Tree(each(tokens), each(self.parents), each(words), each(self.depth), num_nodes)


def random_or_meta(device: str, *shape: int) -> Tensor:
    generator = None if device == "meta" else torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device)


def chain(batch: Batch, words: str, rule: Rule, q: str | None = None, truncated: bool = False) -> Case:
    return RuleCase("accept", words, partial(batch.values, rule=rule, q=q, truncated=truncated))


def tree(batch: Batch, words: str, rule: Rule, q: str | None = None) -> Case:
    return RuleCase("accept_tree", words, partial(batch.values, rule=rule, q=q, tree=True))


_SMALL = Batch(requests=2, nodes=3, vocab_size=12, num_sparse=4, dtype=torch.float32, q_dtype=torch.float32)
SMALL = [
    chain(_SMALL, "coupled", "coupled", truncated=True),
    chain(_SMALL, "match", "match"),
    chain(_SMALL, "ratio, dense", "ratio", "dense"),
    chain(_SMALL, "block, mapped", "block", "mapped"),
    chain(_SMALL, "recursive, sparse", "recursive", "sparse"),
    chain(_SMALL, "block, point", "block", "point"),
    tree(_SMALL, "coupled, tree", "coupled"),
    tree(_SMALL, "match, tree", "match"),
    tree(_SMALL, "recursive, tree", "recursive", "tree"),
]

_BFLOAT16 = {"dtype": torch.bfloat16, "q_dtype": torch.bfloat16}
_SERVER = Batch(requests=64, nodes=8, vocab_size=151_936, num_sparse=32, **_BFLOAT16)
_ODD = Batch(requests=64, nodes=8, vocab_size=50_257, num_sparse=32, **_BFLOAT16)
_TREES, _WIDE_TREES = (Batch(16, nodes, 151_936, 32, torch.bfloat16, torch.float32) for nodes in (32, 256))
SHIPPED = [
    chain(_SERVER, "coupled", "coupled"),
    chain(_ODD, "coupled, 50257", "coupled"),
    chain(_SERVER, "coupled, truncated", "coupled", truncated=True),
    chain(_SERVER, "match", "match"),
    chain(_SERVER, "ratio", "ratio", "dense"),
    chain(_SERVER, "block", "block", "dense"),
    chain(_SERVER, "ratio, sparse and truncated", "ratio", "sparse", truncated=True),
    tree(_TREES, "coupled, tree", "coupled"),
    tree(_WIDE_TREES, "coupled, tree of 256", "coupled"),
    tree(_TREES, "match, tree", "match"),
    tree(_TREES, "recursive", "recursive", "tree"),
]
"""Calls that between them launch every kernel in every configuration of note."""

BUDGETS = {
    "chain_verdict_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "judge_kernel": budgets(Budget(96, 16_384), amd=Budget(96, 16_384)),
    "left_over_kernel": budgets(Budget(168, 16_384), amd=Budget(128, 16_384)),
    "node_lines_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "ratio_kernel": budgets(Budget(255, 65_536), amd=Budget(256, 65_536)),
    "ratio_verdict_kernel": budgets(Budget(255, 65_536), amd=Budget(256, 65_536)),
    "recursive_verdict_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "residual_mass_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "tree_verdict_kernel": budgets(Budget(64, 4_096), amd=Budget(72, 4_096)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_WIDE = dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
CLAIMS = {"left_over_kernel": _WIDE, "residual_mass_kernel": _WIDE}
"""What a kernel is meant to compile to; those that stream rows of logits read 16 bytes at a time."""
