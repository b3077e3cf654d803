"""Launch of the kernels on the paged cache; each op takes one launch, whatever the number of layers it is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dspark.ops.cache_reference import FLOAT8
from dspark.ops.launch import check_devices, check_unit_stride, contiguous, launch, power_of_two
from dspark.ops.types import PagedKV


@dataclass(frozen=True)
class CacheConfig:
    """How the kernels on the cache cut their work.

    Attributes:
        block_n: pairs of a row (or a token) and a head per tile, of ``append_kv`` and ``copy_pages``.
        block_h: heads per tile, of ``rope_append_kv``.
        num_warps: of those two.
        commit_warps: of ``commit_kv``, whose tile is a token's heads.
    """

    block_n: int
    block_h: int
    num_warps: int
    commit_warps: int


@lru_cache
def cache_config(heads: int, head_dim: int, itemsize: int) -> CacheConfig:
    """The configuration for a layer's key heads, with elements of so many bytes.

    Where keys are appended or copied, a thread has two accesses of 16 bytes in flight (of float8 one: the rows that are
    appended are wider than it); a committed token is moved by as many threads as it has 16 bytes, up to 256.

    >>> cache_config(8, 128, 2)
    CacheConfig(block_n=16, block_h=16, num_warps=4, commit_warps=4)
    >>> cache_config(1, 64, 2)
    CacheConfig(block_n=32, block_h=32, num_warps=4, commit_warps=1)
    """
    block_d = power_of_two(head_dim)
    block_n = max(1, 4096 // (block_d * max(itemsize, 2)))
    token = power_of_two(heads) * block_d * itemsize
    return CacheConfig(block_n, max(1, 2048 // block_d), 4, min(8, max(1, token // 512)))


def append_kv_triton(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor, config: CacheConfig | None = None) -> None:
    """Write the rows of a batch, at least one; arguments as checked by :func:`dspark.ops.append_kv`.

    Raises:
        ValueError: a tensor's layout or device does not serve.
    """
    from dspark.kernels.cache import append_kv_kernel

    check_devices(k.device, v=v, slots=slots, **_tensors(kv))
    check_unit_stride("k", k)
    check_unit_stride("v", v)
    num_rows, heads, head_dim = k.shape
    config = config or cache_config(heads, head_dim, kv.k.element_size())
    arguments = _pages(kv)
    arguments |= {
        "k_ptr": k,
        "v_ptr": v,
        "slots_ptr": contiguous(slots),
        "k_scale_ptr": kv.k_scale,
        "v_scale_ptr": kv.v_scale,
        "stride_k_row": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_row": v.stride(0),
        "stride_v_head": v.stride(1),
        "num_rows": num_rows,
        "IS_FLOAT8": kv.k.dtype is FLOAT8,
        "HAS_SCALE": kv.k_scale is not None,
        "BLOCK_N": config.block_n,
        "BLOCK_D": power_of_two(head_dim),
        "num_warps": config.num_warps,
    }
    launch(append_kv_kernel, (-(-num_rows * heads // config.block_n),), arguments)


@dataclass(frozen=True)
class RotaryRows:
    """What :func:`dspark.ops.rope_append_kv` applies to queries and keys."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def rope_append_kv_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    slots: Tensor,
    rotary: RotaryRows,
    out: Tensor,
    config: CacheConfig | None = None,
) -> None:
    """Fill ``out`` and write the rows, at least one; arguments as checked by :func:`dspark.ops.rope_append_kv`.

    Raises:
        ValueError: a tensor's layout or device does not serve.
    """
    from dspark.kernels.cache import rope_append_kv_kernel

    norms = {"q_norm": rotary.q_norm, "k_norm": rotary.k_norm}
    rows = {"k": k, "v": v, "cos": rotary.cos, "sin": rotary.sin, "out": out}
    check_devices(q.device, slots=slots, **rows, **norms, **_tensors(kv))
    for name, tensor in {"q": q, **rows}.items():
        check_unit_stride(name, tensor)
    num_rows, query_heads, head_dim = q.shape
    heads = k.shape[1]
    config = config or cache_config(heads, head_dim, kv.k.element_size())
    arguments = _pages(kv)
    del arguments["HEAD_DIM"]
    arguments |= {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "q_norm_ptr": None if rotary.q_norm is None else contiguous(rotary.q_norm),
        "k_norm_ptr": None if rotary.k_norm is None else contiguous(rotary.k_norm),
        "cos_ptr": rotary.cos,
        "sin_ptr": rotary.sin,
        "out_ptr": out,
        "slots_ptr": contiguous(slots),
        "k_scale_ptr": kv.k_scale,
        "v_scale_ptr": kv.v_scale,
        "stride_q_row": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_row": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_row": v.stride(0),
        "stride_v_head": v.stride(1),
        "stride_cos_row": rotary.cos.stride(0),
        "stride_sin_row": rotary.sin.stride(0),
        "stride_out_row": out.stride(0),
        "stride_out_head": out.stride(1),
        "eps": rotary.eps,
        "QUERY_HEADS": query_heads,
        "HALF": head_dim // 2,
        "HAS_Q_NORM": rotary.q_norm is not None,
        "HAS_K_NORM": rotary.k_norm is not None,
        "IS_FLOAT8": kv.k.dtype is FLOAT8,
        "HAS_SCALE": kv.k_scale is not None,
        "BLOCK_H": min(config.block_h, power_of_two(max(query_heads, heads))),
        "BLOCK_HALF": power_of_two(head_dim // 2),
        "num_warps": config.num_warps,
    }
    launch(rope_append_kv_kernel, (num_rows,), arguments)


def commit_kv_triton(
    kv: PagedKV,
    path: Tensor,
    num_emitted: Tensor,
    query_start: Tensor,
    slots: Tensor,
    config: CacheConfig | None = None,
) -> None:
    """Move the paths of at least one request; arguments as checked by :func:`dspark.ops.commit_kv`.

    Raises:
        ValueError: a tensor's layout or device does not serve.
    """
    from dspark.kernels.cache import commit_kv_kernel

    check_devices(kv.k.device, v=kv.v, path=path, num_emitted=num_emitted, query_start=query_start, slots=slots)
    heads, head_dim = kv.k.shape[-2:]
    config = config or cache_config(heads, head_dim, kv.k.element_size())
    arguments = _pages(kv, layers=True)
    arguments |= {
        "path_ptr": contiguous(path),
        "num_emitted_ptr": contiguous(num_emitted),
        "query_start_ptr": contiguous(query_start),
        "slots_ptr": contiguous(slots),
        "num_rows": slots.shape[0],
        "NODES": path.shape[1],
        "BLOCK_NODES": power_of_two(path.shape[1]),
        "BLOCK_H": power_of_two(heads),
        "BLOCK_D": power_of_two(head_dim),
        "num_warps": config.commit_warps,
    }
    launch(commit_kv_kernel, (path.shape[0], _num_layers(kv)), arguments)


def copy_pages_triton(kv: PagedKV, source: Tensor, target: Tensor, config: CacheConfig | None = None) -> None:
    """Copy at least one page; arguments as checked by :func:`dspark.ops.copy_pages`.

    Raises:
        ValueError: a tensor's layout or device does not serve.
    """
    from dspark.kernels.cache import copy_pages_kernel

    check_devices(kv.k.device, v=kv.v, source=source, target=target)
    page_size, heads, head_dim = kv.k.shape[-3:]
    config = config or cache_config(heads, head_dim, kv.k.element_size())
    block_n = min(config.block_n, power_of_two(page_size * heads))
    arguments = _pages(kv, layers=True)
    arguments |= {
        "source_ptr": contiguous(source),
        "target_ptr": contiguous(target),
        "BLOCK_N": block_n,
        "BLOCK_D": power_of_two(head_dim),
        "num_warps": config.num_warps,
    }
    grid = (source.shape[0], _num_layers(kv), -(-page_size * heads // block_n))
    launch(copy_pages_kernel, grid, arguments)


def _num_layers(kv: PagedKV) -> int:
    return kv.k.shape[0] if kv.k.ndim == 5 else 1


def _tensors(kv: PagedKV) -> dict[str, Tensor | None]:
    return {"kv.k": kv.k, "kv.v": kv.v, "kv.k_scale": kv.k_scale, "kv.v_scale": kv.v_scale}


def _pages(kv: PagedKV, layers: bool = False) -> dict[str, Any]:
    """The arguments that describe a cache; one layer counts as a stack of one where the kernel wants a stack."""
    arguments: dict[str, Any] = {}
    for name, pages in (("k", kv.k), ("v", kv.v)):
        check_unit_stride(f"kv.{name}", pages)
        # Floats of 8 bits travel as bytes: not every target has instructions for them.
        arguments[f"{name}_cache_ptr"] = pages.view(torch.uint8) if pages.dtype is FLOAT8 else pages
        if layers:
            arguments[f"stride_{name}_cache_layer"] = pages.stride(0) if pages.ndim == 5 else 0
        page, offset, head, _ = pages.stride()[-4:]
        arguments[f"stride_{name}_cache_page"] = page
        arguments[f"stride_{name}_cache_offset"] = offset
        arguments[f"stride_{name}_cache_head"] = head
    arguments["PAGE_SIZE"], arguments["HEADS"], arguments["HEAD_DIM"] = kv.k.shape[-3:]
    return arguments
