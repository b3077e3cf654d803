"""Where the rows of a ragged batch belong."""

from __future__ import annotations

import torch
from torch import Tensor


def row_index(query_start: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Each row's request, and its index among that request's rows.

    Args:
        query_start: ``[R + 1]`` int64, first row of each request, ``R >= 1``.
        num_rows: ``T``; rows past ``query_start[R]`` are padding and count as the last request's.

    Returns:
        Two ``[T]`` int64 tensors.

    Graph-safe.

    >>> request, offset = row_index(torch.tensor([0, 2, 2, 5]), 5)
    >>> request.tolist(), offset.tolist()
    ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    """
    row = torch.arange(num_rows, device=query_start.device)
    request = torch.searchsorted(query_start[1:].contiguous(), row, right=True).clamp(max=query_start.shape[0] - 2)
    return request, row - query_start[request]
