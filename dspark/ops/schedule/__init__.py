"""How many drafts of each request to verify (the paper's Algorithm 1 and section 5.2), decided on the device."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, INT_DTYPES, check_dtype, check_shape
from dspark.ops.library.schedule import schedule_prefix_op
from dspark.ops.schedule.launch import schedule_triton, workspace_bytes
from dspark.ops.schedule.reference import MAX_ROWS, ScheduleMode, schedule_reference
from dspark.ops.types import Backend

_FLOATS = (*FLOAT_DTYPES, torch.float64)


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
    worth ``w[r] * a[r, k]`` tokens. Drafts are taken in descending order of worth, ties by (request, slot). After ``n``
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
    _check(confidence, steps_per_second, mode, budget, max_lengths, min_lengths, weights, out)
    taken = resolve("schedule_prefix", backend, confidence)
    requests, draft_len = confidence.shape
    arguments = (confidence, steps_per_second, mode, budget, max_lengths, min_lengths, weights)
    empty = requests == 0 or draft_len == 0
    if taken == "reference" and not empty and not torch.compiler.is_compiling():
        lengths = schedule_reference(*arguments)
        return lengths if out is None else out.copy_(lengths)
    if out is None:
        out = torch.empty(requests, dtype=torch.int64, device=confidence.device)
    if torch.compiler.is_compiling():
        schedule_prefix_op(*arguments, out, workspace, taken)
    elif empty:
        out.zero_()
    else:
        schedule_triton(*arguments, out, workspace)
    return out


def schedule_workspace(num_requests: int, draft_len: int) -> int:
    """Bytes of scratch memory that :func:`schedule_prefix` takes for ``R`` requests and ``G`` drafts of each.

    >>> schedule_workspace(64, 7), schedule_workspace(4096, 16)
    (0, 1315328)
    """
    return workspace_bytes(num_requests, draft_len)


def _check(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: ScheduleMode,
    budget: Tensor | None,
    max_lengths: Tensor | None,
    min_lengths: Tensor | None,
    weights: Tensor | None,
    out: Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_shape("confidence", confidence, "R G", sizes)
    check_dtype("confidence", confidence, _FLOATS)
    rows = sizes["R"] * (1 + sizes["G"])
    if rows > MAX_ROWS:
        raise ValueError(
            f'confidence: expected shape "R G" with R * (1 + G) <= {MAX_ROWS}, got {list(confidence.shape)}'
        )
    if mode not in get_args(ScheduleMode):
        words = ", ".join(repr(word) for word in get_args(ScheduleMode))
        raise ValueError(f"mode: expected one of {words}, got {mode!r}")
    if steps_per_second is None and mode != "budget":
        raise ValueError(f'steps_per_second: mode "{mode}" needs the speed curve "C", got None')
    if steps_per_second is not None:
        check_shape("steps_per_second", steps_per_second, "C", sizes)
        check_dtype("steps_per_second", steps_per_second, _FLOATS)
        if sizes["C"] <= rows:
            raise ValueError(
                f'steps_per_second: expected shape "C" with C > R * (1 + G) = {rows}, '
                f"got {list(steps_per_second.shape)}"
            )
    if (budget is not None) != (mode == "budget"):
        came = "None" if budget is None else "a budget"
        raise ValueError(f'budget: expected with mode "budget" and with no other, got {came} with mode "{mode}"')
    if budget is not None:
        check_shape("budget", budget, "", sizes)
        check_dtype("budget", budget, INT_DTYPES)
    for name, lengths in (("max_lengths", max_lengths), ("min_lengths", min_lengths)):
        if lengths is not None:
            check_shape(name, lengths, "R", sizes)
            check_dtype(name, lengths, INT_DTYPES)
    if weights is not None:
        check_shape("weights", weights, "R", sizes)
        check_dtype("weights", weights, _FLOATS)
    if out is not None:
        check_shape("out", out, "R", sizes)
        check_dtype("out", out, (torch.int64,))
