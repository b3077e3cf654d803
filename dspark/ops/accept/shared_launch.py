"""What the launches behind ``accept`` share, over chains and over trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dspark.ops.accept.gather import Rows, Slots, draw, gather_statistics, slots_of
from dspark.ops.launch import RowConfig, power_of_two, row_config
from dspark.ops.types import DenseQ, Logprobs, Rule, Verdict


@dataclass(frozen=True)
class AcceptPlan:
    """What follows from the sizes of a call alone.

    Attributes:
        rule: of the call.
        num_requests: ``R``.
        nodes: ``N``.
        vocab_size: ``V``.
        draft_vocab_size: width of a dense q, else ``V``.
        config: how rows are cut, if not as :func:`row_config` says.
    """

    rule: Rule
    num_requests: int
    nodes: int
    vocab_size: int
    draft_vocab_size: int
    config: RowConfig | None

    @cached_property
    def slots(self) -> Slots:
        """Those of the target's rows."""
        return self._slots_of(self.vocab_size)

    @cached_property
    def draft_slots(self) -> Slots:
        """Those of the draft's."""
        return self._slots_of(self.draft_vocab_size)

    def _slots_of(self, width: int) -> Slots:
        return slots_of(self.num_requests * self.nodes, self.nodes, width, self.config or row_config(width))

    @cached_property
    def nodes_p2(self) -> int:
        return power_of_two(self.nodes)

    @cached_property
    def sub_columns(self) -> int:
        """Columns that a draw holds of a row: sub-tiles, then the tokens of one."""
        return max(self.slots.tiles_p2 * self.slots.config.subs, self.slots.config.block_sub)

    @cached_property
    def tiles(self) -> dict[str, Any]:
        """Constant arguments of a kernel that reads the statistics of whole rows."""
        return {
            "stride_plane": self.slots.stride_plane,
            "num_tiles": self.slots.num_tiles,
            "TILES": self.slots.tiles_p2,
        }


def read_arguments(rows: Rows, tokens: Tensor) -> dict[str, Any]:
    """What kernels take of the rows and their tokens."""
    return {
        "logits_ptr": rows.logits,
        "stride_logits_row": rows.logits.stride(0),
        "tokens_ptr": tokens,
        "query_start_ptr": rows.query_start,
        "temperature_ptr": rows.sampling.temperature,
        "num_rows": rows.logits.shape[0],
    }


def written_arguments(out: Verdict, logprobs: Logprobs) -> dict[str, Any]:
    """What a verdict kernel takes of its outputs."""
    return {
        "out_tokens_ptr": out.tokens,
        "out_path_ptr": out.path,
        "out_logprobs_ptr": out.logprobs,
        "out_num_ptr": out.num_emitted,
        "out_status_ptr": out.status,
        "RAW": logprobs == "raw",
    }


def dense_arguments(q: DenseQ | None) -> dict[str, Any]:
    """What kernels take of a dense q, or of none."""
    if q is None:
        return {"q_ptr": None, "q_token_ptr": None, "stride_q_request": 0, "stride_q_row": 0, "q_width": 0}
    return {
        "q_ptr": q.logits,
        "q_token_ptr": q.draft_ids,
        "stride_q_request": q.logits.stride(0),
        "stride_q_row": q.logits.stride(1),
        "q_width": q.logits.shape[-1],
    }


def gather_for_draw(rows: Rows, plan: AcceptPlan, regions: tuple[Tensor, ...], *, raw: bool) -> str:
    """The statistics that ``coupled`` and ``match`` need; returns the method by which they draw."""
    method = "greedy" if rows.sampling.all_greedy else "inverse_cdf" if plan.rule == "match" else "gumbel"
    match = method == "inverse_cdf"
    kept = regions[1] if rows.truncated else None
    gather_statistics(
        rows, plan.slots, regions[0], kept, noise=method == "gumbel", sums=match or not raw, sub_sums=match, raw=raw
    )
    return method


def draw_tokens(rows: Rows, plan: AcceptPlan, regions: tuple[Tensor, ...], read: dict[str, Any], method: str) -> Tensor:
    """The token that each row draws ``[plan.slots.count]``, from statistics that were gathered."""
    planes, threshold, drawn = regions
    drawn = drawn.view(torch.int64)
    draw(rows, plan.slots, planes, threshold if rows.truncated else None, drawn, method, plan.sub_columns)
    return drawn
