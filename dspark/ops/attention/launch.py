"""Launch of the kernels behind ``verify_attention``: one pass over the keys, and a merge where they are split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from dspark.ops.attention.config import AttentionConfig, Split, attention_config, occupancy_chunk, part_sizes
from dspark.ops.launch import check_contiguous, check_devices, check_unit_stride, contiguous, launch, scratch
from dspark.ops.types import PagedKV, QueryBatch

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Sizes:
    """What the configuration of a call follows from.

    Attributes:
        num_requests, num_rows, num_heads, kv_heads, head_dim: ``R``, ``T``, ``Hq``, ``Hkv``, ``D``.
        max_query_len: the most rows of a request.
        page_size: ``S``.
        capacity: cache positions that a request's pages may hold, ``B * S``.
        itemsize: bytes per number of the products' operands.
    """

    num_requests: int
    num_rows: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_query_len: int
    page_size: int
    capacity: int
    itemsize: int


@lru_cache(maxsize=256)
def config_of(sizes: Sizes, split: Split, num_sms: int | None, chunk: int | None) -> AttentionConfig:
    """The configuration that a call of these sizes is launched with."""
    group = sizes.num_heads // sizes.kv_heads
    static = (group, sizes.head_dim, sizes.max_query_len, sizes.page_size, sizes.itemsize)
    config = attention_config(*static, chunk)
    if split == "fixed" or num_sms is None or config.chunk == 0:
        return config
    programs = sizes.num_requests * sizes.kv_heads * config.blocks(sizes.max_query_len, group)
    return attention_config(*static, occupancy_chunk(sizes.capacity, programs, num_sms))


def workspace_bytes(sizes: Sizes, config: AttentionConfig) -> int:
    """Bytes of scratch memory that a call takes."""
    return 4 * sum(part_sizes(sizes.num_rows, sizes.num_heads, sizes.head_dim, config.chunks(sizes.capacity)))


@cache
def _kernels() -> tuple[Any, Any]:
    from dspark.kernels.attention.merge import merge_kernel
    from dspark.kernels.attention.verify import attention_kernel

    return attention_kernel, merge_kernel


def attention_triton(
    q: Tensor,
    kv: PagedKV,
    batch: QueryBatch,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    split: Split = "fixed",
    num_sms: int | None = None,
    chunk: int | None = None,
    config: AttentionConfig | None = None,
) -> None:
    """Write the result to ``out`` and ``lse``; arguments as checked by :func:`dspark.ops.verify_attention`.

    Args:
        config: how the call is cut, instead of what the rule says.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    _check_layouts(q, kv, batch, sinks, out, lse)
    num_rows, num_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = kv.k.shape
    num_requests, num_columns = batch.block_table.shape
    fp8 = kv.k.dtype is torch.float8_e4m3fn
    # The interpreter computes in float32; so does the device where queries and keys differ.
    upcast = q.device.type == "cpu" or not (fp8 or kv.k.dtype is q.dtype)
    sizes = Sizes(
        num_requests,
        num_rows,
        num_heads,
        kv_heads,
        head_dim,
        batch.max_query_len,
        page_size,
        num_columns * page_size,
        4 if upcast and q.device.type != "cpu" else q.itemsize,
    )
    config = config or config_of(sizes, split, num_sms, chunk)
    num_chunks = config.chunks(sizes.capacity)
    regions = scratch(part_sizes(num_rows, num_heads, head_dim, num_chunks), q.device, workspace)
    if num_rows == 0:
        return
    if num_requests == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    top, total, part = regions or (None, None, None)
    attention_kernel, merge_kernel = _kernels()
    ancestors = batch.ancestors
    words = 0 if ancestors is None else 1 if ancestors.ndim == 1 else ancestors.shape[1]
    query_start, context_len = contiguous(batch.query_start), contiguous(batch.context_len)
    positions = contiguous(batch.positions) if window else None
    blocks = config.blocks(batch.max_query_len, num_heads // kv_heads)
    k, v = (kv.k.view(torch.uint8), kv.v.view(torch.uint8)) if fp8 else (kv.k, kv.v)
    shared = {
        "query_start_ptr": query_start,
        "context_len_ptr": context_len,
        "positions_ptr": positions,
        "sinks_ptr": None if sinks is None else contiguous(sinks),
        "out_ptr": out,
        "lse_ptr": lse,
        "part_ptr": part,
        "top_ptr": top,
        "total_ptr": total,
        "window": window,
        "num_rows": num_rows,
        "max_rows": batch.max_query_len,
        "num_columns": num_columns,
        "num_chunks": num_chunks,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "HAS_WINDOW": window > 0,
        "HAS_SINKS": sinks is not None,
        "CHUNK_TILES": config.chunk // config.block_keys if num_chunks > 1 else 0,
        "BLOCK_N": config.block_keys,
        "BLOCK_D": config.block_dim,
    }
    arguments = shared | {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "k_scale_ptr": None if kv.k_scale is None else contiguous(kv.k_scale),
        "v_scale_ptr": None if kv.v_scale is None else contiguous(kv.v_scale),
        "table_ptr": batch.block_table,
        "ancestors_ptr": None if ancestors is None else contiguous(ancestors),
        "stride_q_row": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_kv_page": k.stride(0),
        "stride_kv_slot": k.stride(1),
        "stride_kv_head": k.stride(2),
        "stride_table_row": batch.block_table.stride(0),
        "score_scale": scale / soft_cap if soft_cap else scale * _LOG2_E,
        "cap_scale": soft_cap * _LOG2_E,
        "num_requests": num_requests,
        "GROUP": num_heads // kv_heads,
        "KV_HEADS": kv_heads,
        "WORDS": words,
        "FP8": fp8,
        "HAS_CAP": soft_cap > 0,
        "UPCAST": upcast,
        "BLOCK_M": config.block_lines,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.max_registers is not None and torch.version.hip is None:
        arguments["maxnreg"] = config.max_registers
    launch(attention_kernel, (num_requests * kv_heads * num_chunks * blocks,), arguments)
    if num_chunks > 1 and batch.max_query_len > 0:
        merge = shared | {
            "HEADS": num_heads,
            "CAUSAL": words == 0,
            "BLOCK_C": config.block_chunks,
            "num_warps": 4,
        }
        launch(merge_kernel, (num_requests * batch.max_query_len, num_heads), merge)


def _check_layouts(
    q: Tensor, kv: PagedKV, batch: QueryBatch, sinks: Tensor | None, out: Tensor, lse: Tensor | None
) -> None:
    check_unit_stride("q", q)
    check_unit_stride("kv.k", kv.k)
    if kv.v.stride() != kv.k.stride():
        raise ValueError(
            f"kv.v: the kernels need the strides of kv.k, {list(kv.k.stride())}, got {list(kv.v.stride())}"
        )
    check_unit_stride("batch.block_table", batch.block_table)
    check_contiguous("out", out)
    if lse is not None:
        check_contiguous("lse", lse)
    check_devices(
        q.device,
        **{
            "kv.k": kv.k,
            "kv.v": kv.v,
            "kv.k_scale": kv.k_scale,
            "kv.v_scale": kv.v_scale,
            "batch.query_start": batch.query_start,
            "batch.context_len": batch.context_len,
            "batch.block_table": batch.block_table,
            "batch.positions": batch.positions,
            "batch.ancestors": batch.ancestors,
            "sinks": sinks,
            "out": out,
            "lse": lse,
        },
    )
