"""What ``sample`` and ``truncate`` move and launch.

The lower bound counts each row of logits once: truncation, too, could be decided from one reading of a row that a chip
can hold. What the search reads beyond that depends on the row, see :class:`Search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.ops.cost.statistics import RowsRead, Search, add_statistics
from dspark.ops.cost.types import Cost, Tally
from dspark.ops.launch import RowConfig, row_config


@dataclass(frozen=True)
class SampleCall:
    """A call of ``sample`` or ``truncate`` with no bad row.

    Attributes:
        num_rows: ``T``.
        vocab_size: of the call.
        itemsize: bytes per logit.
        padded: rows whose request is negative.
        greedy: rows at temperature 0 among the others; all of them is taken for ``Sampling.all_greedy``.
        request, salt: whether they are given.
        search: of each truncated row; None: nothing may be truncated (``Sampling.any_truncation`` is False).
    """

    num_rows: int
    vocab_size: int
    itemsize: int = 2
    padded: int = 0
    greedy: int = 0
    request: bool = False
    salt: bool = False
    search: Sequence[Search] | None = None

    @property
    def rows(self) -> int:
        """Rows that belong to a request."""
        return self.num_rows - self.padded

    @property
    def all_greedy(self) -> bool:
        """Whether no row is sampled."""
        return self.greedy == self.rows

    @property
    def lower_bound(self) -> int:
        """Each row's logits, once."""
        return self.rows * self.vocab_size * self.itemsize

    def rows_read(self, config: RowConfig) -> RowsRead:
        """The rows as the statistics passes see them."""
        return RowsRead(
            self.num_rows,
            self.rows,
            self.rows - self.greedy,
            self.vocab_size,
            self.itemsize,
            config,
            place=8 * self.request,
            salt=self.salt,
            search=None if self.all_greedy else self.search,
        )


def sample_cost(call: SampleCall, config: RowConfig | None = None) -> Cost:
    """The cost of a call of ``sample``.

    >>> cost = sample_cost(SampleCall(num_rows=8, vocab_size=151_936))
    >>> cost.lower_bound, cost.launches, cost.total / cost.lower_bound < 1.02
    (2430976, 2, True)
    """
    rows, tally = call.rows_read(config or row_config(call.vocab_size)), Tally()
    noise = not call.all_greedy
    add_statistics(tally, rows, noise=noise, sums=False, sub_sums=False, raw=False)
    tally.launches += 1
    tally.read += rows.place * rows.slots + 4 * rows.rows + 8 * rows.tiles * (rows.rows + noise * rows.sampled)
    tally.written += 8 * rows.slots
    return tally.cost(call.lower_bound)


def truncate_cost(call: SampleCall, config: RowConfig | None = None) -> Cost:
    """The cost of a call of ``truncate``.

    Raises:
        ValueError: nothing may be truncated, so no kernel is launched.

    >>> call = SampleCall(num_rows=1, vocab_size=4096, search=[Search(passes=3, searched=2048, kept=4096)])
    >>> truncate_cost(call).launches
    2
    """
    rows, tally = call.rows_read(config or row_config(call.vocab_size)), Tally()
    if rows.search is None:
        raise ValueError("search: expected one of each truncated row, got None or greedy rows alone")
    add_statistics(tally, rows, noise=False, sums=False, sub_sums=False, raw=False)
    return tally.cost(call.lower_bound)
