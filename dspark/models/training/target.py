"""Training of the tiny target: ordinary next-token cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.config import ModelConfig
from dspark.models.training.corpus import crops
from dspark.models.training.loop import Losses, StepLog, Training, run_training
from dspark.models.transformer import CausalLM

TINY_TARGET_SHAPE = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class TargetTraining(Training):
    """Hyper-parameters of the target's training; ``length`` is the tokens in each sequence."""

    length: int = 512


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention over ``[B, L, H, D]``."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


def language_model_loss(network: CausalLM, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each token of ``tokens [B, L]`` after the first."""
    positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
    hidden, _ = network(tokens[:, :-1], positions, causal_attend)
    return F.cross_entropy(network.logits(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def train_target(network: CausalLM, stream: np.ndarray, checkpoint: Path, t: TargetTraining) -> Iterator[StepLog]:
    """Train a target on ``stream [n]`` (uint16 token ids), yielding after every step; see :func:`run_training`."""

    def losses(step: int) -> Losses:
        tokens = torch.from_numpy(crops(stream, t.batch, t.length, (t.seed, step)))
        return Losses(language_model_loss(network, tokens))

    return run_training(network, losses, t, checkpoint)
