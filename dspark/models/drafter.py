"""Drafters: what guesses a block of tokens from the target's hidden states.

:class:`DSparkNetwork` is the network of a DeepSpec checkpoint, in training and in decoding alike; attention is passed
in, as for the target. :class:`DSparkDrafter` runs it over a paged context cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from dspark.models.cache import PagedCache, paged_attend
from dspark.models.config import ModelConfig
from dspark.models.rotary import Rotary
from dspark.models.transformer import Attend, DecoderLayer, RMSNorm, new_embedding
from dspark.ops.cache import append_kv
from dspark.ops.checks import check_shape
from dspark.ops.types import (
    ConfidenceHead,
    Draft,
    GatedHead,
    MarkovHead,
    QueryBatch,
    RNNHead,
    Sampling,
    SequentialHead,
    Stream,
)
from dspark.ops.walk import draft_walk

SlotConvention = Literal["anchor-first"]
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


class Drafter(Protocol):
    """Whatever guesses tokens: fed with the target's hidden states, asked for a block after each request's anchor.

    Its cache has the same pages and block tables as the target's, and the same context length: the committed tokens
    before the anchor. Rolling back rejected tokens is not passing them: whatever their slots hold is overwritten
    before it can be seen.
    """

    @property
    def block_size(self) -> int:
        """The most tokens that one :meth:`propose` can draft, γ."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs :meth:`extend` wants; see ``Target.forward``."""

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """An empty context cache."""

    def extend(self, features: Tensor, batch: QueryBatch, cache: PagedCache) -> None:
        """Take in the target's features of newly committed tokens."""

    def propose(
        self,
        anchor: Tensor,
        batch: QueryBatch,
        cache: PagedCache,
        *,
        draft_len: int,
        sampling: Sampling,
        position: Tensor,
        stream: Stream,
        return_logits: bool,
    ) -> Draft:
        """Draft ``draft_len`` tokens after each request's anchor."""


class DSparkDrafter:
    """A DSpark (or DFlash) network over a paged context cache: a :class:`Drafter`.

    Args:
        network: the drafter's network.
        slots: what the rows of a block predict. ``"anchor-first"`` (DeepSpec): row k, at the anchor's position + k,
            predicts the token after that position. Other formats put the masks *at* the predicted positions (1 + N
            slots); nothing in the tensors tells them apart, and the wrong reading only drafts badly.

    Raises:
        ValueError: another slot convention.
    """

    def __init__(self, network: DSparkNetwork, *, slots: SlotConvention) -> None:
        if slots not in get_args(SlotConvention):
            raise ValueError(f"unsupported slot convention {slots!r}; supported: 'anchor-first'")
        self.network = network
        self.config = network.config
        self._masks = torch.full((1, self.block_size - 1), self.config.mask_token_id, device=self.device)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def dtype(self) -> torch.dtype:
        return self.network.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.network.lm_head.weight.device

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """An empty context cache of the draft layers' shape, the network's dtype and device."""
        return PagedCache.allocate(self.config.model, num_pages, page_size, self.dtype, self.device)

    @torch.no_grad()
    def extend(self, features: Tensor, batch: QueryBatch, cache: PagedCache) -> None:
        """Write the keys and values that the target's features inject (eq. 2 and 3).

        Args:
            features: ``[T, m*h]`` of ``Target.forward`` with :attr:`feature_layers`.
            batch: the rows that these features belong to; only ``positions`` and ``slots`` are read, and a row with
                slot -1 is skipped. Rows of rejected tokens do no harm when the next context length excludes them.
            cache: written in place.

        Raises:
            ValueError: shapes do not fit.
        """
        sizes = {"m*h": self.network.fc.in_features}
        check_shape("features", features, "T m*h", sizes)
        check_shape("batch.slots", batch.slots, "T", sizes)
        context = self.network.context(features)
        for kv, (k, v) in zip(cache.layers, self.network.context_kv(context, batch.positions), strict=True):
            append_kv(k, v, kv, batch.slots)

    @torch.no_grad()
    def block_logits(self, anchor: Tensor, batch: QueryBatch, cache: PagedCache) -> tuple[Tensor, Tensor]:
        """One pass of the parallel backbone, before the sequential head.

        Args:
            anchor: ``[R]`` int64 last committed tokens; -1 in padded requests.
            batch: ``n`` bidirectional rows for each request, ``n <= block_size``, after its committed tokens; their
                keys and values are written to ``batch.slots``, where the next committed tokens will overwrite them.
            cache: context of the committed tokens.

        Returns:
            The post-norm hidden states ``[R, n, h]`` and the base logits ``[R, n, V]``.

        Raises:
            ValueError: shapes do not fit, or there are more rows than the block size.
        """
        rows = batch.max_query_len
        if not 1 <= rows <= self.block_size:
            raise ValueError(f"batch.max_query_len must be in 1..{self.block_size} (block_size), got {rows}")
        sizes: dict[str, int] = {}
        check_shape("anchor", anchor, "R", sizes)
        check_shape("batch.positions", batch.positions, "R*n", {"R*n": sizes["R"] * rows})
        masks = self._masks[:, : rows - 1].expand(sizes["R"], -1)
        token_ids = torch.cat([anchor.clamp(min=0)[:, None], masks], dim=1).flatten()  # [R, n] -> [R*n]
        attend = paged_attend(cache, batch, self.config.model.windows)
        hidden = self.network.block(token_ids, batch.positions, attend).view(sizes["R"], rows, -1)
        return hidden, self.network.lm_head(hidden)

    @torch.no_grad()
    def propose(
        self,
        anchor: Tensor,
        batch: QueryBatch,
        cache: PagedCache,
        *,
        draft_len: int,
        sampling: Sampling,
        position: Tensor,
        stream: Stream,
        return_logits: bool,
    ) -> Draft:
        """Draft ``draft_len`` tokens after each request's anchor.

        Args:
            anchor: ``[R]`` int64 last committed tokens; -1 in padded requests.
            batch: rows of :meth:`block_logits`, at least ``draft_len`` for each request. The network was trained on
                ``block_size`` rows; fewer are cheaper and draft a little worse.
            cache: context of the committed tokens.
            draft_len: tokens to draft, at most ``block_size``.
            sampling: parameters of the ``R`` requests.
            position: ``[R]`` int64 absolute positions of the anchors.
            stream: which random numbers the tokens are drawn with.
            return_logits: whether the draft carries the logits that the tokens were sampled from.

        Raises:
            ValueError: ``draft_len`` is beyond the block size or the batch's rows, or shapes do not fit.
        """
        if not 1 <= draft_len <= self.block_size:
            raise ValueError(f"draft_len must be in 1..{self.block_size} (block_size), got {draft_len}")
        if draft_len > batch.max_query_len:
            raise ValueError(f"draft_len must be <= batch.max_query_len ({batch.max_query_len}), got {draft_len}")
        hidden, base_logits = self.block_logits(anchor, batch, cache)
        return draft_walk(
            base_logits[:, :draft_len],
            anchor,
            head=self.network.sequential_head(),
            hidden=hidden[:, :draft_len],
            confidence_head=self.network.confidence(),
            sampling=sampling,
            position=position,
            stream=stream,
            return_logits=return_logits,
        )
