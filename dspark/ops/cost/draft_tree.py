"""What ``draft_tree`` moves and launches: bytes requested from memory, exactly, and the least.

Counted are the loads and stores of the kernels as they are written, of a batch without padding or bad rows in which
every node has all its children; what a cache serves twice counts twice. The lower bound counts W2 and each base logit
once per level, and each returned score once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dspark.ops.cost.types import Cost, Tally
from dspark.ops.draft.tree_plan import Level, TreePlan
from dspark.ops.draft.walk_plan import WalkConfig, walk_config
from dspark.ops.groups import num_words
from dspark.ops.types import Rule


@dataclass(frozen=True)
class DraftTreeCall:
    """A call of ``draft_tree`` with a Markov head or none, and how it went.

    Attributes:
        depths: of each request, the depths of its nodes.
        draft_len, vocab_size, rank: ``G``, ``V``, ``r`` (0 without a head).
        num_nodes, branching: ``N``, ``K``.
        rule: of the call.
        itemsize, weight_itemsize: bytes per base logit, and per weight.
        greedy: whether all temperatures are 0 (``Sampling.all_greedy``); else all are above 0.
        budget, acceptance: whether they are passed.
    """

    depths: Sequence[Sequence[int]]
    draft_len: int
    vocab_size: int
    num_nodes: int
    branching: int
    rank: int = 256
    rule: Rule = "coupled"
    itemsize: int = 2
    weight_itemsize: int = 2
    greedy: bool = False
    budget: bool = False
    acceptance: bool = False

    @property
    def dot(self) -> Literal["half", "float32"]:
        """How W2 is multiplied."""
        return "half" if self.weight_itemsize == 2 and self.rank else "float32"


def draft_tree_cost(call: DraftTreeCall, config: WalkConfig | None = None) -> Cost:
    """The cost of a call.

    >>> call = DraftTreeCall(depths=[[0, 1, 1, 2]], draft_len=2, vocab_size=151_936, num_nodes=4, branching=2)
    >>> cost = draft_tree_cost(call)
    >>> round(cost.lower_bound / 1e6, 1), cost.launches, round(cost.total / cost.lower_bound, 3)
    (156.2, 7, 1.013)
    """
    return _Model(call, config or walk_config(call.vocab_size, call.rank, call.dot)).cost()


class _Model:
    """The kernels' loads and stores, added up in the order in which the kernels make them."""

    def __init__(self, call: DraftTreeCall, config: WalkConfig) -> None:
        self.call, self.tally = call, Tally()
        self.plan = TreePlan(
            len(call.depths), call.draft_len, call.vocab_size, call.rank, call.rule, call.num_nodes, call.branching,
            max(call.num_nodes - 1, 1), config,
        )  # fmt: skip
        self.recursive, self.hold = call.rule == "recursive", config.hold and call.rank > 0

    def cost(self) -> Cost:
        call, plan = self.call, self.plan
        for level in plan.levels:
            self._score(level)
            self._merge(level)
            self._select(level)
        self._build()
        bound = call.draft_len * call.vocab_size * (call.rank * call.weight_itemsize + plan.requests * call.itemsize)
        if self.recursive:
            self._scores()
            bound += 4 * plan.requests * call.num_nodes * call.vocab_size
        return self.tally.cost(bound)

    def _add(self, read: int = 0, written: int = 0) -> None:
        self.tally.read += read
        self.tally.written += written

    @cached_property
    def _w2(self) -> int:
        return self.call.vocab_size * self.call.rank * self.call.weight_itemsize

    def _score(self, level: Level) -> None:
        call, plan, tiles = self.call, self.plan, self.plan.num_tiles
        scored, (_, nodes, blocks) = plan.scored(level), plan.blocks(level)
        rows, parts = plan.requests * scored, -(-scored // nodes)
        self.tally.launches += 1
        if call.rank:
            per_row = (4 if level.slot else 8) + call.rank * call.weight_itemsize
            self._add(read=self._w2 * (1 if self.hold else blocks) + rows * tiles * per_row)
        self._add(read=plan.requests * parts * call.vocab_size * call.itemsize)
        if not call.greedy:
            self._add(read=4 * rows * tiles)
            if call.rule != "match":
                self._add(read=16 * plan.requests * parts * tiles)
        self._add(written=rows * tiles * (8 * call.branching + 4 * (not self.recursive)))

    def _merge(self, level: Level) -> None:
        call, tiles, rows = self.call, self.plan.num_tiles, self.plan.requests * level.nodes
        self.tally.launches += 1
        # A token and a worth, or at the first level the anchor.
        self._add(read=rows * 8 + rows * 4 * tiles * (1 + (not self.recursive)))
        of_children = 4 * (2 * call.branching - 1) + 4 * call.branching * call.acceptance
        self._add(read=rows * of_children, written=8 * rows * call.branching)

    def _select(self, level: Level) -> None:
        requests, candidates = self.plan.requests, level.nodes * self.call.branching
        self.tally.launches += 1
        per_entry = 16 + 4 * self.recursive
        self._add(read=requests * (8 * candidates + 4 * level.kept), written=requests * per_entry * level.kept)
        if level.slot == 0:
            self._add(read=8 * requests, written=per_entry * requests)

    def _build(self) -> None:
        call, requests = self.call, self.plan.requests
        present = sum(map(len, call.depths))
        self.tally.launches += 1
        self._add(read=requests * (16 * self.plan.entries + 4 + 8 * call.budget))
        self._add(read=present * (8 + 4 * self.recursive + 8))
        per_place = 24 + 4 * self.recursive + 8 * num_words(call.num_nodes)
        self._add(written=requests * (per_place * call.num_nodes + 8))

    def _scores(self) -> None:
        call, plan, tiles = self.call, self.plan, self.plan.num_tiles
        inner = [
            r * call.num_nodes + i for r, own in enumerate(call.depths) for i, d in enumerate(own) if d < call.draft_len
        ]
        places, rows = plan.requests * call.num_nodes, len(inner)
        self.tally.launches += 1
        self._add(read=tiles * (4 * places + 4 * rows), written=4 * places * call.vocab_size)
        blocks = len({place // plan.config.block_rows for place in inner})
        self._add(read=self._w2 * (1 if self.hold else 0 if call.greedy else blocks))
        if call.greedy:
            self._add(read=tiles * rows * 4 * call.branching)
            return
        self._add(read=rows * (8 * tiles + call.vocab_size * call.itemsize))
        if call.rank:
            self._add(read=rows * tiles * (8 + call.rank * call.weight_itemsize))
