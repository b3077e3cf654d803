"""Launch of the kernels behind ``draft_walk_certified``: three, and with fallback the exact walk's steps after them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dspark.ops.draft.certified_reference import slack_of
from dspark.ops.draft.certified_table import BiasTable
from dspark.ops.draft.walk_inputs import WalkInputs, WalkOutputs
from dspark.ops.draft.walk_launch import Walk, check_layouts
from dspark.ops.draft.walk_plan import WalkConfig, plan_of
from dspark.ops.launch import check_contiguous, check_devices, contiguous, launch, padded, power_of_two, scratch
from dspark.ops.types import Draft, MarkovHead, Sampling, Stream


@dataclass(frozen=True)
class CandidateConfig:
    """How the search for candidates is cut.

    Attributes:
        block_vocab: tokens per tile.
        group: neighbouring tokens that a tile takes at a time, a multiple of 4; 16 in half precision fill a sector.
        per_tile: candidates of a tile. The likely tokens spread over the tiles, so few share one.
        block_rank: of the rank, per turn of a dot product.
        block_hidden: of the hidden size, per turn.
    """

    block_vocab: int = 1024
    group: int = 16
    per_tile: int = 8
    block_rank: int = 32
    block_hidden: int = 1024


SHIPPED = CandidateConfig()


@cache
def _kernels() -> tuple[Any, Any, Any]:
    from dspark.kernels.draft.certified import walk_candidates_kernel, walk_certify_kernel, walk_select_kernel

    return walk_candidates_kernel, walk_select_kernel, walk_certify_kernel


def _sizes(rows: int, tiles: int, top_k: int, config: CandidateConfig) -> list[int]:
    """Elements of scratch memory: candidates and bounds of tiles, those of slots, and of confidences."""
    candidates, kept = padded(rows * tiles * config.per_tile), padded(rows * top_k)
    return [candidates, candidates, padded(rows * tiles), kept, kept, padded(rows), padded(rows)]


def _tiles(vocab_size: int, config: CandidateConfig) -> int:
    return -(-vocab_size // config.block_vocab)


def certified_workspace_bytes(
    base: Tensor,
    head: MarkovHead,
    sampling: Sampling,
    top_k: int,
    config: CandidateConfig = SHIPPED,
    walk_config: WalkConfig | None = None,
) -> int:
    """Bytes of scratch memory that such a call takes."""
    rows = base.shape[0] * base.shape[1]
    plan = plan_of(base, head, sampling, WalkOutputs(False), None, walk_config)
    return 4 * sum([*plan.sizes, *_sizes(rows, _tiles(base.shape[2], config), top_k, config)])


def walk_certified_triton(
    inputs: WalkInputs,
    table: BiasTable,
    top_k: int,
    fallback: bool,
    out: Draft,
    certified: Tensor,
    workspace: Tensor | None,
    config: CandidateConfig = SHIPPED,
    walk_config: WalkConfig | None = None,
) -> None:
    """Write the draft to ``out`` and the leading certified slots to ``certified``; arguments as checked by the op.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    check_layouts(inputs, out)
    head = inputs.head
    assert isinstance(head, MarkovHead)
    for name in ("tokens", "biases", "bound", "norm"):
        check_contiguous(f"table.{name}", getattr(table, name))
    check_devices(inputs.base_logits.device, table=table.tokens)
    requests, draft_len, vocab_size = inputs.base_logits.shape
    rows, tiles = requests * draft_len, _tiles(vocab_size, config)
    outputs = WalkOutputs(False)
    plan = plan_of(inputs.base_logits, head, inputs.sampling, outputs, None, walk_config)
    own = _sizes(rows, tiles, top_k, config)
    regions = scratch([*plan.sizes, *own], inputs.base_logits.device, workspace)
    if requests == 0:
        return
    walk = Walk(inputs, outputs, out, plan, regions[: len(plan.sizes)], certified)
    _certify(inputs, head, table, top_k, walk, regions[len(plan.sizes) :], certified, fallback, config)
    if fallback:
        for slot in range(draft_len):
            walk.step(slot)
        walk.finish()


def _certify(
    inputs: WalkInputs,
    head: MarkovHead,
    table: BiasTable,
    top_k: int,
    walk: Walk,
    regions: tuple[Tensor, ...],
    certified: Tensor,
    fallback: bool,
    config: CandidateConfig,
) -> None:
    walk_candidates_kernel, walk_select_kernel, walk_certify_kernel = _kernels()
    base, out = inputs.base_logits, walk.out
    requests, draft_len, vocab_size = base.shape
    rows, tiles = requests * draft_len, _tiles(vocab_size, config)
    tile_value, tile_token, tile_bound, value, token, bound, hidden_part = regions
    tile_token, token = tile_token.view(torch.int32), token.view(torch.int32)
    noise = {
        "NOISE": not inputs.sampling.all_greedy,
        "SALTED": inputs.stream is Stream.DRAFT,
        "STREAM": int(inputs.stream),
    }
    drawn = {
        "base_ptr": base,
        "stride_base_request": base.stride(0),
        "stride_base_slot": base.stride(1),
        "temperature_ptr": walk.sampling.temperature,
        "seed_ptr": walk.sampling.seed,
        "position_ptr": walk.drawn["position_ptr"],
        "draft_len": draft_len,
        "vocab_size": vocab_size,
    }
    arguments: dict[str, Any] = drawn | noise
    arguments |= {
        "value_ptr": tile_value,
        "token_ptr": tile_token,
        "bound_ptr": tile_bound,
        "num_rows": rows,
        "num_tiles": tiles,
        "PER_TILE": config.per_tile,
        "GROUP": config.group,
        "BLOCK_V": config.block_vocab,
        "num_warps": 4,
    }
    launch(walk_candidates_kernel, (tiles, rows), arguments)

    confidence, hidden = inputs.confidence_head, inputs.of_confidence
    confident = confidence is not None and hidden is not None and not fallback
    weight = contiguous(confidence.weight) if confidence is not None and confident else None
    w1 = confidence.w1 if confidence is not None and confident else None
    arguments = {
        "value_ptr": tile_value,
        "token_ptr": tile_token,
        "tile_bound_ptr": tile_bound,
        "hidden_ptr": hidden if confident else None,
        "stride_hidden_request": hidden.stride(0) if hidden is not None and confident else 0,
        "stride_hidden_slot": hidden.stride(1) if hidden is not None and confident else 0,
        "weight_ptr": weight,
        "bias_ptr": confidence.bias if confidence is not None and confident else None,
        "out_value_ptr": value,
        "out_token_ptr": token,
        "out_bound_ptr": bound,
        "out_confidence_ptr": hidden_part if confident else None,
        "draft_len": draft_len,
        "hidden_size": hidden.shape[2] if hidden is not None and confident else 0,
        "num_candidates": tiles * config.per_tile,
        "num_tiles": tiles,
        "top_k": top_k,
        "BLOCK_C": power_of_two(tiles * config.per_tile),
        "TILES": power_of_two(tiles),
        "TOP_K": power_of_two(top_k),
        "BLOCK_H": config.block_hidden,
        "num_warps": 4,
    }
    launch(walk_select_kernel, (rows,), arguments)

    rank = head.w1.shape[1]
    arguments = drawn | noise
    arguments |= {
        "value_ptr": value,
        "token_ptr": token,
        "bound_ptr": bound,
        "confidence_ptr": hidden_part if confident else None,
        "w1_ptr": head.w1,
        "stride_w1_row": head.w1.stride(0),
        "w2_ptr": head.w2,
        "stride_w2_row": head.w2.stride(0),
        "table_token_ptr": table.tokens,
        "table_bias_ptr": table.biases,
        "table_bound_ptr": table.bound,
        "table_norm_ptr": table.norm,
        "anchor_ptr": walk.previous["anchor_ptr"],
        "weight_ptr": weight,
        "confidence_w1_ptr": w1,
        "stride_confidence_w1_row": 0 if w1 is None else w1.stride(0),
        "out_certified_ptr": certified,
        "key_ptr": walk.keys if fallback else None,
        "out_tokens_ptr": None if fallback else out.tokens,
        "out_confidence_logits_ptr": None if fallback else out.confidence_logits,
        "out_confidence_ptr": None if fallback else out.confidence,
        "rank": rank,
        "hidden_size": hidden.shape[2] if hidden is not None and confident else 0,
        "confidence_rank": 0 if w1 is None else w1.shape[1],
        "top_k": top_k,
        "top_m": table.tokens.shape[1],
        "slack": slack_of(rank),
        "TOP_K": power_of_two(top_k),
        "TOP_M": power_of_two(table.tokens.shape[1]),
        "BLOCK_K": config.block_rank,
        "BLOCK_E": 16 if w1 is None else max(16, power_of_two(w1.shape[1])),
        "num_warps": 8,
    }
    launch(walk_certify_kernel, (requests,), arguments)
