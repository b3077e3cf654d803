"""The sequential walk as ``torch.ops.dspark.draft_walk``."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.draft.walk_inputs import DraftVocabulary, W1Rows, WalkInputs, WalkOutputs, WalkTables
from dspark.ops.library.define import define
from dspark.ops.library.rows import SAMPLING, flat
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

_HEADS = {"MarkovHead": MarkovHead, "GatedHead": GatedHead, "RNNHead": RNNHead}
_SCHEMA = (
    "(Tensor base_logits, Tensor anchor, str head_kind, Tensor[] head, Tensor? hidden, Tensor?[] confidence_head, "
    f"Tensor? confidence_hidden, {SAMPLING}, Tensor position, int stream, str w1_rows, Tensor[] vocabulary, "
    "Tensor?[] tables, Tensor(a!) out_tokens, Tensor(b!)? out_logits, Tensor(c!)? out_confidence, "
    "Tensor(d!)? out_confidence_logits, Tensor(e!)? out_margin, Tensor(f!)? out_lse, Tensor(g!)? workspace, "
    "str backend) -> ()"
)


def draft_walk_op(
    inputs: WalkInputs, outputs: WalkOutputs, out: Draft, workspace: Tensor | None, backend: Backend
) -> None:
    """:func:`dspark.ops.draft_walk` as ``torch.ops.dspark.draft_walk``; what is asked for is what ``out`` has."""
    torch.ops.dspark.draft_walk(*flat_inputs(inputs), *flat_draft(out), workspace, backend)


def flat_inputs(inputs: WalkInputs) -> tuple[object, ...]:
    """The op's arguments up to ``tables``."""
    confidence, vocabulary, tables = inputs.confidence_head, inputs.vocabulary, inputs.tables
    return (
        inputs.base_logits,
        inputs.anchor,
        *flat_head(inputs.head),
        inputs.hidden,
        [] if confidence is None else [confidence.weight, confidence.bias, confidence.w1],
        inputs.confidence_hidden,
        *flat(inputs.sampling),
        inputs.position,
        int(inputs.stream),
        "none" if vocabulary is None else vocabulary.w1_rows,
        [] if vocabulary is None else [vocabulary.target_ids, vocabulary.draft_ids],
        [] if tables is None else [tables.gate, tables.confidence],
    )


def flat_draft(out: Draft) -> tuple[Tensor | None, ...]:
    """The op's outputs."""
    return out.tokens, out.logits, out.confidence, out.confidence_logits, out.margin, out.lse


def flat_head(head: SequentialHead | None) -> tuple[str, list[Tensor]]:
    """Its kind and its fields in order."""
    return ("none", []) if head is None else (type(head).__name__, list(head))


def head_of(kind: str, tensors: list[Tensor]) -> SequentialHead | None:
    """The head that was flattened."""
    head: SequentialHead | None = None if kind == "none" else _HEADS[kind](*tensors)
    return head


def _draft_walk(
    base_logits: Tensor,
    anchor: Tensor,
    head_kind: str,
    head: list[Tensor],
    hidden: Tensor | None,
    confidence_head: list[Tensor | None],
    confidence_hidden: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    all_greedy: bool,
    any_truncation: bool,
    position: Tensor,
    stream: int,
    w1_rows: W1Rows,
    vocabulary: list[Tensor],
    tables: list[Tensor | None],
    out_tokens: Tensor,
    out_logits: Tensor | None,
    out_confidence: Tensor | None,
    out_confidence_logits: Tensor | None,
    out_margin: Tensor | None,
    out_lse: Tensor | None,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.draft.walk import draft_walk

    confidence = None
    if confidence_head:
        weight, bias, w1 = confidence_head
        assert weight is not None
        assert bias is not None
        confidence = ConfidenceHead(weight, bias, w1)
    draft_walk(
        base_logits,
        anchor,
        head=head_of(head_kind, head),
        hidden=hidden,
        confidence_head=confidence,
        sampling=Sampling(temperature, top_k, top_p, min_p, seed, all_greedy, any_truncation),
        position=position,
        stream=Stream(stream),
        return_logits=out_logits is not None,
        logits_dtype=torch.float32 if out_logits is None else out_logits.dtype,
        return_margin=out_margin is not None,
        return_lse=out_lse is not None,
        confidence_hidden=confidence_hidden,
        vocabulary=DraftVocabulary(vocabulary[0], vocabulary[1], w1_rows) if vocabulary else None,
        tables=WalkTables(*tables) if tables else None,
        out=Draft(out_tokens, out_logits, out_confidence, out_confidence_logits, out_margin, out_lse),
        workspace=workspace,
        backend=backend,
    )


define("draft_walk", _SCHEMA, _draft_walk)
