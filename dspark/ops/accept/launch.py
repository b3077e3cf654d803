"""Plan and launch of the kernels behind ``accept``, over chains; and what trees share with them.

``coupled`` takes two launches and ``match`` three. ``ratio`` and ``block`` take up to five: the draft's statistics only
when q is dense, the residual's mass only when something is drafted and sampled. Truncation adds two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.launch import (
    DRAFT_PLANES,
    Kernel,
    RowConfig,
    padded,
    power_of_two,
    requests_per_program,
    row_config,
    verdict_warps,
)
from dspark.ops.sample.statistics_launch import (
    KernelRows,
    KernelTree,
    Statistics,
    StatisticsPlan,
    gather_statistics,
    kernel_sampling,
    plan_draw,
    plan_statistics,
    statistics_sizes,
)
from dspark.ops.types import DenseQ, DraftDistribution, Logprobs, PointMass, Rows, Rule, Sampling, Verdict

RECORD_FIELDS = 5
"""Floats per record of ``dspark.kernels.accept.ratio``."""


class KernelTarget(NamedTuple):
    """A target's rows as kernels read scores of them.

    Attributes:
        logits: ``[T, V]``.
        threshold: ``[lines]`` float32, the least scaled score that truncation keeps; None where nothing is truncated.
        stride: elements between rows.
        vocab_size: ``V``.
    """

    logits: Tensor
    threshold: Tensor | None
    stride: int
    vocab_size: int


class KernelQ(NamedTuple):
    """A draft distribution as kernels read it; there is none of a point mass.

    Attributes:
        scores: ``[R, G, width]``, those of a dense q, or the log-probabilities of a sparse one.
        draft_ids: of a dense one.
        tokens: ``[R, G, width]`` of a sparse one, None of a dense one.
        stride_request, stride_row: of the scores.
        token_request, token_row: strides of the tokens.
        width: scores of a row.
    """

    scores: Tensor
    draft_ids: Tensor | None
    tokens: Tensor | None
    stride_request: int
    stride_row: int
    token_request: int
    token_row: int
    width: int


def kernel_q(q: DraftDistribution | None, nodes: int) -> KernelQ | None:
    """The group; None also where nothing is drafted."""
    if q is None or isinstance(q, PointMass) or nodes == 1:
        return None
    if isinstance(q, DenseQ):
        x = q.logits
        return KernelQ(x, q.draft_ids, None, x.stride(0), x.stride(1), 0, 0, x.shape[2])
    x, tokens = q.logprobs, q.tokens
    return KernelQ(x, None, tokens, x.stride(0), x.stride(1), tokens.stride(0), tokens.stride(1), x.shape[2])


class DrawnPlan(NamedTuple):
    """``coupled`` and ``match``: the statistics, a draw from each row (None: the verdict does it), and the verdict."""

    sizes: Sequence[int]
    statistics: StatisticsPlan
    draw: Kernel | None
    verdict: Kernel


class RatioPlan(NamedTuple):
    """``ratio`` and ``block``: the statistics of target and (dense) draft, what is accepted, the residual's mass (None:
    there is no residual), and the verdict."""

    sizes: Sequence[int]
    statistics: StatisticsPlan
    draft: StatisticsPlan | None
    ratio: Kernel
    mass: Kernel | None
    verdict: Kernel


def workspace_bytes(
    num_requests: int,
    nodes: int,
    vocab_size: int,
    draft_vocab_size: int,
    rule: Rule,
    config: RowConfig | None = None,
) -> int:
    """Bytes of scratch memory that a call of these sizes takes."""
    return 4 * sum(_regions(num_requests, nodes, vocab_size, draft_vocab_size, rule, config))


def _regions(
    num_requests: int, nodes: int, vocab_size: int, draft_vocab_size: int, rule: Rule, config: RowConfig | None
) -> list[int]:
    """Elements of the planes, the thresholds, and what the rule needs beside them."""
    cut, lines = config or row_config(vocab_size), num_requests * nodes
    shared = [*statistics_sizes(lines, vocab_size, cut)]
    if rule == "coupled":
        return shared
    if rule == "match":
        return [*shared, padded(2 * lines)]
    records = lines if rule == "block" else num_requests
    mass = records * cut.tiles(vocab_size) * cut.subs
    return [*shared, draft_planes(lines, draft_vocab_size, config), padded(records * RECORD_FIELDS), padded(mass)]


def draft_planes(lines: int, draft_vocab_size: int, config: RowConfig | None) -> int:
    """Elements of the planes of a draft's statistics."""
    return DRAFT_PLANES * padded(lines * (config or row_config(draft_vocab_size)).tiles(draft_vocab_size))


def plan(
    sizes: dict[str, int],
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
    config: RowConfig | None = None,
) -> DrawnPlan | RatioPlan:
    """The launches of a chain's rule; ``config`` changes sums by their rounding only."""
    rule, vocab_size = "ratio" if rule == "recursive" else rule, sizes["V"]
    draft_vocab_size = sizes.get("Vd", vocab_size)
    regions = _regions(sizes["R"], sizes["N"], vocab_size, draft_vocab_size, rule, config)
    if rule == "coupled" or rule == "match":
        return _plan_drawn(sizes, target_logits, rule, sampling, logprobs, regions, config or row_config(vocab_size))
    return _plan_ratio(sizes, target_logits, rule, sampling, q, logprobs, regions, config)


def plan_drawn(
    sizes: dict[str, int],
    target_logits: Tensor,
    rule: Rule,
    sampling: Sampling,
    logprobs: Logprobs,
    config: RowConfig,
) -> tuple[StatisticsPlan, Kernel, str]:
    """Of a rule in which the target draws every row: the statistics, the draw, and the method by which it draws."""
    method = "greedy" if sampling.all_greedy else "inverse_cdf" if rule == "match" else "gumbel"
    match, raw = method == "inverse_cdf", logprobs == "raw"
    statistics = plan_statistics(
        target_logits,
        lines=sizes["R"] * sizes["N"],
        nodes=sizes["N"],
        truncated=sampling.truncates,
        noise=method == "gumbel",
        sums=match or not raw,
        sub_sums=match,
        raw=raw,
        config=config,
    )
    return statistics, plan_draw(statistics, target_logits, method, sub_columns(statistics)), method


def sub_columns(statistics: StatisticsPlan) -> int:
    """Columns that a draw holds of a row: sub-tiles, then the tokens of one."""
    return max(statistics.tiles_p2 * statistics.config.subs, statistics.config.block_sub)


def _plan_drawn(
    sizes: dict[str, int],
    target_logits: Tensor,
    rule: Rule,
    sampling: Sampling,
    logprobs: Logprobs,
    regions: Sequence[int],
    config: RowConfig,
) -> DrawnPlan:
    from dspark.kernels.accept.chain import chain_verdict_kernel

    statistics, draw, method = plan_drawn(sizes, target_logits, rule, sampling, logprobs, config)
    grid, by_request = _by_request(sizes, statistics.tiles_p2)
    verdict = Kernel(
        chain_verdict_kernel,
        grid,
        target_logits.device,
        **by_request,
        NOISE=method == "gumbel",
        RAW=logprobs == "raw",
        TILES=statistics.tiles_p2,
    )
    return DrawnPlan(regions, statistics, draw if method == "inverse_cdf" else None, verdict)


def _plan_ratio(
    sizes: dict[str, int],
    target_logits: Tensor,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    regions: Sequence[int],
    config: RowConfig | None,
) -> RatioPlan:
    from dspark.kernels.accept.ratio import ratio_kernel, ratio_verdict_kernel, residual_mass_kernel

    nodes, device, sampled = sizes["N"], target_logits.device, not sampling.all_greedy
    lines, cut = sizes["R"] * nodes, config or row_config(sizes["V"])
    statistics = plan_statistics(
        target_logits,
        lines=lines,
        nodes=nodes,
        truncated=sampling.truncates,
        sums=True,
        sub_sums=sampled,
        raw=logprobs == "raw",
        config=cut,
    )
    draft = plan_draft(sizes, q, config)
    q_tiles = statistics.tiles_p2 if draft is None else draft.tiles_p2
    sparse = power_of_two(sizes.get("K", 1))
    grid, by_request = _by_request(sizes, max(statistics.tiles_p2, q_tiles, sparse))
    ratio = Kernel(
        ratio_kernel, grid, device, **by_request, RULE=rule, TILES=statistics.tiles_p2, Q_TILES=q_tiles, BLOCK_K=sparse
    )
    mass = None
    if sampled and nodes > 1:
        records = sizes["R"] if rule == "ratio" else lines
        mass = Kernel(
            residual_mass_kernel,
            (-(-records // cut.block_rows), statistics.num_tiles),
            device,
            num_records=records,
            num_lines=lines,
            num_rows=sizes["T"],
            num_tiles=statistics.num_tiles,
            nodes=nodes,
            RULE=rule,
            BLOCK_R=cut.block_rows,
            BLOCK_V=cut.block_vocab,
            BLOCK_S=cut.block_sub,
            num_warps=cut.num_warps,
        )
    columns = sub_columns(statistics)
    grid, by_request = _by_request(sizes, columns)
    held = max(power_of_two(nodes) * statistics.tiles_p2, columns)  # by node, and by the one row drawn from
    verdict = Kernel(
        ratio_verdict_kernel,
        grid,
        device,
        **by_request | {"num_warps": verdict_warps(by_request["BLOCK_R"] * held)},
        RULE=rule,
        SAMPLED=sampled,
        RAW=logprobs == "raw",
        TILES=statistics.tiles_p2,
        BLOCK_V=cut.block_vocab,
        BLOCK_S=cut.block_sub,
    )
    return RatioPlan(regions, statistics, draft, ratio, mass, verdict)


def plan_draft(sizes: dict[str, int], q: DraftDistribution | None, config: RowConfig | None) -> StatisticsPlan | None:
    """The statistics of a dense q, at the lines of the nodes that the drafts follow; None where there is none."""
    nodes = sizes["N"]
    if not isinstance(q, DenseQ) or nodes == 1:
        return None
    config = config or row_config(sizes["Vd"])
    return plan_statistics(
        q.logits, lines=sizes["R"] * nodes, nodes=nodes, num_rows=sizes["T"], sums=True, config=config
    )


def _by_request(sizes: dict[str, int], columns: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a kernel whose programs take requests, of ``columns`` entries per node."""
    nodes_p2 = power_of_two(sizes["N"])
    block_requests = requests_per_program(nodes_p2, columns)
    return (-(-sizes["R"] // block_requests),), {
        "num_requests": sizes["R"],
        "num_rows": sizes["T"],
        "NODES": sizes["N"],
        "NODES_P2": nodes_p2,
        "BLOCK_R": block_requests,
        "num_warps": verdict_warps(block_requests * nodes_p2 * columns),
    }


def run(
    plan: DrawnPlan | RatioPlan,
    regions: Sequence[Tensor],
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
) -> None:
    """Launch the kernels of a chain's rule."""
    if isinstance(plan, DrawnPlan):
        run_drawn(plan, regions, target_logits, rows, sampling, None, out)
        return
    planes, threshold, draft_region, records, mass = regions
    batch, given = KernelRows(*rows[:3]), kernel_sampling(sampling, truncates=False)
    stats, kept = gather_target(plan.statistics, planes, threshold, target_logits, batch, sampling)
    target = KernelTarget(target_logits, kept, target_logits.stride(0), plan.statistics.vocab_size)
    draft = kernel_q(q, rows.max_query_len)
    draft_stats = None
    if plan.draft is not None and draft is not None:
        draft_stats = gather_statistics(plan.draft, draft_region, None, draft.scores, batch)
    plan.ratio(target, batch, given, draft, stats, draft_stats, records)
    if plan.mass is not None:
        plan.mass(target, batch, given, draft, records, mass)
    plan.verdict(target, batch, given, draft, stats, records, mass, out)


def run_drawn(
    plan: DrawnPlan,
    regions: Sequence[Tensor],
    target_logits: Tensor,
    rows: Rows,
    sampling: Sampling,
    tree: KernelTree | None,
    out: Verdict,
) -> None:
    """Launch the kernels of ``coupled`` and ``match``, over chains or trees."""
    batch, given = KernelRows(*rows[:3]), kernel_sampling(sampling, truncates=False)
    stats, kept = gather_target(plan.statistics, regions[0], regions[1], target_logits, batch, sampling, tree)
    drawn = None
    if plan.draw is not None:
        drawn = regions[2].view(torch.int64)
        plan.draw(target_logits, batch, given, tree, stats, kept, None, drawn)
    target = KernelTarget(target_logits, None, target_logits.stride(0), plan.statistics.vocab_size)
    shape = () if tree is None else (tree,)
    plan.verdict(target, batch, given, *shape, stats, drawn, out)


def gather_target(
    plan: StatisticsPlan,
    planes: Tensor,
    threshold: Tensor,
    logits: Tensor,
    rows: KernelRows,
    sampling: Sampling,
    tree: KernelTree | None = None,
) -> tuple[Statistics, Tensor | None]:
    """Run the passes over the target's rows; their statistics, and the thresholds if there are any."""
    kept, given = None if plan.search is None else threshold, kernel_sampling(sampling, sampling.truncates)
    return gather_statistics(plan, planes, kept, logits, rows, given, tree), kept
