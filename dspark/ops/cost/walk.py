"""What ``draft_walk`` and its certified form move and launch: bytes requested from memory, exactly, and the least.

Counted are the loads and stores of the kernels as they are written, of a batch without padding or bad rows and without
truncation; what a cache serves twice counts twice. An atomic maximum is a load and a store. The lower bound counts
W2 once per step, each base logit once and each returned score once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark.ops.cost.types import Cost
from dspark.ops.draft.certified_launch import SHIPPED, CandidateConfig
from dspark.ops.draft.walk_plan import PROGRAMS, WalkConfig, walk_config

HeadKind = Literal["none", "markov", "gated", "rnn"]


@dataclass(frozen=True)
class WalkCall:
    """A call of ``draft_walk`` of padded nothing and truncated nothing.

    Attributes:
        requests, draft_len, vocab_size, rank: ``R``, ``G``, ``V``, ``r`` (0 without a head).
        head: its kind.
        itemsize: bytes per base logit.
        weight_itemsize: bytes per weight, of all of them.
        greedy: whether all temperatures are 0 (``Sampling.all_greedy``); else all are above 0.
        logits_itemsize: bytes per returned score, 0: none are.
        margin, lse: whether those are returned.
        hidden_size: of the block, 0: no confidence and no gate reads it.
        hidden_itemsize: bytes per number of it.
        confidence: whether there is a confidence head, and whether it reads the previous token.
        tables: whether tables are passed.
    """

    requests: int
    draft_len: int
    vocab_size: int
    rank: int = 256
    head: HeadKind = "markov"
    itemsize: int = 2
    weight_itemsize: int = 2
    greedy: bool = False
    logits_itemsize: int = 0
    margin: bool = False
    lse: bool = False
    hidden_size: int = 0
    hidden_itemsize: int = 2
    confidence: Literal["none", "hidden", "hidden and token"] = "none"
    tables: bool = False

    @property
    def given(self) -> bool:
        """Whether the input of W2 has a launch of its own."""
        return self.head == "rnn" or (self.head == "gated" and not self.tables)

    @property
    def dot(self) -> str:
        """How W2 is multiplied, see ``dspark.kernels.draft.walk``; half precision is bfloat16."""
        if self.weight_itemsize == 4:
            return "float32"
        return "half" if self.head == "markov" else "split"


def walk_cost(call: WalkCall, config: WalkConfig | None = None) -> Cost:
    """The cost of a call.

    >>> cost = walk_cost(WalkCall(requests=1, draft_len=7, vocab_size=151_936))
    >>> round(cost.lower_bound / 1e6, 1), cost.launches, round(cost.total / cost.lower_bound, 3)
    (546.7, 9, 1.002)
    """
    return _Model(call, config or walk_config(call.vocab_size, call.rank, call.dot)).cost()


class _Model:
    """The kernels' loads and stores, added up in the order in which the kernels make them."""

    def __init__(self, call: WalkCall, config: WalkConfig) -> None:
        self.call, self.config = call, config
        self.tiles = -(-call.vocab_size // config.block_vocab)
        self.blocks = -(-call.requests // config.block_rows)
        self.gates = {"rnn": 3, "gated": 1}.get(call.head, 0)
        self.read = self.written = self.launches = 0

    def cost(self) -> Cost:
        call = self.call
        self._begin()
        for slot in range(call.draft_len):
            if call.given:
                self._state(slot)
            self._step()
        self._finish()
        steps = call.draft_len * call.vocab_size
        bound = steps * call.rank * call.weight_itemsize + call.requests * steps * (
            call.itemsize + call.logits_itemsize
        )
        return Cost(self.read, self.written, self.launches, bound)

    def _add(self, read: int = 0, written: int = 0) -> None:
        self.read += read
        self.written += written

    def _begin(self) -> None:
        call, rows = self.call, self.call.requests * self.call.draft_len
        self.launches += 1
        self._add(written=8 * rows)
        width = self.gates * call.rank
        row_blocks, unit_blocks = -(-rows // self.config.block_rows), -(-width // 32)
        self._add(read=row_blocks * width * (call.hidden_size + 1) * call.weight_itemsize, written=4 * rows * width)
        self._add(read=unit_blocks * rows * call.hidden_size * call.hidden_itemsize)

    def _state(self, slot: int) -> None:
        call, rank = self.call, self.call.rank
        self.launches += 1
        unit_blocks = -(-rank // self.config.block_units)
        self._add(read=8 * call.requests * unit_blocks)
        products = (call.head == "rnn") + (not call.tables)
        self._add(read=self.blocks * products * self.gates * rank * rank * call.weight_itemsize)
        if not call.tables:
            self._add(read=unit_blocks * call.requests * rank * call.weight_itemsize)
        numbers = call.requests * rank
        self._add(read=4 * self.gates * numbers * (1 + call.tables))
        if call.head == "rnn":
            self._add(read=4 * numbers * (unit_blocks + 1) * (slot > 0), written=8 * numbers)
        else:
            self._add(read=call.weight_itemsize * numbers, written=4 * numbers)

    def _step(self) -> None:
        call, config = self.call, self.config
        requests, rank, tiles = call.requests, call.rank, self.tiles
        self.launches += 1
        per_program = min(tiles, PROGRAMS) if self.blocks == 1 else tiles
        self._add(read=8 * requests * per_program)
        if call.head != "none":
            per_number = 4 if call.given else call.weight_itemsize + (8 if call.head == "gated" else 0)
            self._add(read=requests * rank * per_number * (per_program if config.hold else tiles))
            times = 1 if config.hold else self.blocks
            self._add(read=times * call.vocab_size * rank * call.weight_itemsize)
        self._add(read=requests * call.vocab_size * call.itemsize)
        self._add(read=4 * requests * tiles, written=requests * call.vocab_size * call.logits_itemsize)
        if not call.greedy:
            self._add(read=16 * requests * tiles)
        self._add(written=requests * tiles * (12 * call.margin + 8 * call.lse))
        self._add(read=8 * requests * tiles, written=8 * requests * tiles)

    def _finish(self) -> None:
        call = self.call
        self.launches += 1
        rows = call.requests * call.draft_len
        self._add(read=8 * call.requests * (call.draft_len * (call.draft_len + 1) // 2) + 12 * rows, written=8 * rows)
        if call.confidence != "none":
            self._add(read=rows * (call.hidden_size * (call.hidden_itemsize + call.weight_itemsize)))
            self._add(read=rows * call.weight_itemsize, written=8 * rows)
            if call.confidence == "hidden and token":
                self._add(read=rows * (4 if call.tables else 2 * call.rank * call.weight_itemsize))
        self._add(
            read=rows * self.tiles * (12 * call.margin + 8 * call.lse), written=4 * rows * (call.margin + call.lse)
        )
        if call.greedy:
            self._add(written=rows * call.logits_itemsize)


def certified_cost(call: WalkCall, *, top_k: int, top_m: int, config: CandidateConfig = SHIPPED) -> Cost:
    """The cost of ``draft_walk_certified`` without fallback, when every step is certified.

    The vocabulary is at least ``top_k`` wide; tables of the walk are not used.

    >>> cost = certified_cost(WalkCall(requests=1, draft_len=7, vocab_size=151_936), top_k=128, top_m=64)
    >>> round(cost.total / 1e6, 2), cost.launches
    (2.77, 3)
    """
    rows = call.requests * call.draft_len
    tiles = -(-call.vocab_size // config.block_vocab)
    read = rows * call.vocab_size * call.itemsize + rows * tiles * (4 if call.greedy else 20)
    written = rows * tiles * (8 * config.per_tile + 4)

    read += rows * tiles * (8 * config.per_tile + 4)
    written += rows * (8 * top_k + 4)
    confident = call.confidence != "none"
    if confident:
        read += rows * (call.hidden_size * (call.hidden_itemsize + call.weight_itemsize) + call.weight_itemsize)
        written += 4 * rows

    read += 28 * call.requests
    written += 8 * call.requests + 8 * rows
    read += rows * (8 * top_k + (top_k + 1) * call.rank * call.weight_itemsize)
    read += rows * (top_m * (8 + call.itemsize) + 12)
    if confident:
        token = 2 * call.rank * call.weight_itemsize if call.confidence == "hidden and token" else 0
        read += rows * (4 + token)
        written += 8 * rows
    return Cost(read, written, 3, rows * call.vocab_size * call.itemsize)
