"""The sequential half of semi-autoregressive drafting: a block's tokens, drawn left to right."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import check_workspace
from dspark.ops.draft.walk_checks import check_options, check_walk
from dspark.ops.draft.walk_inputs import (
    DraftVocabulary,
    WalkOutputs,
    WalkTables,
    check_out,
    copy_draft,
    empty_draft,
)
from dspark.ops.draft.walk_reference import sequential_step, walk_reference
from dspark.ops.library import walk as library
from dspark.ops.types import Backend, ConfidenceHead, Draft, Sampling, SequentialHead, Stream

__all__ = ["check_walk", "draft_walk", "draft_walk_workspace", "sequential_step"]


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
    logits_dtype: torch.dtype = torch.float32,
    return_margin: bool = False,
    return_lse: bool = False,
    confidence_hidden: Tensor | None = None,
    vocabulary: DraftVocabulary | None = None,
    tables: WalkTables | None = None,
    out: Draft | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> Draft:
    """Draw a block: ``q_k = softmax(U_k + B(x_{k-1}))`` after the sampling transforms (eq. 4), for k = 1 .. G in turn.

    Slot ``k`` (from 0) is the token at ``position + k + 1``, and that position is the address of its noise. With the
    ``TARGET`` stream a token equals what :func:`~dspark.ops.sample.sample` draws from the same scores (rule
    ``coupled``). ``DRAFT`` noise also carries the anchor's position, so that no round repeats another's.

    Args:
        base_logits: ``[R, G, V]`` float32, float16 or bfloat16, ``U``; ``G >= 1``.
        anchor: ``[R]`` int64, ``x_0``; -1 (or another id outside the vocabulary) is a padded request.
        head: what gives ``B`` (eq. 5 and 6); None is no bias. Weights of any float dtype.
        hidden: ``[R, G, h]`` float, the block's hidden states; gated, recurrent and confidence heads need it.
        confidence_head: what gives ``c_k`` (eq. 7) from ``hidden`` and ``x_{k-1}``; None is no confidence.
        sampling: the drafter's own parameters of the ``R`` requests.
        position: ``[R]`` int64, absolute position of the anchor.
        stream: ``Stream.TARGET`` or ``Stream.DRAFT``.
        return_logits: whether to return the scores that were sampled from; the ratio rule divides by them.
        logits_dtype: what those scores are rounded to, before they are sampled from (contract C2).
        return_margin, return_lse: whether to return these fields of :class:`~dspark.ops.types.Draft`.
        confidence_hidden: ``[R, G, h']`` float, what the confidence head reads in place of ``hidden`` (before the final
            norm, where a checkpoint was trained so).
        vocabulary: the drafter's vocabulary where it is not the target's. ``V`` is then the drafter's: base logits,
            ``W2`` and the returned scores are in it; anchors, tokens and the addresses of noise are the target's.
        tables: of the checkpoint, for the kernels; see :class:`~dspark.ops.draft.walk_inputs.WalkTables`.
        out: a draft whose tensors the result is written into; it has just those that are asked for.
        workspace: ``[bytes]`` uint8, scratch memory of the kernels, :func:`draft_walk_workspace` bytes or more; None
            takes some from the allocator. The reference needs none.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        The draft, ``out`` if that was given. Where a slot's scores are bad (NaN, +inf or all -inf), that token and all
        later ones of the request are -1, their logits -inf and their confidences 0; a padded request is like that from
        slot 0. A confidence that is NaN is 0.

    Raises:
        ValueError: a shape or a layout differs, ``hidden`` is missing, the stream is another one, an option has no use,
            or the backend is unknown or missing.
        TypeError: a dtype differs.

    Computed in float32; the kernels differ from the reference in the order of sums alone. Graph-safe; a request's draft
    depends on its own inputs only. Launches of the kernels: ``G + 2``; ``G`` more for a recurrent head and for a gated
    one without ``tables.gate``; ``3 G`` more where any row may be truncated.

    >>> from dspark.ops import MarkovHead
    >>> w1, w2 = torch.eye(3), torch.eye(3).roll(1, 0)  # each token asks for the next one
    >>> zeros, off = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    >>> draft_walk(
    ...     torch.zeros(1, 4, 3), torch.tensor([1]), head=MarkovHead(w1, w2), hidden=None, confidence_head=None,
    ...     sampling=Sampling(zeros, off, zeros + 1, zeros, off), position=off, stream=Stream.TARGET,
    ...     return_logits=False,
    ... ).tokens.tolist()
    [[2, 0, 1, 2]]
    """
    inputs = check_walk(
        base_logits,
        anchor,
        head,
        hidden,
        confidence_head,
        sampling,
        position,
        stream,
        confidence_hidden=confidence_hidden,
        vocabulary=vocabulary,
        tables=tables,
    )
    outputs = WalkOutputs(return_logits, logits_dtype, return_margin, return_lse)
    check_options(inputs, outputs)
    if out is not None:
        check_out(out, inputs, outputs)
    check_workspace(workspace)
    taken = resolve("draft_walk", backend, base_logits)
    if torch.compiler.is_compiling():
        draft = empty_draft(inputs, outputs) if out is None else out
        library.draft_walk_op(inputs, outputs, draft, workspace, taken)
        return draft
    if taken == "triton":
        from dspark.ops.draft.walk_launch import walk_triton

        draft = empty_draft(inputs, outputs) if out is None else out
        walk_triton(inputs, outputs, draft, workspace)
        return draft
    draft = walk_reference(inputs, outputs)
    return draft if out is None else copy_draft(draft, out)


def draft_walk_workspace(
    base_logits: Tensor,
    *,
    head: SequentialHead | None,
    sampling: Sampling,
    return_margin: bool = False,
    return_lse: bool = False,
    tables: WalkTables | None = None,
) -> int:
    """Bytes of ``workspace`` that :func:`draft_walk` takes for such arguments."""
    from dspark.ops.draft.walk_plan import workspace_bytes

    outputs = WalkOutputs(False, torch.float32, return_margin, return_lse)
    return workspace_bytes(base_logits, head, sampling, outputs, tables)
