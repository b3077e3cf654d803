"""Launch of the kernels behind ``draft_tree``.

``3 G + 1`` launches: three per level, and one that builds the trees; under ``recursive`` one more, which writes the
scores that children were sampled from. A level's passes are apart because each needs all of the one before: every tile
of a node, and every node of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.draft.walk_plan import WalkConfig, dot_of, walk_config
from dspark.ops.groups import num_words
from dspark.ops.launch import Kernel, padded, power_of_two
from dspark.ops.types import MarkovHead, Rule, Sampling, SequentialHead, Stream, Tree

_COMPARED = 4096
"""Pairs that a program compares at a time."""
_REGISTERS_HELD, _REGISTERS = 128, 192
"""Per thread of a program that multiplies by W2, on NVIDIA: two that hold a tile of it share a multiprocessor. Left to
itself, the compiler spills some for the sake of occupancy."""


@dataclass(frozen=True)
class Level:
    """The sizes of a level.

    Attributes:
        depth: of its nodes.
        nodes: that get children.
        first, held: its first entry, and how many it has.
        first_row: of its nodes, among those of all levels.
        kept: entries of the next level.
        next_nodes: of which get children.
    """

    depth: int
    nodes: int
    first: int
    held: int
    first_row: int
    kept: int
    next_nodes: int


def levels_of(draft_len: int, num_nodes: int, branching: int, beam: int) -> tuple[Level, ...]:
    """The sizes of all levels.

    >>> [(level.nodes, level.kept) for level in levels_of(4, 32, 4, 31)]
    [(1, 4), (4, 16), (16, 31), (31, 31)]
    """
    most = max(num_nodes - 1, 1)
    levels, nodes, first, held, first_row = [], 1, 0, 1, 0
    for depth in range(draft_len):
        kept = min(nodes * branching, most)
        next_nodes = min(kept, beam) if depth + 1 < draft_len else 0
        levels.append(Level(depth, nodes, first, held, first_row, kept, next_nodes))
        first, held, first_row, nodes = first + held, kept, first_row + nodes, next_nodes
    return tuple(levels)


@dataclass(frozen=True)
class TreeSizes:
    """What follows from the sizes of a call alone."""

    requests: int
    draft_len: int
    vocab_size: int
    rank: int
    rule: Rule
    num_nodes: int
    branching: int
    beam: int
    config: WalkConfig

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        return levels_of(self.draft_len, self.num_nodes, self.branching, self.beam)

    @property
    def entries(self) -> int:
        """Entries of a request."""
        return self.levels[-1].first + self.levels[-1].held + self.levels[-1].kept

    @property
    def rows(self) -> int:
        """Nodes of a request that get children, of all levels."""
        return self.levels[-1].first_row + self.levels[-1].nodes

    @property
    def num_tiles(self) -> int:
        return -(-self.vocab_size // self.config.block_vocab)

    @property
    def candidates(self) -> int:
        """Children of a request's nodes of one level, at most."""
        return max(level.nodes for level in self.levels) * self.branching

    def scored(self, level: Level) -> int:
        """Nodes of a request that are scored: all are scored alike without a head."""
        return level.nodes if self.rank else 1

    def blocks(self, level: Level) -> tuple[int, int, int]:
        """Requests and nodes of a block of rows, and how many blocks there are."""
        scored, rows = self.scored(level), self.config.block_rows
        nodes = min(power_of_two(scored), rows)
        requests = rows // nodes
        return requests, nodes, -(-self.requests // requests) * -(-scored // nodes)

    @property
    def ints(self) -> list[int]:
        """Of the scratch memory the int32 regions: see :func:`run`."""
        tiles = self.requests * max(map(self.scored, self.levels)) * self.num_tiles
        entries, recursive = padded(self.requests * self.entries), self.rule == "recursive"
        return [
            padded(tiles * self.branching),
            padded(self.requests * self.rows * self.branching),
            *([entries] * 3),
            entries if recursive else 0,
            padded(self.requests * self.num_nodes) if recursive else 0,
        ]

    @property
    def regions(self) -> list[int]:
        """Elements of scratch memory: tiles' largest scores and sums, worth of children and entries, all integers."""
        tiles = self.requests * max(map(self.scored, self.levels)) * self.num_tiles
        return [
            padded(tiles * self.branching),
            0 if self.rule == "recursive" else padded(tiles),
            padded(self.requests * self.candidates),
            padded(self.requests * self.entries),
            sum(self.ints),
        ]


def sizes_of(
    base: Tensor, head: SequentialHead | None, rule: Rule, num_nodes: int, branching: int, beam: int,
    config: WalkConfig | None = None,
) -> TreeSizes:  # fmt: skip
    """The sizes of a call; by default a level is cut as :func:`~dspark.ops.draft.walk_plan.walk_config` cuts a step."""
    requests, draft_len, vocab_size = base.shape
    rank = 0 if head is None else head.w1.shape[1]
    config = config or walk_config(vocab_size, rank, _dot(head))
    return TreeSizes(requests, draft_len, vocab_size, rank, rule, num_nodes, branching, beam, config)


class NodeSampling(NamedTuple):
    """What nodes are drawn with, ``[R]``: the temperature if any is above 0, and the seed and the anchor's position if
    there is noise."""

    temperature: Tensor | None
    seed: Tensor | None
    position: Tensor | None


class Entries(NamedTuple):
    """Candidates for places of the trees, ``[R, entries]``, level by level from the anchor on; None is not read.

    Attributes:
        token: int32, -1 where there is none, though it has a place.
        worth: float32, the logarithm of the product along its path.
        parent: int32, an entry.
        depth: int32.
        row: int32, where its children are, -1 if it has none; only under ``recursive``.
    """

    token: Tensor
    worth: Tensor
    parent: Tensor | None
    depth: Tensor | None
    row: Tensor | None


class Tiles(NamedTuple):
    """Of each tile of what may follow the nodes of a level, that is of rows ``R * nodes``.

    Attributes:
        top: ``[rows, branching, tiles]`` float32, the largest scores in order.
        columns: the same, int32, their tokens.
        sums: ``[rows, tiles]`` float32, sum of exp(score - the tile's largest); None under ``recursive``.
    """

    top: Tensor
    columns: Tensor
    sums: Tensor | None


class Children(NamedTuple):
    """Children of nodes.

    Attributes:
        token: ``[R, rows, branching]`` int32, of the nodes of all levels; -1 where there is none.
        worth: ``[R, nodes, branching]`` float32, of those of one level.
    """

    token: Tensor
    worth: Tensor


class HeadStrides(NamedTuple):
    """Elements between the rows of a head's matrices."""

    w1: int
    w2: int


class TreePlan(NamedTuple):
    """The launches of a call.

    Attributes:
        levels: of each level the three passes.
        build, scores: the trees, and under ``recursive`` their scores.
        ints: see :class:`TreeSizes`.
        sizes: of the regions.
    """

    levels: list[tuple[Kernel, Kernel, Kernel]]
    build: Kernel
    scores: Kernel | None
    ints: list[int]
    sizes: list[int]


def plan(
    _: dict[str, int], base: Tensor, anchor: Tensor, head: MarkovHead | None, hidden: Tensor | None, sampling: Sampling,
    position: Tensor, rule: Rule, num_nodes: int, branching: int, budget: Tensor | None, beam: int,
    acceptance: Tensor | None, tree: Tree, logits: Tensor | None, config: WalkConfig | None = None,
) -> TreePlan:  # fmt: skip
    """Of each level a program for each tile, for some nodes, and for each request; then one for each request again."""
    from dspark.kernels.draft import tree as kernels
    from dspark.kernels.draft import tree_choice as choice

    sizes = sizes_of(base, head, rule, num_nodes, branching, beam, config)
    config, device, recursive = sizes.config, base.device, rule == "recursive"
    per_request = acceptance is not None and acceptance.ndim == 3
    strides = {"stride_child_request": sizes.rows * branching, "stride_entries": sizes.entries}
    scoring: dict[str, Any] = {
        "stride_base_request": base.stride(0),
        "stride_base_depth": base.stride(1),
        "stride_head": None if head is None else HeadStrides(head.w1.stride(0), head.w2.stride(0)),
        "vocab_size": sizes.vocab_size,
        "rank": sizes.rank,
        "DOT": _dot(head),
        "UPCAST": device.type == "cpu",
        "HOLD": config.hold and head is not None,
        "BRANCHING": branching,
        "BLOCK_V": config.block_vocab,
        "BLOCK_K": config.block_rank,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if head is not None and torch.version.hip is None:
        scoring["maxnreg"] = _REGISTERS_HELD if config.hold else _REGISTERS

    def grow(level: Level) -> tuple[Kernel, Kernel, Kernel]:
        requests, nodes, blocks = sizes.blocks(level)
        scored, merged = sizes.scored(level), max(1, 1024 // power_of_two(sizes.num_tiles))
        place = {"level": level.depth, "first": level.first}
        score = Kernel(
            kernels.tree_level_kernel,
            (sizes.num_tiles, 1 if sizes.rank else blocks),
            device,
            **scoring,
            **place,
            stride_entries=sizes.entries,
            num_requests=sizes.requests,
            nodes=scored,
            num_tiles=sizes.num_tiles,
            RECURSIVE=recursive,
            STREAM=int(Stream.DRAFT if recursive else Stream.TARGET),
            REQUESTS=requests,
            NODES=nodes,
        )
        merge = Kernel(
            kernels.tree_merge_kernel,
            (-(-sizes.requests * level.nodes // merged),),
            device,
            **strides,
            **place,
            stride_acceptance_request=sizes.draft_len * branching if per_request else 0,
            num_requests=sizes.requests,
            nodes=level.nodes,
            first_row=level.first_row,
            scored=scored,
            vocab_size=sizes.vocab_size,
            num_tiles=sizes.num_tiles,
            RECURSIVE=recursive,
            BRANCHING=branching,
            BLOCK_R=merged,
            TILES=power_of_two(sizes.num_tiles),
            num_warps=4,
        )
        block = power_of_two(sizes.candidates)
        select = Kernel(
            choice.tree_select_kernel,
            (sizes.requests,),
            device,
            **strides,
            **place,
            nodes=level.nodes,
            held=level.held,
            first_row=level.first_row,
            kept=level.kept,
            next_nodes=level.next_nodes,
            vocab_size=sizes.vocab_size,
            BRANCHING=branching,
            BLOCK_C=block,
            CHUNK=_chunk(block),
            num_warps=_warps(block),
        )
        return score, merge, select

    block = power_of_two(sizes.entries)
    build = Kernel(
        choice.tree_build_kernel,
        (sizes.requests,),
        device,
        num_entries=sizes.entries,
        places=num_nodes,
        draft_len=sizes.draft_len,
        WORDS=num_words(num_nodes),
        BLOCK_E=block,
        BLOCK_N=power_of_two(num_nodes),
        CHUNK=_chunk(block),
        num_warps=_warps(block),
    )
    scores = None
    if logits is not None:
        num_places = sizes.requests * num_nodes
        scores = Kernel(
            kernels.tree_scores_kernel,
            (sizes.num_tiles, 1 if sizes.rank else -(-num_places // config.block_rows)),
            device,
            **scoring,
            stride_child_request=strides["stride_child_request"],
            stride_out_request=logits.stride(0),
            stride_out_node=logits.stride(1),
            num_places=num_places,
            places=num_nodes,
            BLOCK_R=config.block_rows,
        )
    return TreePlan([grow(level) for level in sizes.levels], build, scores, sizes.ints, sizes.regions)


def run(
    plan: TreePlan, regions: tuple[Tensor, ...], base: Tensor, anchor: Tensor, head: MarkovHead | None,
    hidden: Tensor | None, sampling: Sampling, position: Tensor, rule: Rule, num_nodes: int, branching: int,
    budget: Tensor | None, beam: int, acceptance: Tensor | None, tree: Tree, logits: Tensor | None,
) -> None:  # fmt: skip
    """Level by level the children of its nodes, and which of them are kept; then the trees, and the scores."""
    recursive = rule == "recursive"
    top, sums, child_worth, worth, ints = regions
    columns, child, token, parent, depth, row, node_row = ints.view(torch.int32).split_with_sizes(plan.ints)
    tiles, children = Tiles(top, columns, None if recursive else sums), Children(child, child_worth)
    entries = Entries(token, worth, parent, depth, row if recursive else None)
    parents = Entries(token, worth, None, None, None)
    drawn = NodeSampling(None, None, None)
    if not sampling.all_greedy:
        drawn = NodeSampling(sampling.temperature, None, None)
        if rule != "match":
            drawn = NodeSampling(sampling.temperature, sampling.seed, position)
    for score, merge, select in plan.levels:
        score(base, anchor, head, drawn, parents, tiles)
        merge(anchor, parents, tiles, acceptance, children)
        select(anchor, children, entries)
    plan.build(entries, budget, tree, node_row if recursive else None)
    if plan.scores is not None:
        temperature = NodeSampling(sampling.temperature, None, None)
        plan.scores(base, head, temperature, tree, node_row, child, logits)


def _dot(head: SequentialHead | None) -> str:
    """How W2 is multiplied, see ``dot_rows`` of ``dspark.kernels.draft.walk``."""
    return "float32" if head is None else dot_of(head.w2.dtype, head.w1.dtype)


def _chunk(block: int) -> int:
    """How many of ``block`` candidates are compared with all of them at a time."""
    return min(block, max(4, _COMPARED // block))


def _warps(block: int) -> int:
    """Warps of a program that compares so many."""
    return 4 if block <= 512 else 8
