"""What a walk's heads make of the previous token alone: built once for a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.types import ConfidenceHead, GatedHead, RNNHead, SequentialHead


class WalkTables(NamedTuple):
    """What depends on the previous token alone, for every token: a product per step becomes a gather.

    Build them once for a checkpoint, with :func:`build_walk_tables`. The reference computes the products.

    Attributes:
        gate: ``[V1, r]`` float32 of a gated head, ``[V1, 3r]`` of a recurrent one: the projection of ``W1``'s rows
            (``V1`` of them). With it a gated head needs no launch of its own in a step.
        confidence: ``[V1]`` float32, the rows' part of the confidence.
    """

    gate: Tensor | None = None
    confidence: Tensor | None = None


@torch.no_grad()
def build_walk_tables(
    head: SequentialHead | None, confidence_head: ConfidenceHead | None, *, chunk: int = 8192
) -> WalkTables:
    """The tables of a head and a confidence head, computed in float32, ``chunk`` rows at a time.

    A gated head's takes 4 r bytes per token and a recurrent head's 12 r, that of the confidence 4.

    >>> w1, w2 = torch.randn(9, 4), torch.randn(9, 4)
    >>> tables = build_walk_tables(GatedHead(w1, w2, torch.randn(4, 6 + 4), torch.zeros(4)), None)
    >>> tables.gate.shape, tables.confidence
    (torch.Size([9, 4]), None)
    """
    gate = confidence = None
    if isinstance(head, GatedHead | RNNHead):
        weight = token_columns(head).float()
        gate = torch.cat([part.float() @ weight.T for part in torch.split(head.w1, chunk)])
    if confidence_head is not None and confidence_head.w1 is not None:
        w1 = confidence_head.w1
        weight = confidence_head.weight[-w1.shape[1] :].float()
        confidence = torch.cat([part.float() @ weight for part in torch.split(w1, chunk)])
    return WalkTables(gate, confidence)


def hidden_columns(head: GatedHead | RNNHead) -> Tensor:
    """The columns of the head's projection that read the hidden state: ``[r, h]`` or ``[3r, h]``."""
    rank = head.w1.shape[1]
    return head.gate_weight[:, :-rank] if isinstance(head, GatedHead) else head.joint_weight[:, 2 * rank :]


def token_columns(head: GatedHead | RNNHead) -> Tensor:
    """The columns that read the previous token's embedding: ``[r, r]`` or ``[3r, r]``."""
    rank = head.w1.shape[1]
    return head.gate_weight[:, -rank:] if isinstance(head, GatedHead) else head.joint_weight[:, rank : 2 * rank]
