"""Plan and launch of the kernels behind ``accept`` over trees.

``coupled`` and ``match`` take three launches. ``recursive`` takes four, and two for each child that a node may have
(one where nothing is sampled). Truncation adds two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.accept.launch import (
    DrawnPlan,
    KernelTarget,
    draft_planes,
    gather_target,
    kernel_q,
    plan_draft,
    plan_drawn,
    run_drawn,
)
from dspark.ops.groups import num_words
from dspark.ops.launch import Kernel, RowConfig, padded, power_of_two, requests_per_program, row_config, verdict_warps
from dspark.ops.sample.statistics_launch import (
    KernelRows,
    KernelTree,
    StatisticsPlan,
    gather_statistics,
    kernel_sampling,
    plan_statistics,
    statistics_sizes,
)
from dspark.ops.types import DenseQ, Logprobs, Rows, Rule, Sampling, Tree, Verdict

LINE, STATE, STEP = 4, 5, 2
"""Numbers per line (of both kinds), and per rejection, of ``dspark.kernels.accept.recursive_residual``."""
_TILES_AT_A_TIME = 4


class Record(NamedTuple):
    """What the steps of ``recursive`` note of each line; see ``dspark.kernels.accept.recursive_residual``.

    Attributes:
        lines: ``[lines, LINE]`` float64.
        state: ``[lines, STATE]`` int32.
        steps: ``[lines, children, STEP]`` float32.
        rejected: ``[lines, children]`` int32, the rejected tokens.
        mass: float32, what the last step left of p, by sub-tile.
        rest: float32, what it left of q, by tile.
    """

    lines: Tensor
    state: Tensor
    steps: Tensor
    rejected: Tensor
    mass: Tensor
    rest: Tensor


class RecursivePlan(NamedTuple):
    """``recursive``: the statistics, what is known of each node, the steps (``judge`` and, where something is sampled,
    ``left_over``; there are ``children`` of them), and the verdict."""

    sizes: Sequence[int]
    statistics: StatisticsPlan
    draft: StatisticsPlan | None
    lines: Kernel
    judge: Kernel
    left_over: Kernel | None
    children: int
    verdict: Kernel


def workspace_bytes(
    num_requests: int,
    nodes: int,
    vocab_size: int,
    draft_vocab_size: int,
    rule: Rule,
    children: int,
    config: RowConfig | None = None,
) -> int:
    """Bytes of scratch memory that a call of these sizes takes."""
    return 4 * sum(regions_of(num_requests, nodes, vocab_size, draft_vocab_size, rule, children, config))


def regions_of(
    num_requests: int,
    nodes: int,
    vocab_size: int,
    draft_vocab_size: int,
    rule: Rule,
    children: int,
    config: RowConfig | None = None,
) -> list[int]:
    """Elements of the planes, the thresholds, and what the rule needs beside them."""
    cut, lines = config or row_config(vocab_size), num_requests * nodes
    shared = [*statistics_sizes(lines, vocab_size, cut)]
    if rule != "recursive":
        return [*shared, padded(2 * lines)]
    tiles = cut.tiles(vocab_size)
    return [
        *shared,
        draft_planes(lines, draft_vocab_size, config),
        padded(2 * LINE * lines),
        padded(STATE * lines),
        padded(STEP * children * lines),
        padded(children * lines),
        padded(lines * tiles * cut.subs),
        padded(lines * tiles),
    ]


def plan(
    sizes: dict[str, int],
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DenseQ | None,
    logprobs: Logprobs,
    tree: Tree,
    max_branching: int | None,
    out: Verdict,
    config: RowConfig | None = None,
) -> DrawnPlan | RecursivePlan:
    """The launches of a tree's rule; ``config`` changes sums by their rounding only."""
    from dspark.kernels.accept.tree import tree_verdict_kernel

    nodes, vocab_size, children = sizes["N"], sizes["V"], max_branching or 1
    regions = regions_of(sizes["R"], nodes, vocab_size, sizes.get("Vd", vocab_size), rule, children, config)
    by_request = {"nodes": nodes, "num_rows": sizes["T"], "WORDS": num_words(nodes), "NODES_P2": power_of_two(nodes)}
    if rule == "recursive":
        return _plan_recursive(sizes, target_logits, sampling, q, logprobs, children, regions, by_request, config)
    cut = config or row_config(vocab_size)
    statistics, draw, _ = plan_drawn(sizes, target_logits, rule, sampling, logprobs, cut)
    verdict = Kernel(
        tree_verdict_kernel,
        (sizes["R"],),
        target_logits.device,
        **by_request,
        RAW=logprobs == "raw",
        TILES=statistics.tiles_p2,
        num_warps=max(1, by_request["NODES_P2"] // 64),  # a warp, or one for each 64 nodes
    )
    return DrawnPlan(regions, statistics, draw, verdict)


def _plan_recursive(
    sizes: dict[str, int],
    target_logits: Tensor,
    sampling: Sampling,
    q: DenseQ | None,
    logprobs: Logprobs,
    children: int,
    regions: Sequence[int],
    by_request: dict[str, Any],
    config: RowConfig | None,
) -> RecursivePlan:
    from dspark.kernels.accept.recursive import judge_kernel, node_lines_kernel, recursive_verdict_kernel
    from dspark.kernels.accept.recursive_residual import left_over_kernel

    nodes, device, sampled = sizes["N"], target_logits.device, not sampling.all_greedy
    lines, cut = sizes["R"] * nodes, config or row_config(sizes["V"])
    by_line = {"num_lines": lines, "num_rows": sizes["T"], "nodes": nodes}
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
    block_lines = requests_per_program(1, max(statistics.tiles_p2, q_tiles))
    judge = Kernel(
        judge_kernel,
        (sizes["R"],),
        device,
        **by_request,
        num_tiles=statistics.num_tiles,
        children=children,
        SUBS=cut.subs,
        BLOCK_T=_TILES_AT_A_TIME,
        num_warps=verdict_warps(by_request["NODES_P2"] * cut.subs * _TILES_AT_A_TIME),
    )
    left_over = Kernel(
        left_over_kernel,
        statistics.first.grid,
        device,
        **by_line,
        num_tiles=statistics.num_tiles,
        children=children,
        BLOCK_R=cut.block_rows,
        BLOCK_V=cut.block_vocab,
        BLOCK_S=cut.block_sub,
        num_warps=cut.num_warps,
    )
    return RecursivePlan(
        sizes=regions,
        statistics=statistics,
        draft=draft,
        lines=Kernel(
            node_lines_kernel,
            (-(-lines // block_lines),),
            device,
            **by_line,
            vocab_size=sizes["V"],
            TILES=statistics.tiles_p2,
            Q_TILES=q_tiles,
            BLOCK_R=block_lines,
            num_warps=4,
        ),
        judge=judge,
        left_over=left_over if sampled else None,
        children=children if draft is not None else 0,
        verdict=Kernel(
            recursive_verdict_kernel,
            (sizes["R"],),
            device,
            **by_request,
            num_lines=lines,
            children=children,
            SAMPLED=sampled,
            RAW=logprobs == "raw",
            TILES=statistics.tiles_p2,
            BLOCK_V=cut.block_vocab,
            BLOCK_S=cut.block_sub,
            num_warps=4,
        ),
    )


def run(
    plan: DrawnPlan | RecursivePlan,
    regions: Sequence[Tensor],
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DenseQ | None,
    logprobs: Logprobs,
    tree: Tree,
    max_branching: int | None,
    out: Verdict,
) -> None:
    """Launch the kernels of a tree's rule; without q there is the anchor alone."""
    shape = KernelTree(tree.parents, tree.ancestors, tree.depth)
    if isinstance(plan, DrawnPlan):
        run_drawn(plan, regions, target_logits, rows, sampling, shape, out)
        return
    planes, threshold, draft_region, lines, state, steps, rejected, mass, rest = regions
    batch, given = KernelRows(*rows[:3]), kernel_sampling(sampling, truncates=False)
    stats, kept = gather_target(plan.statistics, planes, threshold, target_logits, batch, sampling)
    target = KernelTarget(target_logits, kept, target_logits.stride(0), plan.statistics.vocab_size)
    draft, draft_stats = kernel_q(q, rows.max_query_len), None
    if plan.draft is not None and draft is not None:
        draft_stats = gather_statistics(plan.draft, draft_region, None, draft.scores, batch)
    state, rejected = state.view(torch.int32), rejected.view(torch.int32)
    record = Record(lines.view(torch.float64), state, steps, rejected, mass, rest)
    plan.lines(batch, shape, stats, draft_stats, record)
    for step in range(1, plan.children + 1):
        plan.judge(target, batch, given, shape, draft, record, step)
        if plan.left_over is not None:
            plan.left_over(target, batch, given, draft, record, step)
    plan.verdict(target, batch, given, shape, draft, stats, record, out)
