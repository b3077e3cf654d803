"""Calls of ``accept`` whose traffic is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.cost import AcceptCall, Cost, QKind, accept_cost
from dspark.ops.types import DenseQ, DraftDistribution, PointMass, Rule, Sampling, SparseQ
from tests.gates.traffic.case import Case

NUM_SPARSE = 32
LIKELY = 14.0
"""What is added to one logit of each row, so that some drafts are accepted in a wide vocabulary too."""


def accept_case(
    rule: Rule,
    lengths: Sequence[int],
    vocab_size: int,
    *,
    q: QKind = "dense",
    temperature: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    raw: bool = True,
) -> Case:
    """A call of ``accept`` on random logits; most drafts are what the target finds most likely."""
    kind = f" {q}" if rule in RULES_OF_Q else ""
    greedy = " greedy" if not temperature else ""
    shape = f"rows {'+'.join(map(str, lengths))}, V {vocab_size}, {str(dtype).removeprefix('torch.')}"

    generator = torch.Generator().manual_seed(0)
    num_rows, num_requests, nodes = sum(lengths), len(lengths), max(lengths)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    likely = torch.randint(vocab_size, (num_rows,), generator=generator)
    logits[torch.arange(num_rows), likely] += LIKELY
    tokens = likely.roll(1)
    query_start = torch.tensor([0, *lengths]).cumsum(0)
    place = (query_start[:-1, None] + 1 + torch.arange(nodes - 1)).clamp(max=num_rows - 1)
    distribution = _make_q(q, tokens[place], vocab_size, dtype, generator) if rule in RULES_OF_Q else None
    number = torch.ones(num_requests)
    integer = torch.zeros(num_requests, dtype=torch.int64)
    sampling = Sampling(
        temperature=number * temperature,
        top_k=integer,
        top_p=number,
        min_p=number * 0,
        seed=torch.arange(num_requests),
        all_greedy=not temperature,
        any_truncation=False,
    )
    logits = logits.to(dtype)

    def run() -> Cost:
        verdict = accept(
            logits,
            tokens,
            query_start,
            rule=rule,
            sampling=sampling,
            position=integer,
            max_query_len=nodes,
            q=distribution,
            logprobs="raw" if raw else "processed",
            backend="triton",
        )
        call = AcceptCall(
            lengths=lengths,
            emitted=verdict.num_emitted.numpy().tolist(),
            rule=rule,
            vocab_size=vocab_size,
            itemsize=dtype.itemsize,
            greedy=not temperature,
            raw=raw,
            q=q,
            q_itemsize=dtype.itemsize,
            num_sparse=NUM_SPARSE if q == "sparse" else 0,
        )
        return accept_cost(call)

    return Case("accept", shape, f"{rule}{kind}{greedy}", run)


def _make_q(
    q: QKind, drafts: torch.Tensor, vocab_size: int, dtype: torch.dtype, generator: torch.Generator
) -> DraftDistribution:
    """Random q in which every draft has some probability."""
    if q == "point":
        return PointMass()
    if q == "dense":
        return DenseQ(torch.randn(*drafts.shape, vocab_size, generator=generator).to(dtype))
    tokens = (drafts.unsqueeze(2) + torch.arange(NUM_SPARSE)) % vocab_size
    return SparseQ(tokens, torch.randn(tokens.shape, generator=generator).log_softmax(-1))


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for: one request, 7 drafts, a vocabulary of 151,936 in bfloat16."""
    lengths, vocab_size = [8], 151_936
    cases = [accept_case(rule, lengths, vocab_size) for rule in ("coupled", "match")]
    for rule in RULES_OF_Q:
        cases += [accept_case(rule, lengths, vocab_size, q=q) for q in ("dense", "sparse", "point")]
    return cases


def cases() -> list[Case]:
    """Small calls of every kind. Sub-tiles are whole: the model does not know in which of them a draw ends."""
    ragged = ([3, 0, 1, 2], 5120)  # two tiles, the second one ragged; a padded request and one without drafts
    return [
        *(accept_case(rule, *ragged, temperature=t) for rule in ("coupled", "match") for t in (0.0, 1.0)),
        *(accept_case(rule, *ragged, q=q) for rule in RULES_OF_Q for q in ("dense", "sparse", "point")),
        *(accept_case(rule, *ragged, temperature=0.0) for rule in RULES_OF_Q),
        accept_case("coupled", [2, 2, 2], 300, dtype=torch.float32, raw=False),
        accept_case("ratio", [2, 2, 2], 300, dtype=torch.float32, raw=False),
    ]
