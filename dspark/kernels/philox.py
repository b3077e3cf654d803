"""Random numbers by address (contract C3): the words of :mod:`dspark.ops.philox`, in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def stream(name):
    """The number of a :class:`dspark.ops.Stream`."""
    return {"target": 0, "draft": 1, "accept": 2, "residual": 3}[name]


@triton.jit
def uniform(seed, position, salt, STREAM: tl.constexpr, block=0):
    """One float64 in (0, 1) per address, of 52 bits; ``seed``, ``position`` and ``salt`` are int64 of one shape."""
    zero = (position * 0).to(tl.uint32)
    high, low, _, _ = tl.philox(seed, zero + block, position.to(tl.uint32), zero + STREAM, salt.to(tl.uint32))
    bits = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def gumbel(seed, position, salt, first_token, STREAM: tl.constexpr, BLOCK_V: tl.constexpr):
    """Standard Gumbel noise ``[rows, BLOCK_V]`` of the tokens from ``first_token`` (a multiple of 4) on.

    ``seed``, ``position`` and ``salt`` are int64 ``[rows]``. One Philox call serves four tokens.
    """
    return gumbel_of_fours(seed, position, salt, (first_token // 4 + tl.arange(0, BLOCK_V // 4))[None, :], STREAM)


@triton.jit
def gumbel_of_fours(seed, position, salt, block, STREAM: tl.constexpr):
    """The noise ``[rows, 4 n]`` of the tokens ``4 block .. 4 block + 3``, of each ``block`` ``[1, n]``."""
    counter = block + 0 * position[:, None]  # [rows, n]
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(
        zero + seed[:, None],
        counter.to(tl.uint32),
        (zero + position[:, None]).to(tl.uint32),
        zero.to(tl.uint32) + STREAM,
        (zero + salt[:, None]).to(tl.uint32),
    )
    return _to_gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def gumbel_of(seed, position, salt, token, STREAM: tl.constexpr):
    """The same noise ``[rows, n]`` of any tokens (int64, ``[rows, n]`` or ``[1, n]``), one call each."""
    counter = (token >> 2) + 0 * position[:, None]
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(
        zero + seed[:, None],
        counter.to(tl.uint32),
        (zero + position[:, None]).to(tl.uint32),
        zero.to(tl.uint32) + STREAM,
        (zero + salt[:, None]).to(tl.uint32),
    )
    lane = token & 3
    return _to_gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def _to_gumbel(word):
    word = tl.where(word == 0, 1, word)  # both clamps keep the logarithms finite
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10, 0.999999940395355)  # 2^-32; 1 - 2^-24
    return -tl.log(-_log1p(-u))


@triton.jit
def _log1p(x):
    """``log(1 + x)`` to a few ulps from ``log`` alone (Goldberg 1991, theorem 4)."""
    w = 1.0 + x
    d = w - 1.0
    exact = d == 0.0
    return tl.where(exact, x, tl.log(w) * (x / tl.where(exact, 1.0, d)))
