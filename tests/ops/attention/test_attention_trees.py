"""Attention of draft trees over paged caches, drawn at random: what a node sees is its ancestors, by definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.ops.attention import verify_attention
from tests.ops.attention.paged import Heads, dense_attention, make_paged, make_requests
from tests.strategies import TreeCase, ancestor_words, paged_trees, tree_parents
from tests.tolerances import ATTENTION


@given(parents=st.integers(1, 64).flatmap(tree_parents))
def test_ancestor_words_name_the_path_to_the_root(parents: list[int]) -> None:
    for node, word in enumerate(ancestor_words(parents)):
        path = {node}
        while parents[node] >= 0:
            node = parents[node]
            path.add(node)
        assert {bit for bit in range(64) if word >> bit & 1} == path


@pytest.mark.parametrize(("nodes", "num_words"), [(65, 2), (128, 2), (256, 4), (10, 3)])
def test_large_trees_have_several_words(nodes: int, num_words: int) -> None:
    requests = make_requests([11, 0], [nodes, 3], "tree", Heads(2, 1, 8))
    for kind in ("tree", "block"):
        requests = [replace(request, kind=kind) for request in requests]
        case = make_paged(requests, pad_rows=1, num_words=num_words)
        assert case.batch.ancestors is not None
        assert case.batch.ancestors.shape == (nodes + 4, num_words)
        for window in (0, 4):
            out = verify_attention(case.q, case.kv, case.batch, window=window)
            dense = torch.cat([dense_attention(request, window=window)[0] for request in requests])
            assert (out[:-1].double() - dense).abs().max() < ATTENTION
            assert (out[-1] == 0).all()


@given(case=paged_trees())
def test_a_node_sees_the_context_and_its_ancestors(case: TreeCase) -> None:
    words = [word for request in case.requests for word in ancestor_words(request.parents)]
    assert case.paged.batch.ancestors is not None
    assert case.paged.batch.ancestors[: len(words)].tolist() == words
    out, lse = verify_attention(case.paged.q, case.paged.kv, case.paged.batch, return_lse=True)
    first = 0
    for request in case.requests:
        rows = slice(first, first := first + len(request.parents))
        expected, expected_lse = dense_attention(request)
        assert (out[rows].double() - expected).abs().max() < ATTENTION
        assert (lse[rows].double() - expected_lse).abs().max() < ATTENTION
    assert (out[first:] == 0).all()
