"""Launch of the passes that gather a row's statistics, truncation included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.launch import STATS_PLANES, RowConfig, Scratch, launch, padded, power_of_two, tiles_per_program
from dspark.ops.types import Sampling, Stream

_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@dataclass(frozen=True)
class Rows:
    """Rows of target logits and whose they are.

    Attributes:
        logits: ``[T, V]``.
        sampling: parameters of the requests.
        position: ``[R]`` of anchors, or ``[T]`` of the tokens to draw where ``nodes`` is 0.
        nodes: slots of a request; 0: a slot is a row.
        num_slots: ``R * nodes``, or ``T``.
        query_start: ``[R + 1]``, or None where ``nodes`` is 0.
        request, salt: ``[T]`` or None, where ``nodes`` is 0.
        stream: of the noise.
    """

    logits: Tensor
    sampling: Sampling
    position: Tensor
    nodes: int
    num_slots: int
    query_start: Tensor | None = None
    request: Tensor | None = None
    salt: Tensor | None = None
    stream: Stream = Stream.TARGET

    @property
    def truncated(self) -> bool:
        """Whether any row may be truncated."""
        return self.sampling.any_truncation and not self.sampling.all_greedy


@dataclass(frozen=True)
class Statistics:
    """Results of the passes: the planes of ``dspark.kernels.rows``, and the thresholds ``[slots]`` or None."""

    planes: Tensor
    stride_plane: int
    threshold: Tensor | None


def statistics_elements(num_slots: int, vocab_size: int, config: RowConfig) -> int:
    """4-byte elements of scratch memory that :func:`gather_statistics` takes, thresholds included."""
    return _plane(num_slots, vocab_size, config) * (STATS_PLANES + config.subs) + padded(num_slots)


def _plane(num_slots: int, vocab_size: int, config: RowConfig) -> int:
    return padded(num_slots * config.tiles(vocab_size))


def gather_statistics(
    rows: Rows, config: RowConfig, scratch: Scratch, *, noise: bool, sums: bool, sub_sums: bool, raw: bool,
    threshold: Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Run the passes: one, or with truncation the first, the search for thresholds, and one over the kept tokens.

    ``threshold``: where those go; taken from ``scratch`` when None.
    """
    from dspark.kernels.statistics import row_statistics_kernel
    from dspark.kernels.threshold import threshold_kernel

    logits, sampling = rows.logits, rows.sampling
    num_rows, vocab_size = logits.shape
    num_tiles = config.tiles(vocab_size)
    stride_plane = _plane(rows.num_slots, vocab_size, config)
    planes = scratch.take(stride_plane * (STATS_PLANES + config.subs))
    if rows.truncated and threshold is None:
        threshold = scratch.take(rows.num_slots)
    row_programs = -(-rows.num_slots // config.block_rows)
    per_program = tiles_per_program(row_programs * num_tiles)

    def run(which: str) -> None:
        launch(
            row_statistics_kernel,
            (row_programs, -(-num_tiles // per_program)),
            logits_ptr=logits,
            stride_logits_request=0,
            stride_logits_row=logits.stride(0),
            query_start_ptr=rows.query_start,
            request_ptr=rows.request,
            temperature_ptr=sampling.temperature,
            seed_ptr=sampling.seed,
            position_ptr=rows.position,
            salt_ptr=rows.salt,
            top_k_ptr=sampling.top_k,
            top_p_ptr=sampling.top_p,
            min_p_ptr=sampling.min_p,
            threshold_ptr=threshold,
            stats_ptr=planes,
            stride_plane=stride_plane,
            num_slots=rows.num_slots,
            num_rows=num_rows,
            vocab_size=vocab_size,
            num_tiles=num_tiles,
            NODES=rows.nodes,
            STREAM=int(rows.stream),
            PASS=which,
            DRAFT=False,
            NOISE=noise,
            SUMS=sums or which == "first",
            SUB_SUMS=sub_sums,
            RAW=which == "first" or (raw and which == "only"),
            TILES_PER_PROGRAM=per_program,
            BLOCK_R=config.block_rows,
            BLOCK_V=config.block_vocab,
            BLOCK_S=config.block_sub,
            num_warps=config.num_warps,
        )

    if not rows.truncated:
        run("only")
        return Statistics(planes, stride_plane, None)
    run("first")
    launch(
        threshold_kernel,
        (rows.num_slots,),
        logits_ptr=logits,
        stride_logits_row=logits.stride(0),
        query_start_ptr=rows.query_start,
        request_ptr=rows.request,
        temperature_ptr=sampling.temperature,
        top_k_ptr=sampling.top_k,
        top_p_ptr=sampling.top_p,
        min_p_ptr=sampling.min_p,
        stats_ptr=planes,
        stride_plane=stride_plane,
        threshold_ptr=threshold,
        num_slots=rows.num_slots,
        num_rows=num_rows,
        vocab_size=vocab_size,
        num_tiles=num_tiles,
        NODES=rows.nodes,
        KEY_SHIFT=_KEY_SHIFT[logits.dtype],
        TILES=power_of_two(num_tiles),
        BLOCK_V=config.block_vocab,
        BLOCK_C=config.block_sub,
        num_warps=config.num_warps,
    )
    if noise or sums or sub_sums:
        run("kept")
    return Statistics(planes, stride_plane, threshold)


def gather_draft_statistics(
    logits: Tensor, query_start: Tensor, num_rows: int, nodes: int, config: RowConfig, planes: Tensor, stride_plane: int
) -> None:
    """Maxima and sums of a draft's scores ``[R, G, Vd]``, at the slots of the nodes that the drafts follow."""
    from dspark.kernels.statistics import row_statistics_kernel

    vocab_size = logits.shape[-1]
    num_slots = logits.shape[0] * nodes
    num_tiles = config.tiles(vocab_size)
    row_programs = -(-num_slots // config.block_rows)
    per_program = tiles_per_program(row_programs * num_tiles)
    launch(
        row_statistics_kernel,
        (row_programs, -(-num_tiles // per_program)),
        logits_ptr=logits,
        stride_logits_request=logits.stride(0),
        stride_logits_row=logits.stride(1),
        query_start_ptr=query_start,
        request_ptr=None,
        temperature_ptr=None,
        seed_ptr=None,
        position_ptr=None,
        salt_ptr=None,
        top_k_ptr=None,
        top_p_ptr=None,
        min_p_ptr=None,
        threshold_ptr=None,
        stats_ptr=planes,
        stride_plane=stride_plane,
        num_slots=num_slots,
        num_rows=num_rows,
        vocab_size=vocab_size,
        num_tiles=num_tiles,
        NODES=nodes,
        STREAM=0,
        PASS="only",
        DRAFT=True,
        NOISE=False,
        SUMS=True,
        SUB_SUMS=False,
        RAW=False,
        TILES_PER_PROGRAM=per_program,
        BLOCK_R=config.block_rows,
        BLOCK_V=config.block_vocab,
        BLOCK_S=config.block_sub,
        num_warps=config.num_warps,
    )
