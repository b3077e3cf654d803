"""Checks of a draft walk's arguments."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from dspark.ops.checks import FLOAT_DTYPES, check_dtype, check_sampling, check_shape
from dspark.ops.draft.walk_inputs import DraftVocabulary, W1Rows, WalkInputs, WalkOutputs, WalkTables
from dspark.ops.types import ConfidenceHead, GatedHead, RNNHead, Sampling, SequentialHead, Stream


def check_walk(
    base_logits: Tensor,
    anchor: Tensor,
    head: SequentialHead | None,
    hidden: Tensor | None,
    confidence_head: ConfidenceHead | None,
    sampling: Sampling,
    position: Tensor,
    stream: Stream,
    *,
    confidence_hidden: Tensor | None = None,
    vocabulary: DraftVocabulary | None = None,
    tables: WalkTables | None = None,
) -> WalkInputs:
    """Check what drafting takes, a chain or a tree, and return it; raises as :func:`dspark.ops.draft_walk` does.

    The tables are left to :func:`check_options`.
    """
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
    sizes["V1"] = sizes["V"] if vocabulary is None else _check_vocabulary(vocabulary, sizes["V"])
    if hidden is not None:
        check_shape("hidden", hidden, "R G h", sizes)
        check_dtype("hidden", hidden, FLOAT_DTYPES)
    elif isinstance(head, GatedHead | RNNHead) or (confidence_head is not None and confidence_hidden is None):
        needs = type(head if confidence_head is None else confidence_head).__name__
        raise ValueError(f'hidden: {needs} needs the block\'s hidden states "R G h", got None')
    if head is not None:
        _check_head(head, sizes, vocabulary)
    if confidence_hidden is not None:
        if confidence_head is None:
            raise ValueError("confidence_hidden: there is no confidence_head to read it; pass None")
        sizes["h"] = confidence_hidden.shape[-1] if isinstance(confidence_hidden, Tensor) else 0
        check_shape("confidence_hidden", confidence_hidden, "R G h", sizes)
        check_dtype("confidence_hidden", confidence_hidden, FLOAT_DTYPES)
    if confidence_head is not None:
        # Of the two concatenated inputs, [h ; W1[x]], the second may be absent.
        check_shape("confidence_head.bias", confidence_head.bias, "", sizes)
        if confidence_head.w1 is None:
            check_shape("confidence_head.weight", confidence_head.weight, "h", sizes)
        else:
            letter = "V" if vocabulary is None else "V1"
            own = {letter: sizes["V1"]}
            check_shape("confidence_head.w1", confidence_head.w1, f"{letter} r", own)
            check_shape("confidence_head.weight", confidence_head.weight, "[h;r]", {"[h;r]": sizes["h"] + own["r"]})
    return WalkInputs(
        base_logits,
        anchor,
        head,
        hidden,
        confidence_head,
        confidence_hidden,
        sampling,
        position,
        Stream(stream),
        vocabulary,
        tables,
    )


def check_options(inputs: WalkInputs, outputs: WalkOutputs) -> None:
    """Check the options of a walk whose tensors :func:`check_walk` has seen.

    Raises:
        TypeError, ValueError: an option does not fit, or nothing uses it.
    """
    if outputs.logits_dtype not in FLOAT_DTYPES:
        raise TypeError(f"logits_dtype: expected float32, float16 or bfloat16, got {outputs.logits_dtype}")
    if outputs.logits_dtype is not torch.float32 and not outputs.logits:
        raise ValueError(f"logits_dtype: no logits are returned; pass torch.float32, got {outputs.logits_dtype}")
    tables = inputs.tables
    if tables is None:
        return
    if tables.gate is not None:
        if not isinstance(inputs.head, GatedHead | RNNHead):
            raise ValueError(f"tables.gate: {type(inputs.head).__name__} has no gate; pass None")
        rows, rank = inputs.head.w1.shape
        width = rank if isinstance(inputs.head, GatedHead) else 3 * rank
        check_shape("tables.gate", tables.gate, "V1 gates", {"V1": rows, "gates": width})
        check_dtype("tables.gate", tables.gate, (torch.float32,))
    if tables.confidence is not None:
        if inputs.confidence_head is None or inputs.confidence_head.w1 is None:
            raise ValueError("tables.confidence: no confidence reads the previous token; pass None")
        check_shape("tables.confidence", tables.confidence, "V1", {"V1": inputs.confidence_head.w1.shape[0]})
        check_dtype("tables.confidence", tables.confidence, (torch.float32,))


def _check_vocabulary(vocabulary: DraftVocabulary, draft_size: int) -> int:
    """Rows that W1 has."""
    if vocabulary.w1_rows not in get_args(W1Rows):
        raise ValueError(f"vocabulary.w1_rows: expected 'target' or 'draft', got {vocabulary.w1_rows!r}")
    own = {"Vd": draft_size}
    check_shape("vocabulary.target_ids", vocabulary.target_ids, "Vd", own)
    check_dtype("vocabulary.target_ids", vocabulary.target_ids, (torch.int64,))
    check_shape("vocabulary.draft_ids", vocabulary.draft_ids, "V", own)
    check_dtype("vocabulary.draft_ids", vocabulary.draft_ids, (torch.int32,))
    return own["V"] if vocabulary.w1_rows == "target" else draft_size


def _check_head(head: SequentialHead, sizes: dict[str, int], vocabulary: DraftVocabulary | None) -> None:
    check_shape("head.w1", head.w1, "V r" if vocabulary is None else "V1 r", sizes)
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
