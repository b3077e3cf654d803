"""The target model over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.models.cache import PagedCache, paged_attend
from dspark.models.config import ModelConfig
from dspark.models.transformer import CausalLM
from dspark.ops.call import check_shape
from dspark.ops.types import QueryBatch


class Target:
    """The model whose output counts: hidden states and logits of ragged rows, no gradients.

    Prefill, plain decoding and verification are one call with different batches.
    """

    def __init__(self, network: CausalLM) -> None:
        self.network = network
        self.config: ModelConfig = network.config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.network.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.network.lm_head.weight.device

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """An empty cache of this model's shape, dtype and device."""
        return PagedCache.allocate(self.config, num_pages, page_size, self.dtype, self.device)

    @torch.no_grad()
    def forward(
        self, token_ids: Tensor, batch: QueryBatch, cache: PagedCache, feature_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run the decoder on ``T`` rows; their keys and values are written to ``batch.slots``.

        Args:
            token_ids: ``[T]`` int64; -1 in padded rows.
            batch: where the rows are, and what they see.
            cache: written in place.
            feature_layers: layers whose output (before any norm) is wanted, in this order; -1 is the embedding.

        Returns:
            The normalised last hidden state ``[T, h]``, and the features ``[T, m*h]``.

        Raises:
            ValueError: shapes do not fit, or a feature layer does not exist.
        """
        sizes: dict[str, int] = {}
        check_shape("token_ids", token_ids, "T", sizes)
        check_shape("batch.positions", batch.positions, "T", sizes)
        layers = self.config.num_hidden_layers
        if not all(-1 <= layer < layers for layer in feature_layers):
            raise ValueError(f"feature_layers must be in -1..{layers - 1}, got {list(feature_layers)}")
        attend = paged_attend(cache, batch, self.config.windows)
        out: tuple[Tensor, Tensor] = self.network(token_ids.clamp(min=0), batch.positions, attend, feature_layers)
        return out

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [..., h]`` -> ``[..., V]``."""
        return self.network.logits(hidden)
