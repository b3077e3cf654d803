"""Launch of the kernels behind ``draft_walk_certified``: three, and with fallback the exact walk's steps after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.draft.certified_reference import slack_of
from dspark.ops.draft.certified_table import BiasTable
from dspark.ops.draft.walk_launch import Noise, confidence_of, memory_of, run_steps
from dspark.ops.draft.walk_plan import WalkConfig, WalkPlan, plan_walk, two_strides
from dspark.ops.draft.walk_plan import workspace_bytes as walk_workspace_bytes
from dspark.ops.draft.walk_reference import WalkInputs
from dspark.ops.launch import Kernel, padded, power_of_two
from dspark.ops.types import Draft, MarkovHead, Sampling


@dataclass(frozen=True)
class CandidateConfig:
    """How the search for candidates is cut.

    Attributes:
        block_vocab: tokens per tile.
        group: neighbouring tokens that a tile takes at a time, a multiple of 4; 16 in half precision fill a sector.
        per_tile: candidates of a tile. The likely tokens spread over the tiles, so few share one.
        block_rank: of the rank, per turn of a dot product.
        block_hidden: of the hidden size, per turn.
        walk: how the steps of the fallback are cut; None is as those of ``draft_walk``.
    """

    block_vocab: int = 1024
    group: int = 16
    per_tile: int = 8
    block_rank: int = 32
    block_hidden: int = 1024
    walk: WalkConfig | None = None


SHIPPED = CandidateConfig()


class Candidates(NamedTuple):
    """Tokens with their perturbed base scores, float32 and int32 ``[R, G, n]``, and a bound on the others' scores."""

    value: Tensor
    token: Tensor
    bound: Tensor


class CandidateShape(NamedTuple):
    draft_len: int
    vocab_size: int
    num_tiles: int
    base_request: int
    base_step: int


class SelectShape(NamedTuple):
    draft_len: int
    hidden_size: int
    hidden_request: int
    hidden_step: int
    num_candidates: int
    num_tiles: int
    top_k: int


class CertifyShape(NamedTuple):
    draft_len: int
    vocab_size: int
    rank: int
    hidden_size: int
    confidence_rank: int
    top_k: int
    top_m: int
    base_request: int
    base_step: int
    w1_row: int
    w2_row: int
    confidence_w1_row: int


@dataclass(frozen=True)
class CertifiedPlan:
    """The launches of a call; its own regions of scratch memory come after those of the walk."""

    sizes: Sequence[int]
    walk: WalkPlan
    candidates: Kernel
    select: Kernel
    certify: Kernel


def _sizes(requests: int, draft_len: int, vocab_size: int, top_k: int, config: CandidateConfig) -> list[int]:
    """Elements of scratch memory: candidates and bounds of tiles, those of steps, and of confidences."""
    rows, tiles = requests * draft_len, -(-vocab_size // config.block_vocab)
    candidates, kept = padded(rows * tiles * config.per_tile), padded(rows * top_k)
    return [candidates, candidates, padded(rows * tiles), kept, kept, padded(rows), padded(rows)]


def workspace_bytes(base: Tensor, head: MarkovHead, sampling: Sampling, top_k: int) -> int:
    """Bytes of scratch memory that such a call takes."""
    requests, draft_len, vocab_size = base.shape
    own = _sizes(requests, draft_len, vocab_size, top_k, SHIPPED)
    return walk_workspace_bytes(base, head, sampling, None, margin=False, lse=False) + 4 * sum(own)


def plan(sizes: dict[str, int], *values: Any, config: CandidateConfig = SHIPPED) -> CertifiedPlan:
    """The launches of a call of ``draft_walk_certified``."""
    from dspark.kernels.draft.certified import walk_candidates_kernel, walk_certify_kernel, walk_select_kernel

    inputs, table, top_k, fallback, draft, _ = _named(values)
    base, head = inputs.base_logits, inputs.head
    assert isinstance(head, MarkovHead)
    requests, draft_len, vocab_size = base.shape
    rows, tiles = requests * draft_len, -(-vocab_size // config.block_vocab)
    confidence, hidden = inputs.confidence_head, inputs.of_confidence
    if fallback or confidence is None:  # the exact walk computes it
        confidence = hidden = None
    w1, hidden_size = None if confidence is None else confidence.w1, 0 if hidden is None else hidden.shape[2]
    stream, rank = int(inputs.stream), head.w1.shape[1]
    candidates = Kernel(
        walk_candidates_kernel,
        (tiles, rows),
        base.device,
        shape=CandidateShape(draft_len, vocab_size, tiles, *base.stride()[:2]),
        STREAM=stream,
        PER_TILE=config.per_tile,
        GROUP=config.group,
        BLOCK_V=config.block_vocab,
        num_warps=4,
    )
    select = Kernel(
        walk_select_kernel,
        (rows,),
        base.device,
        shape=SelectShape(draft_len, hidden_size, *two_strides(hidden), tiles * config.per_tile, tiles, top_k),
        BLOCK_C=power_of_two(tiles * config.per_tile),
        TILES=power_of_two(tiles),
        TOP_K=power_of_two(top_k),
        BLOCK_H=config.block_hidden,
        num_warps=4,
    )
    certify = Kernel(
        walk_certify_kernel,
        (requests,),
        base.device,
        shape=CertifyShape(
            draft_len=draft_len,
            vocab_size=vocab_size,
            rank=rank,
            hidden_size=hidden_size,
            confidence_rank=0 if w1 is None else w1.shape[1],
            top_k=top_k,
            top_m=table.tokens.shape[1],
            base_request=base.stride(0),
            base_step=base.stride(1),
            w1_row=head.w1.stride(0),
            w2_row=head.w2.stride(0),
            confidence_w1_row=0 if w1 is None else w1.stride(0),
        ),
        slack=slack_of(rank),
        STREAM=stream,
        TOP_K=power_of_two(top_k),
        TOP_M=power_of_two(table.tokens.shape[1]),
        BLOCK_K=config.block_rank,
        BLOCK_E=16 if w1 is None else max(16, power_of_two(w1.shape[1])),
        num_warps=8,
    )
    walk = plan_walk(inputs, draft, config.walk)
    own = _sizes(requests, draft_len, vocab_size, top_k, config)
    return CertifiedPlan([*walk.sizes, *own], walk, candidates, select, certify)


def run(plan: CertifiedPlan, regions: Sequence[Tensor], *values: Any) -> None:
    """Search and certify, and with fallback draw the other steps."""
    inputs, table, _, fallback, draft, certified = _named(values)
    of_walk, own = regions[: len(plan.walk.sizes)], regions[len(plan.walk.sizes) :]
    memory = memory_of(plan.walk, of_walk)
    base, temperature = inputs.base_logits, inputs.sampling.temperature
    noise = None if inputs.sampling.all_greedy else Noise(inputs.sampling.seed, inputs.position)
    tiles = Candidates(own[0], own[1].view(torch.int32), own[2])
    kept = Candidates(own[3], own[4].view(torch.int32), own[5])
    confidence = None if fallback else confidence_of(inputs)
    part = None if confidence is None else own[6]
    plan.candidates(base, temperature, noise, tiles)
    plan.select(tiles, kept, confidence, part)
    keys, written = (memory.keys, None) if fallback else (None, draft)
    plan.certify(
        base, inputs.anchor, inputs.head, table, kept, temperature, noise, confidence, part, certified, keys, written
    )  # fmt: skip
    if fallback:
        run_steps(plan.walk, inputs, draft, memory, certified)


def _named(values: Sequence[Any]) -> tuple[WalkInputs, BiasTable, int, bool, Draft, Tensor]:
    """The op's arguments: those of a walk, its own, and its results."""
    base_logits, anchor, head, table, *block, top_k, fallback, tokens, confidence, logits, certified = values
    draft = Draft(tokens, None, confidence, logits)
    return WalkInputs(base_logits, anchor, head, *block), table, top_k, fallback, draft, certified
