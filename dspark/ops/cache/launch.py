"""Launch of the kernels on the paged cache; each op takes one launch, whatever the number of layers it is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.call import FLOAT8
from dspark.ops.launch import Kernel, power_of_two
from dspark.ops.types import PagedKV, Rows


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


class PageStrides(NamedTuple):
    """Elements between the layers of a stack (0 where there is one), its pages, a page's slots and a slot's heads."""

    layer: int
    page: int
    slot: int
    head: int


class RowStrides(NamedTuple):
    """Elements between rows and between a row's heads."""

    row: int
    head: int


def plan_append(
    sizes: dict[str, int], k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor, config: CacheConfig | None = None
) -> Kernel:
    """One program for each tile of pairs of a row and a head."""
    from dspark.kernels.cache.append import append_kv_kernel

    config = config or _config_of(kv)
    return Kernel(
        append_kv_kernel,
        (-(-sizes["T"] * sizes["Hkv"] // config.block_n),),
        k.device,
        **_pages(kv),
        row_k=RowStrides(*k.stride()[:2]),
        row_v=RowStrides(*v.stride()[:2]),
        num_rows=sizes["T"],
        IS_FLOAT8=kv.k.dtype is FLOAT8,
        BLOCK_N=config.block_n,
        BLOCK_D=power_of_two(sizes["D"]),
        num_warps=config.num_warps,
    )


def plan_rope_append(
    sizes: dict[str, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float | None,
    out: Tensor,
    config: CacheConfig | None = None,
) -> Kernel:
    """One program for each row."""
    from dspark.kernels.cache.append import rope_append_kv_kernel

    config = config or _config_of(kv)
    pages = _pages(kv)
    del pages["HEAD_DIM"]
    return Kernel(
        rope_append_kv_kernel,
        (sizes["T"],),
        q.device,
        **pages,
        row_q=RowStrides(*q.stride()[:2]),
        row_k=RowStrides(*k.stride()[:2]),
        row_v=RowStrides(*v.stride()[:2]),
        row_out=RowStrides(*out.stride()[:2]),
        stride_cos_row=cos.stride(0),
        stride_sin_row=sin.stride(0),
        QUERY_HEADS=sizes["Hq"],
        HALF=sizes["D"] // 2,
        IS_FLOAT8=kv.k.dtype is FLOAT8,
        BLOCK_H=min(config.block_h, power_of_two(max(sizes["Hq"], sizes["Hkv"]))),
        BLOCK_HALF=power_of_two(sizes["D"] // 2),
        num_warps=config.num_warps,
    )


def plan_commit(
    sizes: dict[str, int],
    kv: PagedKV,
    path: Tensor,
    num_emitted: Tensor,
    rows: Rows,
    slots: Tensor,
    config: CacheConfig | None = None,
) -> Kernel:
    """One program for each request and layer."""
    from dspark.kernels.cache.move import commit_kv_kernel

    return Kernel(
        commit_kv_kernel,
        (sizes["R"], sizes.get("L", 1)),
        path.device,
        **_pages(kv),
        num_rows=sizes["T"],
        NODES=sizes["N"],
        BLOCK_NODES=power_of_two(sizes["N"]),
        BLOCK_H=power_of_two(sizes["Hkv"]),
        BLOCK_D=power_of_two(sizes["D"]),
        num_warps=(config or _config_of(kv)).commit_warps,
    )


def plan_copy(
    sizes: dict[str, int], kv: PagedKV, source: Tensor, target: Tensor, config: CacheConfig | None = None
) -> Kernel:
    """One program for each page, layer and tile of pairs of a token and a head."""
    from dspark.kernels.cache.move import copy_pages_kernel

    config, pairs = config or _config_of(kv), sizes["S"] * sizes["Hkv"]
    block_n = min(config.block_n, power_of_two(pairs))
    return Kernel(
        copy_pages_kernel,
        (sizes["n"], sizes.get("L", 1), -(-pairs // block_n)),
        source.device,
        **_pages(kv),
        BLOCK_N=block_n,
        BLOCK_D=power_of_two(sizes["D"]),
        num_warps=config.num_warps,
    )


def run(kernel: Kernel, _: Any, *arguments: Any) -> None:
    """The launch of each but one of them: its kernel's first arguments are the op's."""
    kernel(*[as_bytes(x) if isinstance(x, PagedKV) else x for x in arguments])


def run_commit(
    kernel: Kernel, _: Any, kv: PagedKV, path: Tensor, num_emitted: Tensor, rows: Rows, slots: Tensor
) -> None:
    """The launch of ``commit_kv``; of the rows it reads where each request's begin."""
    kernel(as_bytes(kv), path, num_emitted, rows.query_start, slots)


def _config_of(kv: PagedKV) -> CacheConfig:
    return cache_config(*kv.k.shape[-2:], kv.k.element_size())


def _pages(kv: PagedKV) -> dict[str, Any]:
    """What kernels are told of a cache beside its tensors."""
    page_size, heads, head_dim = kv.k.shape[-3:]

    def strides(pages: Tensor) -> PageStrides:
        return PageStrides(pages.stride(0) if pages.ndim == 5 else 0, *pages.stride()[-4:-1])

    return {
        "page_k": strides(kv.k),
        "page_v": strides(kv.v),
        "PAGE_SIZE": page_size,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
    }


def as_bytes(kv: PagedKV) -> PagedKV:
    """A cache as kernels take it: floats of 8 bits travel as bytes, as not every target has instructions for them."""
    if kv.k.dtype is not FLOAT8:
        return kv
    return kv._replace(k=kv.k.view(torch.uint8), v=kv.v.view(torch.uint8))
