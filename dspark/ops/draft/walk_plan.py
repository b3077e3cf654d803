"""How a draft walk is cut into launches: tile sizes as plain functions of shapes, and the scratch memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from dspark.ops.draft.walk_inputs import WalkOutputs, WalkTables, head_rank
from dspark.ops.launch import padded, power_of_two
from dspark.ops.sample.launch import workspace_bytes as truncate_workspace
from dspark.ops.types import GatedHead, RNNHead, Sampling, SequentialHead

STATS_PLANES = 5
"""Planes of ``dspark.kernels.draft.walk``."""
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
class WalkPlan:
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


_kept_plan = lru_cache(maxsize=256)(WalkPlan)


def plan_of(
    base: Tensor,
    head: SequentialHead | None,
    sampling: Sampling,
    outputs: WalkOutputs,
    tables: WalkTables | None,
    config: WalkConfig | None,
) -> WalkPlan:
    """The plan of a call."""
    requests, draft_len, vocab_size = base.shape
    rank = head_rank(head)
    kind: Kind = "none" if head is None else "markov"
    if isinstance(head, RNNHead):
        kind = "given"
    elif isinstance(head, GatedHead):
        kind = "given" if tables is None or tables.gate is None else "gated"
    if config is None:
        config = _config_of(vocab_size, rank, "float32" if head is None else dot_of_w2(head, kind))
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


def dot_of_w2(head: SequentialHead, kind: Kind) -> str:
    """A Markov head's rows are W1's own numbers; those of the others are float32."""
    return dot_of(head.w2.dtype, head.w1.dtype if kind == "markov" else torch.float32)


def dot_of(weight: torch.dtype, rows: torch.dtype) -> str:
    """How ``dot_rows`` of the kernels multiplies such numbers without rounding them first."""
    if weight is rows and weight is not torch.float32:
        return "half"
    return "split" if weight is torch.bfloat16 and rows is torch.float32 else "float32"
