"""The network of a DSpark checkpoint and its configuration, in training and in decoding alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from dspark.models.config import ModelConfig, require
from dspark.models.rotary import Rotary
from dspark.models.transformer import Attend, DecoderLayer, RMSNorm, new_embedding
from dspark.ops.types import ConfidenceHead, GatedHead, MarkovHead, RNNHead, SequentialHead

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
ARCHITECTURE = "Qwen3DSparkModel"
FOREIGN_KEYS = ("speculators_model_type", "sample_from_anchor", "draft_vocab_size", "dspark_block_size")
"""Keys of other formats (speculators, DeepSeek-V4), whose slots, vocabulary or layer ids read differently."""


@dataclass(frozen=True)
class DrafterConfig:
    """A DSpark drafter in the DeepSpec format; ``markov_rank`` 0 is DFlash.

    Attributes:
        model: the draft layers; its ``num_hidden_layers`` counts them.
        block_size: γ, rows of a block (the anchor and γ-1 masks), each of which predicts the token after it.
        mask_token_id: id that fills the block after its anchor.
        target_layer_ids: target layers whose outputs are the features, in this order; -1 is the embedding output.
        num_target_layers: layers of the target that it was trained for.
        markov_rank: rank ``r`` of the sequential head; 0 means none.
        markov_head_type: kind of the sequential head.
        enable_confidence_head: whether there is one.
        confidence_head_with_markov: whether it also reads the previous token's ``W1`` embedding.
    """

    model: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    def __post_init__(self) -> None:
        size, mask, rank, vocab = self.block_size, self.mask_token_id, self.markov_rank, self.model.vocab_size
        require(1 <= size <= 63, f"block_size must be in 1..63 (bits of an ancestor word), got {size}")
        require(0 <= mask < vocab, f"mask_token_id must be in the vocabulary of {vocab}, got {mask}")
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        readings = "whose output has two readings (before and after the final norm)"
        require(last not in ids, f"target_layer_ids holds the last target layer {last}, {readings}; got {ids}")
        known = bool(ids) and all(-1 <= i < last for i in ids)
        require(known, f"target_layer_ids must be in -1..{last - 1} for {last + 1} target layers, got {ids}")
        require(rank >= 0, f"markov_rank must be >= 0, got {rank}")
        kind, kinds = self.markov_head_type, get_args(MarkovHeadType)
        require(kind in kinds, f"unknown markov_head_type {kind!r}; supported: {', '.join(kinds)}")
        reads_markov = self.enable_confidence_head and self.confidence_head_with_markov
        require(rank > 0 or not reads_markov, "confidence_head_with_markov needs a Markov head, got markov_rank 0")
        causal = any(self.model.layer_windows)
        require(not causal, "sliding windows are not supported in a drafter: block rows have no causal order")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read the content of a DeepSpec ``config.json``.

        Raises:
            ValueError: another format or architecture, a missing key, or a value out of range.
        """
        foreign = ", ".join(key for key in FOREIGN_KEYS if key in raw)
        require(not foreign, f"not a DeepSpec config: {foreign} would change what its tensors mean")
        named = raw.get("architectures")
        supported = f"supported: [{ARCHITECTURE!r}] (DeepSpec)"
        require(named == [ARCHITECTURE], f"unsupported drafter architectures {named!r}; {supported}")
        own = {f.name: raw.get(f.name, f.default) for f in fields(cls) if f.name != "model"}
        unused = set() if raw.get("markov_rank") else {"markov_head_type"}
        unused |= set() if raw.get("enable_confidence_head") else {"confidence_head_with_markov"}
        missing = [name for name in own if raw.get(name) is None and name not in unused]
        require(not missing, f"drafter config lacks {', '.join(missing)}")
        own["target_layer_ids"] = tuple(own["target_layer_ids"])
        for name in ("enable_confidence_head", "confidence_head_with_markov"):
            own[name] = bool(own[name])
        return cls(model=ModelConfig.from_hf(raw), **own)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` content that :meth:`from_hf` reads back as an equal configuration."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        own["target_layer_ids"] = list(self.target_layer_ids)
        return {**self.model.to_hf(), "architectures": [ARCHITECTURE], **own}


class MarkovModule(nn.Module):
    """Parameters of a sequential head; what it computes is ``dspark.ops.draft_walk``."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        vocab, hidden, rank = c.model.vocab_size, c.model.hidden_size, c.markov_rank
        self.markov_w1 = new_embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if c.markov_head_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank) if c.markov_head_type == "rnn" else None


class ConfidenceModule(nn.Module):
    """Parameters of the confidence head (eq. 7)."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(c.model.hidden_size + (c.markov_rank if c.confidence_head_with_markov else 0), 1)


class DSparkNetwork(nn.Module):
    """The drafter's network, with DeepSpec's parameter names.

    A block of γ rows reads the target's hidden states as extra keys and values (eq. 2 and 3) and gives one hidden
    state per row. Which rows see which, and where context keys live, is up to the ``attend`` that the caller passes.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = config.model
        self.config = config
        self.embed_tokens = new_embedding(c.vocab_size, c.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.tie_weights()
        self.markov_head = MarkovModule(config) if config.markov_rank else None
        self.confidence_head = ConfidenceModule(config) if config.enable_confidence_head else None
        self.rotary = Rotary(c)

    def tie_weights(self) -> None:
        """Make the head and the embedding one parameter if the configuration ties them."""
        if self.config.model.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def context(self, features: Tensor) -> Tensor:
        """``H_ctx = RMSNorm(fc(features))`` (eq. 2): ``[..., m*h]`` -> ``[..., h]``."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def context_kv(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What each layer injects for :meth:`context`'s ``[..., h]`` at absolute positions ``[...]`` (eq. 3).

        Returns:
            Per layer, rotated keys and values, each ``[..., Hkv, D]``.
        """
        cos, sin = self.rotary(positions, context.dtype)
        return [cast(DecoderLayer, layer).self_attn.keys_values(context, cos, sin) for layer in self.layers]

    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of block rows, after the final norm.

        Args:
            token_ids: ``[...]`` the anchor's id, then ``mask_token_id``, for each block.
            positions: ``[...]`` absolute positions, the anchor's first.
            attend: given the block's own q, k and v of a layer, attends to them and to the context.

        Returns:
            ``[..., h]``; row k predicts the token after position k of the block.
        """
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        out: Tensor = self.norm(x)
        return out

    def sequential_head(self) -> SequentialHead | None:
        """The Markov, gated or recurrent head as tensors that share memory with the parameters; None for DFlash."""
        head = self.markov_head
        if head is None:
            return None
        w1, w2 = head.markov_w1.weight, head.markov_w2.weight
        if head.gate_proj is not None:
            return GatedHead(w1, w2, head.gate_proj.weight, head.gate_proj.bias)
        if head.joint_proj is not None:
            return RNNHead(w1, w2, head.joint_proj.weight, head.joint_proj.bias)
        return MarkovHead(w1, w2)

    def confidence(self) -> ConfidenceHead | None:
        """The confidence head as tensors that share memory with the parameters; None when there is none."""
        if self.confidence_head is None:
            return None
        proj = self.confidence_head.proj
        w1 = self.markov_head.markov_w1.weight if self.markov_head and self.config.confidence_head_with_markov else None
        return ConfidenceHead(proj.weight[0], proj.bias[0], w1)
