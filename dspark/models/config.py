"""Model configurations, read from and written to Hugging Face ``config.json`` files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
"""Supported ``model_type`` and the class that Hugging Face names in ``architectures``."""

REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
"""Sizes that a ``config.json`` must state."""

SIZES = (*REQUIRED, "num_key_value_heads", "head_dim")


def require(fits: bool, message: str) -> None:
    """Raise a ValueError with this message unless ``fits``."""
    if not fits:
        raise ValueError(message)


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
        for name in SIZES:
            require(getattr(self, name) >= 1, f"{name} must be positive, got {getattr(self, name)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        grouped = f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        require(heads % kv_heads == 0, grouped)
        require(self.head_dim % 2 == 0, f"head_dim must be even for rotary embedding, got {self.head_dim}")
        layers, windows = self.num_hidden_layers, self.layer_windows
        wanted = f"num_hidden_layers ({layers}) windows >= 0 or nothing"
        fits = not windows or (len(windows) == layers and min(windows) >= 0)
        require(fits, f"layer_windows must hold {wanted}, got {windows}")
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
        model_type, act = raw.get("model_type"), raw.get("hidden_act", "silu")
        supported = ", ".join(ARCHITECTURES)
        require(model_type in ARCHITECTURES, f"unsupported model_type {model_type!r}; supported: {supported}")
        require(act == "silu", f"unsupported hidden_act {act!r}; supported: silu")
        plain = not raw.get("quantization_config")
        require(plain, "unsupported quantization_config: weights must be plain floating point")
        for name in REQUIRED:
            require(type(raw.get(name)) is int, f"config needs an integer {name}, got {raw.get(name)!r}")
        sizes: dict[str, int] = {name: raw[name] for name in REQUIRED}
        num_layers, num_heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
        # Qwen3Config's default; the other two divide.
        default_head_dim = 128 if model_type == "qwen3" else sizes["hidden_size"] // num_heads
        attention_bias = model_type != "qwen2" and bool(raw.get("attention_bias", False))
        return cls(
            **sizes,
            num_key_value_heads=_or(raw.get("num_key_value_heads"), num_heads),
            head_dim=_or(raw.get("head_dim"), default_head_dim),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type == "qwen3",
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type == "llama" and bool(raw.get("mlp_bias", False)),
            rope=_rope(raw, sizes["max_position_embeddings"]),
            layer_windows=_layer_windows(raw, num_layers) if model_type != "llama" else (),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` content that :meth:`from_hf` reads back as an equal configuration.

        Raises:
            ValueError: no supported model type has this mixture of biases, norms and windows.
        """
        shared = {
            **{name: getattr(self, name) for name in (*SIZES, "rms_norm_eps", "tie_word_embeddings")},
            "hidden_act": "silu",
            "rope_parameters": dict(self.rope),
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        bias: dict[str, Any] = {"attention_bias": self.qkv_bias}
        windows: dict[str, Any] = {
            "use_sliding_window": any(self.windows),
            "sliding_window": max(self.windows) or None,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in self.windows],
        }
        own = {"qwen3": bias | windows, "qwen2": windows, "llama": bias | {"mlp_bias": self.mlp_bias}}
        for model_type, architecture in ARCHITECTURES.items():
            raw = {"architectures": [architecture], "model_type": model_type, **shared, **own[model_type]}
            if self.from_hf(raw) == self:
                return raw
        raise ValueError(
            f"no supported model_type has qk_norm={self.qk_norm}, qkv_bias={self.qkv_bias}, o_bias={self.o_bias}, "
            f"mlp_bias={self.mlp_bias}, layer_windows={self.layer_windows}"
        )


def token_ids(raw: int | list[int] | None) -> tuple[int, ...]:
    """An ``eos_token_id`` in any of Hugging Face's spellings: null, one id or a list."""
    if raw is None:
        return ()
    return (raw,) if isinstance(raw, int) else tuple(raw)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _rope(raw: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    nested = any(isinstance(value, Mapping) for value in rope.values())
    require(not nested, f"unsupported rotary parameters per layer type: {sorted(rope)}")
    rope["rope_type"] = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    theta = rope.get("rope_theta")
    rope["rope_theta"] = float(raw.get("rope_theta", 10000.0) if theta is None else theta)
    partial = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    whole = partial in (None, 1.0)
    require(whole, f"unsupported partial_rotary_factor {partial}; every dimension is rotated")
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
    known = len(types) == num_layers and set(types) <= {"full_attention", "sliding_attention"}
    wanted = f"full_attention or sliding_attention for {num_layers} layers"
    require(known, f"layer_types must hold {wanted}, got {types}")
    if "sliding_attention" in types and window < 1:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window and sliding_window give no window")
    return tuple(window if t == "sliding_attention" else 0 for t in types)
