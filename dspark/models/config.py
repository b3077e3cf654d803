"""Model configurations, read from and written to Hugging Face ``config.json`` files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
"""Supported ``model_type`` and the class that Hugging Face names in ``architectures``."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder: everything the network needs, nothing a checkpoint leaves implicit.

    Field names follow Hugging Face's ``config.json`` where it has one.

    Attributes:
        qk_norm: RMS-normalise each query and key head (Qwen3).
        qkv_bias: add a bias to the q, k and v projections (Qwen2).
        o_bias: add a bias to the attention output projection.
        mlp_bias: add a bias to the three MLP projections.
        rope: Hugging Face's ``rope_parameters`` dictionary, with ``rope_theta`` and ``rope_type`` always present.
        layer_windows: sliding window per layer in tokens, 0 for full attention; () is full attention everywhere.
        eos_token_ids: ids that end a text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    layer_windows: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.layer_windows and (len(self.layer_windows) != self.num_hidden_layers or min(self.layer_windows) < 0):
            raise ValueError(
                f"layer_windows must hold num_hidden_layers ({self.num_hidden_layers}) windows >= 0 or nothing, "
                f"got {self.layer_windows}"
            )
        if not any(self.layer_windows):
            object.__setattr__(self, "layer_windows", ())  # one spelling, so that equal models compare equal

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each layer, 0 for full attention."""
        return self.layer_windows or (0,) * self.num_hidden_layers

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a ``config.json`` of model type qwen3, qwen2 or llama.

        A missing key means what it means to transformers. Both spellings of rotary parameters are read:
        ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``.

        Raises:
            ValueError: another model type, a missing size, or a feature that the decoder does not have
                (another activation, quantised weights, nested or partial rotary parameters).
        """
        model_type = raw.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"unsupported model_type {model_type!r}; supported: {', '.join(ARCHITECTURES)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"unsupported hidden_act {raw['hidden_act']!r}; supported: silu")
        if raw.get("quantization_config"):
            raise ValueError("unsupported quantization_config: weights must be plain floating point")
        hidden_size, num_heads = _required(raw, "hidden_size"), _required(raw, "num_attention_heads")
        num_layers = _required(raw, "num_hidden_layers")
        max_positions = _required(raw, "max_position_embeddings")
        # Qwen3Config's default; the other two divide.
        default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
        attention_bias = model_type != "qwen2" and bool(raw.get("attention_bias", False))
        return cls(
            vocab_size=_required(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(raw, "intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=_or(raw.get("num_key_value_heads"), num_heads),
            head_dim=_or(raw.get("head_dim"), default_head_dim),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type == "qwen3",
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type == "llama" and bool(raw.get("mlp_bias", False)),
            rope=_rope(raw, max_positions),
            layer_windows=_layer_windows(raw, num_layers) if model_type != "llama" else (),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` content that :meth:`from_hf` reads back as an equal configuration.

        Raises:
            ValueError: no supported model type has this mixture of biases, norms and windows.
        """
        raw: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_parameters": dict(self.rope),
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        biases = (self.qkv_bias, self.o_bias, self.mlp_bias)
        windows = set(self.layer_windows) - {0}
        if self.qk_norm and biases in ((False, False, False), (True, True, False)):
            model_type = "qwen3"
            raw["attention_bias"] = self.qkv_bias
        elif not self.qk_norm and biases == (True, False, False):
            model_type = "qwen2"
        elif not self.qk_norm and self.qkv_bias == self.o_bias and not windows:
            model_type = "llama"
            raw["attention_bias"], raw["mlp_bias"] = self.qkv_bias, self.mlp_bias
        else:
            model_type = None
        if model_type is None or len(windows) > 1:
            raise ValueError(
                f"no supported model_type has qk_norm={self.qk_norm}, qkv_bias={self.qkv_bias}, o_bias={self.o_bias}, "
                f"mlp_bias={self.mlp_bias}, layer_windows={self.layer_windows}"
            )
        if model_type != "llama":
            raw["use_sliding_window"] = bool(windows)
            raw["sliding_window"] = max(windows, default=None)
            raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in self.windows]
        return {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type, **raw}


def token_ids(raw: int | list[int] | None) -> tuple[int, ...]:
    """An ``eos_token_id`` in any of Hugging Face's spellings: null, one id or a list."""
    if raw is None:
        return ()
    return (raw,) if isinstance(raw, int) else tuple(raw)


def _required(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int:
        raise ValueError(f"config needs an integer {key}, got {value!r}")
    return value


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _rope(raw: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"unsupported rotary parameters per layer type: {sorted(rope)}")
    rope["rope_type"] = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    theta = rope.get("rope_theta")
    rope["rope_theta"] = float(raw.get("rope_theta", 10000.0) if theta is None else theta)
    partial = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"unsupported partial_rotary_factor {partial}; every dimension is rotated")
    if rope["rope_type"] in ("llama3", "yarn"):
        # transformers prefers a key beside the rotary parameters over the one inside them
        original = raw.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
        rope["original_max_position_embeddings"] = max_positions if original is None else original
        if rope["rope_type"] == "yarn" and rope.get("factor") is None:
            rope["factor"] = max_positions / rope["original_max_position_embeddings"]
    return rope


def _layer_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    window = _or(raw.get("sliding_window"), 0) if raw.get("use_sliding_window", False) else 0
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if i >= first else 0 for i in range(num_layers))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types must hold full_attention or sliding_attention for {num_layers} layers, got {types}"
        )
    if "sliding_attention" in types and window < 1:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window and sliding_window give no window")
    return tuple(window if t == "sliding_attention" else 0 for t in types)
