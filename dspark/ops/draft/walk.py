"""The sequential half of semi-autoregressive drafting: a block's tokens, drawn left to right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from dspark.ops.call import FLOATS, Arg, GroupArg, ScalarArg, TensorArg
from dspark.ops.draft import walk_launch, walk_plan, walk_reference
from dspark.ops.draft.walk_reference import WalkInputs
from dspark.ops.draft.walk_tables import WalkTables
from dspark.ops.groups import HEAD, SAMPLING, check_head
from dspark.ops.op import Op
from dspark.ops.types import (
    Backend,
    ConfidenceHead,
    Draft,
    DraftVocabulary,
    GatedHead,
    RNNHead,
    Sampling,
    SequentialHead,
    Stream,
    W1Rows,
)

BLOCK: dict[str, Arg] = {
    "hidden": TensorArg("R G h", FLOATS, optional=True, layout="rows"),
    "confidence_head": GroupArg(
        {
            ConfidenceHead: {
                "weight": TensorArg("f", FLOATS, layout="dense"),
                "bias": TensorArg("", FLOATS),
                "w1": TensorArg("V1 e", FLOATS, optional=True, layout="rows"),
            }
        },
        optional=True,
    ),
    "confidence_hidden": TensorArg("R G c", FLOATS, optional=True, layout="rows"),
    "sampling": SAMPLING,
    "position": TensorArg("R", (torch.int64,), layout="dense"),
    "stream": ScalarArg("SymInt", choices=(Stream.TARGET, Stream.DRAFT)),
}
"""What the certified walk takes too."""
BASE_LOGITS = TensorArg("R G V", FLOATS, layout="rows")
ANCHOR = TensorArg("R", (torch.int64,), layout="dense")
_VOCABULARY = GroupArg(
    {
        DraftVocabulary: {
            "target_ids": TensorArg("V", (torch.int64,), layout="dense"),
            "draft_ids": TensorArg("Vt", (torch.int32,), layout="dense"),
            "w1_rows": ScalarArg("str", choices=get_args(W1Rows)),
        }
    },
    optional=True,
)
_TABLES = GroupArg(
    {
        WalkTables: {
            "gate": TensorArg("V1 g", (torch.float32,), optional=True, layout="contiguous"),
            "confidence": TensorArg("V1", (torch.float32,), optional=True, layout="contiguous"),
        }
    },
    optional=True,
)


def numbers(when: str) -> TensorArg:
    """A number per step that is a result if an argument is there."""
    return TensorArg("R G", (torch.float32,), written=True, layout="contiguous", when=when)


TOKENS = TensorArg("R G", (torch.int64,), written=True, layout="contiguous")
_OUT = GroupArg(
    {
        Draft: {
            "tokens": TOKENS,
            "logits": TensorArg("R G V", "logits_dtype", written=True, layout="rows", when="return_logits"),
            "confidence": numbers("confidence_head"),
            "confidence_logits": numbers("confidence_head"),
            "margin": numbers("return_margin"),
            "lse": numbers("return_lse"),
        }
    },
    optional=True,
)


def check_block(sizes: Mapping[str, int], inputs: WalkInputs) -> None:
    """Check what the table of a walk cannot say.

    Raises:
        ValueError: something is missing, useless or of another size.
    """
    if sizes["G"] == 0:
        shape = list(inputs.base_logits.shape)
        raise ValueError(f'base_logits: expected shape "R G V" with G >= 1, got {shape}')
    target_rows = inputs.vocabulary is not None and inputs.vocabulary.w1_rows == "target"
    rows = inputs.num_anchors if target_rows else sizes["V"]
    check_head(sizes, inputs.head, inputs.hidden, rows)
    confidence = inputs.confidence_head
    if confidence is None:
        if inputs.confidence_hidden is not None:
            raise ValueError("confidence_hidden: there is no confidence_head to read it; pass None")
        return
    if inputs.of_confidence is None:
        raise ValueError('hidden: ConfidenceHead needs the block\'s hidden states "R G h", got None')
    if confidence.w1 is not None and sizes["V1"] != rows:
        got = list(confidence.w1.shape)
        raise ValueError(f'confidence_head.w1: expected shape "V1 e" with V1 = {rows}, got {got}')
    # Of the two concatenated inputs, [h ; W1[x]], the second may be absent.
    letter = "h" if inputs.confidence_hidden is None else "c"
    words = letter if confidence.w1 is None else f"{letter}+e"
    width = sizes[letter] + (0 if confidence.w1 is None else sizes["e"])
    if sizes["f"] != width:
        got = list(confidence.weight.shape)
        raise ValueError(f'confidence_head.weight: expected shape "{words}" with {words} = {width}, got {got}')


def _check(sizes: dict[str, int], out: Draft | None, **given: Any) -> None:
    inputs = WalkInputs(**given)
    check_block(sizes, inputs)
    if inputs.logits_dtype is not torch.float32 and not inputs.return_logits:
        raise ValueError(f"logits_dtype: no logits are returned; pass torch.float32, got {inputs.logits_dtype}")
    if inputs.tables is None:
        return
    gate, confidence = inputs.tables
    if gate is not None:
        if not isinstance(inputs.head, GatedHead | RNNHead):
            raise ValueError(f"tables.gate: {type(inputs.head).__name__} has no gate; pass None")
        width = sizes["r"] if isinstance(inputs.head, GatedHead) else 3 * sizes["r"]
        if sizes["g"] != width:
            raise ValueError(f'tables.gate: expected shape "V1 g" with g = {width}, got {list(gate.shape)}')
    if confidence is not None and (inputs.confidence_head is None or inputs.confidence_head.w1 is None):
        raise ValueError("tables.confidence: no confidence reads the previous token; pass None")


_DRAFT_WALK = Op(
    "draft_walk",
    {
        "base_logits": BASE_LOGITS,
        "anchor": ANCHOR,
        "head": HEAD,
        **BLOCK,
        "vocabulary": _VOCABULARY,
        "tables": _TABLES,
        "return_logits": ScalarArg("bool"),
        "logits_dtype": ScalarArg("ScalarType", choices=FLOATS),
        "return_margin": ScalarArg("bool"),
        "return_lse": ScalarArg("bool"),
        "out": _OUT,
    },
    reference=walk_reference.walk,
    plan=walk_plan.plan,
    run=walk_launch.run,
    results=["out"],
    also=_check,
    empty="R",
    workspace=True,
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

    Step ``k`` (from 0) draws the token at ``position + k + 1``, and that position is the address of its noise. With the
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
        tables: of the checkpoint, for the kernels; see :class:`~dspark.ops.draft.walk_tables.WalkTables`.
        out: a draft whose tensors the result is written into; it has just those that are asked for.
        workspace: ``[bytes]`` uint8, scratch memory of the kernels, :func:`draft_walk_workspace` bytes or more; None
            takes some from the allocator. The reference needs none.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        The draft, ``out`` if that was given. Where a step's scores are bad (NaN, +inf or all -inf), that token and all
        later ones of the request are -1, their logits -inf and their confidences 0; a padded request is like that from
        step 0. A confidence that is NaN is 0.

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
    inputs = WalkInputs(
        base_logits,
        anchor,
        head,
        hidden,
        confidence_head,
        confidence_hidden,
        sampling,
        position,
        stream,
        vocabulary,
        tables,
        return_logits,
        logits_dtype,
        return_margin,
        return_lse,
    )
    draft: Draft = _DRAFT_WALK(backend, *inputs, out, workspace=workspace)
    return draft


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
    table = None if tables is None else tables.gate
    return walk_plan.workspace_bytes(base_logits, head, sampling, table, margin=return_margin, lse=return_lse)
