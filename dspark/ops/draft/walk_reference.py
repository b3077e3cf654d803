"""The torch reference of :func:`dspark.ops.draft_walk`: the executable specification of the sequential walk."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.draft.walk_tables import WalkTables
from dspark.ops.philox import gumbel, gumbel_of
from dspark.ops.sample.reference import transform
from dspark.ops.types import (
    ConfidenceHead,
    Draft,
    DraftVocabulary,
    GatedHead,
    MarkovHead,
    Sampling,
    SequentialHead,
    Stream,
)


class WalkInputs(NamedTuple):
    """The inputs of :func:`dspark.ops.draft_walk` by its names, in the order in which the op declares them."""

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
    return_logits: bool = False
    logits_dtype: torch.dtype = torch.float32
    return_margin: bool = False
    return_lse: bool = False

    @property
    def num_anchors(self) -> int:
        """Ids that an anchor may have."""
        return self.base_logits.shape[2] if self.vocabulary is None else self.vocabulary.draft_ids.shape[0]

    @property
    def of_confidence(self) -> Tensor | None:
        """The hidden states that the confidence head reads."""
        return self.hidden if self.confidence_hidden is None else self.confidence_hidden


def walk(*values: Any) -> Draft:
    """Draw a block; arguments are :class:`WalkInputs`, checked before, and the result is that of ``draft_walk``.

    Computed in float32. Graph-safe.
    """
    inputs = WalkInputs(*values)
    base, anchor, sampling, head = inputs.base_logits, inputs.anchor, inputs.sampling, inputs.head
    noise = None if sampling.all_greedy else walk_noise(inputs)  # [R, G, V]
    if head is not None:
        head = head._replace(w1=_w1_rows(head.w1, inputs.vocabulary), w2=head.w2.float())  # once, not in every step

    scored = inputs.return_logits or inputs.return_lse
    begins = (anchor >= 0) & (anchor < inputs.num_anchors)
    previous, state = first_row(anchor, begins, inputs.vocabulary), None
    best: list[Tensor] = []
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    margins: list[Tensor] = []
    for k in range(base.shape[1]):
        scores = base[:, k].float()  # [R, V]
        if head is not None:
            bias, state = sequential_step(head, previous, None if inputs.hidden is None else inputs.hidden[:, k], state)
            scores = scores + bias
        if inputs.return_margin:
            margins.append(_margin(scores))
        if scored or noise is not None:
            scores = transform(scores, sampling).to(inputs.logits_dtype)  # what is returned is what is sampled from
        # The first of the largest, or of the NaNs; what follows a bad step is drawn all the same, and dropped below.
        top, token = (scores.float() if noise is None else scores.float() + noise[:, k]).max(dim=-1)
        best.append(top)
        tokens.append(token)
        logits.append(scores)
        previous = token
        if inputs.vocabulary is not None and inputs.vocabulary.w1_rows == "target":
            previous = inputs.vocabulary.target_ids[token]

    good = torch.stack(best, dim=1).isfinite() & begins[:, None]
    dropped = good.cumprod(1) == 0  # [R, G]
    block = torch.stack(tokens, dim=1)
    if inputs.vocabulary is not None:
        block = inputs.vocabulary.target_ids[block]
    block = block.masked_fill_(dropped, -1)
    confidence_logits, seen = None, inputs.of_confidence
    if inputs.confidence_head is not None and seen is not None:
        confidence_logits = _confidence(inputs.confidence_head, seen, anchor, block, inputs.vocabulary)
    sampled_from = torch.stack(logits, dim=1) if scored else None
    lse = None
    if sampled_from is not None and inputs.return_lse:
        lse = sampled_from.float().logsumexp(-1).masked_fill(dropped, -torch.inf)
    if sampled_from is not None and inputs.return_logits:
        sampled_from = sampled_from.masked_fill(dropped[..., None], -torch.inf)
    return Draft(
        tokens=block,
        logits=sampled_from if inputs.return_logits else None,
        confidence=None if confidence_logits is None else confidence_logits.sigmoid(),
        confidence_logits=confidence_logits,
        margin=torch.stack(margins, dim=1).masked_fill(dropped, 0.0) if inputs.return_margin else None,
        lse=lse,
    )


def sequential_step(
    head: SequentialHead, previous: Tensor, hidden: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One step of a sequential head: the bias that a token puts on the next one's logits.

    Args:
        head: a Markov (eq. 5), gated or recurrent (eq. 6) head.
        previous: ``[N]`` int64, ``x_{k-1}``, in the vocabulary.
        hidden: ``[N, h]`` float, ``h_k``; a Markov head does not read it.
        state: ``[N, r]`` float32 that the step before returned; None before the first step, and with other heads than
            the recurrent one.

    Returns:
        The bias ``[N, V]`` float32 and the next step's state.

    Raises:
        ValueError: a gated or recurrent head without ``hidden``.

    Computed in float32; differentiable. Graph-safe.
    """
    embedding = F.embedding(previous, head.w1).float()  # [N, r]
    if isinstance(head, MarkovHead):
        return F.linear(embedding, head.w2.float()), None
    if hidden is None:
        raise ValueError(f'hidden: {type(head).__name__} needs the block\'s hidden states "N h", got None')
    hidden = hidden.float()
    if isinstance(head, GatedHead):
        gate = F.linear(torch.cat([hidden, embedding], dim=-1), head.gate_weight.float(), head.gate_bias.float())
        return F.linear(gate.sigmoid() * embedding, head.w2.float()), None
    state = torch.zeros_like(embedding) if state is None else state
    joint = F.linear(
        torch.cat([state, embedding, hidden], dim=-1), head.joint_weight.float(), head.joint_bias.float()
    )  # [N, 3r]
    gate, candidate, output = joint.chunk(3, dim=-1)
    state = torch.lerp(candidate.tanh(), state, gate.sigmoid())
    return F.linear(output.tanh(), head.w2.float()), state


def walk_noise(inputs: WalkInputs) -> Tensor:
    """Gumbel noise of all steps ``[R, G, V]``: that of the target's token ids."""
    position, seed = inputs.position, inputs.sampling.seed
    _, draft_len, vocab_size = inputs.base_logits.shape
    address = position[:, None] + 1 + torch.arange(draft_len, device=position.device)  # [R, G]
    salt = position[:, None].expand_as(address) if inputs.stream == Stream.DRAFT else None
    seed = seed[:, None].expand_as(address)
    if inputs.vocabulary is not None:
        return gumbel_of(seed, address, inputs.vocabulary.target_ids, inputs.stream, salt=salt)
    return gumbel(seed, address, vocab_size, inputs.stream, salt=salt)


def first_row(anchor: Tensor, begins: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """``[R]``: the row of W1 that belongs to each anchor; some row where there is no anchor."""
    anchor = torch.where(begins, anchor, 0)
    if vocabulary is None or vocabulary.w1_rows == "target":
        return anchor
    row = vocabulary.draft_ids[anchor].long()
    return torch.where(row < 0, vocabulary.target_ids.shape[0], row)


def _w1_rows(w1: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """W1, with a row of zeros after the last where a token may have none."""
    return w1 if vocabulary is None or vocabulary.w1_rows == "target" else F.pad(w1, (0, 0, 0, 1))


def _margin(logits: Tensor) -> Tensor:
    """``p1 - p2`` of the softmax, ``[R]``."""
    top, others = logits.max(dim=-1, keepdim=True)
    gap = logits.scatter(-1, others, -torch.inf).amax(-1) - top.squeeze(-1)
    return (1 - gap.exp()) / (logits - top).exp().sum(-1)


def _confidence(
    head: ConfidenceHead, hidden: Tensor, anchor: Tensor, tokens: Tensor, vocabulary: DraftVocabulary | None
) -> Tensor:
    """Confidence logits ``[R, G]`` (eq. 7), -inf where nothing was drafted."""
    features = hidden.float()
    if head.w1 is not None:
        previous = torch.cat([anchor[:, None], tokens[:, :-1]], dim=1).clamp(min=0)  # [R, G]
        previous = torch.where(tokens < 0, 0, previous)  # such a step's is not read, and may be no token
        row = first_row(previous, previous >= 0, vocabulary)
        features = torch.cat([features, F.embedding(row, _w1_rows(head.w1, vocabulary)).float()], dim=-1)
    logits = features @ head.weight.float() + head.bias.float()
    return logits.masked_fill((tokens < 0) | logits.isnan(), -torch.inf)
