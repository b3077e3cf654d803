"""Hypothesis strategies of what the ops take: ragged batches, sampling parameters, trees and paged caches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.types import Sampling
from tests.ops.attention.paged import Heads, Paged, Request, make_paged
from tests.ops.helpers import make_sampling

SEEDS = st.integers(0, 2**63 - 1)
NAN = float("nan")


def row_counts(max_requests: int = 4, max_rows: int = 5) -> st.SearchStrategy[list[int]]:
    """Rows of each request; 0 is a padded one."""
    return st.lists(st.integers(0, max_rows), min_size=1, max_size=max_requests)


@st.composite
def samplings(draw: st.DrawFn, num_requests: int, truncate: bool = True) -> Sampling:
    """Parameters of so many requests, greedy and sampled ones mixed."""

    def each(*values: float) -> list[float]:
        return draw(st.lists(st.sampled_from(values), min_size=num_requests, max_size=num_requests))

    return make_sampling(
        each(0.0, 0.5, 1.0, 1.6),
        top_k=[int(k) for k in each(0, 1, 3)] if truncate else 0,
        top_p=each(1.0, 0.8, 0.3) if truncate else 1.0,
        min_p=each(0.0, 0.1) if truncate else 0.0,
        seed=draw(st.lists(SEEDS, min_size=num_requests, max_size=num_requests)),
    )


@st.composite
def tree_parents(draw: st.DrawFn, num_nodes: int) -> list[int]:
    """Parents of a tree's nodes, each earlier than its child; -1 for node 0. Chains and stars are among them."""
    shape = draw(st.sampled_from(["any", "chain", "star"]))
    if shape == "any":
        return [draw(st.integers(0, i - 1)) if i else -1 for i in range(num_nodes)]
    return [i - 1 if shape == "chain" else min(i - 1, 0) for i in range(num_nodes)]


def ancestor_words(parents: list[int]) -> list[int]:
    """Each node's ancestors and itself as the bits of an int64."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((1 << node) | (words[parent] if parent >= 0 else 0))
    return [word - 2**64 if word >> 63 else word for word in words]


@dataclass(frozen=True)
class TreeCase:
    """Requests with trees to verify, dense and as the op takes them."""

    requests: list[Request]
    paged: Paged


@st.composite
def paged_trees(draw: st.DrawFn, max_requests: int = 3, max_nodes: int = 9) -> TreeCase:
    """Trees over paged caches of all kinds of fill, page sizes and padding; unused numbers are NaN."""
    heads = draw(st.sampled_from([Heads(4, 2, 8), Heads(2, 2, 16), Heads(6, 1, 8)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    requests = []
    for _ in range(draw(st.integers(1, max_requests))):
        parents = draw(tree_parents(draw(st.integers(1, max_nodes))))
        context = draw(st.integers(0, 40))
        k, v = randn(2, context + len(parents), heads.keys, heads.dim)
        requests.append(Request(randn(len(parents), heads.queries, heads.dim), k, v, parents, "tree"))
    paged = make_paged(
        requests,
        draw(st.sampled_from([1, 4, 16])),
        pad_rows=draw(st.integers(0, 3)),
        pad_columns=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 100)),
    )
    return TreeCase(requests, paged)


@dataclass(frozen=True)
class VerifyCase:
    """A ragged verify batch without its rule.

    Attributes:
        logits: ``[T, V]`` float32.
        tokens: ``[T]`` int64, some of them out of the vocabulary.
        query_start: ``[R + 1]`` int64.
        position: ``[R]`` int64.
        sampling: of the ``R`` requests.
        q_logits: ``[R, N, V]`` float32.
        max_query_len: ``N``.
    """

    logits: Tensor
    tokens: Tensor
    query_start: Tensor
    position: Tensor
    sampling: Sampling
    q_logits: Tensor
    max_query_len: int


@st.composite
def verify_cases(draw: st.DrawFn, max_requests: int = 3, max_rows: int = 4, max_vocab: int = 20) -> VerifyCase:
    """Batches in which drafts are likely, unlikely or no tokens, and some rows are bad."""
    counts = draw(row_counts(max_requests, max_rows))
    vocab_size = draw(st.integers(2, max_vocab))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_rows, nodes = sum(counts), max(1, *counts)
    logits = 2 * torch.randn(num_rows, vocab_size, generator=generator)
    tokens = torch.randint(-1, vocab_size + 1, (num_rows,), generator=generator)
    if draw(st.booleans()):
        tokens = logits.argmax(-1).roll(1)
    for row in draw(st.lists(st.integers(0, max(num_rows - 1, 0)), max_size=2 if num_rows else 0)):
        logits[row, draw(st.integers(0, vocab_size - 1))] = NAN
    return VerifyCase(
        logits=logits,
        tokens=tokens,
        query_start=torch.tensor([0, *itertools.accumulate(counts)]),
        position=torch.randint(0, 1000, (len(counts),), generator=generator),
        sampling=draw(samplings(len(counts))),
        q_logits=torch.randn(len(counts), nodes, vocab_size, generator=generator),
        max_query_len=nodes,
    )
