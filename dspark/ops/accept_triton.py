"""Launch of the kernels behind ``accept``.

``coupled`` takes two launches and ``match`` three. ``ratio`` and ``block`` take up to five: the draft's statistics only
when q is dense, the residual's mass only when something is drafted and sampled. Truncation adds two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dspark.ops.launch import (
    DRAFT_PLANES,
    LINE_FIELDS,
    RowConfig,
    Scratch,
    check_unit_stride,
    check_workspace,
    launch,
    padded,
    power_of_two,
    requests_per_program,
    row_config,
    verdict_warps,
)
from dspark.ops.statistics_triton import (
    Rows,
    Statistics,
    gather_draft_statistics,
    gather_statistics,
    statistics_elements,
)
from dspark.ops.types import DenseQ, DraftDistribution, Logprobs, Rule, Sampling, SparseQ, Verdict


@dataclass(frozen=True)
class _Shape:
    """Sizes of a call, and the scratch memory that follows from them, in 4-byte elements."""

    num_requests: int
    nodes: int
    vocab_size: int
    draft_vocab_size: int
    rule: Rule
    config: RowConfig
    draft_config: RowConfig

    @property
    def num_slots(self) -> int:
        return self.num_requests * self.nodes

    @property
    def num_lines(self) -> int:
        return self.num_requests if self.rule == "ratio" else self.num_slots

    @property
    def mass_elements(self) -> int:
        return self.num_lines * self.config.tiles(self.vocab_size) * self.config.subs

    @property
    def draft_plane(self) -> int:
        return padded(self.num_slots * self.draft_config.tiles(self.draft_vocab_size))

    @property
    def elements(self) -> int:
        statistics = statistics_elements(self.num_slots, self.vocab_size, self.config)
        if self.rule == "coupled":
            return statistics
        if self.rule == "match":
            return statistics + padded(2 * self.num_slots)
        lines = padded(self.num_lines * LINE_FIELDS)
        return statistics + DRAFT_PLANES * self.draft_plane + lines + padded(self.mass_elements)


def workspace_bytes(
    num_requests: int,
    max_query_len: int,
    vocab_size: int,
    draft_vocab_size: int,
    rule: Rule,
    config: RowConfig | None = None,
) -> int:
    """Bytes of scratch memory that a call of these sizes takes."""
    given = config or row_config(vocab_size)
    draft_config = config or row_config(draft_vocab_size)
    return 4 * _Shape(num_requests, max_query_len, vocab_size, draft_vocab_size, rule, given, draft_config).elements


def accept_triton(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
    workspace: Tensor | None,
    config: RowConfig | None = None,
) -> None:
    """Write the verdict to ``out``; arguments as checked by :func:`dspark.ops.accept`.

    Args:
        config: how rows are cut; by default what :func:`row_config` says. It changes sums by their rounding only.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    vocab_size = target_logits.shape[1]
    draft_vocab_size = q.logits.shape[-1] if isinstance(q, DenseQ) else vocab_size
    shape = _Shape(
        position.shape[0],
        max_query_len,
        vocab_size,
        draft_vocab_size,
        rule,
        config or row_config(vocab_size),
        config or row_config(draft_vocab_size),
    )
    check_unit_stride("target_logits", target_logits)
    check_workspace(workspace, 4 * shape.elements, target_logits.device)
    for name in ("tokens", "num_emitted", "path", "logprobs", "status"):
        if not getattr(out, name).is_contiguous():
            raise ValueError(f"out.{name}: expected a contiguous tensor")
    if shape.num_requests == 0:
        return
    rows = Rows(target_logits, sampling, position, max_query_len, shape.num_slots, query_start)
    scratch = Scratch(shape.elements, target_logits.device, workspace)
    if rule == "coupled" or rule == "match":
        _accept_drawn(rows, tokens, logprobs, out, shape, scratch)
    else:
        _accept_ratio(rows, tokens, q, logprobs, out, shape, scratch)


def _accept_drawn(
    rows: Rows, tokens: Tensor, logprobs: Logprobs, out: Verdict, shape: _Shape, scratch: Scratch
) -> None:
    """``coupled`` and ``match``."""
    from dspark.kernels.chain import chain_verdict_kernel, sample_kernel

    config = shape.config
    sampled = not rows.sampling.all_greedy
    match = sampled and shape.rule == "match"
    raw = logprobs == "raw"
    noise = sampled and not match
    stats = gather_statistics(rows, config, scratch, noise=noise, sums=match or not raw, sub_sums=match, raw=raw)
    num_tiles = config.tiles(shape.vocab_size)
    tiles_p2 = power_of_two(num_tiles)
    drawn = None
    if match:
        drawn = scratch.take(2 * shape.num_slots).view(tokens.dtype)
        columns = max(tiles_p2 * config.subs, config.block_sub)
        block_rows = max(1, 1024 // columns)
        launch(
            sample_kernel,
            (-(-shape.num_slots // block_rows),),
            logits_ptr=rows.logits,
            stride_logits_row=rows.logits.stride(0),
            query_start_ptr=rows.query_start,
            seed_ptr=rows.sampling.seed,
            position_ptr=rows.position,
            threshold_ptr=stats.threshold,
            request_ptr=None,
            temperature_ptr=rows.sampling.temperature,
            stats_ptr=stats.planes,
            stride_plane=stats.stride_plane,
            token_ptr=drawn,
            num_slots=shape.num_slots,
            num_rows=rows.logits.shape[0],
            vocab_size=shape.vocab_size,
            num_tiles=num_tiles,
            METHOD="inverse_cdf",
            NODES=shape.nodes,
            TILES=tiles_p2,
            BLOCK_R=block_rows,
            BLOCK_V=config.block_vocab,
            BLOCK_S=config.block_sub,
            num_warps=4,
        )
    nodes_p2 = power_of_two(shape.nodes)
    block_requests = requests_per_program(nodes_p2, tiles_p2)
    launch(
        chain_verdict_kernel,
        (-(-shape.num_requests // block_requests),),
        **_verdict_arguments(rows, tokens, out, shape, stats),
        drawn_ptr=drawn,
        NOISE=noise,
        RAW=raw,
        NODES_P2=nodes_p2,
        TILES=tiles_p2,
        BLOCK_R=block_requests,
        num_warps=verdict_warps(block_requests * nodes_p2 * tiles_p2),
    )


def _accept_ratio(
    rows: Rows,
    tokens: Tensor,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
    shape: _Shape,
    scratch: Scratch,
) -> None:
    """``ratio`` and ``block``."""
    from dspark.kernels.ratio import ratio_kernel, ratio_verdict_kernel, residual_mass_kernel

    config, rule, nodes = shape.config, shape.rule, shape.nodes
    sampled = not rows.sampling.all_greedy
    raw = logprobs == "raw"
    stats = gather_statistics(rows, config, scratch, noise=False, sums=True, sub_sums=sampled, raw=raw)
    draft = _draft_arguments(q)
    num_rows = rows.logits.shape[0]
    num_tiles = config.tiles(shape.vocab_size)
    tiles_p2 = power_of_two(num_tiles)
    draft_tiles = shape.draft_config.tiles(shape.draft_vocab_size)
    draft_planes = scratch.take(DRAFT_PLANES * shape.draft_plane)
    if isinstance(q, DenseQ) and nodes > 1:
        gather_draft_statistics(
            q.logits, rows.query_start, num_rows, nodes, shape.draft_config, draft_planes, shape.draft_plane
        )
    lines = scratch.take(shape.num_lines * LINE_FIELDS)
    mass = scratch.take(shape.mass_elements)
    nodes_p2 = power_of_two(nodes)
    sparse_p2 = power_of_two(draft["q_width"]) if isinstance(q, SparseQ) else 1
    sampling = rows.sampling
    request_arguments = {
        "seed_ptr": sampling.seed,
        "position_ptr": rows.position,
        "threshold_ptr": stats.threshold,
        "line_ptr": lines,
        "vocab_size": shape.vocab_size,
        "RULE": rule,
    }
    columns = max(tiles_p2, power_of_two(draft_tiles), sparse_p2)
    block_requests = requests_per_program(nodes_p2, columns)
    launch(
        ratio_kernel,
        (-(-shape.num_requests // block_requests),),
        logits_ptr=rows.logits,
        stride_logits_row=rows.logits.stride(0),
        tokens_ptr=tokens,
        query_start_ptr=rows.query_start,
        temperature_ptr=sampling.temperature,
        stats_ptr=stats.planes,
        stride_plane=stats.stride_plane,
        **request_arguments,
        **draft,
        q_stats_ptr=draft_planes,
        stride_q_plane=shape.draft_plane,
        num_requests=shape.num_requests,
        num_rows=num_rows,
        num_tiles=num_tiles,
        q_tiles=draft_tiles,
        NODES=nodes,
        NODES_P2=nodes_p2,
        TILES=tiles_p2,
        Q_TILES=power_of_two(draft_tiles),
        BLOCK_K=sparse_p2,
        BLOCK_R=block_requests,
        num_warps=verdict_warps(block_requests * nodes_p2 * columns),
    )
    if sampled and nodes > 1:
        launch(
            residual_mass_kernel,
            (-(-shape.num_lines // config.block_rows), num_tiles),
            logits_ptr=rows.logits,
            stride_logits_row=rows.logits.stride(0),
            tokens_ptr=tokens,
            query_start_ptr=rows.query_start,
            temperature_ptr=sampling.temperature,
            threshold_ptr=stats.threshold,
            **draft,
            line_ptr=lines,
            mass_ptr=mass,
            num_lines=shape.num_lines,
            num_slots=shape.num_slots,
            num_rows=num_rows,
            vocab_size=shape.vocab_size,
            num_tiles=num_tiles,
            RULE=rule,
            NODES=nodes,
            BLOCK_R=config.block_rows,
            BLOCK_V=config.block_vocab,
            BLOCK_S=config.block_sub,
            num_warps=config.num_warps,
        )
    columns = max(tiles_p2 * config.subs, config.block_sub)
    block_requests = requests_per_program(nodes_p2, columns)
    launch(
        ratio_verdict_kernel,
        (-(-shape.num_requests // block_requests),),
        **_verdict_arguments(rows, tokens, out, shape, stats),
        **request_arguments,
        **draft,
        mass_ptr=mass,
        SAMPLED=sampled,
        RAW=raw,
        NODES_P2=nodes_p2,
        TILES=tiles_p2,
        BLOCK_R=block_requests,
        BLOCK_V=config.block_vocab,
        BLOCK_S=config.block_sub,
        num_warps=verdict_warps(block_requests * nodes_p2 * tiles_p2 * config.subs),
    )


def _verdict_arguments(rows: Rows, tokens: Tensor, out: Verdict, shape: _Shape, stats: Statistics) -> dict[str, Any]:
    return {
        "logits_ptr": rows.logits,
        "stride_logits_row": rows.logits.stride(0),
        "tokens_ptr": tokens,
        "query_start_ptr": rows.query_start,
        "temperature_ptr": rows.sampling.temperature,
        "stats_ptr": stats.planes,
        "stride_plane": stats.stride_plane,
        "out_tokens_ptr": out.tokens,
        "out_path_ptr": out.path,
        "out_logprobs_ptr": out.logprobs,
        "out_num_ptr": out.num_emitted,
        "out_status_ptr": out.status,
        "num_requests": shape.num_requests,
        "num_rows": rows.logits.shape[0],
        "num_tiles": shape.config.tiles(shape.vocab_size),
        "NODES": shape.nodes,
    }


def _draft_arguments(q: DraftDistribution | None) -> dict[str, Any]:
    """What the kernels take of q; no draft at all is like a point mass."""
    values, ids, kind = None, None, "point"
    if isinstance(q, DenseQ):
        check_unit_stride("q.logits", q.logits)
        values, ids, kind = q.logits, q.draft_ids, "dense"
    elif isinstance(q, SparseQ):
        check_unit_stride("q.tokens", q.tokens)
        check_unit_stride("q.logprobs", q.logprobs)
        values, ids, kind = q.logprobs, q.tokens, "sparse"
    per_row = ids if kind == "sparse" else None
    return {
        "q_ptr": values,
        "q_token_ptr": ids,
        "stride_q_request": 0 if values is None else values.stride(0),
        "stride_q_row": 0 if values is None else values.stride(1),
        "stride_q_token_request": 0 if per_row is None else per_row.stride(0),
        "stride_q_token_row": 0 if per_row is None else per_row.stride(1),
        "q_width": 0 if values is None else values.shape[-1],
        "Q": kind,
    }
