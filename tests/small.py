"""Configurations of models small enough for a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dspark.models import DrafterConfig, ModelConfig


def small_model(vocab_size: int, **changes: Any) -> ModelConfig:
    """Three layers of two query heads that share their keys."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return ModelConfig(vocab_size=vocab_size, **{**shape, **changes})


def small_drafter(target: ModelConfig, **changes: Any) -> DrafterConfig:
    """One layer for ``target``, blocks of three, the last token as mask, and both heads."""
    parts = {
        "block_size": 3,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": (0, 1),
        "num_target_layers": target.num_hidden_layers,
        "markov_rank": 4,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    model = replace(target, num_hidden_layers=1, layer_windows=(), tie_word_embeddings=False)
    return DrafterConfig(model=model, **{**parts, **changes})
