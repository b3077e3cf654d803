"""Walks for the tests, and the same walk as a plain loop over requests and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dspark.ops.draft.walk import draft_walk
from dspark.ops.philox import gumbel
from dspark.ops.sample import sample
from dspark.ops.types import (
    ConfidenceHead,
    Draft,
    GatedHead,
    MarkovHead,
    RNNHead,
    Sampling,
    SequentialHead,
    Stream,
)
from tests.ops.helpers import make_sampling, select

V, RANK, HIDDEN = 19, 6, 10
HEADS = ["none", "markov", "gated", "rnn"]
STREAMS = [Stream.TARGET, Stream.DRAFT]


@dataclass(frozen=True)
class Case:
    """Arguments of a walk."""

    base_logits: Tensor
    anchor: Tensor
    head: SequentialHead | None
    hidden: Tensor | None
    confidence_head: ConfidenceHead | None
    sampling: Sampling
    position: Tensor
    stream: Stream = Stream.TARGET
    return_logits: bool = True

    def walk(self, **options: Any) -> Draft:
        arguments = {f.name: getattr(self, f.name) for f in fields(self)} | options
        return draft_walk(arguments.pop("base_logits"), arguments.pop("anchor"), **arguments)

    def take(self, requests: Sequence[int], draft_len: int) -> Case:
        """Some of the requests, and the first slots of each."""
        rows = torch.tensor(requests, dtype=torch.int64)
        return replace(
            self,
            base_logits=self.base_logits[rows, :draft_len],
            anchor=self.anchor[rows],
            hidden=None if self.hidden is None else self.hidden[rows, :draft_len],
            sampling=select(self.sampling, rows),
            position=self.position[rows],
        )


def make_head(kind: str, g: torch.Generator) -> SequentialHead | None:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    w1, w2 = randn(V, RANK), randn(V, RANK)
    if kind == "markov":
        return MarkovHead(w1, w2)
    if kind == "gated":
        return GatedHead(w1, w2, randn(RANK, HIDDEN + RANK) / 3, randn(RANK))
    if kind == "rnn":
        return RNNHead(w1, w2, randn(3 * RANK, 2 * RANK + HIDDEN) / 3, randn(3 * RANK))
    return None


def make_case(
    head: str = "markov",
    confidence: str = "hidden and token",
    temperature: Sequence[float] = (1.0, 0.0, 0.7),
    draft_len: int = 5,
    seed: int = 0,
    **sampling: Any,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    count = len(temperature)
    sequential = make_head(head, g)
    w1 = None
    if confidence == "hidden and token":
        w1 = torch.randn(V, RANK, generator=g) if sequential is None else sequential.w1
    weight = torch.randn(HIDDEN + (0 if w1 is None else RANK), generator=g) / 2
    return Case(
        base_logits=2 * torch.randn(count, draft_len, V, generator=g),
        anchor=torch.randint(V, (count,), generator=g),
        head=sequential,
        hidden=torch.randn(count, draft_len, HIDDEN, generator=g),
        confidence_head=None if confidence == "none" else ConfidenceHead(weight, torch.tensor(0.3), w1),
        sampling=make_sampling(temperature, **{"seed": [11 * i + seed for i in range(count)], **sampling}),
        position=torch.randint(1000, (count,), generator=g),
    )


def by_hand(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``[R, G]``, scores before the transforms ``[R, G, V]`` and confidence logits ``[R, G]``, in float64.

    One request and one slot at a time, each equation as the paper prints it.
    """
    count, draft_len, _ = case.base_logits.shape
    tokens = torch.empty(count, draft_len, dtype=torch.int64)
    scores = torch.empty(count, draft_len, V, dtype=torch.float64)
    confidence = torch.empty(count, draft_len, dtype=torch.float64)
    head, score_of = case.head, case.confidence_head
    for r in range(count):
        previous = int(case.anchor[r])
        state = torch.zeros(RANK, dtype=torch.float64)
        for k in range(draft_len):
            h = torch.zeros(0) if case.hidden is None else case.hidden[r, k].double()
            bias = torch.zeros(V, dtype=torch.float64)
            if head is not None:
                x, w2 = head.w1[previous].double(), head.w2.double()
                if isinstance(head, MarkovHead):
                    bias = w2 @ x
                elif isinstance(head, GatedHead):
                    gate = head.gate_weight.double() @ torch.cat([h, x]) + head.gate_bias.double()
                    bias = w2 @ (gate.sigmoid() * x)
                else:
                    z = torch.cat([state, x, h])
                    weight, offset = head.joint_weight.double(), head.joint_bias.double()
                    gate = (weight[:RANK] @ z + offset[:RANK]).sigmoid()
                    candidate = (weight[RANK : 2 * RANK] @ z + offset[RANK : 2 * RANK]).tanh()
                    state = gate * state + (1 - gate) * candidate
                    bias = w2 @ (weight[2 * RANK :] @ z + offset[2 * RANK :]).tanh()
            scores[r, k] = case.base_logits[r, k].double() + bias
            if score_of is not None:
                features = h if score_of.w1 is None else torch.cat([h, score_of.w1[previous].double()])
                confidence[r, k] = score_of.weight.double() @ features + score_of.bias.double()
            previous = int(
                sample(
                    scores[r, k : k + 1].float(),
                    select(case.sampling, torch.tensor([r])),
                    case.position[r : r + 1] + k + 1,
                    stream=case.stream,
                    salt=case.position[r : r + 1] if case.stream is Stream.DRAFT else None,
                )
            )
            tokens[r, k] = previous
    return tokens, scores, confidence


def noise_of(case: Case) -> Tensor:
    """Gumbel noise ``[R, G, V]`` at the address that contract C3 gives each slot."""
    slots = [case.position + k + 1 for k in range(case.base_logits.shape[1])]
    salt = case.position if case.stream is Stream.DRAFT else None
    return torch.stack([gumbel(case.sampling.seed, at, V, case.stream, salt=salt) for at in slots], dim=1)
