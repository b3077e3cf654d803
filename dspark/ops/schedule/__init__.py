"""How many drafts of each request to verify (the paper's Algorithm 1 and section 5.2), decided on the device."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from dspark.ops.call import FLOATS, INTS, ScalarArg, TensorArg
from dspark.ops.op import Op
from dspark.ops.schedule import launch, reference
from dspark.ops.schedule.reference import MAX_ROWS, ScheduleMode
from dspark.ops.types import Backend

_FLOATS = (*FLOATS, torch.float64)


def _check(
    sizes: dict[str, int],
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: str,
    budget: Tensor | None,
    **_: Any,
) -> None:
    rows = sizes["R"] * (1 + sizes["G"])
    if rows > MAX_ROWS:
        shape = list(confidence.shape)
        raise ValueError(f'confidence: expected shape "R G" with R * (1 + G) <= {MAX_ROWS}, got {shape}')
    if steps_per_second is None and mode != "budget":
        raise ValueError(f'steps_per_second: mode "{mode}" needs the speed curve "C", got None')
    if steps_per_second is not None and sizes["C"] <= rows:
        shape = list(steps_per_second.shape)
        raise ValueError(f'steps_per_second: expected shape "C" with C > R * (1 + G) = {rows}, got {shape}')
    if (budget is not None) != (mode == "budget"):
        came = "None" if budget is None else "a budget"
        raise ValueError(f'budget: expected with mode "budget" and with no other, got {came} with mode "{mode}"')


_SCHEDULE_PREFIX = Op(
    "schedule_prefix",
    {
        "confidence": TensorArg("R G", _FLOATS),
        "steps_per_second": TensorArg("C", _FLOATS, optional=True, layout="dense"),
        "mode": ScalarArg("str", choices=get_args(ScheduleMode)),
        "budget": TensorArg("", INTS, optional=True),
        "max_lengths": TensorArg("R", INTS, optional=True, layout="dense"),
        "min_lengths": TensorArg("R", INTS, optional=True, layout="dense"),
        "weights": TensorArg("R", _FLOATS, optional=True, layout="dense"),
        "out": TensorArg("R", (torch.int64,), optional=True, written=True, layout="contiguous"),
    },
    reference=reference.schedule,
    plan=launch.plan,
    run=launch.run,
    results=["out"],
    also=_check,
    empty="R",  # of no drafts, the lengths are still to be written
    workspace=True,
)


def schedule_prefix(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    *,
    mode: ScheduleMode,
    budget: Tensor | None = None,
    max_lengths: Tensor | None = None,
    min_lengths: Tensor | None = None,
    weights: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Choose verify lengths for a batch.

    Draft ``k`` of request ``r`` survives with chance ``a[r, k]``, the product of its confidences up to ``k``, and is
    worth ``w[r] * a[r, k]`` tokens. Drafts are taken in descending order of worth, ties by (request, k). After ``n``
    of them ``B = R + n`` rows are verified (one anchor a request), ``tau = sum(w) + (sum of what they are worth)``
    tokens are expected, and throughput is ``Theta_n = tau * SPS(B)``. The modes differ in ``n``:

    * ``"early_stop"`` (Algorithm 1): stop before the first draft that does not raise Theta. Whether a draft is verified
      then depends on nothing that was drawn from it, so the decision is lossless under every acceptance rule.
    * ``"global"``: the first maximum of Theta over all ``n``. It looks past later drafts, so today's confidences may
      not decide today's lengths this way under the ratio rule (appendix A): use it on confidences of earlier rounds.
    * ``"budget"``: the first ``budget`` drafts, Theta unseen.

    Worth is counted in whole units of 2^-30 tokens, rounded down, and its sums are exact: the decision is the same on
    every device, by every backend. A draft worth less than one unit, or past its request's ``max_lengths``, is never
    taken. Drafts below ``min_lengths`` are taken before all others, count towards B, tau and the budget, and are
    verified even if the budget is smaller; the search goes on from there.

    Args:
        confidence: ``[R, G]`` float, chance that draft k survives given that those before it did. NaN counts as 0,
            and values are clamped to [0, 1]. ``R * (1 + G)`` may be up to 2^20.
        steps_per_second: ``[C]`` float with ``C > R * (1 + G)``; entry ``b`` is the speed at ``b`` verified rows. It
            may be jagged; NaN counts as 0, and values are clamped to [0, 1e280]. Only ``"budget"`` may go without.
        mode: one of the three above.
        budget: ``[]`` integer, drafts to take over the whole batch; with ``"budget"`` only.
        max_lengths: ``[R]`` integer caps; None is no cap but G.
        min_lengths: ``[R]`` integer floors, cut to the caps; None is 0. A floor must not depend on what was drafted.
        weights: ``[R]`` float ``w``, how much a token of each request counts; None is 1. NaN counts as 0, and values
            are clamped to [0, 1]. Only their ratios matter.
        out: ``[R]`` int64 for the result.
        workspace: scratch memory of at least :func:`schedule_workspace` bytes, for the kernels.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[R]`` int64 lengths in ``0 .. G``.

    Raises:
        ValueError: a shape differs, the curve is missing or too short, the batch is too large, the mode or backend is
            unknown, a budget is missing or unused, or (kernels) a tensor's device or layout or the workspace does not
            serve.
        TypeError: a dtype differs.

    Survivals and Theta in float64. One launch up to 8,192 drafts (powers of two above R and G), three beyond.
    Graph-safe.
    """
    arguments = (confidence, steps_per_second, mode, budget, max_lengths, min_lengths, weights, out)
    result: Tensor = _SCHEDULE_PREFIX(backend, *arguments, workspace=workspace)
    return result


def schedule_workspace(num_requests: int, draft_len: int) -> int:
    """Bytes of scratch memory that :func:`schedule_prefix` takes for ``R`` requests and ``G`` drafts of each.

    >>> schedule_workspace(64, 7), schedule_workspace(4096, 16)
    (0, 1315328)
    """
    return 4 * sum(launch.scratch_sizes(num_requests, launch.schedule_config(num_requests, draft_len)))
