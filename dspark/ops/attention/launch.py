"""How ``verify_attention`` is cut into programs, and the launch: one pass over the keys, and a merge of their chunks.

Tiles and chunks follow from the heads, the page size, the dtype and a step of ``max_query_len``, never from the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dspark.ops.cache.launch import PageStrides, RowStrides, as_bytes
from dspark.ops.call import FLOAT8
from dspark.ops.launch import Kernel, padded, power_of_two
from dspark.ops.types import PagedKV, QueryBatch

Split = Literal["fixed", "occupancy"]

MAX_SPLIT_ROWS = 256
"""A batch whose requests may have more rows is not split over the keys: its rows alone fill a device."""
BLOCK_KEYS = 32
_MIN_ROWS = 8
_MIN_CHUNK = 128
_MERGED_CHUNKS = 16
_LOG2_E = math.log2(math.e)


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


def config_of(sizes: Mapping[str, int], itemsize: int, num_sms: int | None, chunk: int | None) -> AttentionConfig:
    """The configuration that a call of these sizes is launched with; ``num_sms`` is None under the fixed rule."""
    group = sizes["Hq"] // sizes["Hkv"]
    static = (group, sizes["D"], sizes["Q"], sizes["S"], itemsize)
    config = attention_config(*static, chunk)
    if num_sms is None or config.chunk == 0:
        return config
    programs = sizes["R"] * sizes["Hkv"] * config.blocks(sizes["Q"], group)
    return attention_config(*static, occupancy_chunk(sizes["B"] * sizes["S"], programs, num_sms))


def part_sizes(sizes: Mapping[str, int], config: AttentionConfig) -> list[int]:
    """Elements of scratch memory, by region of :class:`Parts`; nothing where there is one chunk."""
    chunks = config.chunks(sizes["B"] * sizes["S"])
    lines = sizes["T"] * sizes["Hq"] * chunks
    return [padded(lines), padded(lines), padded(lines * sizes["D"])] if chunks > 1 else []


class Parts(NamedTuple):
    """What the chunks of a line leave for the merge.

    Attributes:
        top, total: ``[T, Hq, chunks]`` float32, largest score in units of log 2, and divisor.
        weighted: ``[T, Hq, chunks, D]`` float32, sum of weighted values.
    """

    top: Tensor
    total: Tensor
    weighted: Tensor


class Batch(NamedTuple):
    """What the kernels read of a :class:`~dspark.ops.QueryBatch`; positions are None where there is no window."""

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    positions: Tensor | None
    ancestors: Tensor | None


class Plan(NamedTuple):
    """The launches of a call.

    Attributes:
        sizes: elements of each region of scratch memory.
        attend: the pass over the keys; None where there is no request.
        merge: of the chunks; None where there is one.
    """

    sizes: Sequence[int]
    attend: Kernel | None
    merge: Kernel | None


def plan(
    sizes: dict[str, int],
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    scale: float | None,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    split: Split,
    num_sms: int | None,
    chunk: int | None,
    out: Tensor,
    lse: Tensor | None,
    config: AttentionConfig | None = None,
) -> Plan:
    """A program for each request, key head, chunk and block of lines; one of the merge for each line.

    Raises:
        ValueError: the values' strides are not those of the keys.
    """
    from dspark.kernels.attention.merge import merge_kernel
    from dspark.kernels.attention.verify import attention_kernel

    if kv.v.stride() != kv.k.stride():
        expected, came = list(kv.k.stride()), list(kv.v.stride())
        raise ValueError(f"kv.v: the kernels need the strides of kv.k, {expected}, got {came}")
    is_float8, on_host = kv.k.dtype is FLOAT8, q.device.type == "cpu"
    # The interpreter computes in float32; so does the device where queries and keys differ.
    upcast = on_host or not (is_float8 or kv.k.dtype is q.dtype)
    config = config or config_of(sizes, 4 if upcast and not on_host else q.itemsize, num_sms, chunk)
    num_requests, num_heads, kv_heads, head_dim = (sizes[letter] for letter in ("R", "Hq", "Hkv", "D"))
    num_chunks = config.chunks(sizes["B"] * sizes["S"])
    regions = part_sizes(sizes, config)
    if num_requests == 0:
        return Plan(regions, None, None)
    group = num_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    shared = {
        "window": window or None,
        "num_rows": sizes["T"],
        "max_rows": sizes["Q"],
        "num_columns": sizes["B"],
        "num_chunks": num_chunks,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": sizes["S"],
        "CHUNK_TILES": config.chunk // config.block_keys if num_chunks > 1 else 0,
        "BLOCK_N": config.block_keys,
        "BLOCK_D": config.block_dim,
    }
    limit: dict[str, Any] = {}
    if config.max_registers is not None and torch.version.hip is None:
        limit["maxnreg"] = config.max_registers
    attend = Kernel(
        attention_kernel,
        (num_requests * kv_heads * num_chunks * config.blocks(sizes["Q"], group),),
        q.device,
        **shared,
        row_q=RowStrides(*q.stride()[:2]),
        page_kv=PageStrides(0, *kv.k.stride()[:3]),
        stride_table_row=batch.block_table.stride(0),
        score_scale=scale / soft_cap if soft_cap else scale * _LOG2_E,
        cap_scale=soft_cap * _LOG2_E if soft_cap else None,
        num_requests=num_requests,
        GROUP=group,
        KV_HEADS=kv_heads,
        WORDS=0 if batch.ancestors is None else sizes.get("W", 1),
        IS_FLOAT8=is_float8,
        UPCAST=upcast,
        BLOCK_M=config.block_lines,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **limit,
    )
    merge = None
    if num_chunks > 1 and sizes["Q"] > 0:
        grid = (num_requests * sizes["Q"], num_heads)
        merge = Kernel(
            merge_kernel, grid, q.device, **shared, HEADS=num_heads, BLOCK_C=config.block_chunks, num_warps=4
        )
    return Plan(regions, attend, merge)


def run(
    plan: Plan,
    regions: tuple[Tensor, ...],
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    scale: float | None,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    split: Split,
    num_sms: int | None,
    chunk: int | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Launch them."""
    if plan.attend is None:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    read = Batch(
        batch.query_start, batch.context_len, batch.block_table, batch.positions if window else None, batch.ancestors
    )
    parts = Parts(*regions) if regions else None
    plan.attend(q, as_bytes(kv), read, sinks, parts, out, lse)
    if plan.merge is not None:
        plan.merge(read, sinks, parts, out, lse)
