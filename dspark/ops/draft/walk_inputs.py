"""What a draft walk reads, as it travels between its parts: inputs, a reduced vocabulary, tables of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dspark.ops.checks import check_dtype, check_shape
from dspark.ops.types import ConfidenceHead, Draft, GatedHead, RNNHead, Sampling, SequentialHead, Stream

W1Rows = Literal["target", "draft"]


class DraftVocabulary(NamedTuple):
    """A drafter's own, smaller vocabulary, and where its tokens are in the target's.

    Attributes:
        target_ids: ``[Vd]`` int64, the target's id of each draft id; no two are the same.
        draft_ids: ``[V]`` int32, the draft id of each target id, -1 where there is none: what
            :class:`~dspark.ops.types.DenseQ` takes.
        w1_rows: whose ids number the rows of ``W1``: ``"target"``, so that every token has an embedding (speculators),
            or ``"draft"``. Then an anchor that the drafter's vocabulary lacks has none, and counts as a row of zeros.
    """

    target_ids: Tensor
    draft_ids: Tensor
    w1_rows: W1Rows

    @classmethod
    def from_offsets(cls, d2t: Tensor, target_vocab_size: int, *, w1_rows: W1Rows) -> DraftVocabulary:
        """From the ``d2t`` tensor of EAGLE-3 and speculators: the target's id is the draft id plus its entry.

        Args:
            d2t: ``[Vd]`` integers.
            target_vocab_size: ``V``.
            w1_rows: see the class.

        Raises:
            ValueError: an id lies outside of the target's vocabulary, or two are the same. Reads the device.

        >>> DraftVocabulary.from_offsets(torch.tensor([0, 2, 2]), 6, w1_rows="target").target_ids.tolist()
        [0, 3, 4]
        """
        ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
        inside = (ids >= 0) & (ids < target_vocab_size)
        if not bool(inside.all()) or len(set(ids.tolist())) < len(ids):
            raise ValueError(f"d2t: expected different ids in [0, {target_vocab_size}) as id + d2t[id]")
        draft_ids = torch.full((target_vocab_size,), -1, dtype=torch.int32, device=ids.device)
        draft_ids[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        return cls(ids, draft_ids, w1_rows)


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


@dataclass(frozen=True)
class WalkInputs:
    """The inputs of :func:`dspark.ops.draft_walk`, by its names."""

    base_logits: Tensor
    anchor: Tensor
    head: SequentialHead | None
    hidden: Tensor | None
    confidence_head: ConfidenceHead | None
    confidence_hidden: Tensor | None
    sampling: Sampling
    position: Tensor
    stream: Stream
    vocabulary: DraftVocabulary | None = None
    tables: WalkTables | None = None

    @property
    def num_anchors(self) -> int:
        """Ids that an anchor may have."""
        return self.base_logits.shape[2] if self.vocabulary is None else self.vocabulary.draft_ids.shape[0]

    @property
    def of_confidence(self) -> Tensor | None:
        """The hidden states that the confidence head reads."""
        return self.hidden if self.confidence_hidden is None else self.confidence_hidden


@dataclass(frozen=True)
class WalkOutputs:
    """What is asked of a walk beside its tokens."""

    logits: bool
    logits_dtype: torch.dtype = torch.float32
    margin: bool = False
    lse: bool = False


_OUT = {
    "tokens": ("R G", torch.int64),
    "logits": ("R G V", None),
    "confidence": ("R G", torch.float32),
    "confidence_logits": ("R G", torch.float32),
    "margin": ("R G", torch.float32),
    "lse": ("R G", torch.float32),
}


def empty_draft(inputs: WalkInputs, outputs: WalkOutputs) -> Draft:
    """A draft to be written."""
    base = inputs.base_logits
    block = base.shape[:2]

    def number(wanted: bool) -> Tensor | None:
        return base.new_empty(block, dtype=torch.float32) if wanted else None

    confident = inputs.confidence_head is not None
    return Draft(
        tokens=inputs.anchor.new_empty(block),
        logits=base.new_empty(base.shape, dtype=outputs.logits_dtype) if outputs.logits else None,
        confidence=number(confident),
        confidence_logits=number(confident),
        margin=number(outputs.margin),
        lse=number(outputs.lse),
    )


def check_out(out: Draft, inputs: WalkInputs, outputs: WalkOutputs) -> None:
    """Check that ``out`` has the tensors that are asked for, and no others.

    Raises:
        TypeError, ValueError: it does not.
    """
    if not isinstance(out, Draft):
        raise TypeError(f"out: expected a Draft, got {type(out).__name__}")
    sizes = dict(zip("RGV", inputs.base_logits.shape, strict=True))
    confident = inputs.confidence_head is not None
    wanted = {
        "tokens": True,
        "logits": outputs.logits,
        "confidence": confident,
        "confidence_logits": confident,
        "margin": outputs.margin,
        "lse": outputs.lse,
    }
    for name, (pattern, dtype) in _OUT.items():
        tensor = getattr(out, name)
        if not wanted[name]:
            if tensor is not None:
                raise ValueError(f"out.{name}: expected None, nothing is asked for; got {list(tensor.shape)}")
            continue
        check_shape(f"out.{name}", tensor, pattern, sizes)
        check_dtype(f"out.{name}", tensor, (dtype or outputs.logits_dtype,))


def copy_draft(draft: Draft, out: Draft) -> Draft:
    """Write a draft into the tensors of another."""
    for name in _OUT:
        if getattr(out, name) is not None:
            getattr(out, name).copy_(getattr(draft, name))
    return out


def head_rank(head: SequentialHead | None) -> int:
    """``r``, 0 without a head."""
    return 0 if head is None else head.w1.shape[1]
