"""Drafters: what guesses a block of tokens from the target's hidden states."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from dspark.models.cache import PagedCache, append_layers, paged_attend
from dspark.models.draft_network import DSparkNetwork
from dspark.ops.call import check_shape
from dspark.ops.draft import WalkTables, draft_tree, draft_walk
from dspark.ops.types import Draft, QueryBatch, Rule, Sampling, Stream, TreeDraft

SlotConvention = Literal["anchor-first"]


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
        return_margin: bool = False,
    ) -> Draft:
        """Draft ``draft_len`` tokens after each request's anchor."""

    def propose_tree(
        self,
        anchor: Tensor,
        batch: QueryBatch,
        cache: PagedCache,
        *,
        draft_len: int,
        sampling: Sampling,
        position: Tensor,
        rule: Rule,
        num_nodes: int,
        branching: int,
    ) -> TreeDraft:
        """Draft a tree of ``draft_len`` levels and at most ``num_nodes`` nodes, the anchor's included."""


class DSparkDrafter:
    """A DSpark (or DFlash) network over a paged context cache: a :class:`Drafter`.

    Args:
        network: the drafter's network.
        slots: what the rows of a block predict. ``"anchor-first"`` (DeepSpec): row k, at the anchor's position + k,
            predicts the token after that position. Other formats put the masks *at* the predicted positions (1 + N
            slots); nothing in the tensors tells them apart, and the wrong reading only drafts badly.

    Attributes:
        tables: of the walk, for weights that no longer change: ``build_walk_tables(*heads of the network)``, or None.

    Raises:
        ValueError: another slot convention.
    """

    def __init__(self, network: DSparkNetwork, *, slots: SlotConvention) -> None:
        if slots not in get_args(SlotConvention):
            raise ValueError(f"unsupported slot convention {slots!r}; supported: 'anchor-first'")
        self.network = network
        self.config = network.config
        self.tables: WalkTables | None = None
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
        sizes = {"F": self.network.fc.in_features}
        check_shape("features", features, "T F", sizes)
        check_shape("batch.slots", batch.slots, "T", sizes)
        if sizes["T"] == 0:
            return
        context = self.network.context(features)
        append_layers(cache, self.network.context_kv(context, batch.positions), batch.slots)

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
        check_shape("batch.positions", batch.positions, "T", {"T": sizes["R"] * rows})
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
        return_margin: bool = False,
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
            return_margin: whether it carries how far each draft's best token leads the second.

        Raises:
            ValueError: ``draft_len`` is beyond the block size or the batch's rows, or shapes do not fit.
        """
        self._check_draft_len(draft_len, batch)
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
            return_margin=return_margin,
        )

    @torch.no_grad()
    def propose_tree(
        self,
        anchor: Tensor,
        batch: QueryBatch,
        cache: PagedCache,
        *,
        draft_len: int,
        sampling: Sampling,
        position: Tensor,
        rule: Rule,
        num_nodes: int,
        branching: int,
    ) -> TreeDraft:
        """Draft a tree after each request's anchor: :meth:`block_logits`, then ``draft_tree``.

        Args:
            anchor, batch, cache: as for :meth:`block_logits`.
            draft_len: levels of the tree, at most the batch's rows.
            sampling: the drafter's own parameters.
            position: ``[R]`` int64 absolute positions of the anchors.
            rule: that will judge the tree, ``"coupled"``, ``"match"`` or ``"recursive"``.
            num_nodes: most nodes, the anchor's included.
            branching: most children of a node.

        Raises:
            ValueError: as :meth:`propose` and ``draft_tree``.
        """
        self._check_draft_len(draft_len, batch)
        hidden, base_logits = self.block_logits(anchor, batch, cache)
        return draft_tree(
            base_logits[:, :draft_len],
            anchor,
            head=self.network.sequential_head(),
            hidden=hidden[:, :draft_len],
            sampling=sampling,
            position=position,
            rule=rule,
            num_nodes=num_nodes,
            branching=branching,
        )

    def _check_draft_len(self, draft_len: int, batch: QueryBatch) -> None:
        if not 1 <= draft_len <= self.block_size:
            raise ValueError(f"draft_len must be in 1..{self.block_size} (block_size), got {draft_len}")
        if draft_len > batch.max_query_len:
            raise ValueError(f"draft_len must be <= batch.max_query_len ({batch.max_query_len}), got {draft_len}")
