"""Plan and launch of the passes that gather the statistics of rows of logits, and of the draw from them.

What ``accept``, ``sample`` and ``truncate`` share: :func:`plan_statistics`, then :func:`gather_statistics`; and
:func:`plan_draw`, whose kernel is launched as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.launch import (
    DRAFT_PLANES,
    STATS_PLANES,
    Kernel,
    RowConfig,
    draws_per_program,
    padded,
    power_of_two,
    row_config,
    tiles_per_program,
)
from dspark.ops.types import Sampling, Stream

_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class Statistics(NamedTuple):
    """Statistics of the tiles of rows, as kernels take them.

    Attributes:
        planes: float32, the planes of ``dspark.kernels.sample.rows``.
        stride: elements of a plane.
        num_tiles: tiles of a row.
    """

    planes: Tensor
    stride: int
    num_tiles: int


class KernelSampling(NamedTuple):
    """:class:`~dspark.ops.Sampling` as kernels take it; what truncates is None for kernels that do not read it.

    What the flags say is a constant of a kernel.
    """

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seed: Tensor


def kernel_sampling(sampling: Sampling, truncates: bool) -> KernelSampling:
    """The group of a call, for kernels that truncate or such as do not."""
    if truncates:
        return KernelSampling(*sampling[:5])
    return KernelSampling(sampling.temperature, None, None, None, sampling.seed)


class KernelTree(NamedTuple):
    """:class:`~dspark.ops.Tree` as kernels take it: what they read."""

    parents: Tensor
    ancestors: Tensor
    depth: Tensor


class KernelRows(NamedTuple):
    """:class:`~dspark.ops.Rows` as kernels take it: ``KernelRows(*rows[:3])``.

    An integer in a group is specialised, so there is none. Where a line is a row, there is a position alone: ``[T]`` of
    the tokens to draw, or None where none is drawn.
    """

    tokens: Tensor | None
    query_start: Tensor | None
    position: Tensor | None


class LogitsStrides(NamedTuple):
    """Elements between the requests (of a draft; else 0) and the rows of logits."""

    request: int
    row: int


@dataclass(frozen=True)
class StatisticsPlan:
    """The passes over rows of logits, as they follow from shapes, dtypes and scalars.

    A *line* is a place for a row, see ``dspark.kernels.sample.rows``.

    Attributes:
        lines: ``R * nodes``, or ``T`` where a line is a row.
        nodes: lines of a request; 0: a line is a row.
        num_rows: ``T``.
        vocab_size: of the rows.
        config: how they are cut.
        num_tiles, tiles_p2: tiles of a row, and that rounded up to a power of two.
        stride: elements of a plane.
        sizes: elements of all planes, and of the thresholds (a draft has none).
        first: the pass over all tiles.
        search: for the thresholds; None where nothing is truncated.
        kept: the pass over what truncation keeps; None where nothing more is asked for.
    """

    lines: int
    nodes: int
    num_rows: int
    vocab_size: int
    config: RowConfig
    num_tiles: int
    tiles_p2: int
    stride: int
    sizes: tuple[int, int]
    first: Kernel
    search: Kernel | None
    kept: Kernel | None

    def stats(self, planes: Tensor) -> Statistics:
        """The group that kernels take, of the region ``planes``."""
        return Statistics(planes, self.stride, self.num_tiles)


def statistics_sizes(lines: int, vocab_size: int, config: RowConfig | None = None) -> tuple[int, int]:
    """Elements of the planes of so many lines, and of their thresholds."""
    config = config or row_config(vocab_size)
    return padded(lines * config.tiles(vocab_size)) * (STATS_PLANES + config.subs), padded(lines)


def plan_statistics(
    logits: Tensor,
    *,
    lines: int,
    nodes: int = 0,
    num_rows: int | None = None,
    truncated: bool = False,
    noise: bool = False,
    sums: bool = False,
    sub_sums: bool = False,
    raw: bool = False,
    stream: Stream = Stream.TARGET,
    config: RowConfig | None = None,
) -> StatisticsPlan:
    """The passes: one, or with truncation the first, the search for thresholds, and one over the kept tokens.

    Args:
        logits: ``[T, V]``; or ``[R, G, Vd]``, a draft's scores, which need ``sums`` alone.
        lines, nodes: see :class:`StatisticsPlan`.
        num_rows: ``T``, beside a draft's scores.
        truncated: whether any row may be truncated.
        noise: find the best perturbed scores.
        sums: sum by tile, and with ``sub_sums`` by sub-tile.
        sub_sums: see there.
        raw: sum the logits as they are.
        stream: of the noise.
        config: how rows are cut; None is what :func:`row_config` says. It changes sums by their rounding only.
    """
    from dspark.kernels.sample.statistics import row_statistics_kernel
    from dspark.kernels.sample.threshold import threshold_kernel

    vocab_size, draft = logits.shape[-1], logits.ndim == 3
    config = config or row_config(vocab_size)
    num_rows = logits.shape[0] if num_rows is None else num_rows
    num_tiles = config.tiles(vocab_size)
    stride = padded(lines * num_tiles)
    row_programs = -(-lines // config.block_rows)

    def passing(name: str, *, sums: bool, raw: bool) -> Kernel:
        return Kernel(
            row_statistics_kernel,
            (row_programs, -(-num_tiles // tiles_per_program(row_programs * num_tiles))),
            logits.device,
            stride_logits=LogitsStrides(logits.stride(0) if draft else 0, logits.stride(-2)),
            num_lines=lines,
            num_rows=num_rows,
            vocab_size=vocab_size,
            nodes=nodes,
            STREAM=int(stream),
            PASS=name,
            DRAFT=draft,
            NOISE=noise,
            SUMS=sums,
            SUB_SUMS=sub_sums,
            RAW=raw,
            BLOCK_R=config.block_rows,
            BLOCK_V=config.block_vocab,
            BLOCK_S=config.block_sub,
            num_warps=config.num_warps,
        )

    search = kept = None
    if truncated:
        first = passing("first", sums=True, raw=True)
        search = Kernel(
            threshold_kernel,
            (lines,),
            logits.device,
            stride_logits=logits.stride(0),
            num_lines=lines,
            num_rows=num_rows,
            vocab_size=vocab_size,
            NODES=nodes,
            KEY_SHIFT=_KEY_SHIFT[logits.dtype],
            TILES=power_of_two(num_tiles),
            BLOCK_V=config.block_vocab,
            BLOCK_C=config.block_sub,
            num_warps=4,
        )
        if noise or sums or sub_sums:
            kept = passing("kept", sums=sums, raw=False)
    else:
        first = passing("only", sums=sums, raw=raw)
    sizes = (DRAFT_PLANES * stride, 0) if draft else statistics_sizes(lines, vocab_size, config)
    return StatisticsPlan(
        lines, nodes, num_rows, vocab_size, config, num_tiles, power_of_two(num_tiles), stride, sizes, first, search,
        kept,
    )  # fmt: skip


def gather_statistics(
    plan: StatisticsPlan,
    planes: Tensor,
    threshold: Tensor | None,
    logits: Tensor,
    rows: KernelRows,
    sampling: KernelSampling | None = None,
    tree: KernelTree | None = None,
    request: Tensor | None = None,
    salt: Tensor | None = None,
) -> Statistics:
    """Run the passes; the statistics, as the kernels that read them take them.

    Args:
        plan: of the passes.
        planes: ``[plan.sizes[0]]`` float32, written.
        threshold: ``[lines]`` float32, written where anything is truncated.
        logits: as planned.
        rows: of the batch.
        sampling: parameters of the requests; None of a draft.
        tree: the trees whose nodes the rows are; None: chains.
        request, salt: ``[T]`` or None, where a line is a row.
    """
    stats = plan.stats(planes)
    plan.first(logits, rows, sampling, tree, stats, None, request, salt)
    if plan.search is not None:
        plan.search(logits, rows, sampling, stats, threshold, request)
    if plan.kept is not None:
        plan.kept(logits, rows, sampling, tree, stats, threshold, request, salt)
    return stats


def plan_draw(plan: StatisticsPlan, logits: Tensor, method: str, columns: int) -> Kernel:
    """One token of each line, from statistics that were gathered.

    It is launched with ``(logits, rows, sampling, tree, stats, threshold, request, tokens)``, groups as for
    :func:`gather_statistics`; ``logits``, ``tree`` and ``threshold`` (None where nothing is truncated) are read by
    inverse CDF alone, and ``tokens`` is ``[lines]`` int64, written.

    Args:
        plan: of the statistics.
        logits: ``[T, V]``.
        method: "greedy"; or how sampled rows are drawn, by "gumbel" (noise was gathered) or "inverse_cdf" (sums were).
        columns: entries that a program holds of a row.
    """
    from dspark.kernels.sample.draw import sample_kernel

    block_rows = draws_per_program(columns)
    return Kernel(
        sample_kernel,
        (-(-plan.lines // block_rows),),
        logits.device,
        stride_logits=logits.stride(0),
        num_lines=plan.lines,
        num_rows=plan.num_rows,
        vocab_size=plan.vocab_size,
        nodes=plan.nodes,
        METHOD=method,
        TILES=plan.tiles_p2,
        BLOCK_R=block_rows,
        BLOCK_V=plan.config.block_vocab,
        BLOCK_S=plan.config.block_sub,
        num_warps=4,
    )
