"""Small kernels that the gates are tested on: good ones, and one for each way to be bad."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, stride_x_row, num_cols, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, num_cols, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)  # [BLOCK_C]
        x = tl.load(x_ptr + row * stride_x_row + offs_c, mask=offs_c < num_cols, other=0.0)
        total += x.to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total))


@triton.jit
def narrow_row_sum_kernel(x_ptr, out_ptr, stride_x_row, num_cols, BLOCK_C: tl.constexpr):
    """The product is extended to 64 bit, too late."""
    row = tl.program_id(0)
    first = (row * stride_x_row).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    total = tl.zeros([BLOCK_C], tl.float32)
    for _ in range(0, num_cols, BLOCK_C):
        total += tl.load(x_ptr + first + offs_c, mask=offs_c < num_cols, other=0.0).to(tl.float32)
        offs_c += BLOCK_C
    tl.store(out_ptr + row, tl.sum(total))


@triton.jit
def narrow_loop_kernel(x_ptr, out_ptr, stride_x_row, num_rows, BLOCK_C: tl.constexpr):
    """The product reaches the pointer around a loop and through a branch."""
    first = 0
    if num_rows > 1:
        first = tl.program_id(0) * stride_x_row
    total = tl.zeros([BLOCK_C], tl.float32)
    for _ in range(num_rows):
        total += tl.load(x_ptr + first + tl.arange(0, BLOCK_C)).to(tl.float32)
        first += 1
    tl.store(out_ptr, tl.sum(total))


@triton.jit
def narrow_while_kernel(x_ptr, out_ptr, stride_x_row, num_rows, BLOCK_C: tl.constexpr):
    """The product is made in a while loop, and the pointer after it."""
    row = 0
    first = 0
    while row < num_rows:
        row += 1
        first = row * stride_x_row
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + first + tl.arange(0, BLOCK_C)).to(tl.float32)))


@triton.jit
def narrow_constant_kernel(x_ptr, out_ptr, BLOCK_C: tl.constexpr, NUM_COLS: tl.constexpr):
    """A row times a constant that is no tile size."""
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * NUM_COLS + tl.arange(0, BLOCK_C))
    tl.store(out_ptr + row, tl.sum(x.to(tl.float32)))


@triton.jit
def wide_kernel(x_ptr, out_ptr, stride_x_row, num_cols, BLOCK_C: tl.constexpr):
    """32-bit products that are no pointer offsets, or small: a tile's index, a hash, a comparison."""
    row = tl.program_id(0)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    hashed = ((offs_c * num_cols) ^ (offs_c * stride_x_row)) & 7
    mask = (offs_c * 3 < num_cols) & (row * stride_x_row > 0)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x_row + offs_c + hashed, mask=mask, other=0.0)
    tl.store(out_ptr + row, tl.sum(x.to(tl.float32)) + row * num_cols)


@triton.jit
def greedy_registers_kernel(x_ptr, out_ptr, BLOCK_C: tl.constexpr):
    """Holds a whole row in registers until its sum is known."""
    offs_c = tl.arange(0, BLOCK_C)
    x = tl.load(x_ptr + offs_c)  # [BLOCK_C]
    tl.store(out_ptr + offs_c, x - tl.sum(x))


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_m = tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    offs_k = tl.arange(0, BLOCK_K)
    a = tl.load(a_ptr + offs_m * BLOCK_K + offs_k[None, :])  # [BLOCK_M, BLOCK_K]
    b = tl.load(b_ptr + offs_k[:, None] * BLOCK_N + offs_n)  # [BLOCK_K, BLOCK_N]
    tl.store(c_ptr + offs_m * BLOCK_N + offs_n, tl.dot(a, b))


@triton.jit
def masked_copy_kernel(x_ptr, y_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Copies the positive ones of ``x``, and counts the programs that ran."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x, mask=(offs < n) & (x > 0))
    tl.atomic_add(count_ptr, 1)
