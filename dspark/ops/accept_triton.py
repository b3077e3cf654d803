"""Launch of the kernels behind ``accept``.

``coupled`` takes two launches and ``match`` three. ``ratio`` and ``block`` take up to five: the draft's statistics only
when q is dense, the residual's mass only when something is drafted and sampled. Truncation adds two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dspark.ops.launch import (
    LINE_FIELDS,
    RowConfig,
    check_contiguous,
    check_devices,
    check_unit_stride,
    contiguous,
    contiguous_sampling,
    launch,
    padded,
    power_of_two,
    requests_per_program,
    row_config,
    scratch,
    verdict_warps,
)
from dspark.ops.statistics_triton import Rows, Slots, gather_draft_statistics, gather_statistics, slots_of
from dspark.ops.types import DenseQ, DraftDistribution, Logprobs, Rule, Sampling, SparseQ, Verdict

_OUT = ("tokens", "num_emitted", "path", "logprobs", "status")


@dataclass(frozen=True)
class _Plan:
    """What follows from the sizes of a call alone; :func:`_plan_of` keeps it from call to call.

    Attributes:
        rule: of the call.
        num_requests: ``R``.
        nodes: ``N``.
        slots: of the target's rows.
        draft_slots: of the draft's.
        sparse: ``K`` of a sparse q, else 1.
    """

    rule: Rule
    num_requests: int
    nodes: int
    slots: Slots
    draft_slots: Slots
    sparse: int

    @cached_property
    def num_lines(self) -> int:
        """Lines of the residual: requests under ``ratio``, slots under ``block``."""
        return self.num_requests if self.rule == "ratio" else self.slots.count

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of scratch memory: statistics, thresholds, and what the rule needs beside them."""
        shared = [self.slots.elements, padded(self.slots.count)]
        if self.rule == "coupled":
            return shared
        if self.rule == "match":
            return [*shared, padded(2 * self.slots.count)]
        mass = self.num_lines * self.slots.num_tiles * self.slots.config.subs
        return [*shared, self.draft_slots.draft_elements, padded(self.num_lines * LINE_FIELDS), padded(mass)]

    @cached_property
    def nodes_p2(self) -> int:
        return power_of_two(self.nodes)

    @cached_property
    def sub_columns(self) -> int:
        """Columns that a draw holds of a row: sub-tiles, then the tokens of one."""
        return max(self.slots.tiles_p2 * self.slots.config.subs, self.slots.config.block_sub)

    @cached_property
    def draw(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``sample_kernel``."""
        grid, constants = self.slots.draw(self.sub_columns)
        return grid, constants | {"METHOD": "inverse_cdf"}

    @cached_property
    def chain_verdict(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``chain_verdict_kernel``."""
        return self._by_request(self.slots.tiles_p2)

    @cached_property
    def ratio(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``ratio_kernel``."""
        sparse_p2 = power_of_two(self.sparse)
        grid, arguments = self._by_request(max(self.slots.tiles_p2, self.draft_slots.tiles_p2, sparse_p2))
        return grid, {
            **arguments,
            "stride_q_plane": self.draft_slots.stride_plane,
            "q_tiles": self.draft_slots.num_tiles,
            "Q_TILES": self.draft_slots.tiles_p2,
            "BLOCK_K": sparse_p2,
            "vocab_size": self.slots.vocab_size,
            "RULE": self.rule,
        }

    @cached_property
    def mass(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Grid and constant arguments of ``residual_mass_kernel``."""
        own = {"num_lines": self.num_lines, "RULE": self.rule}
        return (-(-self.num_lines // self.slots.config.block_rows), self.slots.num_tiles), self.slots.tiled | own

    @cached_property
    def ratio_verdict(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and constant arguments of ``ratio_verdict_kernel``."""
        grid, arguments = self._by_request(self.sub_columns)
        held = max(self.nodes_p2 * self.slots.tiles_p2, self.sub_columns)  # by node, and by the one row drawn from
        return grid, {
            **arguments,
            "num_warps": verdict_warps(arguments["BLOCK_R"] * held),
            "vocab_size": self.slots.vocab_size,
            "RULE": self.rule,
            "BLOCK_V": self.slots.config.block_vocab,
            "BLOCK_S": self.slots.config.block_sub,
        }

    @cached_property
    def _tiles(self) -> dict[str, Any]:
        return {
            "stride_plane": self.slots.stride_plane,
            "num_tiles": self.slots.num_tiles,
            "TILES": self.slots.tiles_p2,
        }

    def _by_request(self, columns: int) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and arguments of a kernel whose programs take requests, of ``columns`` entries per node."""
        block_requests = requests_per_program(self.nodes_p2, columns)
        return (-(-self.num_requests // block_requests),), {
            **self._tiles,
            "num_requests": self.num_requests,
            "NODES": self.nodes,
            "NODES_P2": self.nodes_p2,
            "BLOCK_R": block_requests,
            "num_warps": verdict_warps(block_requests * self.nodes_p2 * columns),
        }


@lru_cache(maxsize=256)
def _plan_of(
    rule: Rule,
    num_requests: int,
    nodes: int,
    vocab_size: int,
    draft_vocab_size: int,
    sparse: int,
    config: RowConfig | None,
) -> _Plan:
    slots = slots_of(num_requests * nodes, nodes, vocab_size, config or row_config(vocab_size))
    draft_slots = slots_of(num_requests * nodes, nodes, draft_vocab_size, config or row_config(draft_vocab_size))
    return _Plan(rule, num_requests, nodes, slots, draft_slots, sparse)


def workspace_bytes(
    num_requests: int,
    max_query_len: int,
    vocab_size: int,
    draft_vocab_size: int,
    rule: Rule,
    config: RowConfig | None = None,
) -> int:
    """Bytes of scratch memory that a call of these sizes takes."""
    return 4 * sum(_plan_of(rule, num_requests, max_query_len, vocab_size, draft_vocab_size, 1, config).sizes)


def accept_triton(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
    workspace: Tensor | None,
    config: RowConfig | None = None,
) -> None:
    """Write the verdict to ``out``; arguments as checked by :func:`dspark.ops.accept`.

    Args:
        config: how rows are cut; by default what :func:`row_config` says. It changes sums by their rounding only.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    check_unit_stride("target_logits", target_logits)
    check_devices(
        target_logits.device,
        tokens=tokens,
        query_start=query_start,
        position=position,
        seed=sampling.seed,
        q=q.logits if isinstance(q, DenseQ) else q.tokens if isinstance(q, SparseQ) else None,
    )
    for name in _OUT:
        check_contiguous(f"out.{name}", getattr(out, name))
    vocab_size = target_logits.shape[1]
    plan = _plan_of(
        rule,
        position.shape[0],
        max_query_len,
        vocab_size,
        q.logits.shape[-1] if isinstance(q, DenseQ) else vocab_size,
        q.tokens.shape[-1] if isinstance(q, SparseQ) else 1,
        config,
    )
    regions = scratch(plan.sizes, target_logits.device, workspace)
    if plan.num_requests == 0:
        return
    rows = Rows(target_logits, contiguous_sampling(sampling), contiguous(position), contiguous(query_start))
    verdict = {
        "logits_ptr": target_logits,
        "stride_logits_row": target_logits.stride(0),
        "tokens_ptr": contiguous(tokens),
        "query_start_ptr": rows.query_start,
        "temperature_ptr": rows.sampling.temperature,
        "stats_ptr": regions[0],
        "num_rows": target_logits.shape[0],
    }
    written = {
        "out_tokens_ptr": out.tokens,
        "out_path_ptr": out.path,
        "out_logprobs_ptr": out.logprobs,
        "out_num_ptr": out.num_emitted,
        "out_status_ptr": out.status,
        "RAW": logprobs == "raw",
    }
    if rule == "coupled" or rule == "match":
        _accept_drawn(rows, plan, regions, verdict, written)
    else:
        _accept_ratio(rows, plan, regions, q, verdict, written)


@cache
def _chain_kernels() -> tuple[Any, Any]:
    from dspark.kernels.chain import chain_verdict_kernel, sample_kernel

    return chain_verdict_kernel, sample_kernel


@cache
def _ratio_kernels() -> tuple[Any, Any, Any]:
    from dspark.kernels.ratio import ratio_kernel, ratio_verdict_kernel, residual_mass_kernel

    return ratio_kernel, residual_mass_kernel, ratio_verdict_kernel


def _accept_drawn(
    rows: Rows, plan: _Plan, regions: tuple[Tensor, ...], read: dict[str, Any], written: dict[str, Any]
) -> None:
    """``coupled`` and ``match``."""
    chain_verdict_kernel, sample_kernel = _chain_kernels()
    sampled = not rows.sampling.all_greedy
    match = sampled and plan.rule == "match"
    noise = sampled and not match
    raw = written["RAW"]
    threshold = regions[1] if rows.truncated else None
    gather_statistics(
        rows, plan.slots, regions[0], threshold, noise=noise, sums=match or not raw, sub_sums=match, raw=raw
    )
    drawn = None
    if match:
        drawn = regions[2].view(torch.int64)
        grid, constants = plan.draw
        arguments = constants | read
        del arguments["tokens_ptr"]
        arguments |= {
            "seed_ptr": rows.sampling.seed,
            "position_ptr": rows.position,
            "depth_ptr": None,
            "threshold_ptr": threshold,
            "request_ptr": None,
            "token_ptr": drawn,
        }
        launch(sample_kernel, grid, arguments)
    grid, constants = plan.chain_verdict
    launch(chain_verdict_kernel, grid, constants | read | written | {"drawn_ptr": drawn, "NOISE": noise})


def _accept_ratio(
    rows: Rows,
    plan: _Plan,
    regions: tuple[Tensor, ...],
    q: DraftDistribution | None,
    read: dict[str, Any],
    written: dict[str, Any],
) -> None:
    """``ratio`` and ``block``."""
    ratio_kernel, residual_mass_kernel, ratio_verdict_kernel = _ratio_kernels()
    planes, threshold, draft_planes, lines, mass = regions
    sampled = not rows.sampling.all_greedy
    kept = threshold if rows.truncated else None
    gather_statistics(rows, plan.slots, planes, kept, noise=False, sums=True, sub_sums=sampled, raw=written["RAW"])
    if isinstance(q, DenseQ) and plan.nodes > 1:
        gather_draft_statistics(q.logits, read["query_start_ptr"], read["num_rows"], plan.draft_slots, draft_planes)
    read |= _draft_arguments(q)
    read |= {"threshold_ptr": kept, "line_ptr": lines}
    drawn = {"seed_ptr": rows.sampling.seed, "position_ptr": rows.position}
    grid, constants = plan.ratio
    launch(ratio_kernel, grid, constants | read | drawn | {"q_stats_ptr": draft_planes})
    if sampled and plan.nodes > 1:
        mass_grid, constants = plan.mass
        weighed = constants | read | {"mass_ptr": mass}
        del weighed["stats_ptr"]
        launch(residual_mass_kernel, mass_grid, weighed)
    grid, constants = plan.ratio_verdict
    last = constants | read | drawn | written
    last |= {"mass_ptr": mass, "SAMPLED": sampled}
    launch(ratio_verdict_kernel, grid, last)


def _draft_arguments(q: DraftDistribution | None) -> dict[str, Any]:
    """What the kernels take of q; no draft at all is like a point mass."""
    if isinstance(q, DenseQ):
        check_unit_stride("q.logits", q.logits)
        return {
            "q_ptr": q.logits,
            "q_token_ptr": None if q.draft_ids is None else contiguous(q.draft_ids),
            "stride_q_request": q.logits.stride(0),
            "stride_q_row": q.logits.stride(1),
            "stride_q_token_request": 0,
            "stride_q_token_row": 0,
            "q_width": q.logits.shape[-1],
            "Q": "dense",
        }
    if isinstance(q, SparseQ):
        check_unit_stride("q.tokens", q.tokens)
        check_unit_stride("q.logprobs", q.logprobs)
        return {
            "q_ptr": q.logprobs,
            "q_token_ptr": q.tokens,
            "stride_q_request": q.logprobs.stride(0),
            "stride_q_row": q.logprobs.stride(1),
            "stride_q_token_request": q.tokens.stride(0),
            "stride_q_token_row": q.tokens.stride(1),
            "q_width": q.tokens.shape[-1],
            "Q": "sparse",
        }
    return _POINT


_POINT: dict[str, Any] = {
    "q_ptr": None,
    "q_token_ptr": None,
    "stride_q_request": 0,
    "stride_q_row": 0,
    "stride_q_token_request": 0,
    "stride_q_token_row": 0,
    "q_width": 0,
    "Q": "point",
}
