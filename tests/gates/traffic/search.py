"""The search for a row's threshold, simulated on the sorted row: how often, and how far, the kernel must read.

Independent of the kernel: weights come from one sort in float64, where the kernel counts and weighs tile by tile.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.ops.cost import Search
from dspark.ops.launch import row_config

_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that numbers of the dtype leave at 0."""

_FIRST_NATS = np.array([20, 10, 5, 2], np.float32)


class _Order:
    """Floats of a dtype by their place in the order of floats."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.shift = _UNUSED_BITS[dtype]

    def key(self, x: NDArray[np.float32]) -> NDArray[np.int64]:
        bits = np.asarray(x, np.float32).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits) >> self.shift

    def value(self, key: NDArray[np.int64]) -> NDArray[np.float32]:
        magnitude = np.where(key < 0, (-(key << self.shift) - 1) >> self.shift << self.shift, key << self.shift)
        return np.where(key < 0, -1, 1).astype(np.float32) * magnitude.astype(np.int32).view(np.float32)


def simulate(
    row: NDArray[np.float32], dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Search, float]:
    """What the search reads of one row ``[V]`` of numbers of ``dtype``, and the threshold that it finds."""
    order, vocab_size = _Order(dtype), len(row)
    width = row_config(vocab_size).block_vocab
    inverse = np.float32(1) / np.float32(temperature)
    scores = row * inverse
    tiles = [scores[i : i + width] for i in range(0, vocab_size, width)]
    tile_max, tile_size = np.array([t.max() for t in tiles]), np.array([len(t) for t in tiles])

    ascending = np.sort(scores)
    tail = np.exp((ascending - ascending[-1]).astype(np.float64))[::-1].cumsum()  # mass of the largest i + 1
    lowest, above = order.key(np.array([-np.inf, row.max()], np.float32))
    above += 1
    low, mass = lowest, tail[-1]
    passes = searched = 0
    for active, by_mass in ((0 < top_k < vocab_size, False), (top_p < 1, True)):
        if not active:
            continue
        needed = float(np.float32(top_p)) * mass if by_mass else top_k
        high = above
        pivots = order.key(row.max() - _FIRST_NATS / inverse)
        while high - low > 1:
            asked = (low < pivots) & (pivots < high)
            levels = order.value(np.where(asked, pivots, high)) * inverse
            passes += 1
            searched += int(tile_size[tile_max >= levels.min()].sum())
            count = vocab_size - np.searchsorted(ascending, levels)
            weight = np.where(count > 0, tail[count - 1], 0.0)
            reached = asked & ((weight if by_mass else count) >= needed)
            low = max([low, *pivots[reached]])
            high = min([high, *pivots[asked & ~reached]])
            mass = min([mass, *weight[reached]])
            pivots = low + (int((high - low) * 0.2) + 1) * np.arange(1, 5)
    threshold = np.float32(-np.inf) if low == lowest else order.value(np.array([low]))[0] * inverse
    if min_p > 0:
        threshold = min(max(threshold, scores.max() + np.log(np.float32(min_p))), scores.max())
    return Search(passes, searched, int(tile_size[tile_max >= threshold].sum())), float(threshold)
