"""Calls of ``accept`` over trees, and of ``draft_tree``, whose traffic is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.ops.accept import accept, accept_workspace
from dspark.ops.accept.tree_launch import STATE, plan_of
from dspark.ops.cost import Cost
from dspark.ops.cost.tree import NodeOutcome, TreeCall, accept_tree_cost
from dspark.ops.types import DenseQ, Rows, Rule, Sampling, Tree
from tests.gates.traffic import draft_tree
from tests.gates.traffic.case import Case

LIKELY = 14.0
"""What is added to one logit of each row, so that some children are accepted in a wide vocabulary too."""


def tree_case(
    rule: Rule,
    parents: Sequence[Sequence[int]],
    vocab_size: int,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    raw: bool = True,
    lead: int = 1,
) -> Case:
    """A call on random logits, in which the ``lead``-th child of a node is what the target finds most likely."""
    from tests.ops.trees import tree_of  # needs the tests' other helpers, which a table of the shapes does not

    requests, nodes, rows = len(parents), max(map(len, parents)), sum(map(len, parents))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab_size, generator=generator)
    scores = torch.randn(requests, nodes, vocab_size, generator=generator).to(torch.float32)
    likely = torch.randint(vocab_size, (rows,), generator=generator)
    logits[torch.arange(rows), likely] += LIKELY
    logits = logits.to(dtype)
    start = torch.tensor([0, *map(len, parents)]).cumsum(0)
    tokens = torch.randint(vocab_size, (rows,), generator=generator)
    for r, own in enumerate(parents):
        for node in range(1, len(own)):
            parent = own[node]
            rank = list(own[:node]).count(parent)
            if rank == min(lead, list(own).count(parent)) - 1:
                tokens[start[r] + node] = likely[start[r] + parent]
    wide: Tree = tree_of([[*own, *([0] * (nodes - len(own)))] if own else [-1] + [0] * (nodes - 1) for own in parents])
    branching = max(list(own).count(node) for own in parents for node in range(len(own)))
    number, integer = torch.ones(requests), torch.zeros(requests, dtype=torch.int64)
    sampling = Sampling(
        number * temperature,
        integer,
        number,
        number * 0,
        torch.arange(requests),
        all_greedy=not temperature,
        any_truncation=False,
    )
    recursive = rule == "recursive"
    size = accept_workspace(
        requests, nodes, vocab_size, rule=rule, tree=True, max_branching=branching if recursive else None
    )
    workspace = torch.zeros(size, dtype=torch.uint8)

    def run() -> Cost:
        verdict = accept(
            logits,
            Rows(tokens, start, integer, nodes),
            rule=rule,
            sampling=sampling,
            q=DenseQ(scores) if recursive else None,
            logprobs="raw" if raw else "processed",
            tree=wide,
            max_branching=branching if recursive else None,
            workspace=workspace,
            backend="triton",
        )
        emitted = verdict.num_emitted.numpy().tolist()
        paths = verdict.path.numpy().tolist()
        call = TreeCall(
            parents=parents,
            nodes=nodes,
            emitted=emitted,
            ends=[path[n - 1] for path, n in zip(paths, emitted, strict=True)],
            rule=rule,
            vocab_size=vocab_size,
            itemsize=dtype.itemsize,
            q_itemsize=4,
            greedy=not temperature,
            raw=raw,
            max_branching=branching,
            outcomes=_outcomes(workspace, parents, nodes, vocab_size, branching) if recursive else (),
        )
        return accept_tree_cost(call)

    shape = f"rows {'+'.join(str(len(own)) for own in parents)}, V {vocab_size}, {str(dtype).removeprefix('torch.')}"
    kind = f"{rule} tree{'' if temperature else ' greedy'}{f' {lead}' if recursive else ''}"
    return Case("accept", shape, kind, run)


def _outcomes(
    workspace: torch.Tensor, parents: Sequence[Sequence[int]], nodes: int, vocab_size: int, branching: int
) -> list[list[NodeOutcome]]:
    """What the kernels noted of each node, read from their scratch memory."""
    sizes = plan_of("recursive", len(parents), nodes, vocab_size, vocab_size, None, branching).sizes
    first = sum(sizes[:4])
    state = workspace.numpy().view("int32")[first : first + STATE * len(parents) * nodes].reshape(-1, nodes, STATE)
    return [
        [
            NodeOutcome(
                rejected=int(state[r, node, 3]),
                weighed=int(state[r, node, 4]),
                chosen=int(state[r, state[r, node, 2], 1]) if state[r, node, 2] >= 0 else -1,
            )
            for node in range(len(own))
        ]
        for r, own in enumerate(parents)
    ]


def stated_cases() -> list[Case]:
    """The shape that bounds are stated for: one request, 16 nodes, a vocabulary of 151,936 in bfloat16."""
    parents = [(-1, 0, 1, 0, 2, 0, 1, 3, 4, 0, 1, 2, 3, 4, 5, 8)]
    accepted = [tree_case(rule, parents, 151_936) for rule in ("coupled", "match", "recursive")]
    return [*accepted, *draft_tree.stated_cases()]


def cases() -> list[Case]:
    """Small calls of every kind. Sub-tiles are whole: the model does not know in which of them a draw ends."""
    shapes = [(-1, 0, 0, 1), (), (-1,), (-1, 0, 0, 2, 2)]
    return [
        *(tree_case("coupled", shapes, 5120, temperature=t) for t in (0.0, 1.0)),
        tree_case("match", shapes, 5120),
        tree_case("recursive", shapes, 5120, lead=2),
        tree_case("recursive", shapes, 5120, temperature=0.0),
        tree_case("recursive", [(-1, 0, 0, 0, 1)], 300, dtype=torch.float32, raw=False, lead=3),
        tree_case("coupled", [(-1, 0, 0)], 300, dtype=torch.float32, raw=False),
        *draft_tree.cases(),
    ]
