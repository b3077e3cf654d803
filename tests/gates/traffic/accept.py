"""Calls of ``accept`` whose traffic is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.ops.accept import accept
from dspark.ops.cost import AcceptCall, Cost, QKind, accept_cost
from dspark.ops.types import DenseQ, DraftDistribution, PointMass, Rows, Rule, Sampling, SparseQ
from tests.gates.traffic.case import Case
from tests.gates.traffic.sample import Cut
from tests.gates.traffic.search import simulate

DIVIDING: tuple[Rule, ...] = ("ratio", "block")
"""Rules that divide by q; on a chain, "recursive" is "ratio"."""

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
    mapped: bool = False,
    cuts: Sequence[Cut] | None = None,
) -> Case:
    """A call of ``accept`` on random logits; most drafts are what the target finds most likely.

    ``mapped`` is a drafter that knows every second token; ``cuts`` truncates the requests.
    """
    kind = f" {'mapped' if mapped else q}" if rule in DIVIDING else ""
    greedy = " greedy" if not temperature else ""
    cut = " truncated" if cuts else ""
    shape = f"rows {'+'.join(map(str, lengths))}, V {vocab_size}, {str(dtype).removeprefix('torch.')}"

    generator = torch.Generator().manual_seed(0)
    num_rows, num_requests, nodes = sum(lengths), len(lengths), max(lengths)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    likely = torch.randint(vocab_size, (num_rows,), generator=generator) // (1 + mapped) * (1 + mapped)
    logits[torch.arange(num_rows), likely] += LIKELY
    tokens = likely.roll(1)
    query_start = torch.tensor([0, *lengths]).cumsum(0)
    place = (query_start[:-1, None] + 1 + torch.arange(nodes - 1)).clamp(max=num_rows - 1)
    distribution = _make_q(q, tokens[place], vocab_size, dtype, generator, mapped) if rule in DIVIDING else None
    of = [r for r, length in enumerate(lengths) for _ in range(length)]
    chosen = [Cut()] * num_requests if cuts is None else cuts
    number = torch.ones(num_requests)
    integer = torch.zeros(num_requests, dtype=torch.int64)
    sampling = Sampling(
        temperature=number * temperature,
        top_k=torch.tensor([cut.top_k for cut in chosen]),
        top_p=torch.tensor([cut.top_p for cut in chosen]),
        min_p=torch.tensor([cut.min_p for cut in chosen]),
        seed=torch.arange(num_requests),
        all_greedy=not temperature,
        any_truncation=cuts is not None,
    )
    logits, verified = logits.to(dtype), Rows(tokens, query_start, integer, nodes)
    rows, ids = logits.float().numpy(), tokens.tolist()

    def run() -> Cost:
        verdict = accept(
            logits,
            verified,
            rule=rule,
            sampling=sampling,
            q=distribution,
            logprobs="raw" if raw else "processed",
            backend="triton",
        )
        found = {
            t: simulate(rows[t], dtype, temperature, chosen[r].top_k, chosen[r].top_p, chosen[r].min_p)
            for t, r in enumerate(of)
            if chosen[r].on and temperature
        }
        threshold = [found[t][1] if t in found else float("-inf") for t in range(num_rows)]
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
            draft_vocab_size=vocab_size // 2 if mapped else None,
            mapped=vocab_size // 2 if mapped else None,
            num_sparse=NUM_SPARSE if q == "sparse" else 0,
            search=None if cuts is None else [search for search, _ in found.values()],
            lines=_lines(lengths, [rows[t, ids[t + 1]] / temperature >= threshold[t] for t in range(num_rows - 1)])
            if found
            else None,
        )
        return accept_cost(call)

    return Case("accept", shape, f"{rule}{kind}{greedy}{cut}", run)


def _lines(lengths: Sequence[int], keeps: Sequence[bool]) -> int:
    """Drafted rows up to and with the first of each request whose draft is cut; ``keeps`` is by row."""
    lines = start = 0
    for length in lengths:
        kept = [*keeps[start : start + length - 1], False] if length else []
        lines += min(kept.index(False) + 1, length - 1) if kept else 0
        start += length
    return lines


def _make_q(
    q: QKind, drafts: torch.Tensor, vocab_size: int, dtype: torch.dtype, generator: torch.Generator, mapped: bool
) -> DraftDistribution:
    """Random q in which every draft has some probability."""
    if q == "point":
        return PointMass()
    if mapped:
        even = torch.arange(vocab_size, dtype=torch.int32)
        ids = torch.where(even % 2 == 0, even // 2, -1)
        return DenseQ(torch.randn(*drafts.shape, vocab_size // 2, generator=generator).to(dtype), ids)
    if q == "dense":
        return DenseQ(torch.randn(*drafts.shape, vocab_size, generator=generator).to(dtype))
    tokens = (drafts.unsqueeze(2) + torch.arange(NUM_SPARSE)) % vocab_size
    return SparseQ(tokens, torch.randn(tokens.shape, generator=generator).log_softmax(-1))


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for: one request, 7 drafts, a vocabulary of 151,936 in bfloat16."""
    lengths, vocab_size = [8], 151_936
    cases = [accept_case(rule, lengths, vocab_size) for rule in ("coupled", "match")]
    for rule in DIVIDING:
        cases += [accept_case(rule, lengths, vocab_size, q=q) for q in ("dense", "sparse", "point")]
        cases.append(accept_case(rule, lengths, vocab_size, mapped=True))
    cut = [Cut(top_k=50, top_p=0.95)]
    return cases + [accept_case(rule, lengths, vocab_size, cuts=cut) for rule in ("coupled", "ratio")]


def cases() -> list[Case]:
    """Small calls of every kind. Sub-tiles are whole: the model does not know in which of them a draw ends."""
    cuts = [Cut(), Cut(), Cut(top_k=20, top_p=0.9), Cut(min_p=0.3)]
    ragged = ([3, 0, 1, 2], 5120)  # two tiles, the second one ragged; a padded request and one without drafts
    return [
        *(accept_case(rule, *ragged, temperature=t) for rule in ("coupled", "match") for t in (0.0, 1.0)),
        *(accept_case(rule, *ragged, q=q) for rule in DIVIDING for q in ("dense", "sparse", "point")),
        *(accept_case(rule, *ragged, temperature=0.0) for rule in DIVIDING),
        accept_case("coupled", [2, 2, 2], 300, dtype=torch.float32, raw=False),
        accept_case("ratio", [2, 2, 2], 300, dtype=torch.float32, raw=False),
        *(accept_case(rule, *ragged, mapped=True) for rule in DIVIDING),
        accept_case("coupled", *ragged, dtype=torch.float16, raw=False, cuts=cuts),
        *(accept_case("match", *ragged, temperature=t, cuts=cuts) for t in (0.0, 1.0)),
        accept_case("ratio", *ragged, cuts=cuts),
        accept_case("ratio", *ragged, mapped=True, cuts=cuts),
        *(accept_case("block", *ragged, q=q, cuts=cuts) for q in ("sparse", "point")),
        accept_case("block", [3, 3], 300, dtype=torch.float32, raw=False, cuts=cuts[:1] * 2),
    ]
