"""Walks by the kernels in Triton's interpreter, and what they may differ in from the reference."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dspark.ops.draft.walk_inputs import WalkInputs, WalkOutputs, empty_draft
from dspark.ops.draft.walk_launch import walk_triton
from dspark.ops.draft.walk_plan import WalkConfig
from dspark.ops.draft.walk_reference import walk_noise, walk_reference
from dspark.ops.types import Draft
from tests.ops.draft.walks import Case
from tests.tolerances import LOGITS

TINY = WalkConfig(block_rows=4, block_vocab=16, block_rank=16, hold=True, num_warps=4, block_hidden=16)
PARTS = replace(TINY, hold=False, block_rank=16, block_state=16)
"""W2 and the state in parts of the rank."""
ALL = WalkOutputs(logits=True, margin=True, lse=True)


def inputs_of(case: Case, **changes: Any) -> WalkInputs:
    given = {f.name: getattr(case, f.name) for f in fields(case) if f.name != "return_logits"}
    return WalkInputs(**{"confidence_hidden": None, **given, **changes})


def blank(inputs: WalkInputs, outputs: WalkOutputs) -> Draft:
    """A draft that holds what no op would write."""
    out = empty_draft(inputs, outputs)
    for field in out._fields:
        tensor = getattr(out, field)
        if tensor is not None:
            tensor.fill_(-77 if tensor.dtype is torch.int64 else float("nan"))
    return out


def run(inputs: WalkInputs, outputs: WalkOutputs = ALL, config: WalkConfig | None = TINY) -> Draft:
    """What the kernels say, cut as ``config`` says."""
    out = blank(inputs, outputs)
    walk_triton(inputs, outputs, out, None, config)
    return out


def assert_agrees(inputs: WalkInputs, outputs: WalkOutputs = ALL, config: WalkConfig | None = TINY) -> Draft:
    """The kernels draw what the reference draws, up to a tie that the order of a sum decides; floats agree up to it."""
    expected, out = walk_reference(inputs, outputs), run(inputs, outputs, config)
    same = agreeing_slots(inputs, out.tokens, expected.tokens)
    for name in ("logits", "confidence", "confidence_logits", "margin", "lse"):
        mine, theirs = getattr(out, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine[same].float(), theirs[same].float(), rtol=0, atol=LOGITS, msg=name)
    return out


def agreeing_slots(inputs: WalkInputs, tokens: Tensor, expected: Tensor) -> Tensor:
    """``[R, G]``: the slots before a request's first difference, which is found to be a near-tie."""
    same = (tokens == expected).long().cumprod(1).bool()
    for r, k in (~same & torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)).nonzero().tolist():
        logits = walk_reference(inputs, WalkOutputs(logits=True)).logits
        assert logits is not None
        scores = logits[r, k].float() + (0 if inputs.sampling.all_greedy else walk_noise(inputs)[r, k])
        top = scores.topk(2).values
        assert top[0] - top[1] < LOGITS, f"request {r}, slot {k}: {tokens[r, k]} is drawn, not {expected[r, k]}"
    return same


def assert_same_bits(a: Draft, b: Draft, rows: Any = slice(None), others: Any = slice(None)) -> None:
    for field in Draft._fields:
        mine, theirs = getattr(a, field), getattr(b, field)
        if mine is not None:
            assert torch.equal(mine[rows], theirs[others]), field
