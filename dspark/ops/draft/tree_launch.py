"""Launch of the kernels behind ``draft_tree``.

``3 G + 1`` launches: three per level, and one that builds the trees; under ``recursive`` one more, which writes the
scores that children were sampled from. A level's passes are apart because each needs all of the one before: every tile
of a node, and every node of a request.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dspark.ops.draft.tree_inputs import TreeInputs
from dspark.ops.draft.tree_plan import Level, TreePlan, dot_of_head, plan_of
from dspark.ops.draft.walk_plan import WalkConfig
from dspark.ops.groups import num_words
from dspark.ops.launch import (
    check_contiguous,
    check_devices,
    check_unit_stride,
    contiguous,
    contiguous_sampling,
    launch,
    power_of_two,
    scratch,
)
from dspark.ops.types import Stream, TreeDraft

_COMPARED = 4096
"""Pairs that a program compares at a time."""
_REGISTERS_HELD, _REGISTERS = 128, 192
"""Per thread of a program that multiplies by W2, on NVIDIA: two that hold a tile of it share a multiprocessor. Left to
itself, the compiler spills some for the sake of occupancy."""


@cache
def _kernels() -> tuple[Any, Any, Any, Any, Any]:
    """The kernels, imported at the first launch: a machine without triton has the reference."""
    from dspark.kernels.draft.tree import tree_level_kernel, tree_merge_kernel, tree_scores_kernel
    from dspark.kernels.draft.tree_choice import tree_build_kernel, tree_select_kernel

    return tree_level_kernel, tree_merge_kernel, tree_select_kernel, tree_build_kernel, tree_scores_kernel


def draft_tree_triton(
    inputs: TreeInputs, out: TreeDraft, workspace: Tensor | None, config: WalkConfig | None = None
) -> None:
    """Write the trees to ``out``; arguments as checked by :func:`dspark.ops.draft_tree`.

    Args:
        config: how a level is cut; by default as :func:`dspark.ops.draft.walk_plan.walk_config` cuts a step.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    _check_layouts(inputs, out)
    plan = plan_of(
        inputs.base_logits, inputs.head, inputs.rule, inputs.num_nodes, inputs.branching, inputs.beam, config
    )
    regions = scratch(plan.sizes, inputs.base_logits.device, workspace)
    if plan.requests == 0:
        return
    drafting = _Drafting(inputs, out, plan, regions)
    for level in plan.levels:
        drafting.grow(level)
    drafting.build()


class _Drafting:
    """The launches of one call, and the arguments that they share."""

    def __init__(self, inputs: TreeInputs, out: TreeDraft, plan: TreePlan, regions: tuple[Tensor, ...]) -> None:
        self.inputs, self.out, self.plan = inputs, out, plan
        self.recursive = plan.rule == "recursive"
        values, columns, sums, children, self.child_worth, token, worth, parent, depth, row, self.rows = regions
        self.tiles = {
            "value_ptr": values,
            "column_ptr": columns.view(torch.int32),
            "sum_ptr": None if self.recursive else sums,
        }
        self.children = {
            "child_ptr": children.view(torch.int32),
            "stride_child_request": plan.rows * plan.branching,
        }
        self.token, self.worth = token.view(torch.int32), worth
        self.entries = {
            "token_ptr": self.token,
            "worth_ptr": worth,
            "parent_ptr": parent.view(torch.int32),
            "depth_ptr": depth.view(torch.int32),
            "row_ptr": row.view(torch.int32) if self.recursive else None,
        }
        self.anchor, self.sampling = contiguous(inputs.anchor), contiguous_sampling(inputs.sampling)
        base, head, config = inputs.base_logits, inputs.head, plan.config
        self.scoring = {
            "base_ptr": base,
            "stride_base_request": base.stride(0),
            "stride_base_slot": base.stride(1),
            "w1_ptr": None if head is None else head.w1,
            "stride_w1_row": 0 if head is None else head.w1.stride(0),
            "w2_ptr": None if head is None else head.w2,
            "stride_w2_row": 0 if head is None else head.w2.stride(0),
            "temperature_ptr": self.sampling.temperature,
            "vocab_size": plan.vocab_size,
            "rank": plan.rank,
            "HEAD": head is not None,
            "DOT": dot_of_head(head),
            "UPCAST": base.device.type == "cpu",
            "HOLD": config.hold and head is not None,
            "BRANCHING": plan.branching,
            "BLOCK_V": config.block_vocab,
            "BLOCK_K": config.block_rank,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        if head is not None and torch.version.hip is None:
            self.scoring["maxnreg"] = _REGISTERS_HELD if config.hold else _REGISTERS

    def grow(self, level: Level) -> None:
        """The children of a level's nodes, and which of them are kept."""
        tree_level_kernel, tree_merge_kernel, tree_select_kernel, *_ = _kernels()
        inputs, plan = self.inputs, self.plan
        scored, branching = plan.scored(level), plan.branching
        requests, nodes, blocks = plan.blocks(level)
        above: dict[str, Any] = {
            "anchor_ptr": self.anchor,
            "token_ptr": self.token,
            "stride_entries": plan.entries,
            "slot": level.slot,
            "first": level.first,
        }
        arguments = self.scoring | self.tiles | above
        arguments |= {
            "seed_ptr": self.sampling.seed,
            "position_ptr": contiguous(inputs.position),
            "num_requests": plan.requests,
            "nodes": scored,
            "num_tiles": plan.num_tiles,
            "NOISE": plan.rule != "match" and not inputs.sampling.all_greedy,
            "SCALED": not inputs.sampling.all_greedy,
            "SALTED": self.recursive,
            "STREAM": int(Stream.DRAFT if self.recursive else Stream.TARGET),
            "REQUESTS": requests,
            "NODES": nodes,
        }
        # With W2 a program serves all requests: it is read once per level.
        launch(tree_level_kernel, (plan.num_tiles, 1 if plan.rank else blocks), arguments)

        acceptance = inputs.acceptance
        per_request = acceptance is not None and acceptance.ndim == 3
        children = self.children | {"child_worth_ptr": self.child_worth, "first_row": level.first_row}
        arguments = self.tiles | above | children
        arguments |= {
            "worth_ptr": self.worth,
            "acceptance_ptr": None if acceptance is None else contiguous(acceptance),
            "stride_acceptance_request": plan.draft_len * branching if per_request else 0,
            "num_requests": plan.requests,
            "nodes": level.nodes,
            "scored": scored,
            "vocab_size": plan.vocab_size,
            "num_tiles": plan.num_tiles,
            "STATIC": self.recursive,
            "BRANCHING": branching,
            "BLOCK_R": plan.merged,
            "TILES": power_of_two(plan.num_tiles),
            "num_warps": 4,
        }
        launch(tree_merge_kernel, (-(-plan.requests * level.nodes // plan.merged),), arguments)

        arguments = self.entries | children
        arguments |= {
            "anchor_ptr": self.anchor,
            "stride_entries": plan.entries,
            "slot": level.slot,
            "nodes": level.nodes,
            "first": level.first,
            "held": level.held,
            "kept": level.kept,
            "next_nodes": level.next_nodes,
            "vocab_size": plan.vocab_size,
            "BRANCHING": branching,
            "BLOCK_C": plan.candidates,
            "CHUNK": _chunk(plan.candidates),
            "num_warps": _warps(plan.candidates),
        }
        launch(tree_select_kernel, (plan.requests,), arguments)

    def build(self) -> None:
        """The trees; and under ``recursive`` the scores."""
        *_, tree_build_kernel, tree_scores_kernel = _kernels()
        plan, tree, budget, logits = self.plan, self.out.tree, self.inputs.budget, self.out.logits
        block, rows = power_of_two(plan.entries), self.rows.view(torch.int32)
        arguments: dict[str, Any] = self.entries | {
            "budget_ptr": None if budget is None else contiguous(budget),
            "out_tokens_ptr": tree.tokens,
            "out_parents_ptr": tree.parents,
            "out_ancestors_ptr": tree.ancestors,
            "out_depth_ptr": tree.depth,
            "out_num_ptr": tree.num_nodes,
            "out_row_ptr": rows if self.recursive else None,
            "entries": plan.entries,
            "places": plan.num_nodes,
            "draft_len": plan.draft_len,
            "WORDS": num_words(plan.num_nodes),
            "BLOCK_E": block,
            "BLOCK_N": power_of_two(plan.num_nodes),
            "CHUNK": _chunk(block),
            "num_warps": _warps(block),
        }
        launch(tree_build_kernel, (plan.requests,), arguments)
        if logits is None:
            return
        slots, block_rows = plan.requests * plan.num_nodes, plan.config.block_rows
        arguments = self.scoring | self.children
        arguments |= {
            "tokens_ptr": tree.tokens,
            "depth_ptr": tree.depth,
            "row_ptr": rows,
            "out_ptr": logits,
            "stride_out_request": logits.stride(0),
            "stride_out_node": logits.stride(1),
            "num_slots": slots,
            "places": plan.num_nodes,
            "BLOCK_R": block_rows,
        }
        launch(tree_scores_kernel, (plan.num_tiles, 1 if plan.rank else -(-slots // block_rows)), arguments)


def _chunk(block: int) -> int:
    """How many of ``block`` candidates are compared with all of them at a time."""
    return min(block, max(4, _COMPARED // block))


def _warps(block: int) -> int:
    """Warps of a program that compares so many."""
    return 4 if block <= 512 else 8


def _check_layouts(inputs: TreeInputs, out: TreeDraft) -> None:
    """Check devices, and strides that the kernels rely on.

    Raises:
        ValueError: one does not serve.
    """
    head = inputs.head
    for name, tensor in (
        ("base_logits", inputs.base_logits),
        ("head.w1", None if head is None else head.w1),
        ("head.w2", None if head is None else head.w2),
        ("out.logits", out.logits),
    ):
        if tensor is not None:
            check_unit_stride(name, tensor)
    for name in ("tokens", "parents", "ancestors", "depth", "num_nodes"):
        check_contiguous(f"out.tree.{name}", getattr(out.tree, name))
    check_devices(
        inputs.base_logits.device,
        anchor=inputs.anchor,
        position=inputs.position,
        seed=inputs.sampling.seed,
        w2=None if head is None else head.w2,
        budget=inputs.budget,
        acceptance=inputs.acceptance,
        tree=out.tree.tokens,
    )
