"""Launch of the kernels behind ``accept``.

``coupled`` takes two launches and ``match`` three. ``ratio`` and ``block`` take up to five: the draft's statistics only
when q is dense, the residual's mass only when something is drafted and sampled. Truncation adds two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

from torch import Tensor

from dspark.ops.accept.gather import Rows as LogitRows
from dspark.ops.accept.gather import gather_draft_statistics, gather_statistics
from dspark.ops.accept.shared_launch import (
    AcceptPlan,
    dense_arguments,
    draw_tokens,
    gather_for_draw,
    read_arguments,
    written_arguments,
)
from dspark.ops.launch import (
    LINE_FIELDS,
    RowConfig,
    launch,
    padded,
    power_of_two,
    requests_per_program,
    verdict_warps,
)
from dspark.ops.types import DenseQ, DraftDistribution, Logprobs, Rows, Rule, Sampling, SparseQ, Verdict


@dataclass(frozen=True)
class _Plan(AcceptPlan):
    """That of chains; :func:`_plan_of` keeps it from call to call.

    Attributes:
        sparse: ``K`` of a sparse q, else 1.
    """

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

    def _by_request(self, columns: int) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and arguments of a kernel whose programs take requests, of ``columns`` entries per node."""
        block_requests = requests_per_program(self.nodes_p2, columns)
        return (-(-self.num_requests // block_requests),), {
            **self.tiles,
            "num_requests": self.num_requests,
            "NODES": self.nodes,
            "NODES_P2": self.nodes_p2,
            "BLOCK_R": block_requests,
            "num_warps": verdict_warps(block_requests * self.nodes_p2 * columns),
        }


_plan_of = lru_cache(maxsize=256)(_Plan)


def workspace_bytes(
    num_requests: int,
    max_query_len: int,
    vocab_size: int,
    draft_vocab_size: int,
    rule: Rule,
    config: RowConfig | None = None,
) -> int:
    """Bytes of scratch memory that a call of these sizes takes."""
    return 4 * sum(_plan_of(rule, num_requests, max_query_len, vocab_size, draft_vocab_size, config, 1).sizes)


def plan(
    sizes: dict[str, int],
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
    config: RowConfig | None = None,
) -> _Plan:
    """How the launches are cut; ``config`` changes sums by their rounding only."""
    rule, vocab_size = "ratio" if rule == "recursive" else rule, sizes["V"]
    return _plan_of(rule, sizes["R"], sizes["N"], vocab_size, sizes.get("Vd", vocab_size), config, sizes.get("K", 1))


def run(
    plan: _Plan,
    regions: tuple[Tensor, ...],
    target_logits: Tensor,
    rows: Rows,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
) -> None:
    """Launch the kernels of a chain's rule."""
    written = written_arguments(out, logprobs)
    read_rows = LogitRows(target_logits, sampling, rows.position, rows.query_start)
    read = read_arguments(read_rows, rows.tokens) | {"stats_ptr": regions[0]}
    if plan.rule == "coupled" or plan.rule == "match":
        _accept_drawn(read_rows, plan, regions, read, written)
    else:
        _accept_ratio(read_rows, plan, regions, q, read, written)


@cache
def _chain_verdict_kernel() -> Any:
    from dspark.kernels.accept.chain import chain_verdict_kernel

    return chain_verdict_kernel


@cache
def _ratio_kernels() -> tuple[Any, Any, Any]:
    from dspark.kernels.accept.ratio import ratio_kernel, ratio_verdict_kernel, residual_mass_kernel

    return ratio_kernel, residual_mass_kernel, ratio_verdict_kernel


def _accept_drawn(
    rows: LogitRows, plan: _Plan, regions: tuple[Tensor, ...], read: dict[str, Any], written: dict[str, Any]
) -> None:
    """``coupled`` and ``match``."""
    method = gather_for_draw(rows, plan, regions, raw=written["RAW"])
    drawn = draw_tokens(rows, plan, regions, read, method) if method == "inverse_cdf" else None
    grid, constants = plan.chain_verdict
    own = {"drawn_ptr": drawn, "NOISE": method == "gumbel"}
    launch(_chain_verdict_kernel(), grid, constants | read | written | own)


def _accept_ratio(
    rows: LogitRows,
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
    if isinstance(q, SparseQ):
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
    dense = q if isinstance(q, DenseQ) else None
    kind = "point" if dense is None else "dense"
    return dense_arguments(dense) | {"stride_q_token_request": 0, "stride_q_token_row": 0, "Q": kind}
