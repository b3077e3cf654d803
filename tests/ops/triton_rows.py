"""Device functions of ``dspark.kernels.sample.rows`` as kernels of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.kernels.sample.rows import merge_sums, summable


@triton.jit  # type: ignore[untyped-decorator]
def merge_sums_kernel(max_ptr, sum_ptr, out_ptr, BLOCK_R: tl.constexpr, TILES: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Sums float64 ``[BLOCK_R]`` of rows of tiles ``[BLOCK_R, TILES]``."""
    offs_r = tl.arange(0, BLOCK_R)
    offs = offs_r[:, None] * TILES + tl.arange(0, TILES)[None, :]  # [BLOCK_R, TILES]
    _, total = merge_sums(tl.load(max_ptr + offs), tl.load(sum_ptr + offs))
    tl.store(out_ptr + offs_r, total)


@triton.jit  # type: ignore[untyped-decorator]
def summable_kernel(x_ptr, out_ptr, LIMIT: tl.constexpr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """``summable`` of float64 ``[BLOCK]``."""
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, summable(tl.load(x_ptr + offs), LIMIT))
