"""Trained networks written as checkpoints that ``load_target`` and ``load_drafter`` read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.models.draft_network import DSparkNetwork
from dspark.models.transformer import CausalLM


def save_target(network: CausalLM, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a target as a Hugging Face folder; a tied head is not written twice."""
    weights = dict(network.state_dict())
    if network.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    _write(folder, network.config.to_hf(), weights, dtype)


def save_drafter(network: DSparkNetwork, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a drafter in the DeepSpec format, its copies of the target's embedding and head included."""
    _write(folder, network.config.to_hf(), network.state_dict(), dtype)


def _write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    named = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(named, indent=2) + "\n")
    tensors = {name: w.detach().to(dtype).contiguous() for name, w in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library writes files for the owner alone
