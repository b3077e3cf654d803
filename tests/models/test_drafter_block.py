"""What the drafter's backbone asks of the cache: one bidirectional batch, and new tokens only after a commit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dspark.models import DSparkDrafter, PagedCache
from dspark.models.cache import paged_attend
from dspark.models.transformer import Attend
from dspark.ops.draft.walk_tables import build_walk_tables
from dspark.ops.types import PagedKV, QueryBatch
from tests.models.test_drafter import BLOCK, HIDDEN, LAYER_IDS, MODEL, Requests, new_network, propose


@pytest.fixture(scope="module")
def drafter() -> DSparkDrafter:
    return DSparkDrafter(new_network(), slots="anchor-first")


def test_a_block_is_one_attention_per_layer_for_all_requests(
    drafter: DSparkDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever context lengths: every row of a block sees its whole block, by all ones of its ancestor word."""
    batches: list[QueryBatch] = []
    layers: list[int] = []

    def recorded(cache: PagedCache, batch: QueryBatch, windows: Sequence[int]) -> Attend:
        batches.append(batch)
        attend = paged_attend(cache, batch, windows)

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layers.append(layer)
            assert q.shape[0] == k.shape[0] == 4 * BLOCK
            return attend(layer, q, k, v)

        return attend_layer

    monkeypatch.setattr("dspark.models.drafter.paged_attend", recorded)
    requests = Requests(drafter, [13, 0, 7, 20])
    propose(drafter, requests)
    (batch,) = batches
    assert layers == list(range(MODEL.num_hidden_layers))
    assert batch.ancestors is not None
    assert batch.ancestors.tolist() == [2**BLOCK - 1] * (4 * BLOCK)
    assert batch.context_len.tolist() == [13, 0, 7, 20]
    assert batch.query_start.tolist() == [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK]


def written_slots(before: list[Tensor], caches: list[PagedKV]) -> set[int]:
    """Slots whose keys differ from before in any layer."""
    changed = torch.zeros(before[0].shape[0] * before[0].shape[1], dtype=torch.bool)
    for old, kv in zip(before, caches, strict=True):
        differs = ~((old == kv.k) | (old.isnan() & kv.k.isnan()))
        changed |= differs.flatten(2).any(-1).flatten()
    return set(changed.nonzero().flatten().tolist())


def test_a_commit_touches_the_slots_of_its_tokens_only(drafter: DSparkDrafter) -> None:
    """And its cost is that of its tokens: the context projection runs on their rows alone."""
    requests = Requests(drafter, [9, 4])
    before = [kv.k.clone() for kv in requests.cache.layers]
    batch = requests.rows(requests.context, [2, 1])
    rows: list[int] = []
    hook = drafter.network.fc.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    drafter.extend(torch.randn(3, len(LAYER_IDS) * HIDDEN), batch, requests.cache)
    hook.remove()
    assert rows == [3]
    assert written_slots(before, requests.cache.layers) == set(batch.slots.tolist())
    assert len(requests.cache.layers) == MODEL.num_hidden_layers


def test_drafting_after_a_commit_computes_the_block_and_nothing_of_the_context(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [9, 4])
    rows: list[int] = []
    hook = drafter.network.fc.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    first = drafter.network.layers[0].register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    before = [kv.k.clone() for kv in requests.cache.layers]
    batch = requests.block()
    propose(drafter, requests, batch)
    hook.remove()
    first.remove()
    assert rows == [2 * BLOCK]
    assert written_slots(before, requests.cache.layers) == set(batch.slots.tolist())


def test_tables_change_nothing(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [9, 4])
    expected, _ = propose(drafter, requests)
    with_tables = DSparkDrafter(drafter.network, slots="anchor-first")
    network = drafter.network
    with_tables.tables = build_walk_tables(network.sequential_head(), network.confidence())
    tokens, _ = propose(with_tables, requests)
    assert torch.equal(tokens, expected)
    with_tables.tables = build_walk_tables(None, network.confidence(), chunk=7)
    assert torch.equal(propose(with_tables, requests)[0], expected)
