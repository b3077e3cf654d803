"""Sizes of drafted trees: of each level, of the scratch memory, of the blocks of rows that programs take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from dspark.ops.draft.walk_plan import WalkConfig, dot_of, head_rank, walk_config
from dspark.ops.launch import padded, power_of_two
from dspark.ops.types import Rule, SequentialHead


@dataclass(frozen=True)
class Level:
    """The sizes of a level, whose nodes have depth ``slot``.

    Attributes:
        nodes: that get children.
        first, held: its first entry, and how many it has.
        first_row: of its nodes, among those of all levels.
        kept: entries of the next level.
        next_nodes: of which get children.
    """

    slot: int
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
    for slot in range(draft_len):
        kept = min(nodes * branching, most)
        next_nodes = min(kept, beam) if slot + 1 < draft_len else 0
        levels.append(Level(slot, nodes, first, held, first_row, kept, next_nodes))
        first, held, first_row, nodes = first + held, kept, first_row + nodes, next_nodes
    return tuple(levels)


@dataclass(frozen=True)
class TreePlan:
    """What follows from the sizes of a call alone; :func:`plan_of` keeps it from call to call."""

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

    @cached_property
    def entries(self) -> int:
        """Entries of a request."""
        return self.levels[-1].first + self.levels[-1].held + self.levels[-1].kept

    @cached_property
    def rows(self) -> int:
        """Nodes of a request that get children, of all levels."""
        return self.levels[-1].first_row + self.levels[-1].nodes

    @cached_property
    def num_tiles(self) -> int:
        return -(-self.vocab_size // self.config.block_vocab)

    @cached_property
    def candidates(self) -> int:
        """Children of a request's nodes of one level, at most, rounded up to a power of two."""
        return power_of_two(max(level.nodes for level in self.levels) * self.branching)

    @cached_property
    def merged(self) -> int:
        """Nodes whose tiles a program merges: as many as make 1,024 entries."""
        return max(1, 1024 // power_of_two(self.num_tiles))

    def scored(self, level: Level) -> int:
        """Nodes of a request that are scored: all are scored alike without a head."""
        return level.nodes if self.rank else 1

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of scratch memory: tiles' largest scores, their tokens and their sums, children, entries."""
        tiles = self.requests * max(map(self.scored, self.levels)) * self.num_tiles
        entries, recursive = self.requests * self.entries, self.rule == "recursive"
        return [
            padded(tiles * self.branching),
            padded(tiles * self.branching),
            0 if recursive else padded(tiles),
            padded(self.requests * self.rows * self.branching),
            padded(self.requests * max(level.nodes for level in self.levels) * self.branching),
            *([padded(entries)] * 4),
            padded(entries) if recursive else 0,
            padded(self.requests * self.num_nodes) if recursive else 0,
        ]

    def blocks(self, level: Level) -> tuple[int, int, int]:
        """Requests and nodes of a block of rows, and how many blocks there are."""
        scored, rows = self.scored(level), self.config.block_rows
        nodes = min(power_of_two(scored), rows)
        requests = rows // nodes
        return requests, nodes, -(-self.requests // requests) * -(-scored // nodes)


_kept_plan = lru_cache(maxsize=256)(TreePlan)
_config_of = lru_cache(maxsize=256)(walk_config)


def plan_of(
    base: Tensor,
    head: SequentialHead | None,
    rule: Rule,
    num_nodes: int,
    branching: int,
    beam: int,
    config: WalkConfig | None = None,
) -> TreePlan:
    """The plan of a call."""
    requests, draft_len, vocab_size = base.shape
    rank = head_rank(head)
    if config is None:
        config = _config_of(vocab_size, rank, dot_of_head(head))
    return _kept_plan(requests, draft_len, vocab_size, rank, rule, num_nodes, branching, beam, config)


def workspace_bytes(
    base: Tensor,
    head: SequentialHead | None,
    rule: Rule,
    num_nodes: int,
    branching: int,
    beam: int,
    config: WalkConfig | None = None,
) -> int:
    """Bytes of scratch memory that such a call takes."""
    return 4 * sum(plan_of(base, head, rule, num_nodes, branching, beam, config).sizes)


def dot_of_head(head: SequentialHead | None) -> str:
    """How W2 is multiplied, see ``dot_rows`` of ``dspark.kernels.draft.walk``."""
    return "float32" if head is None else dot_of(head.w2.dtype, head.w1.dtype)
