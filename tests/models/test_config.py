"""Configurations against transformers' own readings of the same dictionaries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers

from dspark.models.config import ModelConfig
from tests.models.helpers import BASE, LLAMA3

SIZES = {**BASE, "num_hidden_layers": 4, "max_position_embeddings": 256}
QWEN3 = {"model_type": "qwen3", "head_dim": 12, **SIZES}
QWEN2 = {"model_type": "qwen2", **SIZES}
LLAMA = {"model_type": "llama", **SIZES}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (QWEN3, {"qk_norm": True, "qkv_bias": False, "o_bias": False, "head_dim": 12}),
        ({**QWEN3, "attention_bias": True}, {"qk_norm": True, "qkv_bias": True, "o_bias": True}),
        (QWEN2, {"qk_norm": False, "qkv_bias": True, "o_bias": False, "head_dim": 8}),
        ({**QWEN2, "attention_bias": True}, {"qkv_bias": True, "o_bias": False}),
        (LLAMA, {"qk_norm": False, "qkv_bias": False, "mlp_bias": False, "head_dim": 8}),
        ({**LLAMA, "head_dim": 10, "attention_bias": True, "mlp_bias": True}, {"head_dim": 10, "mlp_bias": True}),
        ({**LLAMA, "num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ({**QWEN3, "eos_token_id": 7}, {"eos_token_ids": (7,)}),
        ({**QWEN3, "tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({**QWEN3, "eos_token_id": [7, 9]}, {"eos_token_ids": (7, 9)}),
    ],
)
def test_from_hf_reads_each_model_type(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(raw)
    assert {name: getattr(config, name) for name in expected} == expected


def test_qwen3_head_dim_defaults_as_in_transformers() -> None:
    raw = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert ModelConfig.from_hf(raw).head_dim == transformers.Qwen3Config(**raw).head_dim


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 5e4},
        {"rope_theta": 5e4, "rope_scaling": None},
        {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    ],
)
def test_both_rope_spellings_read_as_in_transformers(rope: dict[str, Any]) -> None:
    raw = {**QWEN3, **rope}
    theirs = dict(transformers.Qwen3Config(**raw).rope_parameters)
    theirs.pop("type", None)
    assert ModelConfig.from_hf(raw).rope == theirs


WINDOW = {"sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    "window",
    [
        {},
        {"sliding_window": 16},
        {**WINDOW, "max_window_layers": 2},
        WINDOW,
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ],
)
@pytest.mark.parametrize("base", [QWEN3, QWEN2])
def test_windows_read_as_in_transformers(base: dict[str, Any], window: dict[str, Any]) -> None:
    raw = {**base, **window}
    kind = transformers.Qwen3Config if base is QWEN3 else transformers.Qwen2Config
    theirs = kind(**raw)
    expected = tuple(theirs.sliding_window if t == "sliding_attention" else 0 for t in theirs.layer_types)
    assert ModelConfig.from_hf(raw).windows == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "use_sliding_window"),
    ],
)
def test_unsupported_configurations_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**QWEN3, **change})


@pytest.mark.parametrize(
    "raw",
    [
        QWEN3,
        {**QWEN3, "attention_bias": True, "tie_word_embeddings": True, "eos_token_id": [3, 4]},
        {**QWEN3, **WINDOW, "max_window_layers": 1},
        {**QWEN2, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 10, "rms_norm_eps": 1e-5},
    ],
)
def test_to_hf_reads_back_here_and_in_transformers(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(raw)
    written = config.to_hf()
    assert ModelConfig.from_hf(written) == config
    theirs = transformers.AutoConfig.for_model(**written)
    assert theirs.architectures == written["architectures"]
    assert ModelConfig.from_hf(theirs.to_dict()) == config


def test_full_attention_has_one_spelling() -> None:
    config = ModelConfig.from_hf(QWEN3)
    assert dataclasses.replace(config, layer_windows=(0,) * 4) == config
    assert dataclasses.replace(config, num_hidden_layers=2).windows == (0, 0)
    with pytest.raises(ValueError, match="layer_windows"):
        dataclasses.replace(config, layer_windows=(4, 0))


def test_to_hf_refuses_what_no_model_type_has() -> None:
    base = ModelConfig.from_hf(QWEN3)
    for change in ({"mlp_bias": True}, {"layer_windows": (4, 8, 0, 0)}):
        with pytest.raises(ValueError, match="no supported model_type"):
            dataclasses.replace(base, **change).to_hf()
