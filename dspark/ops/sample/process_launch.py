"""Plan and launch of the logits processors' kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from dspark.ops.launch import Kernel
from dspark.ops.sample.statistics_launch import KernelRows
from dspark.ops.types import Processors, Rows


@dataclass(frozen=True)
class ProcessConfig:
    """Tile of the vocabulary that one program takes, and its warps."""

    block_v: int
    num_warps: int


def process_config(vocab_size: int) -> ProcessConfig:
    """Configuration for a vocabulary; of nothing else, so that a row's result does not depend on its batch."""
    block_v = 128
    while block_v < min(vocab_size, 2048):
        block_v *= 2
    return ProcessConfig(block_v=block_v, num_warps=max(1, block_v // 512))


class ProcessorStrides(NamedTuple):
    """Elements between requests, and of the mask between rows; 0 where there is no such tensor."""

    counts: int
    prompt: int
    eos: int
    banned: int
    allowed: int


class ProcessPlan(NamedTuple):
    """The launch; None where no row has a request."""

    kernel: Kernel | None
    sizes: tuple[int, ...] = ()


def plan_process(
    sizes: dict[str, int],
    logits: Tensor,
    rows: Rows,
    processors: Processors,
    out: Tensor,
    config: ProcessConfig | None = None,
) -> ProcessPlan:
    """One program for each row and tile of the vocabulary."""
    from dspark.kernels.sample.process import process_logits_kernel

    if sizes["R"] == 0:
        return ProcessPlan(None)
    p, config = processors, config or process_config(sizes["V"])
    tables = (p.output_counts, p.prompt_mask, p.eos_tokens, p.banned_tokens, p.allowed_mask)
    kernel = Kernel(
        process_logits_kernel,
        (sizes["T"], -(-sizes["V"] // config.block_v)),
        logits.device,
        stride_logits=logits.stride(0),
        stride_out=out.stride(0),
        stride=ProcessorStrides(*[0 if table is None else table.stride(0) for table in tables]),
        vocab_size=sizes["V"],
        num_requests=sizes["R"],
        search_steps=(sizes["R"] - 1).bit_length(),
        max_query_len=rows.max_query_len,
        num_eos=sizes.get("E", 0),
        num_banned=sizes.get("K", 0),
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )
    return ProcessPlan(kernel)


def run_process(plan: ProcessPlan, _: Any, logits: Tensor, rows: Rows, processors: Processors, out: Tensor) -> None:
    """Fill ``out``."""
    if plan.kernel is None:
        out.copy_(logits)
        return
    if processors.output_counts is not None and not processors.penalises:
        processors = processors._replace(output_counts=None)
    plan.kernel(logits, KernelRows(rows.tokens, rows.query_start, None), processors, out)
