"""Trees: the references, and what a call of ``accept`` costs the host before kernels run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.setup import CONTEXT, DRAFTS, LARGE_VOCAB, RANK, VOCAB, Benchmark, make_sampling
from dspark.ops import DenseQ, MarkovHead, Rule, Sampling, Tree, Verdict, accept, draft_tree
from dspark.ops.launch import recorded_launches

NODES, BRANCHING = 32, 4
RULES: tuple[Rule, ...] = ("coupled", "match", "recursive")


def make_tree(requests: int, sampling: Sampling, rule: Rule) -> tuple[Tree, DenseQ | None]:
    w1, w2 = torch.randn(VOCAB, RANK), torch.randn(VOCAB, RANK)
    draft = draft_tree(
        torch.randn(requests, DRAFTS, VOCAB),
        torch.randint(VOCAB, (requests,)),
        head=MarkovHead(w1, w2),
        hidden=None,
        sampling=sampling,
        position=torch.full((requests,), CONTEXT),
        rule=rule,
        num_nodes=NODES,
        branching=BRANCHING,
    )
    return draft.tree, None if draft.logits is None else DenseQ(draft.logits)


@pytest.mark.parametrize("rule", RULES)
def test_draft_reference(benchmark: Benchmark, requests: int, sampling: Sampling, rule: Rule) -> None:
    tree, _ = benchmark(make_tree, requests, sampling, rule)
    assert tree.num_nodes.min() > 1


@pytest.mark.parametrize("rule", RULES)
def test_accept_reference(benchmark: Benchmark, requests: int, sampling: Sampling, rule: Rule) -> None:
    tree, q = make_tree(requests, sampling, rule)
    verdict = benchmark(
        accept,
        torch.randn(requests * NODES, VOCAB),
        tree.tokens.flatten(),
        torch.arange(requests + 1) * NODES,
        rule=rule,
        sampling=sampling,
        position=torch.full((requests,), CONTEXT),
        max_query_len=NODES,
        q=q,
        tree=tree,
        max_branching=BRANCHING if rule == "recursive" else None,
    )
    assert verdict.num_emitted.min() >= 1


@pytest.mark.parametrize("rule", RULES)
def test_host_overhead(benchmark: Benchmark, requests: int, rule: Rule) -> None:
    """Checks, configuration, allocation and the arguments of every launch; the launches themselves do nothing."""
    logits = torch.zeros(1, LARGE_VOCAB, dtype=torch.bfloat16).expand(requests * NODES, LARGE_VOCAB)
    scores = torch.zeros(1, 1, LARGE_VOCAB).expand(requests, NODES, LARGE_VOCAB)
    recursive = rule == "recursive"
    sampling, position = make_sampling(requests, 1.0), torch.full((requests,), CONTEXT)
    tree, _ = make_tree(requests, sampling, rule)
    tokens, query_start = tree.tokens.flatten(), torch.arange(requests + 1) * NODES

    with recorded_launches() as launches:

        def call() -> Verdict:
            launches.clear()
            return accept(
                logits,
                tokens,
                query_start,
                rule=rule,
                sampling=sampling,
                position=position,
                max_query_len=NODES,
                q=DenseQ(scores) if recursive else None,
                tree=tree,
                max_branching=BRANCHING if recursive else None,
                backend="triton",
            )

        call()  # the first one imports the kernels
        benchmark(call)
        assert launches
