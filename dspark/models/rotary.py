"""Rotary position embedding, with the frequency rules of Hugging Face's ``rope_parameters``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dspark.models.config import ModelConfig, require


def rope_frequencies(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """Frequencies ``[D/2]`` fp32 (CPU) and the factor that scales cosines and sines.

    Args:
        rope: ``rope_parameters`` with ``rope_type`` and ``rope_theta``, and what the type needs.
        dim: head dimension ``D``.

    Raises:
        ValueError: an unknown ``rope_type``, or a parameter that the type needs is missing.
    """
    # On the CPU even when a network is built on the meta device: this is no parameter that a checkpoint fills later.
    # Operations are in transformers' order: an ulp of a frequency is 1e-3 radians at position 16,000.
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    period = float(rope["rope_theta"]) ** exponent
    frequency = 1.0 / period
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return frequency, 1.0
    if rope_type == "linear":
        return frequency / _number(rope, "factor"), 1.0
    if rope_type == "llama3":
        return _llama3(rope, frequency), 1.0
    if rope_type == "yarn":
        return _yarn(rope, period, dim)
    raise ValueError(f"unsupported rope_type {rope_type!r}; supported: default, linear, llama3, yarn")


def _llama3(rope: Mapping[str, Any], frequency: Tensor) -> Tensor:
    """Llama 3.1: divide low frequencies by a factor, keep high ones, interpolate between."""
    factor, original = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    turns = original / (2 * math.pi / frequency)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / factor + kept * frequency


def _yarn(rope: Mapping[str, Any], period: Tensor, dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071): interpolate the dimensions that turn slowly; scale attention."""
    factor, original = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    base = float(rope["rope_theta"])

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    def attention(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    scaled = 1.0 / (factor * period) * (1 - kept) + 1.0 / period * kept

    scale = rope.get("attention_factor")
    if scale is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = attention(mscale) / attention(all_dim) if mscale and all_dim else attention(1.0)
    return scaled, float(scale)


def _number(rope: Mapping[str, Any], key: str) -> float:
    require(rope.get(key) is not None, f"rope_type {rope['rope_type']!r} needs {key}")
    return float(rope[key])


class Rotary(nn.Module):
    """Cosines and sines at given positions, computed on the fly in fp32 (no table that could run out)."""

    _frequency_bits: Tensor

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        frequency, self.scale = rope_frequencies(c.rope, c.head_dim)
        # Kept as integers, so that moving the network to bf16 cannot round them: that would turn late positions
        # by whole radians.
        bits = torch.cat([frequency, frequency]).view(torch.int32)
        self.register_buffer("_frequency_bits", bits, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``positions [...]`` -> ``cos, sin``, each ``[..., 1, D]`` (all heads alike), for :func:`apply_rotary`.

        The sine of the first half is negated, which saves a negation for each query and key.
        """
        angle = positions[..., None, None] * self._frequency_bits.view(torch.float32)
        cos, sin = angle.cos(), angle.sin()
        sin[..., : sin.shape[-1] // 2].neg_()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype), sin.to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [..., H, D]`` by :class:`Rotary`'s ``cos``/``sin`` ``[..., 1, D]``, halves paired as in Llama."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x * cos + swapped * sin
