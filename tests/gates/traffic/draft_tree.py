"""Calls of ``draft_tree`` whose traffic is counted."""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.ops.cost import Cost
from dspark.ops.cost.draft_tree import DraftTreeCall, draft_tree_cost
from dspark.ops.draft.tree import draft_tree
from dspark.ops.types import MarkovHead, Sampling
from tests.gates.traffic.case import Case

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def draft_tree_case(requests: int, call: DraftTreeCall) -> Case:
    """A call on random numbers; the depths of its nodes are seen only then."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(requests, call.draft_len, call.vocab_size, generator=generator).to(DTYPES[call.itemsize])
    head = None
    if call.rank:
        w1, w2 = (
            torch.randn(call.vocab_size, call.rank, generator=generator).to(DTYPES[call.weight_itemsize])
            for _ in range(2)
        )
        head = MarkovHead(w1, w2)
    number, integer = torch.ones(requests), torch.zeros(requests, dtype=torch.int64)
    sampling = Sampling(
        number * (not call.greedy), integer, number, number * 0, torch.arange(requests), call.greedy, False
    )
    acceptance = torch.rand(call.draft_len, call.branching, generator=generator) if call.acceptance else None

    anchor, budget = integer + 5, integer + call.num_nodes - 1 if call.budget else None

    def run() -> Cost:
        tree = draft_tree(
            base,
            anchor,
            head=head,
            hidden=None,
            sampling=sampling,
            position=integer,
            rule=call.rule,
            num_nodes=call.num_nodes,
            branching=call.branching,
            budget=budget,
            acceptance=acceptance,
            backend="triton",
        ).tree
        depths = [own[:n] for own, n in zip(tree.depth.numpy().tolist(), tree.num_nodes.numpy().tolist(), strict=True)]
        return draft_tree_cost(replace(call, depths=depths))

    shape = f"R {requests}, G {call.draft_len}, V {call.vocab_size}, N {call.num_nodes}, K {call.branching}"
    kind = f"{call.rule} tree{' greedy' if call.greedy else ''}{'' if call.rank else ', no head'}"
    return Case("draft", shape, kind, run)


def stated_cases() -> list[Case]:
    """Of the full vocabulary, one level of it: the root's."""
    return [draft_tree_case(1, DraftTreeCall((), 1, 151_936, 5, 4))]


def cases() -> list[Case]:
    """Small calls of every kind: three tiles, the last one ragged."""
    return [
        draft_tree_case(3, DraftTreeCall((), 2, 300, 7, 2, 16, budget=True)),
        draft_tree_case(2, DraftTreeCall((), 2, 300, 6, 2, 16, "recursive", acceptance=True)),
        draft_tree_case(2, DraftTreeCall((), 2, 150, 20, 3, 40, "recursive", itemsize=4, weight_itemsize=4)),
        draft_tree_case(2, DraftTreeCall((), 2, 150, 4, 1, 24, "recursive", greedy=True)),
        draft_tree_case(2, DraftTreeCall((), 2, 150, 6, 3, 0, "match")),
    ]
