"""How a draft walk is cut into launches.

``G + 2`` launches: one before the first step, one per step, one after the last. A recurrent head, and a gated one
without a table, takes one more per step, for what depends on the hidden state of the step and on the previous token
together. Truncation needs complete rows and takes three more: statistics, the search for thresholds, and the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.draft.walk_reference import WalkInputs
from dspark.ops.draft.walk_tables import hidden_columns, token_columns
from dspark.ops.launch import Kernel, padded, power_of_two
from dspark.ops.sample.launch import TruncatePlan, plan_truncate
from dspark.ops.sample.statistics_launch import statistics_sizes
from dspark.ops.types import Draft, GatedHead, MarkovHead, RNNHead, Sampling, SequentialHead

PROGRAMS = 264
"""Two for each multiprocessor of an H100 or H200. Each takes tiles in turn, and reads the previous tokens once."""


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


class BeginShape(NamedTuple):
    draft_len: int
    hidden_size: int
    num_outputs: int
    hidden_request: int
    hidden_step: int
    weight_row: int


class StateShape(NamedTuple):
    draft_len: int
    num_anchors: int
    rank: int
    weight_row: int
    w1_row: int


class StepShape(NamedTuple):
    draft_len: int
    num_anchors: int
    vocab_size: int
    rank: int
    num_tiles: int
    base_request: int
    base_step: int
    w1_row: int
    w2_row: int
    scores_request: int
    scores_step: int
    plane: int


class FinishShape(NamedTuple):
    draft_len: int
    num_anchors: int
    vocab_size: int
    num_tiles: int
    hidden_size: int
    rank: int
    hidden_request: int
    hidden_step: int
    w1_row: int
    scores_request: int
    scores_step: int
    plane: int


@dataclass(frozen=True)
class WalkPlan:
    """The launches of a call, and names and elements of the scratch memory (see ``walk_launch.Memory``)."""

    names: Sequence[str]
    sizes: Sequence[int]
    draft_len: int
    begin: Kernel
    state: Kernel | None
    step: Kernel
    truncation: TruncatePlan | None
    draw: Kernel | None
    finish: Kernel


@dataclass(frozen=True)
class _Cut:
    """What the sizes of a call come to."""

    requests: int
    draft_len: int
    vocab_size: int
    rank: int
    gates: int
    given: bool
    truncated: bool
    config: WalkConfig

    @property
    def num_tiles(self) -> int:
        return -(-self.vocab_size // self.config.block_vocab)

    @property
    def plane(self) -> int:
        return padded(self.requests * self.draft_len * self.num_tiles)

    def memory(self, margin: bool, lse: bool) -> dict[str, int]:
        """Elements of each part of the scratch memory that is taken, by its name in ``walk_launch.Memory``."""
        rows = self.requests * self.draft_len
        found = {
            "keys": padded(2 * rows),
            "projected": padded(rows * self.gates * self.rank),
            "given": padded(self.requests * self.rank) if self.given else 0,
            "states": padded(2 * self.requests * self.rank) if self.gates == 3 else 0,
            "margin": 3 * self.plane if margin else 0,
            "lse": 2 * self.plane if lse else 0,
        }
        if self.truncated:
            found["raw"] = padded(self.requests * padded(self.vocab_size))
            found["threshold"] = padded(self.requests)
            found["planes"] = statistics_sizes(self.requests, self.vocab_size)[0]
        return {name: size for name, size in found.items() if size}


def _cut(
    base: Tensor, head: SequentialHead | None, sampling: Sampling, table: Tensor | None, config: WalkConfig | None
) -> _Cut:
    requests, draft_len, vocab_size = base.shape
    given = isinstance(head, RNNHead) or (isinstance(head, GatedHead) and table is None)
    gates = 3 if isinstance(head, RNNHead) else 1 if isinstance(head, GatedHead) else 0
    rank = head_rank(head)
    config = config or walk_config(vocab_size, rank, _dot_of_w2(head))
    return _Cut(requests, draft_len, vocab_size, rank, gates, given, sampling.truncates, config)


def workspace_bytes(
    base: Tensor,
    head: SequentialHead | None,
    sampling: Sampling,
    table: Tensor | None,
    *,
    margin: bool,
    lse: bool,
) -> int:
    """Bytes of scratch memory of a call with such arguments, where ``table`` is the one of the gate."""
    return 4 * sum(_cut(base, head, sampling, table, None).memory(margin, lse).values())


def plan(sizes: dict[str, int], *values: Any, config: WalkConfig | None = None) -> WalkPlan:
    """The launches of a call of ``draft_walk``."""
    *given, draft = values
    return plan_walk(WalkInputs(*given), draft, config)


def plan_walk(inputs: WalkInputs, draft: Draft, config: WalkConfig | None = None) -> WalkPlan:
    """The launches of a walk, of whose arguments only shapes, strides, dtypes and scalars count."""
    from dspark.kernels.draft.walk import walk_draw_kernel, walk_step_kernel
    from dspark.kernels.draft.walk_block import walk_begin_kernel, walk_finish_kernel, walk_state_kernel

    base, head, hidden, tables = inputs.base_logits, inputs.head, inputs.hidden, inputs.tables
    cut = _cut(base, head, inputs.sampling, None if tables is None else tables.gate, config)
    config, device, upcast = cut.config, base.device, base.device.type == "cpu"
    requests, draft_len, rank = cut.requests, cut.draft_len, cut.rank
    rows, row_blocks = requests * draft_len, -(-requests // config.block_rows)
    scores_request, scores_step = two_strides(draft.logits)
    plane = cut.plane if inputs.return_margin or inputs.return_lse else 0
    memory = cut.memory(inputs.return_margin, inputs.return_lse)

    shape, dot, blocks_of_outputs = BeginShape(draft_len, 0, 0, 0, 0, 0), "float32", 1
    if isinstance(head, GatedHead | RNNHead) and hidden is not None:
        weight = hidden_columns(head)
        strides = (*hidden.stride()[:2], weight.stride(0))
        shape = BeginShape(draft_len, hidden.shape[2], weight.shape[0], *strides)
        dot, blocks_of_outputs = dot_of(weight.dtype, hidden.dtype), -(-weight.shape[0] // 32)
    begin = Kernel(
        walk_begin_kernel,
        (-(-rows // config.block_rows), blocks_of_outputs),
        device,
        num_rows=rows,
        shape=shape,
        DOT=dot,
        UPCAST=upcast,
        BLOCK_R=config.block_rows,
        BLOCK_N=32,
        BLOCK_K=config.block_hidden,
        num_warps=4,
    )

    state = None
    if cut.given:
        assert isinstance(head, GatedHead | RNNHead)
        weight = state_weight(head)
        state = Kernel(
            walk_state_kernel,
            (row_blocks, -(-rank // config.block_units)),
            device,
            num_requests=requests,
            shape=StateShape(draft_len, inputs.num_anchors, rank, weight.stride(0), head.w1.stride(0)),
            RECURRENT=cut.gates == 3,
            DOT_TOKEN=dot_of(weight.dtype, head.w1.dtype),
            DOT_STATE=dot_of(weight.dtype, torch.float32),
            UPCAST=upcast,
            BLOCK_R=config.block_rows,
            BLOCK_N=config.block_units,
            BLOCK_K=config.block_state,
            num_warps=4,
        )

    of_step = StepShape(
        draft_len=draft_len,
        num_anchors=inputs.num_anchors,
        vocab_size=cut.vocab_size,
        rank=rank,
        num_tiles=cut.num_tiles,
        base_request=base.stride(0),
        base_step=base.stride(1),
        w1_row=0 if head is None or cut.given else head.w1.stride(0),
        w2_row=0 if head is None else head.w2.stride(0),
        scores_request=padded(cut.vocab_size) if cut.truncated else scores_request,
        scores_step=0 if cut.truncated else scores_step,
        plane=plane,
    )
    step = Kernel(
        walk_step_kernel,
        # Without W2 there is nothing to share, and each block of rows gets its own programs.
        (min(cut.num_tiles, PROGRAMS), row_blocks if head is None else 1),
        device,
        num_requests=requests,
        shape=of_step,
        DOT=_dot_of_w2(head),
        RAW=cut.truncated,
        STREAM=int(inputs.stream),
        UPCAST=upcast,
        ONE_BLOCK=row_blocks <= 1,
        HOLD=config.hold and head is not None,
        BLOCK_R=config.block_rows,
        BLOCK_V=config.block_vocab,
        BLOCK_K=config.block_rank,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    truncation = draw = None
    if cut.truncated:
        row = padded(cut.vocab_size)
        raw = torch.empty_strided((requests, cut.vocab_size), (row, 1), dtype=torch.float32, device=device)
        truncation = plan_truncate({"T": requests}, raw, inputs.sampling, None, raw)
        draw = Kernel(
            walk_draw_kernel,
            (cut.num_tiles, row_blocks),
            device,
            num_requests=requests,
            shape=of_step._replace(base_request=row, scores_request=scores_request, scores_step=scores_step),
            STREAM=int(inputs.stream),
            BLOCK_R=config.block_rows,
            BLOCK_V=config.block_vocab,
            num_warps=4,
        )

    confidence, seen = inputs.confidence_head, inputs.of_confidence
    w1 = None if confidence is None else confidence.w1
    seen = None if confidence is None else seen
    hidden_size = 0 if seen is None else seen.shape[2]
    read = w1 is not None and (tables is None or tables.confidence is None)
    finish = Kernel(
        walk_finish_kernel,
        (rows,),
        device,
        shape=FinishShape(
            draft_len,
            inputs.num_anchors,
            cut.vocab_size,
            cut.num_tiles,
            hidden_size,
            0 if w1 is None else w1.shape[1],
            *two_strides(seen),
            w1.stride(0) if w1 is not None and read else 0,
            scores_request,
            scores_step,
            plane,
        ),
        TILES=power_of_two(cut.num_tiles),
        BLOCK_G=power_of_two(draft_len),
        BLOCK_H=1024,
        BLOCK_K=16 if w1 is None else max(16, power_of_two(w1.shape[1])),
        BLOCK_V=1024,
        num_warps=4,
    )
    return WalkPlan(list(memory), list(memory.values()), draft_len, begin, state, step, truncation, draw, finish)


def two_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Elements between requests and between steps, 0 where there is nothing."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def state_weight(head: GatedHead | RNNHead) -> Tensor:
    """The part of a head's projection that ``walk_state_kernel`` multiplies by."""
    return token_columns(head) if isinstance(head, GatedHead) else head.joint_weight


def head_rank(head: SequentialHead | None) -> int:
    """``r``, 0 without a head."""
    return 0 if head is None else head.w1.shape[1]


def _dot_of_w2(head: SequentialHead | None) -> str:
    """A Markov head's rows are W1's own numbers; those of the others are float32."""
    if head is None:
        return "float32"
    return dot_of(head.w2.dtype, head.w1.dtype if isinstance(head, MarkovHead) else torch.float32)


def dot_of(weight: torch.dtype, rows: torch.dtype) -> str:
    """How ``dot_rows`` of the kernels multiplies such numbers without rounding them first."""
    if weight is rows and weight is not torch.float32:
        return "half"
    return "split" if weight is torch.bfloat16 and rows is torch.float32 else "float32"
