"""Cost profiles from arithmetic, for hardware that nobody has timed yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.policy.cost import CostProfile


@dataclass(frozen=True)
class Hardware:
    """What a card can do at best, in bfloat16.

    Attributes:
        name: in words.
        flops_per_second: of dense matrix products.
        bytes_per_second: of memory.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float


H200 = Hardware("NVIDIA H200, from measured ceilings", flops_per_second=780e12, bytes_per_second=4.3e12)
"""4.3 TB/s of a large copy and 769-798 TFLOP/s of a large product, measured on one."""

RTX_4090 = Hardware("NVIDIA GeForce RTX 4090, from its data sheet", flops_per_second=165e12, bytes_per_second=1.008e12)
"""1,008 GB/s and 165 TFLOP/s (dense, sums in float32), as its maker states; a real one reaches less."""


@dataclass(frozen=True)
class ModelSize:
    """What a model makes the hardware do.

    Attributes:
        weight_bytes: read once per pass, whatever the number of rows.
        flops_per_row: about twice the number of weights.
        kv_bytes_per_token: keys and values of a token of context, all layers.
    """

    weight_bytes: float
    flops_per_row: float
    kv_bytes_per_token: float = 0.0


def roofline_profile(
    hardware: Hardware,
    target: ModelSize,
    drafter: ModelSize | None = None,
    *,
    draft_len: int = 0,
    context_tokens: int = 0,
    overhead: float = 0.0,
    captured: Sequence[int] = (),
) -> CostProfile:
    """A profile from peak rates: ``overhead + max(weight time, arithmetic time) + cache time``.

    Args:
        hardware: peak rates.
        target: the model that verifies.
        drafter: the model that drafts, all of a round's slots in one pass; None: drafting is free.
        draft_len: G, slots that it fills for each request.
        context_tokens: over all requests, to begin with; the cost of each is the profile's slope.
        overhead: seconds of a round that are no model's.
        captured: sizes that graphs are captured for.

    Returns:
        A profile whose ``source`` is "modelled": it says where the knee is, not what a machine will do.

    Raises:
        ValueError: there is a drafter and ``draft_len`` is below 1, or a number is below 0.

    >>> qwen3_8b = ModelSize(weight_bytes=16.4e9, flops_per_row=16.4e9, kv_bytes_per_token=147_456)
    >>> profile = roofline_profile(H200, qwen3_8b, context_tokens=8_192)
    >>> profile.source, [round(1000 * profile.round_seconds(n), 2) for n in (1, 128, 512)]
    ('modelled', [4.09, 4.09, 11.05])
    """
    if drafter is not None and draft_len < 1:
        raise ValueError(f"draft_len: expected at least 1 with a drafter, got {draft_len}")
    if overhead < 0 or context_tokens < 0:
        raise ValueError(f"overhead, context_tokens: expected at least 0, got {overhead} and {context_tokens}")
    per_token = target.kv_bytes_per_token / hardware.bytes_per_second
    rows, seconds = _curve(hardware, target, 1)
    requests: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    if drafter is not None:
        requests, draft_seconds = _curve(hardware, drafter, draft_len)
    return CostProfile(
        rows=rows,
        seconds=tuple(s + overhead + per_token * context_tokens for s in seconds),
        draft_requests=requests,
        draft_seconds=draft_seconds,
        captured=tuple(captured),
        context_tokens=context_tokens,
        seconds_per_context_token=per_token,
        source="modelled",
        device=hardware.name,
    )


def _curve(hardware: Hardware, model: ModelSize, rows_each: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The points of ``max(a, b n)``: the first, those on either side of the knee, and one beyond."""
    level = model.weight_bytes / hardware.bytes_per_second
    slope = rows_each * model.flops_per_row / hardware.flops_per_second
    knee = int(level / slope)
    points = sorted({1, max(1, knee), knee + 1, 2 * knee + 2})
    return tuple(points), tuple(max(level, slope * n) for n in points)


_QWEN3_4B = ModelSize(weight_bytes=8.04e9, flops_per_row=8.04e9, kv_bytes_per_token=147_456)
_ITS_DRAFTER = ModelSize(weight_bytes=1.95e9, flops_per_row=1.87e9)

MACHINES = {
    name: roofline_profile(hardware, _QWEN3_4B, _ITS_DRAFTER, draft_len=7, overhead=2e-4)
    for name, hardware in (("h200", H200), ("rtx4090", RTX_4090))
}
"""Modelled, not measured: a target of 4 billion parameters in bfloat16 (36 layers, 8 key/value heads of 128) and a
DSpark drafter of 5 layers, 7 drafts a round, on peak rates of two cards."""
