"""Calls of ``draft_walk`` whose traffic is counted."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.cost import Cost
from dspark.ops.cost.walk import WalkCall, certified_cost, walk_cost
from dspark.ops.draft.certified import draft_walk_certified
from dspark.ops.draft.certified_table import build_bias_table
from dspark.ops.draft.walk import draft_walk
from dspark.ops.draft.walk_tables import build_walk_tables
from dspark.ops.types import (
    ConfidenceHead,
    GatedHead,
    MarkovHead,
    RNNHead,
    Sampling,
    SequentialHead,
    Stream,
)
from tests.gates.traffic.case import Case

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def walk_case(call: WalkCall, certified: tuple[int, int] | None = None) -> Case:
    """A call on random numbers; ``certified`` is ``(top_k, top_m)`` of the certified walk."""
    generator = torch.Generator().manual_seed(0)
    weights, logits, states = DTYPES[call.weight_itemsize], DTYPES[call.itemsize], DTYPES[call.hidden_itemsize]

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weights)

    vocab_size, rank, hidden_size = call.vocab_size, call.rank, call.hidden_size
    block = (call.requests, call.draft_len)
    head = _head(call, randn)
    confidence = None
    if call.confidence != "none":
        w1 = head.w1 if head is not None and call.confidence == "hidden and token" else None
        confidence = ConfidenceHead(randn(hidden_size + (0 if w1 is None else rank)), randn(1)[0], w1)
    scale = 30.0 if certified else 1.0  # so that the base scores decide, and every step is certified
    base = (scale * torch.randn(*block, vocab_size, generator=generator)).to(logits)
    anchor = torch.randint(vocab_size, block[:1], generator=generator)
    number, integer = torch.ones(call.requests), torch.zeros(call.requests, dtype=torch.int64)
    hidden = torch.randn(*block, hidden_size, generator=generator).to(states) if hidden_size else None
    arguments = {
        "head": head,
        "hidden": hidden,
        "confidence_head": confidence,
        "sampling": Sampling(
            number * (not call.greedy), integer, number, number * 0, integer + 5, call.greedy, any_truncation=False
        ),
        "position": integer,
        "stream": Stream.TARGET,
        "backend": "triton",
    }
    tables = build_walk_tables(head, confidence) if call.tables else None
    bias_table = None
    if certified is not None:
        assert isinstance(head, MarkovHead)
        bias_table = build_bias_table(head, top_m=certified[1])

    def run() -> Cost:
        if bias_table is None or certified is None:
            draft_walk(
                base,
                anchor,
                return_logits=call.logits_itemsize > 0,
                logits_dtype=DTYPES[call.logits_itemsize or 4],
                return_margin=call.margin,
                return_lse=call.lse,
                tables=tables,
                **arguments,  # type: ignore[arg-type]
            )
            return walk_cost(call)
        result = draft_walk_certified(
            base,
            anchor,
            table=bias_table,
            top_k=certified[0],
            fallback=False,
            **arguments,  # type: ignore[arg-type]
        )
        assert result.certified.numpy().tolist() == [call.draft_len] * call.requests
        return certified_cost(call, top_k=certified[0], top_m=certified[1])

    kind = f"{call.head}{' greedy' if call.greedy else ''}{' certified' if certified else ''}"
    shape = f"R {call.requests}, G {call.draft_len}, V {vocab_size}, r {rank}"
    return Case("walk", shape, kind, run)


def _head(call: WalkCall, randn: object) -> SequentialHead | None:
    assert callable(randn)
    rank, hidden = call.rank, call.hidden_size
    if call.head == "none":
        return None
    w1, w2 = randn(call.vocab_size, rank), randn(call.vocab_size, rank)
    if call.head == "gated":
        return GatedHead(w1, w2, randn(rank, hidden + rank), randn(rank))
    if call.head == "rnn":
        return RNNHead(w1, w2, randn(3 * rank, 2 * rank + hidden), randn(3 * rank))
    return MarkovHead(w1, w2)


def stated_cases() -> list[Case]:
    """Of the full vocabulary, one step of it: the model is linear in the block's length."""
    return [walk_case(WalkCall(requests=8, draft_len=1, vocab_size=151_936))]


def cases() -> list[Case]:
    """Small calls of every kind: three tiles, the last one ragged."""
    token, states = "hidden and token", 40
    return [
        walk_case(WalkCall(3, 2, 300, 16, hidden_size=states, confidence=token)),  # type: ignore[arg-type]
        walk_case(WalkCall(2, 2, 300, 24, greedy=True, logits_itemsize=2, margin=True, lse=True)),
        walk_case(WalkCall(17, 2, 300, 16)),
        walk_case(WalkCall(17, 2, 200, 40, itemsize=4, weight_itemsize=4, logits_itemsize=4, greedy=True)),
        walk_case(WalkCall(2, 2, 300, 0, head="none", hidden_size=states, confidence="hidden")),
        walk_case(WalkCall(2, 2, 150, 40, head="gated", hidden_size=states, confidence=token, tables=True)),  # type: ignore[arg-type]
        walk_case(WalkCall(2, 2, 150, 40, head="gated", hidden_size=states, greedy=True)),
        walk_case(WalkCall(2, 2, 150, 40, head="rnn", hidden_size=states, greedy=True)),
        walk_case(WalkCall(2, 2, 150, 40, head="rnn", hidden_size=states, greedy=True, tables=True)),
        walk_case(WalkCall(1, 2, 1500, 16, hidden_size=states, confidence=token), (12, 10)),  # type: ignore[arg-type]
    ]
