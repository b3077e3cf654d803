"""Checks of a drafted tree's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.checks import FLOAT_DTYPES, check_dtype, check_sampling, check_shape
from dspark.ops.types import GatedHead, RNNHead, Sampling, SequentialHead


def check_block(
    base_logits: Tensor,
    anchor: Tensor,
    head: SequentialHead | None,
    hidden: Tensor | None,
    sampling: Sampling,
    position: Tensor,
) -> None:
    """Check what drafting a tree takes; raises as :func:`dspark.ops.draft_walk` does."""
    sizes: dict[str, int] = {}
    check_shape("base_logits", base_logits, "R G V", sizes)
    check_dtype("base_logits", base_logits, FLOAT_DTYPES)
    if sizes["G"] == 0:
        raise ValueError(f'base_logits: expected shape "R G V" with G >= 1, got {list(base_logits.shape)}')
    for name, tensor in (("anchor", anchor), ("position", position)):
        check_shape(name, tensor, "R", sizes)
        check_dtype(name, tensor, (torch.int64,))
    check_sampling(sampling, sizes)
    if hidden is not None:
        check_shape("hidden", hidden, "R G h", sizes)
        check_dtype("hidden", hidden, FLOAT_DTYPES)
    elif isinstance(head, GatedHead | RNNHead):
        raise ValueError(f'hidden: {type(head).__name__} needs the block\'s hidden states "R G h", got None')
    if head is None:
        return
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
