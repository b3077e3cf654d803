"""Batches of drafted trees, and their verdicts by a plain walk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.draft.tree_reference import ancestor_words
from dspark.ops.philox import gumbel, uniform
from dspark.ops.sample.reference import inverse_cdf, perturbed_argmax, transform
from dspark.ops.types import DenseQ, Rule, Sampling, Stream, Tree
from tests.ops.helpers import select

TREE_RULES: tuple[Rule, ...] = ("coupled", "match", "recursive")


def random_parents(generator: torch.Generator, nodes: int, branching: int) -> list[int]:
    """Parents of a random tree; -1 for node 0."""
    parents = [-1]
    for node in range(1, nodes):
        open_nodes = [i for i in range(node) if parents.count(i) < branching]
        parents.append(open_nodes[int(torch.randint(len(open_nodes), (1,), generator=generator))])
    return parents


def tree_of(parents: list[list[int]], tokens: Tensor | None = None) -> Tree:
    """Trees of these parents."""
    shape = torch.tensor(parents)
    depth = torch.zeros_like(shape)
    for node in range(1, shape.shape[1]):
        depth[:, node] = depth.gather(1, shape[:, node : node + 1]).squeeze(1) + 1
    num_nodes = torch.full(shape.shape[:1], shape.shape[1])
    words = ancestor_words(shape, num_nodes, shape.shape[1])
    return Tree(torch.zeros_like(shape) if tokens is None else tokens, shape, words, depth, num_nodes)


def tree_problem(
    rule: Rule,
    sampling: Sampling,
    *,
    nodes: int = 7,
    vocab_size: int = 12,
    branching: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    parents: list[int] | None = None,
    lengths: list[int] | None = None,
    noise: float = 1.0,
) -> dict[str, Any]:
    """Arguments of ``accept``: random trees whose siblings are drawn from q, which resembles the target."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(sampling.temperature)
    branching = min(branching, vocab_size)
    shapes = [parents or random_parents(generator, nodes, branching) for _ in range(requests)]
    nodes = len(shapes[0])
    scores = 2 * torch.randn(requests, nodes, vocab_size, generator=generator)
    target = (scores + noise * torch.randn(scores.shape, generator=generator)).to(dtype)
    keys = scores - torch.rand(scores.shape, generator=generator).log().neg().log()
    order = keys.argsort(-1, descending=True)
    tokens = torch.zeros(requests, nodes, dtype=torch.int64)
    for r, own in enumerate(shapes):
        for node in range(1, nodes):
            tokens[r, node] = order[r, own[node], own[:node].count(own[node])]
    lengths = [nodes] * requests if lengths is None else lengths
    recursive = rule == "recursive"
    return {
        "target_logits": torch.cat([target[r, :n] for r, n in enumerate(lengths)]),
        "tokens": torch.cat([tokens[r, :n] for r, n in enumerate(lengths)]),
        "query_start": torch.tensor([0, *lengths]).cumsum(0),
        "rule": rule,
        "sampling": sampling,
        "position": torch.arange(requests) * 13 + 5,
        "max_query_len": nodes,
        "q": DenseQ(scores.to(dtype)) if recursive else None,
        "logprobs": "raw",
        "tree": tree_of(shapes, tokens),
        "max_branching": max(1, branching) if recursive else None,
    }


def walk(arguments: dict[str, Any], request: int) -> tuple[list[int], list[int]]:
    """Tokens and path of one request, one node after another."""
    start, end = arguments["query_start"][request : request + 2].tolist()
    logits, tokens = arguments["target_logits"][start:end], arguments["tokens"][start:end].tolist()
    sampling = select(arguments["sampling"], torch.tensor([request]))
    tree, vocab_size = arguments["tree"], logits.shape[1]
    parents = tree.parents[request].tolist()
    emitted: list[int] = []
    path: list[int] = []
    node = 0 if end > start else -1
    while node >= 0:
        at = arguments["position"][request : request + 1] + len(path) + 1
        scores = transform(logits[node : node + 1], sampling)
        p = scores.double().softmax(-1)[0]
        children = [i for i in range(end - start) if parents[i] == node and i > node and 0 <= tokens[i] < vocab_size]
        chosen = -1
        if arguments["rule"] == "coupled":
            noise = gumbel(sampling.seed, at, vocab_size, Stream.TARGET)
            last = int(perturbed_argmax(scores, None if sampling.all_greedy else noise))
            chosen = next((i for i in children if tokens[i] == last), -1)
        elif arguments["rule"] == "match":
            last = int(inverse_cdf(p, uniform(sampling.seed, at, Stream.RESIDUAL)))
            chosen = next((i for i in children if tokens[i] == last), -1)
        else:
            q = arguments["q"].logits[request, node].double().softmax(-1)
            for rank, child in enumerate(children[: arguments["max_branching"]] if q.isfinite().all() else []):
                x = tokens[child]
                u = float(uniform(sampling.seed, at, Stream.ACCEPT, block=torch.tensor([rank])))
                if q[x] > 0 and u < p[x] / q[x]:
                    chosen = child
                    break
                excess = (p - q).clamp(min=0)
                p = excess / excess.sum()
                q[x] = 0
                q = q / q.sum() if q.sum() > 0 else q
            last = tokens[chosen] if chosen >= 0 else int(inverse_cdf(p, uniform(sampling.seed, at, Stream.RESIDUAL)))
        if last < 0:
            break
        emitted.append(last)
        path.append(node)
        node = chosen
    return emitted, path
