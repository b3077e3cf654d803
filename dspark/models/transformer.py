"""The network shared by targets and drafters: one decoder layer, agnostic of where keys and values live.

A layer computes projections, norms and the MLP; *attention itself* is a callable that the caller passes in. Decoding
passes one that appends to a paged cache and runs ``verify_attention``; training passes a dense causal or block mask.
Parameter names equal Hugging Face's, so a checkpoint loads without renaming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.config import ModelConfig
from dspark.models.rotary import Rotary, apply_rotary

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q [..., Hq, D], k [..., Hkv, D], v [..., Hkv, D]) -> [..., Hq, D]``."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def new_embedding(count: int, size: int) -> nn.Embedding:
    """A trainable embedding, ``[count, size]``; on the meta device its values are not drawn.

    To "draw" them there, torch would import what it compiles with, which takes longer than loading a small model.
    """
    weight = torch.empty(count, size)
    if not weight.is_meta:
        nn.init.normal_(weight)
    return nn.Embedding(count, size, _weight=weight)


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [..., h]`` -> rotated queries ``[..., Hq, D]``."""
        return apply_rotary(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``x [..., h]`` -> rotated keys and plain values, each ``[..., Hkv, D]``."""
        k = apply_rotary(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class DecoderLayer(nn.Module):
    def __init__(self, c: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """``x [..., h]``, with :class:`Rotary`'s ``cos``/``sin`` at each row's position -> ``[..., h]``."""
        h = self.input_layernorm(x)
        q = self.self_attn.queries(h, cos, sin)
        k, v = self.self_attn.keys_values(h, cos, sin)
        x = x + self.self_attn.o_proj(attend(self.index, q, k, v).flatten(-2))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Transformer(nn.Module):
    """Embedding, layers and final norm (Hugging Face's ``model.*``)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = new_embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary = Rotary(c)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, feature_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run the decoder on ids ``[...]`` at absolute positions ``[...]``.

        Returns:
            The normalised last hidden state ``[..., h]``, and the features ``[..., m*h]``: outputs of
            ``feature_layers``, before any norm and in this order; -1 is the embedding output.
        """
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(positions, x.dtype)
        taken = {-1: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attend)
            if index in feature_layers:
                taken[index] = x
        features = torch.cat([taken[i] for i in feature_layers], dim=-1) if feature_layers else x[..., :0]
        return self.norm(x), features


class CausalLM(nn.Module):
    """A decoder with its language-model head; ``forward`` stops before the head so that callers pick their rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head and the embedding one parameter if the configuration ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, feature_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Transformer.forward`."""
        hidden, features = self.model(token_ids, positions, attend, feature_layers)
        return hidden, features

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., h]`` -> ``[..., V]``."""
        out: Tensor = self.lm_head(hidden)
        return out
