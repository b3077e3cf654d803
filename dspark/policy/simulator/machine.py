"""Machines to begin with."""

from __future__ import annotations

from dspark.policy.roofline import H200, RTX_4090, ModelSize, roofline_profile

_QWEN3_4B = ModelSize(weight_bytes=8.04e9, flops_per_row=8.04e9, kv_bytes_per_token=147_456)
_ITS_DRAFTER = ModelSize(weight_bytes=1.95e9, flops_per_row=1.87e9)

MACHINES = {
    name: roofline_profile(hardware, _QWEN3_4B, _ITS_DRAFTER, draft_len=7, overhead=2e-4)
    for name, hardware in (("h200", H200), ("rtx4090", RTX_4090))
}
"""Modelled, not measured: a target of 4 billion parameters in bfloat16 (36 layers, 8 key/value heads of 128) and a
DSpark drafter of 5 layers, 7 drafts a round, on peak rates of two cards."""
