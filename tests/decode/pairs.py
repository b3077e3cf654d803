"""Pairs that the decoder's tests run on."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from dspark.models import DrafterConfig, DSparkDrafter, ModelConfig, Target, load_drafter, load_target
from dspark.models.draft_network import DSparkNetwork
from dspark.models.transformer import CausalLM
from dspark.policy import CostProfile

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_DRAFTERS = ("vanilla", "gated", "rnn", "dflash")

STEEP = CostProfile(rows=(1, 4, 32), seconds=(1.0, 1.3, 6.0))
"""A cost curve under which the scheduler verifies some drafts and leaves others."""

CROWDED = CostProfile(rows=(1, 2000), seconds=(1.0, 3.0))
"""The same for some hundreds of requests."""


@functools.cache
def golden_target() -> Target:
    return load_target(GOLDEN / "target")


@functools.cache
def golden_drafter(kind: str) -> DSparkDrafter:
    return load_drafter(GOLDEN / f"draft_{kind}", golden_target())


def narrow_pair(vocab_size: int, seed: int = 0, sharpness: float = 2.0) -> tuple[Target, DSparkDrafter]:
    """A random pair over a few tokens, whose draft and target distributions differ widely."""
    model = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    config = DrafterConfig(
        model=ModelConfig(**{**vars(model), "num_hidden_layers": 1, "layer_windows": ()}),
        block_size=3,
        mask_token_id=vocab_size - 1,
        target_layer_ids=(0, 1),
        num_target_layers=3,
        markov_rank=4,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    generator = torch.Generator().manual_seed(seed)
    networks = CausalLM(model), DSparkNetwork(config)
    for network in networks:
        for name, parameter in network.named_parameters():
            if parameter.ndim >= 2:
                scale = sharpness / 4 if name == "lm_head.weight" else 0.5
                parameter.data = scale * torch.randn(parameter.shape, generator=generator)
        network.requires_grad_(False)
    return Target(networks[0]), DSparkDrafter(networks[1], slots="anchor-first")
