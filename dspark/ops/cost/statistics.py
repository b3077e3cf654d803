"""What the passes of :mod:`dspark.ops.sample.statistics_launch` move: the first of every op over rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.ops.cost.types import Tally
from dspark.ops.launch import RowConfig, tiles_per_program

_PARAMETERS = 20
"""Temperature, top-k, top-p and min-p of a request."""


@dataclass(frozen=True)
class Search:
    """What finding one row's threshold read, and what the threshold keeps; it depends on the row.

    Attributes:
        passes: over the row's tile maxima, for top-k and top-p together.
        searched: tokens read by all passes: those of tiles whose maximum reaches the pass's least pivot.
        kept: tokens of the tiles that hold a kept one, which the statistics pass reads a second time.
    """

    passes: int
    searched: int
    kept: int


@dataclass(frozen=True)
class RowsRead:
    """Rows of logits, none of them bad.

    Attributes:
        slots: places for rows.
        rows: of which exist.
        sampled: rows at a temperature above 0.
        vocab_size, itemsize: of the logits.
        config: how they are cut.
        place: bytes that say what row a slot is: 16 in ``query_start``, 8 in ``request``, 0 where it is the slot.
        salt: whether there is one.
        search: of each truncated row, in any order; None: nothing may be truncated (``Sampling.any_truncation``).
    """

    slots: int
    rows: int
    sampled: int
    vocab_size: int
    itemsize: int
    config: RowConfig
    place: int
    salt: bool = False
    search: Sequence[Search] | None = field(default=None)

    @property
    def tiles(self) -> int:
        """Tiles per row."""
        return self.config.tiles(self.vocab_size)

    @property
    def programs_per_row(self) -> int:
        """Programs of a statistics pass that share a row; each reads the row's parameters."""
        row_programs = -(-self.slots // self.config.block_rows)
        return -(-self.tiles // tiles_per_program(row_programs * self.tiles))


def add_statistics(tally: Tally, rows: RowsRead, *, noise: bool, sums: bool, sub_sums: bool, raw: bool) -> None:
    """Add what ``gather_statistics`` moves and launches; arguments as there."""
    if rows.search is None:
        _add_pass(tally, rows, noise=noise, sums=sums, sub_sums=sub_sums, raw=raw)
        return
    _add_pass(tally, rows, noise=noise, sums=True, sub_sums=sub_sums, raw=True)
    _add_search(tally, rows, rows.search)
    if noise or sums or sub_sums:
        _add_kept(tally, rows, rows.search, noise=noise, sums=sums, sub_sums=sub_sums)


def _noise_address(rows: RowsRead) -> int:
    """Seed, position and salt."""
    return 16 + 8 * rows.salt


def _add_pass(tally: Tally, rows: RowsRead, *, noise: bool, sums: bool, sub_sums: bool, raw: bool) -> None:
    """The pass over whole rows. Rows that will be truncated get their noise later."""
    truncated = rows.search is not None
    with_noise = rows.sampled - (len(rows.search) if rows.search is not None else 0)
    per_row = 4 + noise * (_noise_address(rows) + _PARAMETERS * truncated)
    per_tile = 8 + 8 * raw + 4 * sums + 4 * rows.config.subs * sub_sums
    tally.launches += 1
    tally.read += rows.programs_per_row * (rows.place * rows.slots + per_row * rows.rows)
    tally.read += rows.rows * rows.vocab_size * rows.itemsize
    tally.written += rows.tiles * (rows.rows * per_tile + 8 * noise * with_noise)


def _add_search(tally: Tally, rows: RowsRead, search: Sequence[Search]) -> None:
    """Every row's maxima and parameters; of a truncated one the raw maxima and sums, and then the passes."""
    tally.launches += 1
    tally.read += rows.place * rows.slots + rows.rows * (4 * rows.tiles + _PARAMETERS)
    tally.read += len(search) * (8 * rows.tiles + _PARAMETERS)
    tally.read += sum(4 * rows.tiles * row.passes + rows.itemsize * row.searched for row in search)
    tally.written += 4 * rows.slots


def _add_kept(
    tally: Tally, rows: RowsRead, search: Sequence[Search], *, noise: bool, sums: bool, sub_sums: bool
) -> None:
    """The pass over what truncation keeps: thresholds, maxima, and the tiles that reach them."""
    per_row = 8 + noise * _noise_address(rows)  # threshold and temperature
    tally.launches += 1
    tally.read += rows.programs_per_row * (rows.place * rows.slots + _PARAMETERS * rows.rows + per_row * len(search))
    tally.read += len(search) * 4 * rows.tiles + sum(rows.itemsize * row.kept for row in search)
    tally.written += len(search) * rows.tiles * (4 * sums + 4 * rows.config.subs * sub_sums + 8 * noise)
