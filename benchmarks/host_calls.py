"""One call of each op, of the size that a server makes, for ``benchmarks.host``.

Large tensors are ``torch.empty`` and never touched, so that they take no memory. Each checkout that is compared builds
its own calls: the names are what two checkouts agree on, and what a name stands for does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.setup import DRAFTS, LARGE_VOCAB, ROWS, make_sampling
from dspark.ops import (
    ConfidenceHead,
    DenseQ,
    MarkovHead,
    PagedKV,
    Processors,
    QueryBatch,
    Rows,
    Rule,
    Stream,
    Tree,
    accept,
    append_kv,
    commit_kv,
    copy_pages,
    draft_tree,
    draft_walk,
    process_logits,
    rope_append_kv,
    sample,
    schedule_prefix,
    truncate,
    verify_attention,
)

Call = Callable[[], Any]

REQUESTS, CONTEXT = 8, 2000
NUM_ROWS = REQUESTS * ROWS
NODES, BRANCHING = 32, 4
RANK, HIDDEN = 256, 2560
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 32, 8, 128, 16, 36
PAGES_OF_ONE = -(-(CONTEXT + ROWS) // PAGE_SIZE)


def bfloat16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def make_calls() -> dict[str, Call]:
    """Every call that is measured, under its name."""
    return rows_of_logits() | drafting() | cache()


def rows_of_logits() -> dict[str, Call]:
    """The ops that read a target's logits."""
    logits = bfloat16(NUM_ROWS, LARGE_VOCAB)
    sampling, position = make_sampling(REQUESTS, 1.0), torch.full((REQUESTS,), CONTEXT)
    rows = Rows(torch.zeros(NUM_ROWS, dtype=torch.int64), torch.arange(REQUESTS + 1) * ROWS, position, ROWS)
    q = DenseQ(bfloat16(REQUESTS, DRAFTS, LARGE_VOCAB))
    chain = partial(accept, logits, rows, sampling=sampling, backend="triton")
    on_chains: tuple[tuple[Rule, DenseQ | None], ...] = (("coupled", None), ("match", None), ("ratio", q), ("block", q))
    calls: dict[str, Call] = {f"accept {rule}": partial(chain, rule=rule, q=own) for rule, own in on_chains}

    node = torch.arange(NODES)
    tree = Tree(
        tokens=torch.zeros(REQUESTS, NODES, dtype=torch.int64),
        parents=(node - 1).expand(REQUESTS, NODES).contiguous(),
        ancestors=((2 << node) - 1).expand(REQUESTS, NODES).contiguous(),
        depth=node.expand(REQUESTS, NODES).contiguous(),
        num_nodes=torch.full((REQUESTS,), NODES),
    )
    trees = partial(
        accept,
        bfloat16(REQUESTS * NODES, LARGE_VOCAB),
        Rows(tree.tokens.flatten(), torch.arange(REQUESTS + 1) * NODES, position, NODES),
        sampling=sampling,
        tree=tree,
        backend="triton",
    )
    scores = DenseQ(torch.empty(REQUESTS, NODES, LARGE_VOCAB))
    calls["accept coupled, trees"] = partial(trees, rule="coupled")
    calls["accept recursive, trees"] = partial(trees, rule="recursive", q=scores, max_branching=BRANCHING)

    last = bfloat16(REQUESTS, LARGE_VOCAB)
    calls["sample"] = partial(sample, last, sampling, position, backend="triton")
    calls["truncate"] = partial(truncate, last, sampling._replace(any_truncation=True), backend="triton")
    processors = Processors(
        output_counts=torch.empty(REQUESTS, LARGE_VOCAB, dtype=torch.int32), repetition_penalty=torch.ones(REQUESTS)
    )
    calls["process_logits"] = partial(
        process_logits,
        logits,
        rows,
        processors=processors,
        out=torch.empty(NUM_ROWS, LARGE_VOCAB),
        backend="triton",
    )
    return calls


def drafting() -> dict[str, Call]:
    """The ops that draft, and the one that says how much."""
    weights = bfloat16(LARGE_VOCAB, RANK)
    head = MarkovHead(weights, bfloat16(LARGE_VOCAB, RANK))
    hidden = bfloat16(REQUESTS, DRAFTS, HIDDEN)
    block: tuple[Tensor, Tensor] = (bfloat16(REQUESTS, DRAFTS, LARGE_VOCAB), torch.zeros(REQUESTS, dtype=torch.int64))
    shared: dict[str, Any] = {
        "head": head,
        "sampling": make_sampling(REQUESTS, 1.0),
        "position": torch.full((REQUESTS,), CONTEXT),
        "backend": "triton",
    }
    confidence = ConfidenceHead(bfloat16(HIDDEN + RANK), torch.zeros(()), weights)
    rows = torch.arange(REQUESTS * ROWS + 1, dtype=torch.float64)
    return {
        "draft_walk": partial(
            draft_walk,
            *block,
            hidden=hidden,
            confidence_head=confidence,
            stream=Stream.TARGET,
            return_logits=False,
            **shared,
        ),
        "draft_tree": partial(
            draft_tree, *block, hidden=None, rule="coupled", num_nodes=NODES, branching=BRANCHING, **shared
        ),
        "schedule_prefix": partial(
            schedule_prefix,
            torch.full((REQUESTS, DRAFTS), 0.9),
            steps_per_second=1000 / (10 + rows / REQUESTS),
            mode="early_stop",
            max_lengths=torch.full((REQUESTS,), DRAFTS),
            backend="triton",
        ),
    }


def cache() -> dict[str, Call]:
    """The ops on the paged cache: one layer, and a stack of layers where an op takes one."""
    pages = REQUESTS * PAGES_OF_ONE
    storage = bfloat16(LAYERS, 2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    stack, layer = PagedKV(storage[:, 0], storage[:, 1]), PagedKV(storage[0, 0], storage[0, 1])
    positions = CONTEXT + torch.arange(ROWS).repeat(REQUESTS)
    owner = torch.arange(REQUESTS).repeat_interleave(ROWS)
    batch = QueryBatch(
        query_start=torch.arange(REQUESTS + 1) * ROWS,
        context_len=torch.full((REQUESTS,), CONTEXT),
        block_table=torch.arange(pages).view(REQUESTS, PAGES_OF_ONE),
        positions=positions,
        slots=owner * PAGES_OF_ONE * PAGE_SIZE + positions,
        ancestors=None,
        max_query_len=ROWS,
    )
    q, k, v = bfloat16(NUM_ROWS, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM).split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
    angle, weight = bfloat16(NUM_ROWS, 1, HEAD_DIM), bfloat16(HEAD_DIM)
    rows = Rows(torch.zeros(NUM_ROWS, dtype=torch.int64), batch.query_start, batch.context_len, ROWS)
    path, emitted = torch.arange(ROWS).repeat(REQUESTS, 1), torch.full((REQUESTS,), ROWS)
    source = torch.arange(REQUESTS)
    return {
        "verify_attention": partial(verify_attention, bfloat16(*q.shape), layer, batch, backend="triton"),
        "append_kv": partial(append_kv, k, v, layer, batch.slots, backend="triton"),
        "rope_append_kv": partial(
            rope_append_kv,
            *(q, k, v, layer, batch.slots),
            cos=angle,
            sin=angle,
            q_norm=weight,
            k_norm=weight,
            eps=1e-6,
            backend="triton",
        ),
        "commit_kv": partial(commit_kv, stack, path, emitted, rows, batch.slots, backend="triton"),
        "copy_pages": partial(copy_pages, stack, source, source + REQUESTS, backend="triton"),
    }
