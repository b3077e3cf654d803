"""The scheduler as ``torch.ops.dspark.schedule_prefix``."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.library.define import define
from dspark.ops.schedule.reference import ScheduleMode
from dspark.ops.types import Backend

# Torch calls an implementation with a "mode" of its own, so that argument has another name here.
_SCHEMA = (
    "(Tensor confidence, Tensor? steps_per_second, str search, Tensor? budget, Tensor? max_lengths, "
    "Tensor? min_lengths, Tensor? weights, Tensor(a!) out, Tensor(b!)? workspace, str backend) -> ()"
)


def schedule_prefix_op(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: ScheduleMode,
    budget: Tensor | None,
    max_lengths: Tensor | None,
    min_lengths: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    """:func:`dspark.ops.schedule_prefix` as ``torch.ops.dspark.schedule_prefix``."""
    torch.ops.dspark.schedule_prefix(
        confidence, steps_per_second, mode, budget, max_lengths, min_lengths, weights, out, workspace, backend
    )


def _schedule_prefix(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    search: ScheduleMode,
    budget: Tensor | None,
    max_lengths: Tensor | None,
    min_lengths: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.schedule import schedule_prefix

    schedule_prefix(
        confidence,
        steps_per_second,
        mode=search,
        budget=budget,
        max_lengths=max_lengths,
        min_lengths=min_lengths,
        weights=weights,
        out=out,
        workspace=workspace,
        backend=backend,
    )


define("schedule_prefix", _SCHEMA, _schedule_prefix)
