"""What ``accept`` over trees moves and launches, without truncation; counted as in :mod:`dspark.ops.cost.accept`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dspark.ops.accept.tree_launch import LINE, STATE, STEP
from dspark.ops.cost.types import Cost
from dspark.ops.groups import num_words
from dspark.ops.launch import RowConfig, row_config, tiles_per_program
from dspark.ops.types import Rule


@dataclass(frozen=True)
class NodeOutcome:
    """How the children of a node were judged under ``recursive``.

    Attributes:
        rejected: how many were.
        weighed: the last step in which its residual was weighed.
        chosen: rank of the child that was accepted, or -1.
    """

    rejected: int = 0
    weighed: int = 0
    chosen: int = -1


@dataclass(frozen=True)
class TreeCall:
    """A call of ``accept`` over trees without truncation, and how it went.

    Attributes:
        parents: of each request, the parents of its rows (-1 for node 0); all rows are good and all nodes in order.
        nodes: ``N``, places per request.
        emitted: tokens that each request emitted.
        ends: of each request, the node that gave its last token.
        rule, vocab_size: of the call.
        itemsize, q_itemsize: bytes per target logit and per draft score.
        greedy: whether all temperatures are 0 (``Sampling.all_greedy``); else all are above 0.
        raw: whether log-probabilities are those of the logits themselves.
        max_branching: of the call, under ``recursive``.
        outcomes: of each request's rows, under ``recursive``.
    """

    parents: Sequence[Sequence[int]]
    nodes: int
    emitted: Sequence[int]
    ends: Sequence[int]
    rule: Rule
    vocab_size: int
    itemsize: int = 2
    q_itemsize: int = 4
    greedy: bool = False
    raw: bool = True
    max_branching: int = 1
    outcomes: Sequence[Sequence[NodeOutcome]] = field(default_factory=tuple)


def accept_tree_cost(call: TreeCall, config: RowConfig | None = None) -> Cost:
    """The cost of a call.

    >>> chain = (-1, *range(7))
    >>> call = TreeCall(parents=[chain], nodes=8, emitted=[8], ends=[7], rule="coupled", vocab_size=151_936)
    >>> cost = accept_tree_cost(call)
    >>> cost.lower_bound, cost.launches, cost.total / cost.lower_bound < 1.02
    (2430976, 3, True)
    """
    return _Model(call, config or row_config(call.vocab_size)).cost()


class _Model:
    """The kernels' loads and stores, added up in the order in which the kernels make them."""

    def __init__(self, call: TreeCall, config: RowConfig) -> None:
        self.call, self.config = call, config
        self.requests, self.slots = len(call.parents), len(call.parents) * call.nodes
        lengths = [len(parents) for parents in call.parents]
        self.rows, self.present = sum(lengths), sum(length > 0 for length in lengths)
        self.children = self.rows - self.present
        self.tiles = config.tiles(call.vocab_size)
        self.subtiles = self.tiles * config.subs
        self.sub_tile = min(config.block_sub, call.vocab_size)
        self.words = num_words(call.nodes)
        self.read = self.written = self.launches = 0

    def cost(self) -> Cost:
        call = self.call
        if call.rule == "recursive":
            self._recursive()
        else:
            self._drawn()
        bound = self.rows * call.vocab_size * call.itemsize
        if call.rule == "recursive":
            again = 0 if call.greedy else sum(self._weighed(step) for step in range(1, call.max_branching + 1))
            bound += call.vocab_size * (self.children * call.q_itemsize + again * (call.itemsize + call.q_itemsize))
        return Cost(self.read, self.written, self.launches, bound)

    def _add(self, read: int = 0, written: int = 0) -> None:
        self.read += read
        self.written += written

    @cached_property
    def _columns(self) -> int:
        """Programs along the tiles of a row."""
        row_programs = -(-self.slots // self.config.block_rows)
        return -(-self.tiles // tiles_per_program(row_programs * self.tiles))

    def _statistics(self, noise: bool, sums: bool, sub_sums: bool) -> None:
        call = self.call
        self.launches += 1
        self._add(read=self._columns * (16 * self.slots + (28 if noise else 4) * self.rows))
        per_tile = 8 + 8 * call.raw + 4 * sums + 4 * self.config.subs * sub_sums + 8 * noise
        self._add(read=self.rows * call.vocab_size * call.itemsize, written=self.rows * self.tiles * per_tile)

    def _drawn(self) -> None:
        call = self.call
        noise = call.rule == "coupled" and not call.greedy
        match = call.rule == "match" and not call.greedy
        self._statistics(noise, sums=match or not call.raw, sub_sums=match)
        self.launches += 2
        best = 8 * self.tiles * (2 if noise else 1)
        self._add(read=16 * self.slots + (4 + best) * self.rows, written=8 * self.slots)
        if match:
            self._add(read=self.rows * (24 + self._draw_from_target()))
        self._add(read=16 * self.requests + 24 * self.rows + 8 * self.children)
        self._verdict()

    def _recursive(self) -> None:
        call = self.call
        self._statistics(noise=False, sums=True, sub_sums=not call.greedy)
        self.launches += 2
        self._add(read=self._columns * 16 * self.slots + self.children * call.vocab_size * call.q_itemsize)
        self._add(written=self.children * self.tiles * 8)
        self._add(read=16 * self.slots + self.rows * (16 * self.tiles + 16) + self.children * 8 * self.tiles)
        self._add(read=8 * sum(node - 1 + rank for node, rank in self._ranks))
        self._add(written=(8 * LINE + 4 * STATE) * self.slots)
        for step in range(1, call.max_branching + 1):
            self._judge(step)
            if not call.greedy:
                self._left_over(step)
        self._last_draw()
        self._verdict()

    @cached_property
    def _ranks(self) -> list[tuple[int, int]]:
        """(node, rank among its siblings) of every child."""
        return [(i, own[:i].count(own[i])) for own in map(list, self.call.parents) for i in range(1, len(own))]

    @cached_property
    def _judged_nodes(self) -> list[tuple[int, NodeOutcome]]:
        """(number of children, outcome) of every row."""
        return [
            (list(own).count(node), outcome)
            for own, outcomes in zip(self.call.parents, self.call.outcomes, strict=True)
            for node, outcome in zip(range(len(own)), outcomes, strict=True)
        ]

    def _weighed(self, step: int) -> int:
        return sum(outcome.weighed >= step for _, outcome in self._judged_nodes)

    def _judge(self, step: int) -> None:
        call, nodes = self.call, self._judged_nodes
        self.launches += 1
        candidates = sum(count >= step for count, _ in nodes)
        still_open = sum(count >= step and not 0 <= outcome.chosen < step - 1 for count, outcome in nodes)
        rejected = sum(outcome.rejected >= step for _, outcome in nodes)
        accepted = sum(outcome.chosen == step - 1 for _, outcome in nodes)
        judged = rejected + accepted
        self._add(read=36 * self.requests + 4 * self.rows + 24 * self.children + 4 * candidates)
        if step > 1 and not call.greedy:
            self._add(read=4 * still_open + 4 * judged * (self.subtiles + self.tiles), written=4 * STEP * judged)
            self._add(read=12 * (step - 1) * judged)
        self._add(read=judged * (8 + 16 + call.itemsize + call.q_itemsize + 8 + 4 * call.greedy))
        self._add(written=4 * accepted + 8 * rejected)
        self._add(read=8 * self.children + (4 + 8 * self.words) * self.rows)
        self._add(written=0 if call.greedy else 4 * self._weighed(step))

    def _left_over(self, step: int) -> None:
        call, weighed = self.call, self._weighed(step)
        self.launches += 1
        self._add(read=4 * self.slots * self._columns + weighed * self.tiles * self._per_left_over(step, step))
        self._add(read=weighed * call.vocab_size * (call.itemsize + call.q_itemsize))
        self._add(written=4 * weighed * (self.subtiles + self.tiles))

    def _per_left_over(self, step: int, last_step: int) -> int:
        """Bytes that what is left of a row reads whatever its width: place, temperature, its line, its rejections."""
        return 16 + 4 + 8 * LINE + 12 * min(step - 1, last_step - 1) + 4 * step

    def _last_draw(self) -> None:
        call = self.call
        self.launches += 1
        self._add(read=16 * self.requests + 4 * self.rows + 12 * self.children + 12 * self.present)
        self._add(read=4 * sum(call.emitted) + 8 * sum(max(n - 1, 0) for n in call.emitted))
        if call.greedy:
            return
        self._add(read=20 * self.requests + 12 * self.present)
        for end, outcomes in zip(call.ends, call.outcomes, strict=True):
            if not outcomes:
                continue
            step = outcomes[end].rejected
            if step == 0:
                self._add(read=self._draw_from_target())
            else:
                per_token = call.itemsize + call.q_itemsize
                self._add(read=4 * self.subtiles + self.sub_tile * per_token)
                self._add(read=self._per_left_over(step, call.max_branching))

    def _draw_from_target(self) -> int:
        return 4 * self.tiles + 4 * self.subtiles + self.sub_tile * self.call.itemsize

    def _verdict(self) -> None:
        """The path and what it emits."""
        call, emitted = self.call, sum(self.call.emitted)
        self._add(read=self.rows * 8 * (self.words + 2) + 4 * self.requests)
        self._add(read=emitted * (call.itemsize + 8 * self.tiles))
        self._add(written=20 * self.slots + 16 * self.requests)
