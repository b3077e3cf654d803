"""Launch of the kernels behind ``draft_walk``.

``G + 2`` launches: one before the first step, one per step, one after the last. A recurrent head, and a gated one
without a table, takes one more per step, for what depends on the hidden state of the slot and on the previous token
together. Truncation needs complete rows and takes three more: statistics, the search for thresholds, and the draw.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from dspark.ops.draft.walk_inputs import WalkInputs, WalkOutputs, WalkTables, hidden_columns, token_columns
from dspark.ops.draft.walk_plan import WalkConfig, WalkPlan, dot_of, dot_of_w2, plan_of
from dspark.ops.launch import (
    check_contiguous,
    check_devices,
    check_unit_stride,
    contiguous,
    contiguous_sampling,
    launch,
    padded,
    power_of_two,
    scratch,
)
from dspark.ops.sample.launch import plan_truncate, run_truncate
from dspark.ops.types import Draft, GatedHead, RNNHead, Stream


@cache
def _kernels() -> tuple[Any, Any, Any, Any, Any]:
    """The kernels, imported at the first launch: a machine without triton has the reference."""
    from dspark.kernels.draft.walk import walk_draw_kernel, walk_step_kernel
    from dspark.kernels.draft.walk_block import walk_begin_kernel, walk_finish_kernel, walk_state_kernel

    return walk_begin_kernel, walk_state_kernel, walk_step_kernel, walk_draw_kernel, walk_finish_kernel


def walk_triton(
    inputs: WalkInputs, outputs: WalkOutputs, out: Draft, workspace: Tensor | None, config: WalkConfig | None = None
) -> None:
    """Write the draft to ``out``; arguments as checked by :func:`dspark.ops.draft_walk`.

    Args:
        config: how steps are cut; by default what :func:`walk_config` says.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    check_layouts(inputs, out)
    plan = plan_of(inputs.base_logits, inputs.head, inputs.sampling, outputs, inputs.tables, config)
    regions = scratch(plan.sizes, inputs.base_logits.device, workspace)
    if plan.requests == 0:
        return
    walk = Walk(inputs, outputs, out, plan, regions)
    walk.begin()
    for slot in range(plan.draft_len):
        walk.step(slot)
    walk.finish()


class Walk:
    """The launches of one call, and the arguments that they share."""

    def __init__(
        self,
        inputs: WalkInputs,
        outputs: WalkOutputs,
        out: Draft,
        plan: WalkPlan,
        regions: tuple[Tensor, ...],
        resume: Tensor | None = None,
    ) -> None:
        self.inputs, self.outputs, self.out, self.plan, self.resume = inputs, outputs, out, plan, resume
        keys, self.projected, self.head_input, self.states, stats, self.raw, self.threshold, self.cut = regions
        self.keys = keys.view(torch.int64)
        self.stats = stats if plan.planes else None
        self.sampling = contiguous_sampling(inputs.sampling)
        self.upcast = inputs.base_logits.device.type == "cpu"
        vocabulary = inputs.vocabulary
        own_rows = vocabulary is not None and vocabulary.w1_rows == "draft"
        self.previous = {
            "anchor_ptr": contiguous(inputs.anchor),
            "key_ptr": self.keys,
            "to_target_ptr": None if vocabulary is None else contiguous(vocabulary.target_ids),
            "from_target_ptr": contiguous(vocabulary.draft_ids) if vocabulary is not None and own_rows else None,
            "num_anchors": inputs.num_anchors,
        }
        scores = out.logits
        self.scores = {
            "scores_ptr": scores,
            "stride_scores_request": 0 if scores is None else scores.stride(0),
            "stride_scores_slot": 0 if scores is None else scores.stride(1),
        }
        self.sizes = {
            "num_requests": plan.requests,
            "draft_len": plan.draft_len,
            "vocab_size": plan.vocab_size,
            "num_tiles": plan.num_tiles,
        }
        self.drawn = {
            "temperature_ptr": self.sampling.temperature,
            "seed_ptr": self.sampling.seed,
            "position_ptr": contiguous(inputs.position),
            "stats_ptr": self.stats,
            "stride_plane": plan.stride_plane if plan.planes else 0,
            "NOISE": not inputs.sampling.all_greedy,
            "SALTED": inputs.stream is Stream.DRAFT,
            "STREAM": int(inputs.stream),
            "MARGIN": outputs.margin,
            "LSE": outputs.lse,
            "BLOCK_R": plan.config.block_rows,
            "BLOCK_V": plan.config.block_vocab,
        }

    def begin(self) -> None:
        """Keys of nothing drawn, and the projections of the hidden states."""
        walk_begin_kernel, *_ = _kernels()
        head, hidden, plan, config = self.inputs.head, self.inputs.hidden, self.plan, self.plan.config
        arguments: dict[str, Any] = {
            "hidden_ptr": None,
            "stride_hidden_request": 0,
            "stride_hidden_slot": 0,
            "weight_ptr": None,
            "stride_weight_row": 0,
            "bias_ptr": None,
            "out_ptr": None,
            "key_ptr": self.keys,
            "num_rows": plan.requests * plan.draft_len,
            "draft_len": plan.draft_len,
            "hidden_size": 0,
            "num_outputs": 0,
            "DOT": "float32",
            "UPCAST": self.upcast,
            "BLOCK_R": config.block_rows,
            "BLOCK_N": 32,
            "BLOCK_K": config.block_hidden,
            "num_warps": 4,
        }
        blocks, outputs = -(-arguments["num_rows"] // config.block_rows), 1
        if isinstance(head, GatedHead | RNNHead) and hidden is not None:
            weight, bias = hidden_columns(head), head.gate_bias if isinstance(head, GatedHead) else head.joint_bias
            outputs = -(-weight.shape[0] // arguments["BLOCK_N"])
            arguments |= {
                "hidden_ptr": hidden,
                "stride_hidden_request": hidden.stride(0),
                "stride_hidden_slot": hidden.stride(1),
                "weight_ptr": weight,
                "stride_weight_row": weight.stride(0),
                "bias_ptr": bias,
                "out_ptr": self.projected,
                "hidden_size": hidden.shape[2],
                "num_outputs": weight.shape[0],
                "DOT": dot_of(weight.dtype, hidden.dtype),
            }
        launch(walk_begin_kernel, (blocks, outputs), arguments)

    def step(self, slot: int) -> None:
        """Draw one slot of all requests."""
        _, walk_state_kernel, walk_step_kernel, walk_draw_kernel, _ = _kernels()
        plan, config = self.plan, self.plan.config
        if plan.kind == "given":
            grid = plan.row_blocks, -(-plan.rank // config.block_units)
            launch(walk_state_kernel, grid, self._state | self._states_of(slot) | {"slot": slot})
        launch(walk_step_kernel, plan.grid, self._step | {"slot": slot})
        if plan.truncated:
            given = self._raw, self.sampling, None, self.threshold[: plan.requests]
            cut = plan_truncate({"T": plan.requests}, *given)
            run_truncate(cut, self.cut.split_with_sizes(cut.sizes), *given)
            launch(walk_draw_kernel, (plan.num_tiles, plan.row_blocks), self._draw | {"slot": slot})

    @cached_property
    def _step(self) -> dict[str, Any]:
        """Arguments of ``walk_step_kernel`` that do not change from slot to slot."""
        inputs, plan = self.inputs, self.plan
        base, head, tables = inputs.base_logits, inputs.head, inputs.tables
        gated = plan.kind == "gated" and tables is not None
        scores = self.scores
        if plan.truncated:
            scores = {"scores_ptr": self.raw, "stride_scores_request": padded(plan.vocab_size), "stride_scores_slot": 0}
        return {
            **self.previous,
            **self.sizes,
            **self.drawn,
            **scores,
            "base_ptr": base,
            "stride_base_request": base.stride(0),
            "stride_base_slot": base.stride(1),
            "w1_ptr": None if head is None else head.w1,
            "stride_w1_row": 0 if head is None else head.w1.stride(0),
            "w2_ptr": None if head is None else head.w2,
            "stride_w2_row": 0 if head is None else head.w2.stride(0),
            "gate_ptr": self.projected if gated else None,
            "gate_table_ptr": tables.gate if tables is not None and gated else None,
            "input_ptr": self.head_input if plan.kind == "given" else None,
            "resume_ptr": self.resume,
            "rank": plan.rank,
            "INPUT": plan.kind,
            "DOT": "float32" if head is None else dot_of_w2(head, plan.kind),
            "RAW": plan.truncated,
            "UPCAST": self.upcast,
            "ONE_BLOCK": plan.one_block,
            "HOLD": plan.config.hold and head is not None,
            "BLOCK_K": plan.config.block_rank,
            "num_warps": plan.config.num_warps,
            "num_stages": plan.config.num_stages,
        }

    @cached_property
    def _raw(self) -> Tensor:
        """Logits of the slot, before they are truncated."""
        return self.raw.as_strided((self.plan.requests, self.plan.vocab_size), (padded(self.plan.vocab_size), 1))

    @cached_property
    def _draw(self) -> dict[str, Any]:
        """Arguments of ``walk_draw_kernel`` that do not change from slot to slot."""
        return {
            **self.sizes,
            **self.drawn,
            **self.scores,
            "logits_ptr": self._raw,
            "stride_logits_row": self._raw.stride(0),
            "threshold_ptr": self.threshold,
            "to_target_ptr": self.previous["to_target_ptr"],
            "key_ptr": self.keys,
            "num_warps": 4,
        }

    @cached_property
    def _state(self) -> dict[str, Any]:
        """Arguments of ``walk_state_kernel`` that do not change from slot to slot."""
        head, plan, config = self.inputs.head, self.plan, self.plan.config
        assert isinstance(head, GatedHead | RNNHead)
        weight = token_columns(head) if isinstance(head, GatedHead) else head.joint_weight
        return {
            **self.previous,
            "projected_ptr": self.projected,
            "table_ptr": None if self.inputs.tables is None else self.inputs.tables.gate,
            "weight_ptr": weight,
            "stride_weight_row": weight.stride(0),
            "w1_ptr": head.w1,
            "stride_w1_row": head.w1.stride(0),
            "out_input_ptr": self.head_input,
            "num_requests": plan.requests,
            "draft_len": plan.draft_len,
            "rank": plan.rank,
            "RECURRENT": plan.recurrent,
            "DOT_TOKEN": dot_of(weight.dtype, head.w1.dtype),
            "DOT_STATE": dot_of(weight.dtype, torch.float32),
            "UPCAST": self.upcast,
            "BLOCK_R": config.block_rows,
            "BLOCK_N": config.block_units,
            "BLOCK_K": config.block_state,
            "num_warps": 4,
        }

    def _states_of(self, slot: int) -> dict[str, Any]:
        """The state before a slot and the one after it, in turn."""
        if not self.plan.recurrent:
            return {"state_ptr": None, "out_state_ptr": None}
        states = self.states.view(2, -1)
        return {"state_ptr": states[slot % 2], "out_state_ptr": states[1 - slot % 2]}

    def finish(self) -> None:
        """Tokens, confidences, margins and log-sum-exps."""
        *_, walk_finish_kernel = _kernels()
        inputs, plan, out = self.inputs, self.plan, self.out
        head, hidden = inputs.confidence_head, inputs.of_confidence
        table = None if inputs.tables is None else inputs.tables.confidence
        w1 = None if head is None or table is not None else head.w1
        confident = head is not None and hidden is not None
        rank = 0 if head is None or head.w1 is None else head.w1.shape[1]
        arguments = self.previous | self.scores | self.sizes
        arguments |= {
            "temperature_ptr": self.sampling.temperature,
            "hidden_ptr": hidden if confident else None,
            "stride_hidden_request": hidden.stride(0) if hidden is not None and confident else 0,
            "stride_hidden_slot": hidden.stride(1) if hidden is not None and confident else 0,
            "weight_ptr": contiguous(head.weight) if head is not None and confident else None,
            "bias_ptr": head.bias if head is not None and confident else None,
            "w1_ptr": w1,
            "stride_w1_row": 0 if w1 is None else w1.stride(0),
            "table_ptr": table,
            "stats_ptr": self.stats,
            "stride_plane": plan.stride_plane if plan.planes else 0,
            "out_tokens_ptr": out.tokens,
            "out_confidence_logits_ptr": out.confidence_logits,
            "out_confidence_ptr": out.confidence,
            "out_margin_ptr": out.margin,
            "out_lse_ptr": out.lse,
            "hidden_size": hidden.shape[2] if hidden is not None and confident else 0,
            "rank": rank,
            "MARGIN": self.outputs.margin,
            "LSE": self.outputs.lse,
            "TILES": power_of_two(plan.num_tiles),
            "BLOCK_G": power_of_two(plan.draft_len),
            "BLOCK_H": 1024,
            "BLOCK_K": max(16, power_of_two(rank)),
            "BLOCK_V": 1024,
            "num_warps": 4,
        }
        launch(walk_finish_kernel, (plan.requests * plan.draft_len,), arguments)


def check_layouts(inputs: WalkInputs, out: Draft) -> None:
    """Check devices, and strides that the kernels rely on.

    Raises:
        ValueError: one does not serve.
    """
    head, confidence = inputs.head, inputs.confidence_head
    for name, tensor in (
        ("base_logits", inputs.base_logits),
        ("hidden", inputs.hidden),
        ("confidence_hidden", inputs.confidence_hidden),
        ("head.w1", None if head is None else head.w1),
        ("head.w2", None if head is None else head.w2),
        ("head.gate_weight", head.gate_weight if isinstance(head, GatedHead) else None),
        ("head.joint_weight", head.joint_weight if isinstance(head, RNNHead) else None),
        ("confidence_head.w1", None if confidence is None else confidence.w1),
        ("out.logits", out.logits),
    ):
        if tensor is not None:
            check_unit_stride(name, tensor)
    for name in ("tokens", "confidence", "confidence_logits", "margin", "lse"):
        written = getattr(out, name)
        if written is not None:
            check_contiguous(f"out.{name}", written)
    tables = inputs.tables or WalkTables()
    for name, tensor in (("gate", tables.gate), ("confidence", tables.confidence)):
        if tensor is not None:
            check_contiguous(f"tables.{name}", tensor)
    check_devices(
        inputs.base_logits.device,
        anchor=inputs.anchor,
        hidden=inputs.hidden,
        position=inputs.position,
        seed=inputs.sampling.seed,
        w2=None if head is None else head.w2,
        vocabulary=None if inputs.vocabulary is None else inputs.vocabulary.target_ids,
        tables=tables.gate,
    )
