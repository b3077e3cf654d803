"""Launch of the passes that gather a row's statistics, truncation included."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dspark.ops.launch import (
    DRAFT_PLANES,
    STATS_PLANES,
    RowConfig,
    draws_per_program,
    launch,
    padded,
    power_of_two,
    tiles_per_program,
)
from dspark.ops.types import Sampling, Stream

_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@dataclass(frozen=True)
class Rows:
    """Rows of target logits and whose they are.

    Attributes:
        logits: ``[T, V]``.
        sampling: parameters of the requests.
        position: ``[R]`` of anchors, or ``[T]`` of the tokens to draw where a slot is a row; None where none is drawn.
        query_start: ``[R + 1]``, or None where a slot is a row.
        request, salt: ``[T]`` or None, where a slot is a row.
        stream: of the noise.
        depth: ``[R, N]`` of a tree's nodes; None: node ``i`` of a request has depth ``i``.
    """

    logits: Tensor
    sampling: Sampling
    position: Tensor | None
    query_start: Tensor | None = None
    request: Tensor | None = None
    salt: Tensor | None = None
    stream: Stream = Stream.TARGET
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

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """Arguments of ``row_statistics_kernel`` that do not change from call to call."""
        return {"stride_plane": self.stride_plane, **self.tiled}

    def draw(self, columns: int) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``sample_kernel``, which holds ``columns`` of a row."""
        block_rows = draws_per_program(columns)
        own = {"TILES": self.tiles_p2, "BLOCK_R": block_rows, "num_warps": 4}
        return (-(-self.count // block_rows),), self.statistics | own

    @cached_property
    def threshold(self) -> dict[str, Any]:
        """Arguments of ``threshold_kernel`` that do not change from call to call."""
        return {
            "stride_plane": self.stride_plane,
            "num_slots": self.count,
            "vocab_size": self.vocab_size,
            "num_tiles": self.num_tiles,
            "NODES": self.nodes,
            "TILES": self.tiles_p2,
            "BLOCK_V": self.config.block_vocab,
            "BLOCK_C": self.config.block_sub,
            "num_warps": 4,
        }


@cache
def _kernels() -> tuple[Any, Any]:
    """The kernels, imported at the first launch: a machine without triton has the references."""
    from dspark.kernels.sample.statistics import row_statistics_kernel
    from dspark.kernels.sample.threshold import threshold_kernel

    return row_statistics_kernel, threshold_kernel


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
    """Run the passes: one, or with truncation the first, the search for thresholds, and one over the kept tokens.

    Args:
        rows: what to read.
        slots: its sizes.
        planes: ``[slots.elements]`` float32, written: the planes of ``dspark.kernels.sample.rows``.
        threshold: ``[slots.count]`` float32, written; None where nothing is truncated.
        noise: find the best perturbed scores.
        sums: sum by tile, and with ``sub_sums`` by sub-tile.
        sub_sums: see there.
        raw: sum the logits as they are.
    """
    row_statistics_kernel, threshold_kernel = _kernels()
    logits, sampling = rows.logits, rows.sampling
    num_rows = logits.shape[0]
    shared = {
        "logits_ptr": logits,
        "stride_logits_row": logits.stride(0),
        "query_start_ptr": rows.query_start,
        "request_ptr": rows.request,
        "temperature_ptr": sampling.temperature,
        "top_k_ptr": sampling.top_k,
        "top_p_ptr": sampling.top_p,
        "min_p_ptr": sampling.min_p,
        "threshold_ptr": threshold,
        "stats_ptr": planes,
        "num_rows": num_rows,
    }
    statistics = slots.statistics | shared
    statistics |= {
        "stride_logits_request": 0,
        "seed_ptr": sampling.seed,
        "position_ptr": rows.position,
        "depth_ptr": rows.depth,
        "salt_ptr": rows.salt,
        "STREAM": int(rows.stream),
        "DRAFT": False,
        "NOISE": noise,
        "SUB_SUMS": sub_sums,
    }
    if threshold is None:
        statistics |= {"PASS": "only", "SUMS": sums, "RAW": raw}
        launch(row_statistics_kernel, slots.grid, statistics)
        return
    launch(row_statistics_kernel, slots.grid, statistics | {"PASS": "first", "SUMS": True, "RAW": True})
    launch(threshold_kernel, (slots.count,), slots.threshold | shared | {"KEY_SHIFT": _KEY_SHIFT[logits.dtype]})
    if noise or sums or sub_sums:
        launch(row_statistics_kernel, slots.grid, statistics | {"PASS": "kept", "SUMS": sums, "RAW": False})


_DRAFT_CONSTANTS: dict[str, Any] = {
    "request_ptr": None,
    "temperature_ptr": None,
    "seed_ptr": None,
    "position_ptr": None,
    "depth_ptr": None,
    "salt_ptr": None,
    "top_k_ptr": None,
    "top_p_ptr": None,
    "min_p_ptr": None,
    "threshold_ptr": None,
    "STREAM": 0,
    "PASS": "only",
    "DRAFT": True,
    "NOISE": False,
    "SUMS": True,
    "SUB_SUMS": False,
    "RAW": False,
}


def gather_draft_statistics(logits: Tensor, query_start: Tensor, num_rows: int, slots: Slots, planes: Tensor) -> None:
    """Maxima and sums of a draft's scores ``[R, G, Vd]``, at the slots of the nodes that the drafts follow.

    ``planes`` is ``[slots.draft_elements]`` float32, and is written.
    """
    row_statistics_kernel, _ = _kernels()
    arguments = slots.statistics | _DRAFT_CONSTANTS
    arguments |= {
        "logits_ptr": logits,
        "stride_logits_request": logits.stride(0),
        "stride_logits_row": logits.stride(1),
        "query_start_ptr": query_start,
        "stats_ptr": planes,
        "num_rows": num_rows,
    }
    launch(row_statistics_kernel, slots.grid, arguments)
