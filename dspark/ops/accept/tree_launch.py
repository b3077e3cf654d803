"""Launch of the kernels behind ``accept`` over trees.

``coupled`` and ``match`` take three launches. ``recursive`` takes four, and two for each child that a node may have
(one where nothing is sampled). Truncation adds two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dspark.ops.accept.gather import Rows as LogitRows
from dspark.ops.accept.gather import gather_draft_statistics, gather_statistics
from dspark.ops.accept.shared_launch import (
    AcceptPlan,
    dense_arguments,
    draw_tokens,
    gather_for_draw,
    read_arguments,
    written_arguments,
)
from dspark.ops.groups import num_words
from dspark.ops.launch import (
    RowConfig,
    launch,
    padded,
    requests_per_program,
    verdict_warps,
)
from dspark.ops.types import DenseQ, Logprobs, Rows, Rule, Sampling, Tree, Verdict

LINE, STATE, STEP = 4, 5, 2
"""Numbers per node, and per node and child, of ``dspark.kernels.accept.recursive_residual``."""
_TILES_AT_A_TIME = 4


@dataclass(frozen=True)
class TreePlan(AcceptPlan):
    """That of trees; :func:`plan_of` keeps it from call to call.

    Attributes:
        children: most children of a node, under ``recursive``.
    """

    children: int

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of scratch memory: statistics, thresholds, and what the rule needs beside them."""
        count, shared = self.slots.count, [self.slots.elements, padded(self.slots.count)]
        if self.rule != "recursive":
            return [*shared, padded(2 * count)]
        return [
            *shared,
            self.draft_slots.draft_elements,
            padded(2 * LINE * count),
            padded(STATE * count),
            padded(STEP * self.children * count),
            padded(self.children * count),
            padded(count * self.slots.num_tiles * self.slots.config.subs),
            padded(count * self.slots.num_tiles),
        ]

    @cached_property
    def verdict(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``tree_verdict_kernel``: a warp per request, or one for each 64 nodes."""
        return (self.num_requests,), self._by_request | self.tiles | {"num_warps": max(1, self.nodes_p2 // 64)}

    @cached_property
    def lines(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``node_lines_kernel``."""
        block_rows = requests_per_program(1, max(self.slots.tiles_p2, self.draft_slots.tiles_p2))
        return (-(-self.slots.count // block_rows),), {
            **self.tiles,
            "stride_q_plane": self.draft_slots.stride_plane,
            "num_slots": self.slots.count,
            "vocab_size": self.vocab_size,
            "q_tiles": self.draft_slots.num_tiles,
            "nodes": self.nodes,
            "Q_TILES": self.draft_slots.tiles_p2,
            "BLOCK_R": block_rows,
            "num_warps": 4,
        }

    @cached_property
    def judge(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``judge_kernel``."""
        subs = self.slots.config.subs
        return (self.num_requests,), {
            **self._by_request,
            "children": self.children,
            "SUBS": subs,
            "BLOCK_T": _TILES_AT_A_TIME,
            "num_warps": verdict_warps(self.nodes_p2 * subs * _TILES_AT_A_TIME),
        }

    @cached_property
    def left_over(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Grid and constant arguments of ``left_over_kernel``."""
        return self.slots.grid, self.slots.tiled | {"children": self.children}

    @cached_property
    def recursive_verdict(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``recursive_verdict_kernel``."""
        config = self.slots.config
        return (self.num_requests,), {
            **self._by_request,
            **self.tiles,
            "num_slots": self.slots.count,
            "vocab_size": self.vocab_size,
            "children": self.children,
            "BLOCK_V": config.block_vocab,
            "BLOCK_S": config.block_sub,
            "num_warps": 4,
        }

    @cached_property
    def _by_request(self) -> dict[str, Any]:
        return {
            "num_tiles": self.slots.num_tiles,
            "nodes": self.nodes,
            "WORDS": num_words(self.nodes),
            "NODES_P2": self.nodes_p2,
        }


plan_of = lru_cache(maxsize=256)(TreePlan)


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
    return 4 * sum(plan_of(rule, num_requests, nodes, vocab_size, draft_vocab_size, config, children).sizes)


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
) -> TreePlan:
    """How the launches are cut; ``config`` changes sums by their rounding only."""
    vocab_size = sizes["V"]
    draft_vocab_size = sizes.get("Vd", vocab_size)
    return plan_of(rule, sizes["R"], sizes["N"], vocab_size, draft_vocab_size, config, max_branching or 1)


def run(
    plan: TreePlan,
    regions: tuple[Tensor, ...],
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
    """Launch the kernels of a tree's rule."""
    written = written_arguments(out, logprobs)
    read_rows = LogitRows(target_logits, sampling, rows.position, rows.query_start, depth=tree.depth)
    read = read_arguments(read_rows, rows.tokens)
    shape = {"parents_ptr": tree.parents, "ancestors_ptr": tree.ancestors, "depth_ptr": tree.depth}
    written["stats_ptr"] = regions[0]
    if rule == "recursive":
        _accept_recursive(read_rows, plan, regions, q, read, shape, written)
    else:
        _accept_drawn(read_rows, plan, regions, read, shape, written)


@cache
def _tree_verdict_kernel() -> Any:
    from dspark.kernels.accept.tree import tree_verdict_kernel

    return tree_verdict_kernel


@cache
def _recursive_kernels() -> tuple[Any, Any, Any, Any]:
    from dspark.kernels.accept.recursive import judge_kernel, node_lines_kernel, recursive_verdict_kernel
    from dspark.kernels.accept.recursive_residual import left_over_kernel

    return node_lines_kernel, judge_kernel, left_over_kernel, recursive_verdict_kernel


def _accept_drawn(
    rows: LogitRows,
    plan: TreePlan,
    regions: tuple[Tensor, ...],
    read: dict[str, Any],
    shape: dict[str, Any],
    written: dict[str, Any],
) -> None:
    """``coupled`` and ``match``."""
    method = gather_for_draw(rows, plan, regions, raw=written["RAW"])
    drawn = draw_tokens(rows, plan, regions, read, method)
    grid, constants = plan.verdict
    launch(_tree_verdict_kernel(), grid, constants | read | shape | written | {"drawn_ptr": drawn})


def _accept_recursive(
    rows: LogitRows,
    plan: TreePlan,
    regions: tuple[Tensor, ...],
    q: DenseQ | None,
    read: dict[str, Any],
    shape: dict[str, Any],
    written: dict[str, Any],
) -> None:
    """``recursive``; without q there is the anchor alone."""
    node_lines_kernel, judge_kernel, left_over_kernel, recursive_verdict_kernel = _recursive_kernels()
    planes, threshold, draft_planes, lines, state, steps, rejected, mass, rest = regions
    sampled = not rows.sampling.all_greedy
    kept = threshold if rows.truncated else None
    gather_statistics(rows, plan.slots, planes, kept, noise=False, sums=True, sub_sums=sampled, raw=written["RAW"])
    if q is not None and plan.nodes > 1:
        gather_draft_statistics(q.logits, read["query_start_ptr"], read["num_rows"], plan.draft_slots, draft_planes)
    lines, state, rejected = lines.view(torch.float64), state.view(torch.int32), rejected.view(torch.int32)
    record: dict[str, Any] = {"line_ptr": lines, "state_ptr": state}
    grid, constants = plan.lines
    arguments = constants | record
    arguments |= {name: read[name] for name in ("tokens_ptr", "query_start_ptr", "num_rows")}
    arguments |= {"parents_ptr": shape["parents_ptr"], "stats_ptr": planes, "q_stats_ptr": draft_planes}
    launch(node_lines_kernel, grid, arguments)

    record |= {"steps_ptr": steps, "rejected_ptr": rejected, "mass_ptr": mass, "threshold_ptr": kept}
    record |= dense_arguments(q)
    drawn = {"seed_ptr": rows.sampling.seed, "position_ptr": rows.position}
    judge_grid, judge = plan.judge
    weigh_grid, weigh = plan.left_over
    judge = judge | read | shape | record | drawn | {"rest_ptr": rest}
    weigh = weigh | read | record | {"rest_ptr": rest}
    del weigh["tokens_ptr"]
    for step in range(1, plan.children + 1 if q is not None and plan.nodes > 1 else 1):
        launch(judge_kernel, judge_grid, judge | {"step": step})
        if sampled:
            launch(left_over_kernel, weigh_grid, weigh | {"step": step})
    grid, constants = plan.recursive_verdict
    arguments = constants | read | shape | record | drawn | written
    arguments |= {"SAMPLED": sampled}
    launch(recursive_verdict_kernel, grid, arguments)
