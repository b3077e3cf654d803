"""Texts that a target writes itself, for its drafter to learn from: many at once, all of one length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dspark.models.training.target import causal_attend
from dspark.models.transformer import CausalLM


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
