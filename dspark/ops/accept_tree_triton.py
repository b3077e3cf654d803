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

from dspark.ops.launch import (
    RowConfig,
    check_contiguous,
    check_devices,
    check_unit_stride,
    contiguous,
    contiguous_sampling,
    launch,
    padded,
    power_of_two,
    requests_per_program,
    row_config,
    scratch,
    verdict_warps,
)
from dspark.ops.statistics_triton import Rows, Slots, gather_draft_statistics, gather_statistics, slots_of
from dspark.ops.tree_checks import num_words
from dspark.ops.types import DenseQ, DraftDistribution, Logprobs, Rule, Sampling, Tree, Verdict

LINE, STATE, STEP = 4, 5, 2
"""Numbers per node, and per node and child, of ``dspark.kernels.left_over``."""
_TILES_AT_A_TIME = 4


@dataclass(frozen=True)
class TreePlan:
    """What follows from the sizes of a call alone; :func:`plan_of` keeps it from call to call.

    Attributes:
        rule: of the call.
        num_requests: ``R``.
        nodes: ``N``.
        children: most children of a node, under ``recursive``.
        slots: of the target's rows.
        draft_slots: of the draft's.
    """

    rule: Rule
    num_requests: int
    nodes: int
    children: int
    slots: Slots
    draft_slots: Slots

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
    def draw(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``sample_kernel``."""
        config = self.slots.config
        return self.slots.draw(max(self.slots.tiles_p2 * config.subs, config.block_sub))

    @cached_property
    def verdict(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``tree_verdict_kernel``: a warp per request, or one for each 64 nodes."""
        constants = {"TILES": self.slots.tiles_p2, "num_warps": max(1, power_of_two(self.nodes) // 64)}
        return (self.num_requests,), self._by_request | constants

    @cached_property
    def lines(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``node_lines_kernel``."""
        block_rows = requests_per_program(1, max(self.slots.tiles_p2, self.draft_slots.tiles_p2))
        return (-(-self.slots.count // block_rows),), {
            "stride_plane": self.slots.stride_plane,
            "stride_q_plane": self.draft_slots.stride_plane,
            "num_slots": self.slots.count,
            "vocab_size": self.slots.vocab_size,
            "num_tiles": self.slots.num_tiles,
            "q_tiles": self.draft_slots.num_tiles,
            "nodes": self.nodes,
            "TILES": self.slots.tiles_p2,
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
            "num_warps": verdict_warps(power_of_two(self.nodes) * subs * _TILES_AT_A_TIME),
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
            "num_slots": self.slots.count,
            "vocab_size": self.slots.vocab_size,
            "stride_plane": self.slots.stride_plane,
            "children": self.children,
            "TILES": self.slots.tiles_p2,
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
            "NODES_P2": power_of_two(self.nodes),
        }


@lru_cache(maxsize=256)
def plan_of(
    rule: Rule,
    num_requests: int,
    nodes: int,
    vocab_size: int,
    draft_vocab_size: int,
    children: int,
    config: RowConfig | None,
) -> TreePlan:
    """The plan of a call of these sizes."""
    slots = slots_of(num_requests * nodes, nodes, vocab_size, config or row_config(vocab_size))
    draft_slots = slots_of(num_requests * nodes, nodes, draft_vocab_size, config or row_config(draft_vocab_size))
    return TreePlan(rule, num_requests, nodes, children, slots, draft_slots)


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
    return 4 * sum(plan_of(rule, num_requests, nodes, vocab_size, draft_vocab_size, children, config).sizes)


def accept_tree_triton(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    tree: Tree,
    max_branching: int,
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
    check_unit_stride("target_logits", target_logits)
    dense = q if isinstance(q, DenseQ) else None
    check_devices(
        target_logits.device,
        tokens=tokens,
        query_start=query_start,
        position=position,
        seed=sampling.seed,
        tree=tree.parents,
        q=None if dense is None else dense.logits,
    )
    for name in ("tokens", "num_emitted", "path", "logprobs", "status"):
        check_contiguous(f"out.{name}", getattr(out, name))
    vocab_size = target_logits.shape[1]
    draft_vocab_size = vocab_size if dense is None else dense.logits.shape[-1]
    plan = plan_of(rule, position.shape[0], max_query_len, vocab_size, draft_vocab_size, max_branching, config)
    regions = scratch(plan.sizes, target_logits.device, workspace)
    if plan.num_requests == 0:
        return
    depth = contiguous(tree.depth)
    rows = Rows(
        target_logits, contiguous_sampling(sampling), contiguous(position), contiguous(query_start), depth=depth
    )  # fmt: skip
    read = {
        "logits_ptr": target_logits,
        "stride_logits_row": target_logits.stride(0),
        "tokens_ptr": contiguous(tokens),
        "query_start_ptr": rows.query_start,
        "temperature_ptr": rows.sampling.temperature,
        "num_rows": target_logits.shape[0],
    }
    shape = {
        "parents_ptr": contiguous(tree.parents),
        "ancestors_ptr": contiguous(tree.ancestors),
        "depth_ptr": depth,
    }
    written = {
        "stats_ptr": regions[0],
        "out_tokens_ptr": out.tokens,
        "out_path_ptr": out.path,
        "out_logprobs_ptr": out.logprobs,
        "out_num_ptr": out.num_emitted,
        "out_status_ptr": out.status,
        "RAW": logprobs == "raw",
    }
    if rule == "recursive":
        _accept_recursive(rows, plan, regions, dense, read, shape, written)
    else:
        _accept_drawn(rows, plan, regions, read, shape, written)


@cache
def _drawn_kernels() -> tuple[Any, Any]:
    from dspark.kernels.chain import sample_kernel
    from dspark.kernels.tree import tree_verdict_kernel

    return sample_kernel, tree_verdict_kernel


@cache
def _recursive_kernels() -> tuple[Any, Any, Any, Any]:
    from dspark.kernels.left_over import left_over_kernel
    from dspark.kernels.recursive import judge_kernel, node_lines_kernel, recursive_verdict_kernel

    return node_lines_kernel, judge_kernel, left_over_kernel, recursive_verdict_kernel


def _accept_drawn(
    rows: Rows,
    plan: TreePlan,
    regions: tuple[Tensor, ...],
    read: dict[str, Any],
    shape: dict[str, Any],
    written: dict[str, Any],
) -> None:
    """``coupled`` and ``match``."""
    sample_kernel, tree_verdict_kernel = _drawn_kernels()
    planes, threshold, drawn = regions
    sampled, raw = not rows.sampling.all_greedy, written["RAW"]
    match = sampled and plan.rule == "match"
    noise = sampled and not match
    kept = threshold if rows.truncated else None
    gather_statistics(rows, plan.slots, planes, kept, noise=noise, sums=match or not raw, sub_sums=match, raw=raw)
    drawn = drawn.view(torch.int64)
    grid, constants = plan.draw
    arguments = constants | read
    del arguments["tokens_ptr"]
    arguments |= {
        "seed_ptr": rows.sampling.seed,
        "position_ptr": rows.position,
        "depth_ptr": shape["depth_ptr"],
        "threshold_ptr": kept,
        "request_ptr": None,
        "stats_ptr": planes,
        "token_ptr": drawn,
        "METHOD": "inverse_cdf" if match else "gumbel" if noise else "greedy",
    }
    launch(sample_kernel, grid, arguments)
    grid, constants = plan.verdict
    arguments = constants | read | shape | written
    arguments |= {"stride_plane": plan.slots.stride_plane, "drawn_ptr": drawn}
    launch(tree_verdict_kernel, grid, arguments)


def _accept_recursive(
    rows: Rows,
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
        check_unit_stride("q.logits", q.logits)
        gather_draft_statistics(q.logits, read["query_start_ptr"], read["num_rows"], plan.draft_slots, draft_planes)
    lines, state, rejected = lines.view(torch.float64), state.view(torch.int32), rejected.view(torch.int32)
    record: dict[str, Any] = {"line_ptr": lines, "state_ptr": state}
    grid, constants = plan.lines
    arguments = constants | record
    arguments |= {name: read[name] for name in ("tokens_ptr", "query_start_ptr", "num_rows")}
    arguments |= {"parents_ptr": shape["parents_ptr"], "stats_ptr": planes, "q_stats_ptr": draft_planes}
    launch(node_lines_kernel, grid, arguments)

    record |= {"steps_ptr": steps, "rejected_ptr": rejected, "mass_ptr": mass, "threshold_ptr": kept}
    record |= _draft_arguments(q)
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


def _draft_arguments(q: DenseQ | None) -> dict[str, Any]:
    """What the kernels take of q."""
    if q is None:
        return {"q_ptr": None, "q_token_ptr": None, "stride_q_request": 0, "stride_q_row": 0, "q_width": 0}
    return {
        "q_ptr": q.logits,
        "q_token_ptr": None if q.draft_ids is None else contiguous(q.draft_ids),
        "stride_q_request": q.logits.stride(0),
        "stride_q_row": q.logits.stride(1),
        "q_width": q.logits.shape[-1],
    }
