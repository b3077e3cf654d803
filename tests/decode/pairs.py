"""Pairs that the decoder's tests run on."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from dspark.models import DSparkDrafter, Target, load_drafter, load_target
from dspark.models.draft_network import DSparkNetwork
from dspark.models.transformer import CausalLM
from dspark.policy import CostProfile
from tests.small import small_drafter, small_model

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
    model = small_model(vocab_size)
    config = small_drafter(model)
    generator = torch.Generator().manual_seed(seed)
    networks = CausalLM(model), DSparkNetwork(config)
    for network in networks:
        for name, parameter in network.named_parameters():
            if parameter.ndim >= 2:
                scale = sharpness / 4 if name == "lm_head.weight" else 0.5
                parameter.data = scale * torch.randn(parameter.shape, generator=generator)
        network.requires_grad_(False)
    return Target(networks[0]), DSparkDrafter(networks[1], slots="anchor-first")
