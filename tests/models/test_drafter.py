"""The DSpark drafter: its network against a dense computation, its paged context, and its limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models import Drafter, DrafterConfig, DSparkDrafter, ModelConfig, PagedCache, query_batch
from dspark.models.cache import paged_attend
from dspark.models.draft_network import DSparkNetwork
from dspark.models.transformer import Attend
from dspark.ops.types import GatedHead, MarkovHead, QueryBatch, RNNHead, Sampling, Stream
from tests.models.helpers import close, poison, scattered_table

VOCAB, HIDDEN, BLOCK, MASK = 61, 32, 6, 60
LAYER_IDS = (-1, 0, 2)
FEATURES = len(LAYER_IDS) * HIDDEN
MODEL = ModelConfig(VOCAB, HIDDEN, 48, 2, 4, 2, head_dim=12, max_position_embeddings=64)
CONFIG = DrafterConfig(
    MODEL, BLOCK, MASK, LAYER_IDS, num_target_layers=4, markov_rank=5, markov_head_type="rnn",
    enable_confidence_head=True, confidence_head_with_markov=True,
)  # fmt: skip


def new_network(config: DrafterConfig = CONFIG) -> DSparkNetwork:
    network = DSparkNetwork(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.data = centre + 0.3 * torch.randn(parameter.shape, generator=generator)
    return network


@pytest.fixture(scope="module")
def drafter() -> DSparkDrafter:
    return DSparkDrafter(new_network(), slots="anchor-first")


class Requests:
    """Requests with committed features, in pages that held NaN before."""

    def __init__(self, drafter: DSparkDrafter, lengths: list[int], page_size: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.drafter, self.page_size = drafter, page_size
        self.features = [torch.randn(n, FEATURES, generator=generator) for n in lengths]
        self.anchor = torch.randint(VOCAB, (len(lengths),), generator=generator)
        self.context = torch.tensor(lengths)
        self.table = scattered_table(len(lengths), max(lengths) + 2 * BLOCK, page_size, seed)
        self.cache: PagedCache = poison(drafter.new_cache(int(self.table.max()) + 1, page_size))
        drafter.extend(torch.cat(self.features), self.rows(torch.zeros_like(self.context), lengths), self.cache)

    def rows(self, context: Tensor, lengths: list[int]) -> QueryBatch:
        return query_batch(self.table, context, lengths, self.page_size)

    def keys(self) -> Tensor:
        return self.cache.stacked.k.clone()

    def block(self, rows: int = BLOCK) -> QueryBatch:
        return query_batch(self.table, self.context, [rows] * len(self.context), self.page_size, bidirectional=True)


def sampling(requests: int, temperature: float = 0.0) -> Sampling:
    zeros = torch.zeros(requests)
    return Sampling(
        zeros + temperature, zeros.long(), zeros + 1, zeros, torch.arange(requests), all_greedy=temperature == 0
    )


def propose(
    drafter: DSparkDrafter, requests: Requests, batch: QueryBatch | None = None, **options: Any
) -> tuple[Tensor, Any]:
    """Tokens and confidence of a greedy draft of a full block."""
    how = {"draft_len": BLOCK, "stream": Stream.TARGET, "return_logits": False, **options}
    rows, greedy = batch or requests.block(), sampling(len(requests.context))
    draft = drafter.propose(requests.anchor, rows, requests.cache, sampling=greedy, position=requests.context, **how)
    return draft.tokens, draft.confidence


def dense_block(network: DSparkNetwork, features: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """One request without pages: hidden states ``[n, h]`` and base logits ``[n, V]``, all of it visible to all rows."""
    length = len(features)
    context = network.context_kv(network.context(features), torch.arange(length))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = torch.cat([context[layer][0], k]), torch.cat([context[layer][1], v])
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))

    token_ids = torch.cat([anchor[None], torch.full((BLOCK - 1,), MASK)])
    hidden = network.block(token_ids, length + torch.arange(BLOCK), attend)
    return hidden, network.lm_head(hidden)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_paged_block_equals_the_dense_network(drafter: DSparkDrafter, page_size: int) -> None:
    """Ragged requests, one without any context, against each alone with a dense attention."""
    requests = Requests(drafter, [13, 0, 7, 20], page_size)
    hidden, base_logits = drafter.block_logits(requests.anchor, requests.block(), requests.cache)
    with torch.no_grad():
        for r, features in enumerate(requests.features):
            expected_hidden, expected_logits = dense_block(drafter.network, features, requests.anchor[r])
            close(hidden[r], expected_hidden)
            close(base_logits[r], expected_logits)


def test_features_projection_is_a_normalised_linear_map(drafter: DSparkDrafter) -> None:
    """Equation 2, written out."""
    network, features = drafter.network, torch.randn(3, FEATURES)
    with torch.no_grad():
        mixed = features @ network.fc.weight.T
        expected = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-6).sqrt() * network.hidden_norm.weight
        close(network.context(features), expected)


def test_every_row_of_a_block_sees_the_last(drafter: DSparkDrafter) -> None:
    """Bidirectional: fewer masks change the first row too."""
    requests = Requests(drafter, [9])
    full, _ = drafter.block_logits(requests.anchor, requests.block(), requests.cache)
    short, _ = drafter.block_logits(requests.anchor, requests.block(3), requests.cache)
    assert short.shape == (1, 3, HIDDEN)
    assert (full[:, :3] - short).abs().max() > 1e-3


def test_context_grows_in_parts_like_in_one(drafter: DSparkDrafter) -> None:
    whole = Requests(drafter, [11, 8])
    parts = Requests(drafter, [11, 8])
    poison(parts.cache)
    for start, counts in (([0, 0], [4, 0]), ([4, 0], [6, 1]), ([10, 1], [1, 7])):
        features = torch.cat([f[s : s + n] for f, s, n in zip(parts.features, start, counts, strict=True)])
        drafter.extend(features, parts.rows(torch.tensor(start), counts), parts.cache)
    for got, expected in zip(propose(drafter, parts), propose(drafter, whole), strict=True):
        close(got, expected)


def test_rejected_rows_and_old_blocks_are_never_seen(drafter: DSparkDrafter) -> None:
    """A round that writes a block and the features of rejected rows leaves no trace in the next one."""
    clean = Requests(drafter, [9, 6])
    used = Requests(drafter, [9, 6])
    drafter.block_logits(used.anchor, used.block(), used.cache)
    junk = torch.full((2 * BLOCK, FEATURES), float("inf"))
    drafter.extend(junk, used.rows(used.context, [BLOCK] * 2), used.cache)
    expected = drafter.block_logits(clean.anchor, clean.block(), clean.cache)
    got = drafter.block_logits(used.anchor, used.block(), used.cache)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_extend_skips_rows_without_a_slot(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [5])
    before = requests.keys()
    batch = requests.rows(requests.context, [2])._replace(slots=torch.tensor([-1, -1]))
    drafter.extend(torch.full((2, FEATURES), 3.0), batch, requests.cache)
    torch.testing.assert_close(requests.keys(), before, rtol=0, atol=0, equal_nan=True)


def test_a_request_drafts_the_same_in_any_company(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [13, 2, 7])
    tokens, confidence = propose(drafter, requests)
    assert tokens.shape == confidence.shape == (3, BLOCK)
    order = [2, 0, 1]
    requests.table, requests.context, requests.anchor = (
        x[order] for x in (requests.table, requests.context, requests.anchor)
    )
    again, confidence_again = propose(drafter, requests)
    assert torch.equal(again, tokens[order])
    close(confidence_again, confidence[order])


def test_p12_padded_requests_touch_nothing(drafter: DSparkDrafter) -> None:
    """Anchor -1, no pages, no context: other requests draft the same, and the pads' numbers stay finite."""
    requests = Requests(drafter, [13, 7])
    tokens, confidence = propose(drafter, requests)
    written = requests.keys()
    pads = torch.full((2, requests.table.shape[1]), -1)
    requests.table = torch.cat([requests.table, pads])
    requests.context = torch.cat([requests.context, torch.zeros(2, dtype=torch.int64)])
    requests.anchor = torch.cat([requests.anchor, torch.full((2,), -1)])
    padded_tokens, padded_confidence = propose(drafter, requests)
    assert torch.equal(padded_tokens[:2], tokens)
    close(padded_confidence[:2], confidence)
    assert padded_confidence.isfinite().all()
    close(requests.keys(), written, nan=True)


def test_shorter_drafts_are_a_prefix(drafter: DSparkDrafter) -> None:
    """draft_len cuts what is drafted; the rows of the block stay those that it was trained on."""
    requests = Requests(drafter, [13, 7])
    tokens, confidence = propose(drafter, requests)
    short, short_confidence = propose(drafter, requests, draft_len=2)
    assert torch.equal(short, tokens[:, :2])
    close(short_confidence, confidence[:, :2])


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


def written_slots(before: Tensor, cache: PagedCache) -> set[int]:
    """Slots whose keys differ from before, ``[L, P, S, Hkv, D]``, in any layer."""
    now = cache.stacked.k
    differs = ~((before == now) | (before.isnan() & now.isnan()))
    return set(differs.flatten(1, 2).flatten(2).any(-1).any(0).nonzero().flatten().tolist())


def test_a_commit_touches_the_slots_of_its_tokens_only(drafter: DSparkDrafter) -> None:
    """And its cost is that of its tokens: the context projection runs on their rows alone."""
    requests = Requests(drafter, [9, 4])
    before = requests.keys()
    batch = requests.rows(requests.context, [2, 1])
    with rows_of(drafter.network.fc) as rows:
        drafter.extend(torch.randn(3, FEATURES), batch, requests.cache)
    assert rows == [3]
    assert written_slots(before, requests.cache) == set(batch.slots.tolist())
    assert len(requests.cache.layers) == MODEL.num_hidden_layers


def test_drafting_after_a_commit_computes_the_block_and_nothing_of_the_context(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [9, 4])
    before = requests.keys()
    batch = requests.block()
    with rows_of(drafter.network.fc, drafter.network.layers[0]) as rows:
        propose(drafter, requests, batch)
    assert rows == [2 * BLOCK]
    assert written_slots(before, requests.cache) == set(batch.slots.tolist())


@contextmanager
def rows_of(*modules: nn.Module) -> Iterator[list[int]]:
    """How many rows each call of these modules gets."""
    rows: list[int] = []
    hooks = [m.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0]))) for m in modules]
    yield rows
    for hook in hooks:
        hook.remove()


def test_p11_draft_beyond_the_block_size_raises(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [5])
    for rows, draft_len, message in (
        (6, 7, r"draft_len must be in 1\.\.6 \(block_size\), got 7"),
        (7, 6, r"max_query_len must be in 1\.\.6 \(block_size\), got 7"),
        (3, 4, r"draft_len must be <= batch.max_query_len \(3\), got 4"),
        (6, 0, r"draft_len must be in 1\.\.6 \(block_size\), got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            propose(drafter, requests, requests.block(rows), draft_len=draft_len)


def test_p10_slot_convention_is_required() -> None:
    network = new_network()
    with pytest.raises(TypeError, match="slots"):
        DSparkDrafter(network)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="slot convention '1\\+N'"):
        DSparkDrafter(network, slots="1+N")  # type: ignore[arg-type]


def test_shapes_are_checked(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [5, 3])
    with pytest.raises(ValueError, match="features"):
        drafter.extend(torch.zeros(2, HIDDEN), requests.rows(requests.context, [1, 1]), requests.cache)
    with pytest.raises(ValueError, match="slots"):
        drafter.extend(torch.zeros(3, FEATURES), requests.rows(requests.context, [1, 1]), requests.cache)
    requests.anchor = requests.anchor[:1]
    with pytest.raises(ValueError, match="positions"):
        propose(drafter, requests)


def test_logits_are_what_the_tokens_were_drawn_from(drafter: DSparkDrafter) -> None:
    requests = Requests(drafter, [13, 7])
    draft = drafter.propose(
        requests.anchor, requests.block(), requests.cache, draft_len=4, sampling=sampling(2, temperature=0.7),
        position=requests.context, stream=Stream.DRAFT, return_logits=True,
    )  # fmt: skip
    assert draft.logits.shape == (2, 4, VOCAB)
    assert draft.logits.gather(-1, draft.tokens[..., None]).isfinite().all()
    assert not draft.logits.requires_grad


@pytest.mark.parametrize(("kind", "head_type"), [("vanilla", MarkovHead), ("gated", GatedHead), ("rnn", RNNHead)])
def test_heads_share_memory_with_the_network(kind: str, head_type: type) -> None:
    config = dataclasses.replace(CONFIG, markov_head_type=kind)  # type: ignore[arg-type]
    network = new_network(config)
    head, confidence = network.sequential_head(), network.confidence()
    assert type(head) is head_type
    assert head.w1.data_ptr() == network.state_dict()["markov_head.markov_w1.weight"].data_ptr()
    assert confidence.weight.shape == (HIDDEN + CONFIG.markov_rank,)
    assert confidence.bias.shape == ()
    assert confidence.w1 is head.w1


def test_dflash_has_no_heads() -> None:
    network = new_network(DrafterConfig(MODEL, BLOCK, MASK, LAYER_IDS, num_target_layers=4))
    assert network.sequential_head() is None
    assert network.confidence() is None
    requests = Requests(DSparkDrafter(network, slots="anchor-first"), [9])
    tokens, confidence = propose(requests.drafter, requests)
    _, base_logits = requests.drafter.block_logits(requests.anchor, requests.block(), requests.cache)
    assert torch.equal(tokens, base_logits.argmax(-1))
    assert confidence is None


def test_confidence_may_read_the_hidden_state_alone() -> None:
    network = new_network(dataclasses.replace(CONFIG, confidence_head_with_markov=False))
    head = network.confidence()
    assert head is not None
    assert head.w1 is None
    requests = Requests(DSparkDrafter(network, slots="anchor-first"), [9])
    _, confidence = propose(requests.drafter, requests)
    hidden, _ = requests.drafter.block_logits(requests.anchor, requests.block(), requests.cache)
    close(confidence, (hidden @ head.weight + head.bias).sigmoid())


def test_training_reaches_every_parameter() -> None:
    """Dense blocks in training: gradients flow to the network through the heads' tensors and the context."""
    network = new_network()
    _, logits = dense_block(network, torch.randn(7, FEATURES), torch.tensor(3))
    head, confidence = network.sequential_head(), network.confidence()
    assert isinstance(head, RNNHead)
    extra = sum((tensor.sum() for tensor in head), torch.tensor(0.0))
    (F.cross_entropy(logits, torch.arange(BLOCK)) + extra + confidence.weight.sum() + confidence.bias).backward()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_drafter_meets_the_protocol(drafter: DSparkDrafter) -> None:
    as_protocol: Drafter = drafter
    assert as_protocol.block_size == BLOCK
    assert as_protocol.feature_layers == LAYER_IDS


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "dflash"])
def test_config_reads_back_what_it_writes(head: str) -> None:
    raw = json.loads((Path(__file__).parents[1] / "golden" / f"draft_{head}" / "config.json").read_text())
    config = DrafterConfig.from_hf(raw)
    written = config.to_hf()
    assert DrafterConfig.from_hf(written) == config
    assert {key: written[key] for key in written if key in raw} == {key: raw[key] for key in written if key in raw}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 64}, "block_size"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"block_size": 0}, "block_size"),
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"target_layer_ids": (3,)}, "last target layer 3"),
        ({"target_layer_ids": (0, 5)}, "target_layer_ids"),
        ({"target_layer_ids": (-2, 1)}, r"target_layer_ids must be in -1\.\.2"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"markov_rank": -1}, "markov_rank"),
        ({"markov_rank": 0}, "needs a Markov head"),
        ({"markov_head_type": "lstm"}, "unknown markov_head_type 'lstm'"),
        ({"model": dataclasses.replace(MODEL, layer_windows=(4, 0))}, "sliding windows"),
    ],
)
def test_wrong_configs_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
