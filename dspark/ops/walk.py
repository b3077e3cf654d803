"""The sequential half of semi-autoregressive drafting: a block's tokens, drawn left to right."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, check_dtype, check_sampling, check_shape
from dspark.ops.philox import gumbel
from dspark.ops.sample import transform
from dspark.ops.types import (
    Backend,
    ConfidenceHead,
    Draft,
    GatedHead,
    MarkovHead,
    RNNHead,
    Sampling,
    SequentialHead,
    Stream,
)


def draft_walk(
    base_logits: Tensor,
    anchor: Tensor,
    *,
    head: SequentialHead | None,
    hidden: Tensor | None,
    confidence_head: ConfidenceHead | None,
    sampling: Sampling,
    position: Tensor,
    stream: Stream,
    return_logits: bool,
    backend: Backend = "auto",
) -> Draft:
    """Draw a block: ``q_k = softmax(U_k + B(x_{k-1}))`` after the sampling transforms (eq. 4), for k = 1 .. G in turn.

    Slot ``k`` (from 0) is the token at ``position + k + 1``, and that position is the address of its noise. With the
    ``TARGET`` stream a token equals what :func:`~dspark.ops.sample.sample` draws from the same scores (rule
    ``coupled``). ``DRAFT`` noise also carries the anchor's position, so that no round repeats another's.

    Args:
        base_logits: ``[R, G, V]`` float32, float16 or bfloat16, ``U``; ``G >= 1``.
        anchor: ``[R]`` int64, ``x_0``; -1 is a padded request.
        head: what gives ``B`` (eq. 5 and 6); None is no bias. Weights of any float dtype.
        hidden: ``[R, G, h]`` float, the block's hidden states; gated, recurrent and confidence heads need it.
        confidence_head: what gives ``c_k`` (eq. 7) from ``hidden`` and ``x_{k-1}``; None is no confidence.
        sampling: the drafter's own parameters of the ``R`` requests.
        position: ``[R]`` int64, absolute position of the anchor.
        stream: ``Stream.TARGET`` or ``Stream.DRAFT``.
        return_logits: whether to return the scores that were sampled from; the ratio rule divides by them.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        The draft. Where a slot's scores are bad (NaN, +inf or all -inf), that token and all later ones of the request
        are -1, their logits -inf and their confidences 0; a padded request is like that from slot 0. A confidence
        that is NaN is 0.

    Raises:
        ValueError: a shape differs, ``hidden`` is missing, the stream is another one, or the backend is unknown or
            missing.
        TypeError: a dtype differs.

    Computed in float32. Graph-safe; a request's draft depends on its own inputs only.
    """
    _check(base_logits, anchor, head, hidden, confidence_head, sampling, position, stream)
    resolve("draft_walk", backend, base_logits)
    noise = None if sampling.all_greedy else _noise(base_logits, sampling, position, stream)  # [R, G, V]
    if head is not None:
        head = replace(head, w2=head.w2.float())  # once, not in every step

    previous, state = anchor.clamp(min=0), None
    best: list[Tensor] = []
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    for k in range(base_logits.shape[1]):
        scores = base_logits[:, k].float()  # [R, V]
        if head is not None:
            bias, state = sequential_step(head, previous, None if hidden is None else hidden[:, k], state)
            scores = scores + bias
        if return_logits or noise is not None:
            scores = transform(scores, sampling)
        # The first of the largest, or of the NaNs; what follows a bad slot is drawn all the same, and dropped below.
        top, previous = (scores if noise is None else scores + noise[:, k]).max(dim=-1)
        best.append(top)
        tokens.append(previous)
        if return_logits:
            logits.append(scores)

    good = torch.stack(best, dim=1).isfinite() & (anchor >= 0)[:, None]
    dropped = good.cumprod(1) == 0  # [R, G]
    block = torch.stack(tokens, dim=1).masked_fill_(dropped, -1)
    confidence_logits = None
    if confidence_head is not None and hidden is not None:
        confidence_logits = _confidence(confidence_head, hidden, anchor, block)
    return Draft(
        tokens=block,
        logits=torch.stack(logits, dim=1).masked_fill_(dropped[..., None], -torch.inf) if return_logits else None,
        confidence=None if confidence_logits is None else confidence_logits.sigmoid(),
        confidence_logits=confidence_logits,
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


def _noise(base_logits: Tensor, sampling: Sampling, position: Tensor, stream: Stream) -> Tensor:
    """Gumbel noise of all slots, ``[R, G, V]``."""
    _, draft_len, vocab_size = base_logits.shape
    address = position[:, None] + 1 + torch.arange(draft_len, device=position.device)  # [R, G]
    salt = position[:, None].expand_as(address) if stream is Stream.DRAFT else None
    return gumbel(sampling.seed[:, None].expand_as(address), address, vocab_size, stream, salt=salt)


def _confidence(head: ConfidenceHead, hidden: Tensor, anchor: Tensor, tokens: Tensor) -> Tensor:
    """Confidence logits ``[R, G]`` (eq. 7), -inf where nothing was drafted."""
    features = hidden.float()
    if head.w1 is not None:
        previous = torch.cat([anchor[:, None], tokens[:, :-1]], dim=1).clamp(min=0)  # [R, G]
        features = torch.cat([features, F.embedding(previous, head.w1).float()], dim=-1)  # [R, G, h + r]
    logits = features @ head.weight.float() + head.bias.float()
    return logits.masked_fill((tokens < 0) | logits.isnan(), -torch.inf)


def _check(
    base_logits: Tensor,
    anchor: Tensor,
    head: SequentialHead | None,
    hidden: Tensor | None,
    confidence_head: ConfidenceHead | None,
    sampling: Sampling,
    position: Tensor,
    stream: Stream,
) -> None:
    sizes: dict[str, int] = {}
    check_shape("base_logits", base_logits, "R G V", sizes)
    check_dtype("base_logits", base_logits, FLOAT_DTYPES)
    if sizes["G"] == 0:
        raise ValueError(f'base_logits: expected shape "R G V" with G >= 1, got {list(base_logits.shape)}')
    for name, tensor in (("anchor", anchor), ("position", position)):
        check_shape(name, tensor, "R", sizes)
        check_dtype(name, tensor, (torch.int64,))
    check_sampling(sampling, sizes)
    if stream not in (Stream.TARGET, Stream.DRAFT):
        raise ValueError(f"stream: expected Stream.TARGET or Stream.DRAFT, got {stream!r}")
    if hidden is not None:
        check_shape("hidden", hidden, "R G h", sizes)
        check_dtype("hidden", hidden, FLOAT_DTYPES)
    elif confidence_head is not None or isinstance(head, GatedHead | RNNHead):
        needs = type(head if confidence_head is None else confidence_head).__name__
        raise ValueError(f'hidden: {needs} needs the block\'s hidden states "R G h", got None')
    if head is not None:
        _check_head(head, sizes)
    if confidence_head is not None:
        # Of the two concatenated inputs, [h ; W1[x]], the second may be absent.
        check_shape("confidence_head.bias", confidence_head.bias, "", sizes)
        if confidence_head.w1 is None:
            check_shape("confidence_head.weight", confidence_head.weight, "h", sizes)
        else:
            own = {"V": sizes["V"]}
            check_shape("confidence_head.w1", confidence_head.w1, "V r", own)
            check_shape("confidence_head.weight", confidence_head.weight, "[h;r]", {"[h;r]": sizes["h"] + own["r"]})


def _check_head(head: SequentialHead, sizes: dict[str, int]) -> None:
    check_shape("head.w1", head.w1, "V r", sizes)
    check_shape("head.w2", head.w2, "V r", sizes)
    rank = sizes["r"]
    if isinstance(head, GatedHead):
        sizes["[h;r]"] = sizes["h"] + rank
        check_shape("head.gate_weight", head.gate_weight, "r [h;r]", sizes)
        check_shape("head.gate_bias", head.gate_bias, "r", sizes)
    elif isinstance(head, RNNHead):
        sizes["3r"], sizes["[r;r;h]"] = 3 * rank, 2 * rank + sizes["h"]
        check_shape("head.joint_weight", head.joint_weight, "3r [r;r;h]", sizes)
        check_shape("head.joint_bias", head.joint_bias, "3r", sizes)
