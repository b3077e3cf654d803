"""Walks by the kernels in Triton's interpreter, and what they may differ in from the reference."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dspark.ops.draft.walk_plan import WalkConfig
from dspark.ops.draft.walk_reference import WalkInputs, walk, walk_noise
from dspark.ops.op import OPS
from dspark.ops.types import Draft
from tests.ops.draft.walks import Case
from tests.tolerances import LOGITS

TINY = WalkConfig(block_rows=4, block_vocab=16, block_rank=16, hold=True, num_warps=4, block_hidden=16)
PARTS = replace(TINY, hold=False, block_rank=16, block_state=16)
"""W2 and the state in parts of the rank."""


def inputs_of(case: Case, **changes: Any) -> WalkInputs:
    """The arguments of a case; all that a walk can return, but for what ``changes`` says."""
    given = {f.name: getattr(case, f.name) for f in fields(case)}
    returned = {"return_logits": True, "return_margin": True, "return_lse": True}
    return WalkInputs(**{"confidence_hidden": None, **given, **returned, **changes})


TOKENS = {"return_logits": False, "return_margin": False, "return_lse": False}
"""Changes to :func:`inputs_of` for a walk that returns tokens alone."""


def blank(inputs: WalkInputs) -> Draft:
    """A draft that holds what no op would write."""
    requests, draft_len, vocab_size = inputs.base_logits.shape

    def number(wanted: bool) -> Tensor | None:
        return torch.full((requests, draft_len), float("nan")) if wanted else None

    confident = inputs.confidence_head is not None
    scores = torch.full((requests, draft_len, vocab_size), float("nan"), dtype=inputs.logits_dtype)
    return Draft(
        tokens=torch.full((requests, draft_len), -77),
        logits=scores if inputs.return_logits else None,
        confidence=number(confident),
        confidence_logits=number(confident),
        margin=number(inputs.return_margin),
        lse=number(inputs.return_lse),
    )


def run(inputs: WalkInputs, config: WalkConfig | None = TINY, **options: Any) -> Draft:
    """What the kernels say, cut as ``config`` says."""
    out: Draft = OPS["draft_walk"]("triton", *inputs, blank(inputs), config=config, **options)
    return out


def assert_agrees(inputs: WalkInputs, config: WalkConfig | None = TINY) -> Draft:
    """The kernels draw what the reference draws, up to a tie that the order of a sum decides; floats agree up to it."""
    expected, out = walk(*inputs), run(inputs, config)
    same = agreeing_steps(inputs, out.tokens, expected.tokens)
    for name in ("logits", "confidence", "confidence_logits", "margin", "lse"):
        mine, theirs = getattr(out, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine[same].float(), theirs[same].float(), rtol=0, atol=LOGITS, msg=name)
    return out


def agreeing_steps(inputs: WalkInputs, tokens: Tensor, expected: Tensor) -> Tensor:
    """``[R, G]``: the steps before a request's first difference, which is found to be a near-tie."""
    same = (tokens == expected).long().cumprod(1).bool()
    for r, k in (~same & torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)).nonzero().tolist():
        logits = walk(*inputs._replace(return_logits=True)).logits
        assert logits is not None
        scores = logits[r, k].float() + (0 if inputs.sampling.all_greedy else walk_noise(inputs)[r, k])
        top = scores.topk(2).values
        assert top[0] - top[1] < LOGITS, f"request {r}, step {k}: {tokens[r, k]} is drawn, not {expected[r, k]}"
    return same


def assert_same_bits(a: Draft, b: Draft, rows: Any = slice(None), others: Any = slice(None)) -> None:
    for field in Draft._fields:
        mine, theirs = getattr(a, field), getattr(b, field)
        if mine is not None:
            assert torch.equal(mine[rows], theirs[others]), field
