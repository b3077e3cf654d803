"""Launch of the kernels behind ``draft_walk``: groups of tensors, and what is launched with them step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.draft.walk_plan import WalkPlan, state_weight
from dspark.ops.draft.walk_reference import WalkInputs
from dspark.ops.draft.walk_tables import hidden_columns
from dspark.ops.launch import padded
from dspark.ops.sample.launch import run_truncate
from dspark.ops.types import Draft, GatedHead, MarkovHead, RNNHead


class Vocabulary(NamedTuple):
    """A :class:`~dspark.ops.types.DraftVocabulary`; ``draft_ids`` is None unless they number the rows of W1."""

    target_ids: Tensor
    draft_ids: Tensor | None


class Block(NamedTuple):
    """Where a step finds its previous token: ``anchor [R]`` int64, and ``keys [R, G]`` int64 of the steps."""

    anchor: Tensor
    keys: Tensor
    vocabulary: Vocabulary | None


class StepHead(NamedTuple):
    """A sequential head as a step reads it.

    Attributes:
        w1: rows that W2 is applied to; None where ``given`` is there.
        w2: ``[V, r]``.
        given: ``[R, r]`` float32, what W2 is applied to, of the launch before.
        gate: ``[R, G, r]`` float32, the hidden state's part of a gate.
        gate_table: ``[V1, r]`` float32, the previous token's.
    """

    w1: Tensor | None
    w2: Tensor
    given: Tensor | None
    gate: Tensor | None
    gate_table: Tensor | None


class Noise(NamedTuple):
    """The address of a request's noise, ``[R]`` int64 each: its key, and the position of its anchor."""

    seed: Tensor
    position: Tensor


class Stats(NamedTuple):
    """Statistics of the tiles, planes of float32 ``[R, G, num_tiles]``; None where nobody asks for what they make.

    Attributes:
        margin: the largest logit before temperature and truncation, the second, the sum of ``exp(logit - largest)``.
        lse: the largest score that is sampled from, and the sum of ``exp(score - largest)``.
    """

    margin: Tensor | None
    lse: Tensor | None


class Drawing(NamedTuple):
    """What a step draws with, and what it writes beside the keys.

    Attributes:
        block: see there; the keys are written.
        temperature: ``[R]`` float32.
        noise: None where all requests are greedy.
        resume: ``[R]`` int64, the first step that is to be drawn; None: all are.
        scores: ``[R, G, V]`` that are sampled from, or None.
        stats: see there.
    """

    block: Block
    temperature: Tensor
    noise: Noise | None
    resume: Tensor | None
    scores: Tensor | None
    stats: Stats


class Confidence(NamedTuple):
    """A confidence head, and what it reads; with a table ``w1`` is None."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    w1: Tensor | None
    table: Tensor | None


class Memory(NamedTuple):
    """Scratch memory; None is not taken.

    Attributes:
        keys: of the steps.
        projected: what heads make of the hidden states.
        given: what W2 is applied to.
        states: of a recurrent head, before and after a step in turn.
        margin, lse: see :class:`Stats`.
        raw: logits of a step, before they are truncated.
        threshold: the least score that is kept.
        planes: of the search for it.
    """

    keys: Tensor
    projected: Tensor | None = None
    given: Tensor | None = None
    states: Tensor | None = None
    margin: Tensor | None = None
    lse: Tensor | None = None
    raw: Tensor | None = None
    threshold: Tensor | None = None
    planes: Tensor | None = None


def run(plan: WalkPlan, regions: Sequence[Tensor], *values: Any) -> None:
    """Launch a walk from its first step to its last."""
    *given, draft = values
    inputs, memory = WalkInputs(*given), memory_of(plan, regions)
    head, hidden = inputs.head, inputs.hidden
    if isinstance(head, GatedHead | RNNHead):
        bias = head.gate_bias if isinstance(head, GatedHead) else head.joint_bias
        plan.begin(hidden, hidden_columns(head), bias, memory.projected, memory.keys)
    else:
        plan.begin(None, None, None, None, memory.keys)
    run_steps(plan, inputs, draft, memory)


def memory_of(plan: WalkPlan, regions: Sequence[Tensor]) -> Memory:
    """The regions of a plan's sizes by their names."""
    memory = Memory(**dict(zip(plan.names, regions, strict=True)))
    return memory._replace(keys=memory.keys.view(torch.int64))


def run_steps(plan: WalkPlan, inputs: WalkInputs, draft: Draft, memory: Memory, resume: Tensor | None = None) -> None:
    """Launch what follows once the keys are there; ``resume`` is the first step ``[R]`` that is to be drawn."""
    base, head, tables, sampling = inputs.base_logits, inputs.head, inputs.tables, inputs.sampling
    vocabulary = None
    if inputs.vocabulary is not None:
        target_ids, draft_ids, w1_rows = inputs.vocabulary
        vocabulary = Vocabulary(target_ids, draft_ids if w1_rows == "draft" else None)
    block = Block(inputs.anchor, memory.keys, vocabulary)
    noise = None if sampling.all_greedy else Noise(sampling.seed, inputs.position)
    stats = Stats(memory.margin, memory.lse)
    drawing = Drawing(block, sampling.temperature, noise, resume, draft.logits, stats)
    stepping = drawing
    if plan.draw is not None:  # the step writes its logits alone
        stepping = Drawing(block, sampling.temperature, None, None, memory.raw, Stats(None, None))
    table = None if tables is None else tables.gate
    of_step = None
    if isinstance(head, MarkovHead):
        of_step = StepHead(head.w1, head.w2, None, None, None)
    elif plan.state is None and head is not None:
        of_step = StepHead(head.w1, head.w2, None, memory.projected, table)
    elif head is not None:
        of_step = StepHead(None, head.w2, memory.given, None, None)
    before: Tensor | None = None
    after: Tensor | None = None
    if memory.states is not None:
        before, after = memory.states.view(2, -1).unbind()
    weight = state_weight(head) if isinstance(head, GatedHead | RNNHead) and plan.state is not None else None
    raw = None
    if memory.raw is not None:
        requests, _, vocab_size = base.shape
        raw = memory.raw.as_strided((requests, vocab_size), (padded(vocab_size), 1))

    for step in range(plan.draft_len):
        if plan.state is not None and head is not None:
            plan.state(block, head.w1, weight, memory.projected, table, before, after, memory.given, step)
            before, after = after, before
        plan.step(base, of_step, stepping, step)
        if plan.truncation is not None and plan.draw is not None and raw is not None:
            assert memory.planes is not None
            assert memory.threshold is not None
            run_truncate(plan.truncation, (memory.planes,), raw, sampling, None, memory.threshold)
            plan.draw(raw, memory.threshold, drawing, step)

    plan.finish(block, draft, confidence_of(inputs), sampling.temperature, stats)


def confidence_of(inputs: WalkInputs) -> Confidence | None:
    """The confidence head of a call, if it has one."""
    head, hidden = inputs.confidence_head, inputs.of_confidence
    if head is None or hidden is None:
        return None
    table = None if inputs.tables is None else inputs.tables.confidence
    return Confidence(hidden, head.weight, head.bias, head.w1 if table is None else None, table)
