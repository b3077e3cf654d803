"""What ``accept`` moves and launches: bytes requested from memory, exactly, and the least that the rule allows.

Counted are the loads and stores of the kernels as they are written; what a cache serves twice counts twice. The lower
bound counts only what the rule must see: each logit row once, and the rows of a residual a second time, since it needs
the normaliser of the first. Truncation does not raise it, see :mod:`dspark.ops.cost.sample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dspark.ops.cost.statistics import RowsRead, Search, add_statistics
from dspark.ops.cost.types import Cost, Tally
from dspark.ops.launch import LINE_FIELDS, RowConfig, row_config, tiles_per_program
from dspark.ops.types import Rule

QKind = Literal["dense", "sparse", "point"]


@dataclass(frozen=True)
class AcceptCall:
    """A call of ``accept``, and how it went.

    Attributes:
        lengths: rows of each request, anchor included.
        emitted: tokens that each request emitted; none of its rows are bad.
        rule, vocab_size: of the call.
        itemsize: bytes per target logit.
        greedy: whether all temperatures are 0 (``Sampling.all_greedy``); else all are above 0.
        raw: whether log-probabilities are those of the logits themselves.
        q: form of the draft distribution under ``ratio`` and ``block``.
        q_itemsize: bytes per draft score.
        draft_vocab_size: width of a dense q; None: the target's.
        mapped: tokens of the target's vocabulary that have a column in a dense q, the drafts among them and as many in
            every sub-tile; None: there is no map (``DenseQ.draft_ids``).
        num_sparse: tokens of a sparse row.
        search: of each truncated row, in any order; None: nothing may be truncated (``Sampling.any_truncation`` is
            False).
        lines: rows whose residual is weighed under ``block``: the drafted ones, but for those after a draft that
            truncation cuts (or whose p is 0 in float32). None: all that are drafted.
    """

    lengths: Sequence[int]
    emitted: Sequence[int]
    rule: Rule
    vocab_size: int
    itemsize: int = 2
    greedy: bool = False
    raw: bool = True
    q: QKind = "dense"
    q_itemsize: int = 2
    draft_vocab_size: int | None = None
    mapped: int | None = None
    num_sparse: int = 0
    search: Sequence[Search] | None = None
    lines: int | None = None


def accept_cost(call: AcceptCall, config: RowConfig | None = None) -> Cost:
    """The cost of a call.

    >>> call = AcceptCall(lengths=[8], emitted=[8], rule="coupled", vocab_size=151_936)
    >>> cost = accept_cost(call)
    >>> cost.lower_bound, cost.launches, cost.total / cost.lower_bound < 1.02
    (2430976, 2, True)
    """
    return _Model(call, config or row_config(call.vocab_size)).cost()


class _Model:
    """The kernels' loads and stores, added up in the order in which the kernels make them."""

    def __init__(self, call: AcceptCall, config: RowConfig) -> None:
        self.call, self.config = call, config
        self.requests, self.nodes = len(call.lengths), max(1, *call.lengths)
        self.slots = self.requests * self.nodes
        self.rows = sum(call.lengths)
        self.present = sum(length > 0 for length in call.lengths)
        self.drafts = sum(max(length - 1, 0) for length in call.lengths)
        self.tiles = config.tiles(call.vocab_size)
        self.subtiles = self.tiles * config.subs
        self.sub_tile = min(config.block_sub, call.vocab_size)  # entries of the sub-tile that a draw reads
        self.tally = Tally()
        self.truncated = call.search is not None and not call.greedy

    def cost(self) -> Cost:
        call = self.call
        drawn = call.rule in ("coupled", "match")
        noise = call.rule == "coupled" and not call.greedy
        sub_sums = call.rule != "coupled" and not call.greedy
        sums = sub_sums or call.rule in ("ratio", "block") or not call.raw
        sampled = 0 if call.greedy else self.rows
        search = call.search if self.truncated else None
        read = RowsRead(
            self.slots, self.rows, sampled, call.vocab_size, call.itemsize, self.config, place=16, search=search
        )
        add_statistics(self.tally, read, noise=noise, sums=sums, sub_sums=sub_sums, raw=call.raw)
        if drawn:
            self._drawn(noise)
        else:
            self._divided()
        return self.tally.cost(self._lower_bound())

    @property
    def with_residual(self) -> int:
        """Requests whose last token comes from a residual: a draft follows the row that gave it."""
        if self.call.greedy:
            return 0
        return sum(0 < n < length for n, length in zip(self.call.emitted, self.call.lengths, strict=True))

    @property
    def lines(self) -> int:
        """Rows whose residual is weighed."""
        if self.call.rule == "ratio" or self.call.greedy:
            return self.with_residual
        return self.drafts if self.call.lines is None else self.call.lines

    def _add(self, read: int = 0, written: int = 0) -> None:
        self.tally.read += read
        self.tally.written += written

    def _draft_statistics(self) -> None:
        call = self.call
        width = call.draft_vocab_size or call.vocab_size
        config = row_config(width)
        self.tally.launches += 1
        tiles = config.tiles(width)
        row_programs = -(-self.slots // config.block_rows)
        columns = -(-tiles // tiles_per_program(row_programs * tiles))
        self._add(read=columns * 16 * self.slots + self.drafts * width * call.q_itemsize)
        self._add(written=self.drafts * tiles * 8)

    def _drawn(self, noise: bool) -> None:
        call = self.call
        best = 8 * self.tiles * self.rows * (2 if noise else 1)
        by_inverse_cdf = call.rule == "match" and not call.greedy
        if by_inverse_cdf:
            self.tally.launches += 1
            self._add(read=16 * self.slots + 4 * self.rows + best + 16 * self.rows, written=8 * self.slots)
            self._add(read=self.rows * self._draw_from_target())
        self.tally.launches += 1
        self._add(read=16 * self.slots + 4 * self.rows + 8 * self.drafts)
        self._add(read=8 * self.rows if by_inverse_cdf else best)
        self._emit()

    def _divided(self) -> None:
        call = self.call
        if call.q == "dense" and self.nodes > 1:
            self._draft_statistics()
        self.tally.launches += 1
        draft_tiles = row_config(call.draft_vocab_size or call.vocab_size).tiles(
            call.draft_vocab_size or call.vocab_size
        )
        per_draft = {
            "dense": 8 * draft_tiles + call.q_itemsize + (4 if call.mapped is not None else 0),
            "sparse": 12 * call.num_sparse,
            "point": 0,
        }[call.q]
        self._add(read=16 * self.slots + 4 * self.rows + 8 * self.drafts + 16 * self.tiles * self.rows)
        self._add(read=self.drafts * (call.itemsize + per_draft) + (16 + 4 * self.truncated) * self.rows)
        lines = self.requests if call.rule == "ratio" else self.slots
        self._add(written=4 * LINE_FIELDS * lines)
        if not call.greedy and self.nodes > 1:
            self.tally.launches += 1
            self._add(read=4 * lines * self.tiles, written=4 * self.lines * self.subtiles)
            whole = self._residual_tokens(call.vocab_size)
            self._add(read=self.lines * (self.tiles * self._per_residual_program() + whole))
        self.tally.launches += 1
        self._add(read=16 * self.slots + 4 * self.rows + 8 * self.drafts)
        if call.rule == "ratio":
            self._add(read=4 * self.slots)
        else:
            self._add(read=24 * self.rows + 4 * self.lines * self.subtiles)
        self._add(read=16 * self.requests + 8 * self.tiles * self.present)
        if not call.greedy:
            self._add(read=24 * self.present + 4 * self.with_residual * self.subtiles)
            per_program = self._per_residual_program() - (4 if call.rule == "ratio" else 0)
            self._add(read=self.with_residual * (per_program + self._residual_tokens(self.sub_tile)))
            self._add(read=(self.present - self.with_residual) * self._draw_from_target())
        self._emit()

    def _per_residual_program(self) -> int:
        """Bytes that a program of a residual reads whatever its width: place, parameters, offsets, draft."""
        q = {"dense": 8, "sparse": 12 * self.call.num_sparse, "point": 8}[self.call.q]
        return 16 + 4 + 4 * self.truncated + 8 + q + (4 if self.call.rule == "ratio" else 0)

    def _residual_tokens(self, count: int) -> int:
        """Bytes of so many tokens of a residual; with a map, its entries and the scores that they lead to."""
        call = self.call
        target = count * call.itemsize
        if call.q != "dense":
            return target
        if call.mapped is None:
            return target + count * call.q_itemsize
        return target + 4 * count + call.mapped * count // call.vocab_size * call.q_itemsize

    def _draw_from_target(self) -> int:
        return 4 * self.truncated + 4 * self.tiles + 4 * self.subtiles + self.sub_tile * self.call.itemsize

    def _emit(self) -> None:
        emitted = sum(self.call.emitted)
        self._add(read=emitted * (self.call.itemsize + 8 * self.tiles))
        self._add(written=20 * self.slots + 16 * self.requests)

    def _lower_bound(self) -> int:
        call = self.call
        target = self.rows * call.vocab_size * call.itemsize
        if call.rule in ("coupled", "match"):
            return target
        width = (call.draft_vocab_size or call.vocab_size) if call.q == "dense" else 0
        draft = width * call.q_itemsize
        id_map = call.vocab_size * 4 if call.mapped is not None else 0
        again = self.lines * (call.vocab_size * call.itemsize + draft) + (id_map if self.lines else 0)
        return target + self.drafts * draft + again
