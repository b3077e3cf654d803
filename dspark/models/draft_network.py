"""The network of a DSpark checkpoint and its configuration, in training and in decoding alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from dspark.models.config import ModelConfig
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
        if not 1 <= self.block_size <= 63:
            raise ValueError(f"block_size must be in 1..63 (bits of an ancestor word), got {self.block_size}")
        if not 0 <= self.mask_token_id < self.model.vocab_size:
            raise ValueError(
                f"mask_token_id must be in the vocabulary of {self.model.vocab_size}, got {self.mask_token_id}"
            )
        last = self.num_target_layers - 1
        if last in self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids holds the last target layer {last}, whose output has two readings (before and "
                f"after the final norm); got {self.target_layer_ids}"
            )
        if not self.target_layer_ids or not all(-1 <= i < last for i in self.target_layer_ids):
            raise ValueError(
                f"target_layer_ids must be in -1..{last - 1} for {self.num_target_layers} target layers, "
                f"got {self.target_layer_ids}"
            )
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank must be >= 0, got {self.markov_rank}")
        if self.markov_head_type not in get_args(MarkovHeadType):
            raise ValueError(
                f"unknown markov_head_type {self.markov_head_type!r}; supported: {', '.join(get_args(MarkovHeadType))}"
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError("confidence_head_with_markov needs a Markov head, got markov_rank 0")
        if any(self.model.layer_windows):
            raise ValueError("sliding windows are not supported in a drafter: block rows have no causal order")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read the content of a DeepSpec ``config.json``.

        Raises:
            ValueError: another format or architecture, a missing key, or a value out of range.
        """
        foreign = [key for key in FOREIGN_KEYS if key in raw]
        if foreign:
            raise ValueError(f"not a DeepSpec config: {', '.join(foreign)} would change what its tensors mean")
        architectures = raw.get("architectures")
        if architectures != [ARCHITECTURE]:
            raise ValueError(
                f"unsupported drafter architectures {architectures!r}; supported: [{ARCHITECTURE!r}] (DeepSpec)"
            )
        keys = ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank"]
        keys += ["enable_confidence_head"]
        if raw.get("markov_rank"):
            keys += ["markov_head_type"]
        if raw.get("enable_confidence_head"):
            keys += ["confidence_head_with_markov"]
        missing = [key for key in keys if raw.get(key) is None]
        if missing:
            raise ValueError(f"drafter config lacks {', '.join(missing)}")
        return cls(
            model=ModelConfig.from_hf(raw),
            block_size=raw["block_size"],
            mask_token_id=raw["mask_token_id"],
            target_layer_ids=tuple(raw["target_layer_ids"]),
            num_target_layers=raw["num_target_layers"],
            markov_rank=raw["markov_rank"],
            markov_head_type=cast(MarkovHeadType, raw.get("markov_head_type", "vanilla")),
            enable_confidence_head=bool(raw["enable_confidence_head"]),
            confidence_head_with_markov=bool(raw.get("confidence_head_with_markov", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` content that :meth:`from_hf` reads back as an equal configuration."""
        return {
            **self.model.to_hf(),
            "architectures": [ARCHITECTURE],
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "num_target_layers": self.num_target_layers,
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
        }


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
        """Keys and values that each layer injects for the context (eq. 3).

        Args:
            context: ``[..., h]`` of :meth:`context`.
            positions: ``[...]`` absolute positions of those tokens.

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
