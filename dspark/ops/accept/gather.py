"""Launch of the passes that gather a row's statistics, truncation included."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from dspark.ops.launch import (
    DRAFT_PLANES,
    STATS_PLANES,
    RowConfig,
    padded,
    power_of_two,
    tiles_per_program,
)
from dspark.ops.sample import statistics_launch as launched
from dspark.ops.types import Sampling, Tree


@dataclass(frozen=True)
class Rows:
    """Rows of target logits and whose they are.

    Attributes:
        logits: ``[T, V]``.
        sampling: parameters of the requests.
        position: ``[R]`` of anchors, or ``[T]`` of the tokens to draw where a slot is a row; None where none is drawn.
        query_start: ``[R + 1]``, or None where a slot is a row.
        depth: ``[R, N]`` of a tree's nodes; None: node ``i`` of a request has depth ``i``.
    """

    logits: Tensor
    sampling: Sampling
    position: Tensor | None
    query_start: Tensor | None = None
    depth: Tensor | None = None

    @property
    def truncated(self) -> bool:
        """Whether any row may be truncated."""
        return self.sampling.any_truncation and not self.sampling.all_greedy


@dataclass(frozen=True)
class Slots:
    """What follows from the sizes of a call alone; :func:`slots_of` keeps it from call to call.

    Attributes:
        count: ``R * nodes``, or ``T`` where a slot is a row.
        nodes: slots of a request; 0: a slot is a row.
        vocab_size: of the rows.
        config: how they are cut.
    """

    count: int
    nodes: int
    vocab_size: int
    config: RowConfig

    @cached_property
    def num_tiles(self) -> int:
        """Tiles per row."""
        return self.config.tiles(self.vocab_size)

    @cached_property
    def tiles_p2(self) -> int:
        """Tiles per row, rounded up to a power of two."""
        return power_of_two(self.num_tiles)

    @cached_property
    def stride_plane(self) -> int:
        """Elements of a plane of statistics."""
        return padded(self.count * self.num_tiles)

    @cached_property
    def elements(self) -> int:
        """Elements of all planes of the target's statistics."""
        return self.stride_plane * (STATS_PLANES + self.config.subs)

    @cached_property
    def draft_elements(self) -> int:
        """Elements of the planes of a draft's statistics."""
        return self.stride_plane * DRAFT_PLANES

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Programs of the statistics pass; those of a row take its tiles in turn."""
        row_programs = -(-self.count // self.config.block_rows)
        return row_programs, -(-self.num_tiles // tiles_per_program(row_programs * self.num_tiles))

    @cached_property
    def tiled(self) -> dict[str, Any]:
        """Constant arguments of a kernel whose programs take tiles of rows."""
        return {
            "num_slots": self.count,
            "vocab_size": self.vocab_size,
            "num_tiles": self.num_tiles,
            "nodes": self.nodes,
            "BLOCK_R": self.config.block_rows,
            "BLOCK_V": self.config.block_vocab,
            "BLOCK_S": self.config.block_sub,
            "num_warps": self.config.num_warps,
        }


slots_of = lru_cache(maxsize=256)(Slots)


def gather_statistics(
    rows: Rows,
    slots: Slots,
    planes: Tensor,
    threshold: Tensor | None,
    *,
    noise: bool,
    sums: bool,
    sub_sums: bool,
    raw: bool,
) -> None:
    """:func:`dspark.ops.sample.statistics_launch.gather_statistics`, planned anew."""
    plan = _plan(rows, slots, truncated=threshold is not None, noise=noise, sums=sums, sub_sums=sub_sums, raw=raw)
    launched.gather_statistics(plan, planes, threshold, rows.logits, _rows(rows), _sampling(rows), _tree(rows))


def gather_draft_statistics(logits: Tensor, query_start: Tensor, num_rows: int, slots: Slots, planes: Tensor) -> None:
    """Maxima and sums of a draft's scores ``[R, G, Vd]``, at the lines of the nodes that the drafts follow."""
    plan = launched.plan_statistics(
        logits, lines=slots.count, nodes=slots.nodes, num_rows=num_rows, sums=True, config=slots.config
    )
    launched.gather_statistics(plan, planes, None, logits, launched.KernelRows(None, query_start, None))


def draw(
    rows: Rows, slots: Slots, planes: Tensor, threshold: Tensor | None, tokens: Tensor, method: str, columns: int
) -> None:
    """The token that each line draws, written to ``tokens`` ``[slots.count]`` int64."""
    plan = _plan(rows, slots)
    kernel = launched.plan_draw(plan, rows.logits, method, columns)
    kernel(rows.logits, _rows(rows), _sampling(rows), _tree(rows), plan.stats(planes), threshold, None, tokens)


def _plan(rows: Rows, slots: Slots, **wanted: Any) -> launched.StatisticsPlan:
    return launched.plan_statistics(
        rows.logits, lines=slots.count, nodes=slots.nodes, config=slots.config, **wanted
    )  # fmt: skip


def _rows(rows: Rows) -> launched.KernelRows:
    return launched.KernelRows(None, rows.query_start, rows.position)


def _sampling(rows: Rows) -> launched.KernelSampling:
    return launched.KernelSampling(*rows.sampling[:5])


def _tree(rows: Rows) -> Tree | None:
    nothing: Any = None
    return None if rows.depth is None else Tree(nothing, nothing, nothing, rows.depth, nothing)
