"""The paged decoder against transformers' own models, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dspark.models.cache import PagedCache, query_batch
from dspark.models.target import Target
from tests.models.helpers import LLAMA3, as_target, close, poison, random_hf_model, scattered_table

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3_tied_bias": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_windows": ("qwen3", {"head_dim": 12, **WINDOWS}),
    "qwen3_yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2_linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama_bias": ("llama", {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 32}}),
}
LENGTHS = [29, 17, 24]


class Case:
    """A model pair, three texts, and transformers' results for them."""

    def __init__(self, name: str) -> None:
        model_type, changes = MODELS[name]
        self.hf = random_hf_model(model_type, changes)
        self.target = as_target(self.hf)
        generator = torch.Generator().manual_seed(1)
        self.texts = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
        with torch.no_grad():
            self.results = [self.hf(text[None], output_hidden_states=True) for text in self.texts]


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(params=[1, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class Session:
    """Paged decoding of the three texts, with the bookkeeping that a decoder does."""

    def __init__(self, target: Target, texts: list[Tensor], page_size: int) -> None:
        self.target, self.texts, self.page_size = target, texts, page_size
        room = max(len(text) for text in texts) + 8
        self.table = scattered_table(len(texts), room, page_size)
        self.cache: PagedCache = poison(target.new_cache(int(self.table.max()) + 1, page_size))
        self.done = [0] * len(texts)

    def run(self, rows: list[Tensor], features: tuple[int, ...] = ()) -> tuple[list[Tensor], Tensor, Tensor]:
        """Logits of each request's rows, after what is committed; commits nothing."""
        lengths = [len(row) for row in rows]
        batch = query_batch(self.table, torch.tensor(self.done), lengths, self.page_size)
        hidden, taken = self.target.forward(torch.cat(rows), batch, self.cache, features)
        return list(self.target.logits(hidden).split(lengths)), hidden, taken

    def advance(self, counts: list[int]) -> list[Tensor]:
        """Feed the next ``counts`` tokens of each text and commit them."""
        rows = [text[done : done + n] for text, done, n in zip(self.texts, self.done, counts, strict=True)]
        logits, _, _ = self.run(rows)
        self.done = [done + n for done, n in zip(self.done, counts, strict=True)]
        return logits


def check(case: Case, session: Session, logits: list[Tensor]) -> None:
    """``logits`` are those of the rows that were just committed."""
    for request, (got, stop) in enumerate(zip(logits, session.done, strict=True)):
        close(got, case.results[request].logits[0, stop - len(got) : stop])


ONE_BY_ONE = [[length - 12 for length in LENGTHS], *[[1, 1, 1]] * 12]


@pytest.mark.parametrize(
    "chunks", [[LENGTHS], [[16, 5, 0], [0, 11, 1], [13, 1, 23]], ONE_BY_ONE], ids=["whole", "chunks", "decode"]
)
def test_prefill_and_decoding_of_a_ragged_batch(case: Case, page_size: int, chunks: list[list[int]]) -> None:
    session = Session(case.target, case.texts, page_size)
    for counts in chunks:
        check(case, session, session.advance(counts))
    assert session.done == LENGTHS


def test_verify_ragged_drafts_and_roll_back(case: Case, page_size: int) -> None:
    """Rows of an anchor and its drafts, right or wrong; wrong ones are overwritten by the next round."""
    session = Session(case.target, case.texts, page_size)
    session.advance([9, 6, 8])
    generator = torch.Generator().manual_seed(2)
    for drafts, right in (([3, 0, 7], [2, 0, 0]), ([0, 5, 1], [0, 4, 1]), ([7, 2, 4], [3, 0, 4])):
        rows = []
        for text, done, proposed, good in zip(session.texts, session.done, drafts, right, strict=True):
            row = text[done : done + 1 + proposed].clone()
            row[1 + good :] = torch.randint(61, (proposed - good,), generator=generator)
            rows.append(row)
        logits, _, _ = session.run(rows)
        session.done = [done + 1 + good for done, good in zip(session.done, right, strict=True)]
        check(case, session, [got[: 1 + good] for got, good in zip(logits, right, strict=True)])


def test_features_are_layer_outputs(case: Case) -> None:
    """Feature l is transformers' hidden_states[l + 1]; -1 is the embedding; order and repetition are the caller's."""
    session = Session(case.target, case.texts, 4)
    _, hidden, features = session.run(case.texts, (1, -1, 0, 1))
    states = [torch.cat([result.hidden_states[i][0] for result in case.results]) for i in range(4)]
    expected = torch.cat([states[2], states[0], states[1], states[2]], dim=-1)
    close(features, expected)
    close(hidden, states[3])


@pytest.fixture(scope="module")
def plain() -> Case:
    return Case("qwen3")


def test_p07_padding_ids_are_never_an_index(plain: Case) -> None:
    """Padded rows after the last request's: id -1, slot -1; the other rows keep their bits."""
    session = Session(plain.target, plain.texts, 16)
    batch = query_batch(session.table, torch.tensor([0, 0, 0]), LENGTHS, 16)
    expected, _ = plain.target.forward(torch.cat(plain.texts), batch, session.cache)
    pads = torch.full((5,), -1)
    padded = batch._replace(positions=torch.cat([batch.positions, pads * 0]), slots=torch.cat([batch.slots, pads]))
    before = session.cache.stacked.k.clone()
    hidden, _ = plain.target.forward(torch.cat([*plain.texts, pads]), padded, session.cache)
    close(hidden[: sum(LENGTHS)], expected)
    assert not hidden[sum(LENGTHS) :].isnan().any()
    close(session.cache.stacked.k, before, nan=True)


def test_p13_beyond_max_position_embeddings(plain: Case) -> None:
    """The cache, not a table of cosines, bounds a text: 80 tokens where the configuration says 64."""
    text = torch.randint(61, (80,), generator=torch.Generator().manual_seed(3))
    session = Session(plain.target, [text], 16)
    with torch.no_grad():
        expected = plain.hf(text[None]).logits[0]
    for start in (0, 61, 62, 63, 64, 65, 66):
        stop = 80 if start == 66 else max(61, start + 1)
        got = session.advance([stop - start])[0]
        close(got, expected[start:stop])


def test_results_carry_no_gradient(plain: Case) -> None:
    session = Session(plain.target, plain.texts, 16)
    logits, hidden, features = session.run(plain.texts, (0,))
    assert not any(x.requires_grad for x in (*logits, hidden, features))


def test_low_precision_keeps_its_dtype() -> None:
    network = as_target(random_hf_model("qwen3", {"head_dim": 12})).network
    target = Target(network.to(torch.bfloat16))
    assert target.dtype == torch.bfloat16
    table = scattered_table(1, 8, 4)
    cache = target.new_cache(4, 4)
    assert cache.layers[0].k.dtype == torch.bfloat16
    batch = query_batch(table, torch.tensor([0]), [5], 4)
    hidden, features = target.forward(torch.arange(5), batch, cache, (-1, 0))
    assert hidden.dtype == features.dtype == target.logits(hidden).dtype == torch.bfloat16


def test_bad_arguments_raise(plain: Case) -> None:
    session = Session(plain.target, plain.texts, 16)
    batch = query_batch(session.table, torch.tensor([0, 0, 0]), [1, 1, 1], 16)
    with pytest.raises(ValueError, match="positions"):
        plain.target.forward(torch.tensor([1, 2]), batch, session.cache)
    for layer in (3, -2):
        with pytest.raises(ValueError, match="feature_layers"):
            plain.target.forward(torch.tensor([1, 2, 3]), batch, session.cache, (0, layer))


def test_reference_is_what_it_claims(plain: Case) -> None:
    """The comparison is with transformers' own class, and its random logits are wide enough to tell errors."""
    assert isinstance(plain.hf, transformers.Qwen3ForCausalLM)
    assert plain.results[0].logits.std() > 0.5
