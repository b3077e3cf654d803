"""Sampling parameters in the schemas of ``torch.ops.dspark.*``."""

from __future__ import annotations

from torch import Tensor

from dspark.ops.types import Sampling

SAMPLING = (
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, bool all_greedy, bool any_truncation"
)


def flat(s: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool]:
    return s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.all_greedy, s.any_truncation
