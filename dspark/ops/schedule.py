"""How many drafts of each request to verify (the paper's Algorithm 1 and section 5.2), decided on the device."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import FLOAT_DTYPES, INT_DTYPES, check_dtype, check_shape
from dspark.ops.types import Backend

ScheduleMode = Literal["early_stop", "global", "budget"]
_FLOATS = (*FLOAT_DTYPES, torch.float64)


def schedule_prefix(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    *,
    mode: ScheduleMode,
    budget: Tensor | None = None,
    max_lengths: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Choose verify lengths for a batch.

    Draft ``k`` of request ``r`` survives with chance ``a[r, k]``, the product of its confidences up to ``k``. Drafts
    are taken in descending order of survival, ties by (request, slot). After ``n`` of them ``B = R + n`` rows are
    verified (one anchor a request), ``tau = R + (sum of their survivals)`` tokens are expected, and throughput is
    ``Theta_n = tau * SPS(B)``. The modes differ in ``n``:

    * ``"early_stop"`` (Algorithm 1): stop before the first draft that does not raise Theta. Whether a draft is verified
      then depends on nothing that was drawn from it, so the decision is lossless under every acceptance rule.
    * ``"global"``: the first maximum of Theta over all ``n``. It looks past later drafts, so today's confidences may
      not decide today's lengths this way under the ratio rule (appendix A): use it on confidences of earlier rounds.
    * ``"budget"``: the first ``budget`` drafts, Theta unseen.

    A draft of survival 0, or past its request's ``max_lengths``, is never taken.

    Args:
        confidence: ``[R, G]`` float, chance that draft k survives given that those before it did. NaN counts as 0,
            and values are clamped to [0, 1].
        steps_per_second: ``[C]`` float with ``C > R * (1 + G)``; entry ``b`` is the speed at ``b`` verified rows. It
            may be jagged. Only ``"budget"`` may go without.
        mode: one of the three above.
        budget: ``[]`` integer, drafts to take over the whole batch; with ``"budget"`` only.
        max_lengths: ``[R]`` integer caps; None is no cap but G.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[R]`` int64 lengths in ``0 .. G``.

    Raises:
        ValueError: a shape differs, the curve is missing or too short, the mode or backend is unknown, or a budget is
            missing or unused.
        TypeError: a dtype differs.

    Computed in float64. Graph-safe.
    """
    _check(confidence, steps_per_second, mode, budget, max_lengths)
    resolve("schedule_prefix", backend, confidence)
    requests, draft_len = confidence.shape
    device = confidence.device
    survival = confidence.double().nan_to_num(0.0).clamp(0, 1).cumprod(-1)  # [R, G]
    if max_lengths is not None:
        survival = survival.masked_fill(torch.arange(draft_len, device=device) >= max_lengths[:, None], 0)

    # Flat order is (request, slot) order, which a stable sort keeps among equals. Survival does not rise along a
    # request, so what is taken of it is a prefix.
    taken, order = survival.flatten().sort(descending=True, stable=True)  # [R*G] each
    rank = torch.arange(taken.shape[0], device=device)
    possible = (taken > 0).sum()
    if budget is not None:
        count = torch.minimum(budget, possible)
    elif steps_per_second is None:
        raise ValueError(f'steps_per_second: mode "{mode}" needs the speed curve "C", got None')
    else:
        expected = torch.cat([taken.new_full((1,), requests), taken]).cumsum(0)  # [1 + R*G], tau after n drafts
        theta = expected * steps_per_second[requests : requests + expected.shape[0]].double()
        if mode == "early_stop":
            rises = (theta[1:] > theta[:-1]) & (rank < possible)
            count = rises.long().cumprod(0).sum()
        else:
            count = theta.masked_fill(torch.arange(theta.shape[0], device=device) > possible, -torch.inf).argmax()
    return torch.zeros_like(order).scatter_(0, order, (rank < count).long()).view(requests, draft_len).sum(-1)


def _check(
    confidence: Tensor,
    steps_per_second: Tensor | None,
    mode: ScheduleMode,
    budget: Tensor | None,
    max_lengths: Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_shape("confidence", confidence, "R G", sizes)
    check_dtype("confidence", confidence, _FLOATS)
    if mode not in get_args(ScheduleMode):
        words = ", ".join(repr(word) for word in get_args(ScheduleMode))
        raise ValueError(f"mode: expected one of {words}, got {mode!r}")
    if steps_per_second is not None:
        check_shape("steps_per_second", steps_per_second, "C", sizes)
        check_dtype("steps_per_second", steps_per_second, _FLOATS)
        rows = sizes["R"] * (1 + sizes["G"])
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
    if max_lengths is not None:
        check_shape("max_lengths", max_lengths, "R", sizes)
        check_dtype("max_lengths", max_lengths, INT_DTYPES)
