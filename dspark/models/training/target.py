"""Training of the tiny target, by ordinary next-token cross-entropy; and texts that it then writes for its drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
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
    return dense_attention(q, k, v, is_causal=True)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, **masking: Any) -> Tensor:
    """Attention of ``q [B, n, H, D]`` to ``k, v [B, L, Hkv, D]``, masked as torch's own function is told."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **masking).transpose(1, 2)


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


@torch.inference_mode()
def roll_out(network: CausalLM, prompts: Tensor, temperature: Tensor, new_tokens: int, seed: int) -> Iterator[Tensor]:
    """Continue prompts of one length by sampling, yielding one token of each after every step.

    Args:
        network: the target.
        prompts: ``[n, L]`` int64.
        temperature: ``[n]`` float32; 0 takes the largest logit.
        new_tokens: how many to add; end-of-text tokens do not stop a text.
        seed: of torch's generator.

    Yields:
        ``[n]`` int64, ``new_tokens`` times.
    """
    count, length = prompts.shape
    generator = torch.Generator().manual_seed(seed)
    cache: list[tuple[Tensor, Tensor]] = []  # by layer, [n, L + new_tokens, Hkv, D]

    def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        room = (0, 0, 0, 0, 0, new_tokens)
        cache.append((F.pad(k, room), F.pad(v, room)))
        return causal_attend(layer, q, k, v)

    def extend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache[layer]
        keys[:, length], values[:, length] = k[:, 0], v[:, 0]
        groups = rearrange(q, "n 1 (h g) d -> n h g d", h=k.shape[2])  # a group's queries see the same keys
        out = F.scaled_dot_product_attention(
            groups, keys[:, : length + 1].transpose(1, 2), values[:, : length + 1].transpose(1, 2)
        )
        return rearrange(out, "n h g d -> n 1 (h g) d")

    hidden, _ = network(prompts, torch.arange(length).expand(count, -1), prefill, ())
    while True:
        logits = network.logits(hidden[:, -1])  # [n, V]
        # The largest of p / Exp(1) is a draw from p.
        race = (logits / temperature.clamp(min=1e-6).unsqueeze(1)).softmax(-1)
        race /= torch.empty_like(race).exponential_(generator=generator)
        token = torch.where(temperature > 0, race.argmax(-1), logits.argmax(-1))
        yield token
        new_tokens -= 1
        if new_tokens == 0:
            return
        hidden, _ = network(token.unsqueeze(1), torch.full((count, 1), length), extend, ())
        length += 1
