"""Hypothesis strategies for tests of policies and rules (needs ``hypothesis``, which this package does not install).

>>> from hypothesis import find
>>> history = find(histories(), lambda turns: len(turns) == 2)
>>> history[0].signals.draft_len
2
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dspark.policy.protocol import Signals
from dspark.testing.causality import Turn

EDGES = st.sampled_from([0.0, 0.25, 0.5, 0.8, 0.9, 1.0])
"""Confidences that tie, and those that are certain."""


def matrices(elements: st.SearchStrategy[float], rows: int, columns: int) -> st.SearchStrategy[Tensor]:
    """Float32 tensors of a shape."""
    row = st.lists(elements, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda values: torch.tensor(values).view(rows, columns))


def confidences(requests: int, draft_len: int) -> st.SearchStrategy[Tensor]:
    """``[R, G]`` float32 in [0, 1], with ties and both ends."""
    return matrices(EDGES | st.floats(0, 1, width=32), requests, draft_len)


def margins(requests: int, draft_len: int) -> st.SearchStrategy[Tensor]:
    """``[R, G]`` float32, at least 0."""
    return matrices(st.sampled_from([0.0, 0.5, 3.0]) | st.floats(0, 30, width=32), requests, draft_len)


def counts(requests: int, draft_len: int) -> st.SearchStrategy[Tensor]:
    """``[R]`` int64 from 0 to G: caps, or accepted lengths."""
    return st.lists(st.integers(0, draft_len), min_size=requests, max_size=requests).map(torch.tensor)


@st.composite
def histories(
    draw: Any, *, max_requests: int = 3, max_draft_len: int = 4, max_rounds: int = 4, classes: tuple[str, ...] = ()
) -> list[Turn]:
    """Rounds for :func:`~dspark.testing.assert_non_anticipating`, of requests that run through all of them.

    Args:
        max_requests, max_draft_len, max_rounds: at least 1, 2 and 1 are drawn.
        classes: kinds of requests to draw from; none says nothing of classes.
    """
    requests, draft_len = draw(st.integers(1, max_requests)), draw(st.integers(2, max_draft_len))
    kinds = tuple(draw(st.sampled_from(classes)) for _ in range(requests)) if classes else None
    shape = requests, draft_len
    return [
        Turn(
            signals=Signals(
                tuple(range(requests)),
                draw(counts(*shape)),
                draft_len,
                draw(confidences(*shape)),
                draw(margins(*shape)),
                classes=kinds,
            ),
            other=draw(matrices(EDGES, *shape)),
            accepted=draw(counts(*shape)),
            other_margin=draw(margins(*shape)),
        )
        for _ in range(draw(st.integers(1, max_rounds)))
    ]
