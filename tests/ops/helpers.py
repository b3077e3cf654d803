"""Small builders that the sampling and acceptance tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from dspark.ops.accept import accept
from dspark.ops.launch import RowConfig
from dspark.ops.op import OPS
from dspark.ops.types import Rows, Sampling, Verdict


def make_sampling(
    temperature: Sequence[float],
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
) -> Sampling:
    """Parameters of ``len(temperature)`` requests; a plain number serves all of them."""

    def tensor(value: float | Sequence[float], dtype: torch.dtype) -> Tensor:
        values = torch.tensor(value, dtype=dtype)
        return values.expand(len(temperature)).contiguous()

    return Sampling(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=tensor(top_k, torch.int64),
        top_p=tensor(top_p, torch.float32),
        min_p=tensor(min_p, torch.float32),
        seed=tensor(seed, torch.int64),
        all_greedy=not any(temperature),
        any_truncation=bool(
            np.any(np.asarray(top_k) > 0) or np.any(np.asarray(top_p) < 1) or np.any(np.asarray(min_p) > 0)
        ),
    )


def select(sampling: Sampling, requests: Tensor) -> Sampling:
    """The parameters of some requests, in the order given."""
    fields = {f: getattr(sampling, f)[requests] for f in ("temperature", "top_k", "top_p", "min_p", "seed")}
    return Sampling(**fields, all_greedy=sampling.all_greedy, any_truncation=sampling.any_truncation)


def chi_square_pvalue(tokens: Tensor, probs: Tensor) -> float:
    """P-value of drawn ``tokens`` ``[n]`` under ``probs`` ``[V]``; 0 when a token of probability 0 was drawn."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    if len(counts) > len(probs) or counts[probs == 0].any():
        return 0.0
    expected = probs.double() * tokens.numel()
    used = expected > 0
    return float(
        stats.chisquare(
            counts[used].numpy(), expected[used].numpy() * (counts[used].sum() / expected[used].sum()).item()
        ).pvalue
    )


def verify(
    target_logits: Tensor, tokens: Tensor, query_start: Tensor, *, position: Tensor, max_query_len: int, **options: Any
) -> Verdict:
    """``accept`` with its rows given field by field, as tests change one at a time."""
    return accept(target_logits, Rows(tokens, query_start, position, max_query_len), **options)


def verify_cut(
    arguments: dict[str, Any], out: Verdict, config: RowConfig | None = None, workspace: Tensor | None = None
) -> Verdict:
    """The same by the kernels, cut as ``config`` says."""
    op = OPS["accept" if arguments.get("tree") is None else "accept_tree"]
    given = arguments | {"rows": Rows(*(arguments[name] for name in Rows._fields)), "out": out}
    verdict: Verdict = op("triton", *(given[name] for name in op.signature.args), workspace=workspace, config=config)
    return verdict
