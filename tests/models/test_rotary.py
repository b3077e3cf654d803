"""Rotary embedding against transformers' frequency rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dspark.models.config import ModelConfig
from dspark.models.rotary import Rotary, apply_rotary, rope_frequencies
from tests.models.helpers import BASE, LLAMA3

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "llama3": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 256},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn_betas": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn_factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 0.7},
    "yarn_mscale": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn_smooth": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False},
    "yarn_wide": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn_ratio": {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 256},
    "yarn_shrunk": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.5, "original_max_position_embeddings": 64},
    "yarn_narrow": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4},
}


def make(rope: dict[str, Any], head_dim: int) -> tuple[Qwen3Config, ModelConfig]:
    raw = {**BASE, "head_dim": head_dim, "max_position_embeddings": 1024, "rope_parameters": dict(rope)}
    return Qwen3Config(**raw), ModelConfig.from_hf({"model_type": "qwen3", **raw})


@pytest.mark.parametrize("head_dim", [16, 24, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_scale_match_transformers(name: str, head_dim: int) -> None:
    theirs_config, config = make(ROPES[name], head_dim)
    theirs = Qwen3RotaryEmbedding(theirs_config)
    frequency, scale = rope_frequencies(config.rope, head_dim)
    torch.testing.assert_close(frequency, theirs.inv_freq, rtol=0, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", ROPES)
def test_rotation_matches_transformers(name: str) -> None:
    theirs_config, config = make(ROPES[name], 16)
    positions = torch.tensor([0, 1, 2, 63, 64, 255, 1023, 1024, 4097])
    q, k = torch.randn(2, 9, 4, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3RotaryEmbedding(theirs_config)(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    cos, sin = Rotary(config)(positions, q.dtype)
    torch.testing.assert_close(apply_rotary(q, cos, sin), expected_q[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(apply_rotary(k, cos, sin), expected_k[0], rtol=1e-4, atol=1e-4)


def test_p13_positions_have_no_end() -> None:
    """Past max_position_embeddings, at 2,048 and at 58k: the angle is that of the position, to fp32 rounding."""
    _, config = make(ROPES["default"], 128)
    positions = torch.tensor([1023, 1024, 2047, 2048, 58_000, 131_072])
    cos, sin = Rotary(config)(positions, torch.float32)
    exponent = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    angle = positions[:, None].double() * 10000.0**-exponent
    torch.testing.assert_close(cos[:, 0, :64].double(), angle.cos(), rtol=0, atol=2e-2)
    torch.testing.assert_close(sin[:, 0, 64:].double(), angle.sin(), rtol=0, atol=2e-2)


def test_relative_rotation_depends_on_distance_only() -> None:
    _, config = make(ROPES["llama3"], 16)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(1))
    rotary = Rotary(config)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned_q = apply_rotary(q, *rotary(torch.tensor([at_q]), torch.float32))
        turned_k = apply_rotary(k, *rotary(torch.tensor([at_k]), torch.float32))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(9, 4), score(205, 200), rtol=1e-4, atol=1e-4)


def test_casting_the_network_keeps_the_frequencies() -> None:
    _, config = make(ROPES["default"], 16)
    rotary = Rotary(config)
    before = rotary(torch.tensor([1000]), torch.float32)
    after = rotary.to(torch.bfloat16)(torch.tensor([1000]), torch.float32)
    assert all(map(torch.equal, before, after))
    assert not rotary.state_dict()  # they are no part of a checkpoint


def test_frequencies_are_real_on_the_meta_device() -> None:
    _, config = make(ROPES["yarn"], 16)
    with torch.device("meta"):
        rotary = Rotary(config)
    assert torch.equal(*(x(torch.tensor([5]), torch.float32)[0] for x in (rotary, Rotary(config))))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "proportional", "nonsense"])
def test_unknown_types_raise(rope_type: str) -> None:
    _, config = make(ROPES["default"], 16)
    config = dataclasses.replace(config, rope={"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match=f"rope_type '{rope_type}'"):
        Rotary(config)


@pytest.mark.parametrize(
    ("rope", "missing"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({**LLAMA3, "rope_theta": 1e4}, "original_max_position_embeddings"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}, "low_freq"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 8}, "factor"),
    ],
)
def test_missing_parameters_raise(rope: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"needs {missing}"):
        rope_frequencies(rope, 16)
