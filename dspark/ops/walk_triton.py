"""Launch of the kernels behind ``draft_walk``.

``G + 2`` launches: one before the first step, one per step, one after the last. A recurrent head, and a gated one
without a table, takes one more per step, for what depends on the hidden state of the slot and on the previous token
together. Truncation needs complete rows and takes three more: statistics, the search for thresholds, and the draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

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
from dspark.ops.sample_triton import truncate_triton
from dspark.ops.sample_triton import workspace_bytes as truncate_workspace
from dspark.ops.statistics_triton import Rows
from dspark.ops.types import Draft, GatedHead, RNNHead, Sampling, SequentialHead, Stream
from dspark.ops.walk_inputs import WalkInputs, WalkOutputs, WalkTables, head_rank, hidden_columns, token_columns

STATS_PLANES = 5
"""Planes of ``dspark.kernels.walk``."""
PROGRAMS = 264
"""Two for each multiprocessor of an H100 or H200. Each takes tiles in turn, and reads the previous tokens once."""

Kind = Literal["none", "markov", "gated", "given"]


@dataclass(frozen=True)
class WalkConfig:
    """How a step is cut.

    Attributes:
        block_rows: requests that share one read of W2; matrix units want 16.
        block_vocab: tokens per tile.
        block_rank: of the rank, held at a time.
        hold: whether a program holds a tile of W2 in full, for all blocks of requests.
        num_warps, num_stages: of the step.
        block_units: units of the state per program, where it has a launch of its own.
        block_state: of the rank, per turn of that launch's loop.
        block_hidden: of the hidden size, per turn of the projection's loop.
    """

    block_rows: int = 16
    block_vocab: int = 128
    block_rank: int = 64
    hold: bool = False
    num_warps: int = 8
    num_stages: int = 3
    block_units: int = 16
    block_state: int = 32
    block_hidden: int = 128


def walk_config(vocab_size: int, rank: int, dot: str) -> WalkConfig:
    """The configuration that is launched for a vocabulary, a rank (0 without a head) and a kind of product.

    Half-precision weights up to rank 256 are held: a tile of them is as large as the local memory of a compute unit of
    gfx942, and two fit on an H100's. A split product needs too many registers beside them.

    >>> config = walk_config(151_936, 256, "half")
    >>> config.hold, config.block_vocab, config.block_rank
    (True, 128, 256)
    >>> config = walk_config(151_936, 256, "split")
    >>> config.hold, config.block_vocab, config.block_rank
    (False, 128, 64)
    """
    block_vocab = max(16, min(128, power_of_two(vocab_size)))
    if rank == 0:
        return WalkConfig(block_vocab=block_vocab, num_warps=4)
    rank = max(16, power_of_two(rank))
    if dot == "half" and rank <= 256:
        return WalkConfig(block_vocab=block_vocab, block_rank=rank, hold=True, num_stages=1)
    return WalkConfig(block_vocab=block_vocab, block_rank=min(rank, 32 if dot == "float32" else 64))


@dataclass(frozen=True)
class _Plan:
    """What follows from the sizes of a call alone, kept from call to call."""

    requests: int
    draft_len: int
    vocab_size: int
    rank: int
    kind: Kind
    recurrent: bool
    truncated: bool
    planes: bool
    config: WalkConfig

    @cached_property
    def num_tiles(self) -> int:
        return -(-self.vocab_size // self.config.block_vocab)

    @cached_property
    def stride_plane(self) -> int:
        return padded(self.requests * self.draft_len * self.num_tiles)

    @cached_property
    def gates(self) -> int:
        return 3 if self.recurrent else 1

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of scratch memory: keys, projection, input of W2, two states, statistics, and of truncation."""
        rows, rank = self.requests * self.draft_len, self.rank
        projected = self.kind == "gated" or self.kind == "given"
        return [
            padded(2 * rows),
            padded(rows * self.gates * rank) if projected else 0,
            padded(self.requests * rank) if self.kind == "given" else 0,
            padded(2 * self.requests * rank) if self.recurrent else 0,
            STATS_PLANES * self.stride_plane if self.planes else 0,
            padded(self.requests * padded(self.vocab_size)) if self.truncated else 0,
            padded(self.requests) if self.truncated else 0,
            truncate_workspace(self.requests, self.vocab_size) // 4 if self.truncated else 0,
        ]

    @cached_property
    def row_blocks(self) -> int:
        return -(-self.requests // self.config.block_rows)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Programs of a step. Without W2 there is nothing to share, and each block of rows gets its own."""
        return min(self.num_tiles, PROGRAMS), 1 if self.kind != "none" else self.row_blocks

    @cached_property
    def one_block(self) -> bool:
        return self.row_blocks <= 1


_kept_plan = lru_cache(maxsize=256)(_Plan)


def plan_of(
    base: Tensor,
    head: SequentialHead | None,
    sampling: Sampling,
    outputs: WalkOutputs,
    tables: WalkTables | None,
    config: WalkConfig | None,
) -> _Plan:
    """The plan of a call."""
    requests, draft_len, vocab_size = base.shape
    rank = head_rank(head)
    kind: Kind = "none" if head is None else "markov"
    if isinstance(head, RNNHead):
        kind = "given"
    elif isinstance(head, GatedHead):
        kind = "given" if tables is None or tables.gate is None else "gated"
    if config is None:
        config = _config_of(vocab_size, rank, "float32" if head is None else _dot_of_w2(head, kind))
    truncated = sampling.any_truncation and not sampling.all_greedy
    planes = outputs.margin or outputs.lse
    return _kept_plan(requests, draft_len, vocab_size, rank, kind, isinstance(head, RNNHead), truncated, planes, config)


_config_of = lru_cache(maxsize=256)(walk_config)


def workspace_bytes(
    base: Tensor,
    head: SequentialHead | None,
    sampling: Sampling,
    outputs: WalkOutputs,
    tables: WalkTables | None = None,
    config: WalkConfig | None = None,
) -> int:
    """Bytes of scratch memory that such a call takes."""
    return 4 * sum(plan_of(base, head, sampling, outputs, tables, config).sizes)


@cache
def _kernels() -> tuple[Any, Any, Any, Any, Any]:
    """The kernels, imported at the first launch: a machine without triton has the reference."""
    from dspark.kernels.walk import walk_draw_kernel, walk_step_kernel
    from dspark.kernels.walk_block import walk_begin_kernel, walk_finish_kernel, walk_state_kernel

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
        plan: _Plan,
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
        _, _, walk_step_kernel, walk_draw_kernel, _ = _kernels()
        inputs, plan = self.inputs, self.plan
        if plan.kind == "given":
            self._state(slot)
        base, head = inputs.base_logits, inputs.head
        gated = plan.kind == "gated" and inputs.tables is not None
        scores = self._raw_scores if plan.truncated else self.scores
        arguments = self.previous | self.sizes | self.drawn | scores
        arguments |= {
            "base_ptr": base,
            "stride_base_request": base.stride(0),
            "stride_base_slot": base.stride(1),
            "w1_ptr": None if head is None else head.w1,
            "stride_w1_row": 0 if head is None else head.w1.stride(0),
            "w2_ptr": None if head is None else head.w2,
            "stride_w2_row": 0 if head is None else head.w2.stride(0),
            "gate_ptr": self.projected if gated else None,
            "gate_table_ptr": inputs.tables.gate if gated and inputs.tables is not None else None,
            "input_ptr": self.head_input if plan.kind == "given" else None,
            "resume_ptr": self.resume,
            "slot": slot,
            "rank": plan.rank,
            "INPUT": plan.kind,
            "DOT": "float32" if head is None else _dot_of_w2(head, plan.kind),
            "RAW": plan.truncated,
            "UPCAST": self.upcast,
            "ONE_BLOCK": plan.one_block,
            "HOLD": plan.config.hold and head is not None,
            "BLOCK_K": plan.config.block_rank,
            "num_warps": plan.config.num_warps,
            "num_stages": plan.config.num_stages,
        }
        launch(walk_step_kernel, plan.grid, arguments)
        if not plan.truncated:
            return
        raw = self.raw.as_strided((plan.requests, plan.vocab_size), (padded(plan.vocab_size), 1))
        cut = self.cut.view(torch.uint8)
        truncate_triton(Rows(raw, self.sampling, None), self.threshold[: plan.requests], cut)
        arguments = self.sizes | self.drawn | self.scores
        arguments |= {
            "logits_ptr": raw,
            "stride_logits_row": raw.stride(0),
            "threshold_ptr": self.threshold,
            "to_target_ptr": self.previous["to_target_ptr"],
            "key_ptr": self.keys,
            "slot": slot,
            "num_warps": 4,
        }
        launch(walk_draw_kernel, (plan.num_tiles, plan.row_blocks), arguments)

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

    @property
    def _raw_scores(self) -> dict[str, Any]:
        """Where a step writes the logits that are truncated next."""
        return {"scores_ptr": self.raw, "stride_scores_request": padded(self.plan.vocab_size), "stride_scores_slot": 0}

    def _state(self, slot: int) -> None:
        """A gated or recurrent head up to the product with W2."""
        _, walk_state_kernel, *_ = _kernels()
        head, plan, config = self.inputs.head, self.plan, self.plan.config
        if not isinstance(head, GatedHead | RNNHead):
            return
        table = None if self.inputs.tables is None else self.inputs.tables.gate
        weight = token_columns(head) if isinstance(head, GatedHead) else head.joint_weight
        before = after = None
        if plan.recurrent:
            states = self.states.view(2, -1)
            before, after = states[slot % 2], states[1 - slot % 2]
        arguments = self.previous | {
            "projected_ptr": self.projected,
            "table_ptr": table,
            "weight_ptr": weight,
            "stride_weight_row": weight.stride(0),
            "w1_ptr": head.w1,
            "stride_w1_row": head.w1.stride(0),
            "state_ptr": before,
            "out_state_ptr": after,
            "out_input_ptr": self.head_input,
            "slot": slot,
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
        launch(walk_state_kernel, (plan.row_blocks, -(-plan.rank // config.block_units)), arguments)


def _dot_of_w2(head: SequentialHead, kind: Kind) -> str:
    """A Markov head's rows are W1's own numbers; those of the others are float32."""
    return dot_of(head.w2.dtype, head.w1.dtype if kind == "markov" else torch.float32)


def dot_of(weight: torch.dtype, rows: torch.dtype) -> str:
    """How ``dot_rows`` of the kernels multiplies such numbers without rounding them first."""
    if weight is rows and weight is not torch.float32:
        return "half"
    return "split" if weight is torch.bfloat16 and rows is torch.float32 else "float32"


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
