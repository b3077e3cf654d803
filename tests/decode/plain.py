"""What plain decoding would give: token for token, and in law."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from dspark.decode import Completion, Decoder, SamplingParams
from dspark.models import Target
from dspark.models.cache import query_batch
from dspark.ops.types import Rule
from tests.tolerances import CHI_SQUARE

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 318), min_size=1, max_size=24),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
            top_k=st.sampled_from([0, 0, 5]),
            top_p=st.sampled_from([1.0, 0.8]),
            min_p=st.sampled_from([0.0, 0.05]),
            seed=st.integers(-(2**63), 2**63 - 1),
            max_tokens=st.integers(1, 20),
        ),
    ),
    min_size=1,
    max_size=4,
)
"""Prompts of a vocabulary of 319, each with its parameters."""


def plain(target: Target, prompt: list[int], params: SamplingParams, rule: Rule = "coupled") -> Completion:
    return Decoder(target, rule=rule).generate([prompt], params)[0]


def exact_law(target: Target, prompt: list[int], length: int, temperature: float) -> torch.Tensor:
    """Probability of every continuation, ``[V] * length``, from dense passes over all of them."""
    vocab = target.vocab_size
    law = torch.ones(1, dtype=torch.float64)
    for depth in range(length):
        prefixes = [prompt + list(p) for p in itertools.product(range(vocab), repeat=depth)]
        rows = len(prefixes[0])
        table = torch.arange(len(prefixes))[:, None]
        batch = query_batch(table, torch.zeros(len(prefixes), dtype=torch.int64), [rows] * len(prefixes), 64)
        hidden, _ = target.forward(torch.tensor(prefixes).flatten(), batch, target.new_cache(len(prefixes), 64))
        logits = target.logits(hidden.unflatten(0, (-1, rows))[:, -1])
        law = (law[:, None] * (logits.double() / temperature).softmax(-1)).flatten()
    return law


def assert_plain_law(decoder: Decoder, seeds: int) -> list[Completion]:
    """Chi-square of four tokens after a prompt over so many seeds; returns what was decoded.

    With 16,000 seeds and a vocabulary of 4 (256 outcomes) a bias of a few per cent in one token fails it.
    """
    target, vocab, length, temperature = decoder.target, decoder.target.vocab_size, 4, 0.9
    expected = exact_law(target, [1, 2], length, temperature) * seeds
    params = [SamplingParams(temperature=temperature, seed=s, max_tokens=length) for s in range(seeds)]
    completions = decoder.generate([[1, 2]] * seeds, params)
    tokens = torch.tensor([c.token_ids for c in completions])
    assert tokens.shape == (seeds, length)
    counts = torch.bincount((tokens * vocab ** torch.arange(length).flip(0)).sum(1), minlength=vocab**length)
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic = ((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()
    degrees = torch.tensor(common.sum().item(), dtype=torch.float64)
    assert torch.special.gammaincc(degrees / 2, statistic / 2) > CHI_SQUARE
    return completions
