"""What the ops on the paged cache move and launch: bytes requested from memory, exactly.

The lower bounds count every number once that is read or written: rows, slots, angles, weights and paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.ops.cost.types import Cost


@dataclass(frozen=True)
class CacheShape:
    """A cache and the rows that go into it.

    Attributes:
        heads, head_dim: ``Hkv`` and ``D``.
        itemsize: bytes per stored number; 1 is float8.
        row_itemsize: bytes per number of the new rows.
        slot_itemsize: bytes per slot or page number.
        scaled: whether a float8 cache has scales.
        layers: ``L``, of the ops that take a stack.
    """

    heads: int
    head_dim: int
    itemsize: int = 2
    row_itemsize: int = 2
    slot_itemsize: int = 8
    scaled: bool = False
    layers: int = 1

    @property
    def numbers(self) -> int:
        """Of a token, keys or values of one layer."""
        return self.heads * self.head_dim


def append_kv_cost(shape: CacheShape, num_rows: int, num_written: int) -> Cost:
    """``append_kv`` of ``num_rows`` rows, of which some have a slot. A slot, and a scale, is read once per head.

    >>> cost = append_kv_cost(CacheShape(heads=8, head_dim=128), num_rows=64, num_written=64)
    >>> cost.lower_bound, cost.total / cost.lower_bound < 1.02
    (524800, True)
    """
    moved_in = 2 * num_written * shape.numbers * shape.row_itemsize
    moved_out = 2 * num_written * shape.numbers * shape.itemsize
    scales = 2 * 4 * shape.heads * shape.scaled
    slots = num_rows * shape.slot_itemsize
    read = moved_in + slots * shape.heads + scales * num_written
    return Cost(read, moved_out, 1, moved_in + moved_out + slots + scales)


def rope_append_kv_cost(
    shape: CacheShape,
    num_rows: int,
    num_written: int,
    *,
    query_heads: int,
    angle_itemsize: int = 2,
    norm_itemsize: int = 2,
    q_norm: bool = True,
    k_norm: bool = True,
) -> Cost:
    """``rope_append_kv``; every row reads the weights of the norms.

    >>> shape = CacheShape(heads=8, head_dim=128)
    >>> cost = rope_append_kv_cost(shape, 64, 64, query_heads=32)
    >>> cost.launches, cost.lower_bound
    (1, 1606656)
    """
    head = shape.head_dim
    queries = num_rows * query_heads * head * shape.row_itemsize
    moved_in = 2 * num_written * shape.numbers * shape.row_itemsize
    moved_out = 2 * num_written * shape.numbers * shape.itemsize
    angles, weight = 2 * head * angle_itemsize, head * norm_itemsize
    slots = num_rows * shape.slot_itemsize
    read = queries + moved_in + slots + num_rows * (angles + weight * q_norm) + num_written * weight * k_norm
    scales = 2 * 4 * shape.heads * shape.scaled
    read += 2 * scales * num_written  # one read for each half of a head
    bound = 2 * queries + moved_in + moved_out + slots + num_rows * angles + weight * (q_norm + k_norm) + scales
    return Cost(read, queries + moved_out, 1, bound)


def commit_kv_cost(shape: CacheShape, paths: Sequence[Sequence[int]]) -> Cost:
    """``commit_kv`` of accepted paths, one for each request, () for a padded one; all rows have slots.

    >>> chains = commit_kv_cost(CacheShape(8, 128, layers=36), [range(8)] * 64)
    >>> chains.written, chains.read // 64
    (0, 2592)
    """
    read = moved = bound = 0
    for path in paths:
        rows = sum(node > i for i, node in enumerate(path))
        read += 8 + 8 * len(path)
        if rows:
            read += 16 + rows * (8 + 2 * shape.slot_itemsize)
            bound += 16 + rows * 2 * shape.slot_itemsize
        bound += 8 + 8 * len(path)
        moved += rows
    row_bytes = 2 * moved * shape.numbers * shape.itemsize * shape.layers
    return Cost(read * shape.layers + row_bytes, row_bytes, 1, bound + 2 * row_bytes)


def copy_pages_cost(shape: CacheShape, page_size: int, num_pages: int, *, block_n: int) -> Cost:
    """``copy_pages`` of so many pages; a program of ``block_n`` heads (``CacheConfig.block_n``) reads two numbers.

    >>> cost = copy_pages_cost(CacheShape(8, 128, layers=36), 16, 4, block_n=16)
    >>> cost.read - cost.written, cost.lower_bound == 2 * cost.written + 64
    (18432, True)
    """
    page = 2 * page_size * shape.numbers * shape.itemsize * shape.layers
    programs = num_pages * shape.layers * -(-page_size * shape.heads // block_n)
    numbers = 2 * shape.slot_itemsize
    return Cost(num_pages * page + programs * numbers, num_pages * page, 1, num_pages * (2 * page + numbers))
