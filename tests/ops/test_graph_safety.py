"""No op reads the device from the host or asks for a shape that depends on data (contract C7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dspark.ops import (
    DenseQ,
    MarkovHead,
    PagedKV,
    PointMass,
    Rows,
    SparseQ,
    accept,
    append_kv,
    commit_kv,
    copy_pages,
    draft_tree,
    rope_append_kv,
    verify_attention,
)
from dspark.ops.launch import recorded_launches
from dspark.ops.sample import count_tokens
from dspark.ops.types import DraftDistribution, Rule
from dspark.testing.guards import SyncError, forbid_sync
from tests.ops.attention.paged import Kind, make_paged, make_requests
from tests.ops.helpers import make_sampling, verify
from tests.ops.trees import TREE_RULES, tree_problem

LENGTHS = [3, 0, 1]
REQUESTS, ROWS, NODES, VOCAB = 3, 4, 3, 12
SAMPLING = make_sampling([1.0, 0.0, 0.7], [3, 0, 5], 0.9, 0.05, seed=[1, 2, 3])
QUERY_START = torch.tensor([0, *LENGTHS]).cumsum(0)
POSITION = torch.tensor([4, 5, 6])
ANCHOR = torch.tensor([1, -1, 2])

DISTRIBUTIONS: dict[str, DraftDistribution | None] = {
    "none": None,
    "dense": DenseQ(torch.randn(REQUESTS, NODES - 1, VOCAB)),
    "mapped": DenseQ(torch.randn(REQUESTS, NODES - 1, 5), torch.arange(-7, VOCAB - 7, dtype=torch.int32).clamp(min=-1)),
    "sparse": SparseQ(torch.arange(2).expand(REQUESTS, NODES - 1, 2).contiguous(), torch.full((REQUESTS, 2, 2), -0.7)),
    "point": PointMass(),
}


@pytest.fixture(autouse=True)
def unlaunched() -> Iterator[None]:
    """What is forbidden would be the host's doing: the kernels need not run."""
    with recorded_launches():
        yield


BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]


def run_accept(rule: Rule, q: str, **options: Any) -> None:
    accept(
        torch.randn(ROWS, VOCAB),
        Rows(torch.randint(VOCAB, (ROWS,)), QUERY_START, POSITION, NODES),
        rule=rule,
        sampling=SAMPLING,
        q=DISTRIBUTIONS[q],
        **options,
    )


def run_attention(kind: Kind, backend: Any) -> None:
    paged = make_paged(make_requests([5, 0], [3, 2], kind), 4, pad_rows=1)
    with forbid_sync():
        verify_attention(paged.q, paged.kv, paged.batch, window=4, return_lse=True, backend=backend)


def run_cache(backend: Any) -> None:
    paged = make_paged(make_requests([5, 0], [3, 2]), 4, pad_rows=1)
    kv, batch = paged.kv, paged.batch
    k, q, angle = torch.randn(6, *kv.k.shape[2:]), torch.randn(paged.q.shape), torch.ones(6, 1, kv.k.shape[-1])
    stack = PagedKV(kv.k[None], kv.v[None])
    path, emitted = torch.tensor([[0, 2], [0, -1]]), torch.tensor([2, 1])
    pages = torch.tensor([0, -1]), torch.tensor([1, 2])
    with forbid_sync():
        append_kv(k, k, kv, batch.slots, backend=backend)
        rope_append_kv(q, k, k, kv, batch.slots, cos=angle, sin=angle, q_norm=angle[0, 0], eps=1e-6, backend=backend)
        rows = Rows(batch.positions, batch.query_start, batch.context_len, 2)
        commit_kv(stack, path, emitted, rows, batch.slots, backend=backend)
        copy_pages(stack, *pages, backend=backend)


CASES = [("coupled", "none"), ("match", "none")] + [
    (rule, q) for rule in ("ratio", "block") for q in ("dense", "mapped", "sparse", "point")
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "q"), CASES)
def test_accept(rule: Rule, q: str, backend: str) -> None:
    with forbid_sync():
        run_accept(rule, q, backend=backend)
        run_accept(rule, q, backend=backend, logprobs="processed")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_accept_of_trees(rule: Rule, backend: Any) -> None:
    arguments = tree_problem(rule, SAMPLING, nodes=3, vocab_size=VOCAB, branching=2, lengths=LENGTHS)
    with forbid_sync():
        verify(**arguments, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_draft_tree(rule: Rule, backend: Any) -> None:
    base, w = torch.randn(REQUESTS, 2, VOCAB), torch.randn(VOCAB, 4)
    sampling = SAMPLING if backend == "reference" else SAMPLING._replace(any_truncation=False)
    budget = torch.tensor([4, 0, 2])
    with forbid_sync():
        draft_tree(
            base,
            ANCHOR,
            head=MarkovHead(w, w),
            hidden=None,
            sampling=sampling,
            position=POSITION,
            rule=rule,
            num_nodes=5,
            branching=2,
            budget=budget,
            backend=backend,
        )


def test_counts() -> None:
    counts = torch.zeros(REQUESTS, VOCAB, dtype=torch.int32)
    tokens, num = torch.full((REQUESTS, 2), -1), torch.zeros(REQUESTS, dtype=torch.int64)
    with forbid_sync():
        count_tokens(counts, tokens, num)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_verify_attention(kind: Kind, backend: Any) -> None:
    run_attention(kind, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ops_on_the_paged_cache(backend: Any) -> None:
    run_cache(backend)


X = torch.tensor([3.0, 0.0, 1.0])
OFFENDERS: dict[str, Callable[[], object]] = {
    "item": lambda: X[0].item(),
    "float": lambda: float(X[0]),
    "if": lambda: 1 if X[0] > 1 else 0,
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 0),
    "argwhere": lambda: torch.argwhere(X),
    "masked_select": lambda: X.masked_select(X > 0),
    "boolean index": lambda: X[X > 0],
    "boolean write": lambda: X.clone().index_put_((X > 0,), X[:2]),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "bincount": lambda: torch.bincount(X.long()),
    "repeat_interleave": lambda: X.repeat_interleave(X.long()),
    "host data": lambda: torch.tensor([1, 2]),
    "to the host": lambda: torch.empty(2, device="meta").cpu(),
    "from the host": lambda: torch.zeros(2).to("meta"),
    "copy": lambda: torch.empty(2, device="meta").copy_(torch.zeros(2)),
}
INNOCENTS: dict[str, Callable[[], object]] = {
    "gather": lambda: X.gather(0, torch.zeros(2, dtype=torch.int64)),
    "integer index": lambda: X[torch.zeros(2, dtype=torch.int64)],
    "masked_fill": lambda: X.masked_fill(X > 0, 0.0),
    "where": lambda: torch.where(X > 0, X, 1.0),
    "repeat_interleave": lambda: X.repeat_interleave(2),
    "repeat_interleave in inference mode": lambda: torch.inference_mode()(X.repeat_interleave)(2, dim=0),
    "sized repeat_interleave": lambda: X.repeat_interleave(X.long(), output_size=4),
    "cast": lambda: X.double(),
    "full": lambda: torch.full_like(X, 2.0),
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_an_offender_is_caught(name: str) -> None:
    with pytest.raises(SyncError), forbid_sync():
        OFFENDERS[name]()


@pytest.mark.parametrize("name", INNOCENTS)
def test_what_a_graph_can_capture_passes(name: str) -> None:
    with forbid_sync():
        INNOCENTS[name]()
