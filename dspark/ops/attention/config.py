"""How ``verify_attention`` is cut into programs: plain functions of static sizes, and the scratch memory that follows.

Tiles and chunks follow from the heads, the page size, the dtype and a step of ``max_query_len``, never from the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark.ops.launch import padded, power_of_two

Split = Literal["fixed", "occupancy"]

MAX_SPLIT_ROWS = 256
"""A batch whose requests may have more rows is not split over the keys: its rows alone fill a device."""
MAX_HEAD_DIM = 256
BLOCK_KEYS = 32
_MIN_ROWS = 8
_MIN_CHUNK = 128
_MERGED_CHUNKS = 16


@dataclass(frozen=True)
class AttentionConfig:
    """How one call is cut.

    Attributes:
        block_lines: lines (row and query head) of a program.
        block_keys: keys of a tile.
        block_dim: head dim as the tiles hold it.
        block_chunks: chunks that a program of the merge adds at a time.
        chunk: keys of a chunk, a multiple of ``block_keys``; 0: all keys are one chunk.
        num_warps, num_stages: of the pass over the keys.
        max_registers: per thread, that the compiler may use (NVIDIA); None: as many as there are.
    """

    block_lines: int
    block_keys: int
    block_dim: int
    block_chunks: int
    chunk: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def blocks(self, max_query_len: int, group: int) -> int:
        """Programs that a key head's lines of one request take."""
        return max(1, -(-max_query_len * group // self.block_lines))

    def chunks(self, capacity: int) -> int:
        """Chunks of ``capacity`` cache positions."""
        return max(1, -(-capacity // self.chunk)) if self.chunk else 1


def attention_config(
    group: int, head_dim: int, max_query_len: int, page_size: int, itemsize: int = 2, chunk: int | None = None
) -> AttentionConfig:
    """The configuration of the fixed rule.

    Up to eight rows a request count as eight, and more as the next power of two, so that a row's result is the same for
    all of them. A chunk of 24 keys per line keeps what the parts move under a tenth of what the keys and values do.

    Args:
        group: query heads per key head.
        head_dim: ``D``.
        max_query_len: the most rows of a request.
        page_size: ``S``.
        itemsize: bytes per number of the products' operands.
        chunk: keys of a chunk, instead of the rule's.

    >>> config = attention_config(group=4, head_dim=128, max_query_len=8, page_size=16)
    >>> config.block_lines, config.block_keys, config.chunk
    (32, 32, 768)
    """
    lines = power_of_two(max(max_query_len, _MIN_ROWS)) * group
    block_lines = min(128, max(16, power_of_two(lines)))
    block_dim = max(16, power_of_two(head_dim))
    if chunk is None:
        chunk = max(_MIN_CHUNK, -(-24 * min(lines, 128) // 64) * 64)
    if max_query_len > MAX_SPLIT_ROWS:
        chunk = 0
    # A tile that is gathered from several pages is two loads deep, and takes two stages for one of its own.
    num_stages = 5 if page_size % BLOCK_KEYS and block_lines <= 32 else 3
    if block_dim * itemsize > 256:
        num_stages = 3 if block_lines * itemsize <= 64 else 2
    small = block_lines <= 32 and block_lines * block_dim * itemsize <= 8192
    return AttentionConfig(
        block_lines=block_lines,
        block_keys=BLOCK_KEYS,
        block_dim=block_dim,
        block_chunks=_MERGED_CHUNKS,
        chunk=chunk,
        num_warps=8,
        num_stages=num_stages,
        max_registers=128 if small else None,
    )


def occupancy_chunk(capacity: int, programs: int, num_sms: int) -> int:
    """Keys of a chunk under the occupancy rule: two programs for each multiprocessor, where there are keys enough.

    Args:
        capacity: cache positions of a request, ``B * S``.
        programs: of the call, were nothing split.
        num_sms: multiprocessors of the device.

    >>> occupancy_chunk(8192, programs=8, num_sms=132), occupancy_chunk(8192, programs=512, num_sms=132)
    (256, 8192)
    """
    splits = max(1, -(-2 * num_sms // max(programs, 1)))
    return max(_MIN_CHUNK, power_of_two(-(-capacity // splits)))


def part_sizes(num_rows: int, num_heads: int, head_dim: int, num_chunks: int) -> list[int]:
    """Elements of scratch memory: largest scores, divisors, weighted values; nothing where there is one chunk."""
    if num_chunks == 1:
        return []
    lines = num_rows * num_heads * num_chunks
    return [padded(lines), padded(lines), padded(lines * head_dim)]
