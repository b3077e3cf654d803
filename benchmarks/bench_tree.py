"""Trees: the references, what calls cost the host before kernels run, and drafting by the kernels on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_timing
from benchmarks.setup import CONTEXT, DRAFTS, LARGE_VOCAB, RANK, VOCAB, Benchmark, make_sampling
from dspark.ops import DenseQ, MarkovHead, Rows, Rule, Sampling, Tree, TreeDraft, Verdict, accept, draft_tree
from dspark.ops.draft.tree_launch import levels_of
from dspark.ops.launch import recorded_launches
from dspark.testing import bounds

NODES, BRANCHING = 32, 4
ROTATING_BYTES = 2**28
LARGE_RANK = 256
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
        Rows(tree.tokens.flatten(), torch.arange(requests + 1) * NODES, torch.full((requests,), CONTEXT), NODES),
        rule=rule,
        sampling=sampling,
        q=q,
        tree=tree,
        max_branching=BRANCHING if rule == "recursive" else None,
    )
    assert verdict.num_emitted.min() >= 1


@pytest.mark.parametrize("rule", RULES)
def test_draft_host_overhead(benchmark: Benchmark, requests: int, rule: Rule) -> None:
    """Checks, configuration, allocation and the arguments of every launch; the launches themselves do nothing."""
    rows = torch.zeros(1, LARGE_RANK, dtype=torch.bfloat16).expand(LARGE_VOCAB, LARGE_RANK)
    call = partial(
        draft_tree,
        torch.zeros(1, 1, LARGE_VOCAB, dtype=torch.bfloat16).expand(requests, DRAFTS, LARGE_VOCAB),
        torch.zeros(requests, dtype=torch.int64),
        head=MarkovHead(rows, rows),
        hidden=None,
        sampling=make_sampling(requests, 1.0),
        position=torch.full((requests,), CONTEXT),
        rule=rule,
        num_nodes=NODES,
        branching=BRANCHING,
        out=TreeDraft(_blank_tree(requests), torch.zeros(LARGE_VOCAB).expand(requests, NODES, LARGE_VOCAB))
        if rule == "recursive"
        else None,
        backend="triton",
    )
    with recorded_launches() as launches:

        def recorded() -> TreeDraft:
            launches.clear()
            return call()

        recorded()  # the first one imports the kernels
        benchmark(recorded)
        assert len(launches) == 3 * DRAFTS + 1 + (rule == "recursive")


def _blank_tree(requests: int) -> Tree:
    tokens, parents, ancestors, depth = torch.zeros(4, requests, NODES, dtype=torch.int64)
    return Tree(tokens, parents, ancestors, depth, torch.zeros(requests, dtype=torch.int64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_draft_device_time(benchmark: Any, num_requests: int, rule: Rule) -> None:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    head = MarkovHead(randn(LARGE_VOCAB, LARGE_RANK) / 16, randn(LARGE_VOCAB, LARGE_RANK))
    sampling, position = make_sampling(num_requests, 1.0, "cuda"), torch.full((num_requests,), CONTEXT, device="cuda")
    copies = max(2, -(-ROTATING_BYTES // (num_requests * DRAFTS * LARGE_VOCAB * 2)))
    calls = [
        partial(
            draft_tree,
            4 * randn(num_requests, DRAFTS, LARGE_VOCAB),
            torch.randint(LARGE_VOCAB, (num_requests,), device="cuda"),
            head=head,
            hidden=None,
            sampling=sampling,
            position=position,
            rule=rule,
            num_nodes=NODES,
            branching=BRANCHING,
        )
        for _ in range(copies)
    ]
    score_rows = num_requests * NODES * (rule == "recursive")
    bound = bounds.draft_tree(num_requests, DRAFTS, LARGE_VOCAB, LARGE_RANK, score_rows=score_rows)
    scored = sum(level.nodes for level in levels_of(DRAFTS, NODES, BRANCHING, NODES - 1))
    benchmark.extra_info |= {"R": num_requests, "rule": rule, "V": LARGE_VOCAB}
    gpu_timing.measure(benchmark, calls, bound, 2 * num_requests * scored * LARGE_VOCAB * LARGE_RANK)


@pytest.mark.parametrize("rule", RULES)
def test_accept_host_overhead(benchmark: Benchmark, requests: int, rule: Rule) -> None:
    """Checks, configuration, allocation and the arguments of every launch; the launches themselves do nothing."""
    logits = torch.zeros(1, LARGE_VOCAB, dtype=torch.bfloat16).expand(requests * NODES, LARGE_VOCAB)
    scores = torch.zeros(1, 1, LARGE_VOCAB).expand(requests, NODES, LARGE_VOCAB)
    recursive = rule == "recursive"
    sampling, position = make_sampling(requests, 1.0), torch.full((requests,), CONTEXT)
    tree, _ = make_tree(requests, sampling, rule)
    rows = Rows(tree.tokens.flatten(), torch.arange(requests + 1) * NODES, position, NODES)

    with recorded_launches() as launches:

        def call() -> Verdict:
            launches.clear()
            return accept(
                logits,
                rows,
                rule=rule,
                sampling=sampling,
                q=DenseQ(scores) if recursive else None,
                tree=tree,
                max_branching=BRANCHING if recursive else None,
                backend="triton",
            )

        call()  # the first one imports the kernels
        benchmark(call)
        assert launches
