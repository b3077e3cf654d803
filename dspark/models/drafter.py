"""Drafters: what guesses a block of tokens from the target's hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, get_args

import torch
from torch import Tensor

from dspark.models.cache import PagedCache, append_layers, paged_attend
from dspark.models.draft_network import DSparkNetwork
from dspark.ops.call import check_shape
from dspark.ops.draft import draft_tree, draft_walk
from dspark.ops.types import Draft, QueryBatch, Rule, Sampling, Stream, TreeDraft

if TYPE_CHECKING:
    from typing_extensions import NotRequired, Unpack

SlotConvention = Literal["anchor-first"]


class ChainOptions(TypedDict):
    """How :meth:`Drafter.propose` draws its tokens.

    Attributes:
        sampling: parameters of the ``R`` requests.
        position: ``[R]`` int64 absolute positions of the anchors.
        stream: which random numbers the tokens are drawn with.
        return_logits: whether the draft carries the logits that the tokens were sampled from.
        return_margin: whether it carries how far each draft's best token leads the second; not if it is left out.
    """

    sampling: Sampling
    position: Tensor
    stream: Stream
    return_logits: bool
    return_margin: NotRequired[bool]


class TreeOptions(TypedDict):
    """How :meth:`Drafter.propose_tree` grows a tree.

    Attributes:
        sampling: the drafter's own parameters of the ``R`` requests.
        position: ``[R]`` int64 absolute positions of the anchors.
        rule: that will judge the tree, ``"coupled"``, ``"match"`` or ``"recursive"``.
        num_nodes: most nodes, the anchor's included.
        branching: most children of a node.
    """

    sampling: Sampling
    position: Tensor
    rule: Rule
    num_nodes: int
    branching: int


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
        """Take in the target's features of newly committed tokens.

        Args:
            features: ``[T, m*h]`` of ``Target.forward`` with :attr:`feature_layers`.
            batch: the rows that these features belong to; only ``positions`` and ``slots`` are read, and a row with
                slot -1 is skipped. Rows of rejected tokens do no harm when the next context length excludes them.
            cache: written in place.

        Raises:
            ValueError: shapes do not fit.
        """

    def propose(
        self, anchor: Tensor, batch: QueryBatch, cache: PagedCache, *, draft_len: int, **options: Unpack[ChainOptions]
    ) -> Draft:
        """Draft ``draft_len`` tokens after each request's anchor.

        Args:
            anchor: ``[R]`` int64 last committed tokens; -1 in padded requests.
            batch: ``n`` bidirectional rows for each request after its committed tokens, ``draft_len <= n`` and at most
                :attr:`block_size`; their keys and values are written to ``batch.slots``, where the next committed
                tokens will overwrite them.
            cache: context of the committed tokens.
            draft_len: tokens to draft.
            options: see :class:`ChainOptions`.

        Raises:
            ValueError: ``draft_len`` is beyond the block size or the batch's rows, or shapes do not fit.
        """

    def propose_tree(
        self, anchor: Tensor, batch: QueryBatch, cache: PagedCache, *, draft_len: int, **options: Unpack[TreeOptions]
    ) -> TreeDraft:
        """Draft a tree of ``draft_len`` levels after each request's anchor; the rest as in :meth:`propose`."""


class DSparkDrafter:
    """A DSpark (or DFlash) network over a paged context cache: a :class:`Drafter`, where arguments are described.

    Args:
        network: the drafter's network. It was trained on ``block_size`` rows; fewer are cheaper and draft a little
            worse.
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
        self.block_size, self.feature_layers = self.config.block_size, self.config.target_layer_ids
        self._masks = torch.full((1, self.block_size - 1), self.config.mask_token_id, device=self.device)

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
        """Write the keys and values that the target's features inject (eq. 2 and 3)."""
        sizes = {"F": self.network.fc.in_features}
        check_shape("features", features, "T F", sizes)
        check_shape("batch.slots", batch.slots, "T", sizes)
        if sizes["T"] == 0:
            return
        context = self.network.context(features)
        append_layers(cache, self.network.context_kv(context, batch.positions), batch.slots)

    @torch.no_grad()
    def block_logits(self, anchor: Tensor, batch: QueryBatch, cache: PagedCache) -> tuple[Tensor, Tensor]:
        """One pass of the parallel backbone, before the sequential head; arguments as in :meth:`propose`.

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
        self, anchor: Tensor, batch: QueryBatch, cache: PagedCache, *, draft_len: int, **options: Unpack[ChainOptions]
    ) -> Draft:
        """Draft a chain: :meth:`block_logits`, then ``draft_walk``."""
        hidden, base_logits = self._first_rows(anchor, batch, cache, draft_len)
        head, confidence = self.network.sequential_head(), self.network.confidence()
        return draft_walk(base_logits, anchor, head=head, hidden=hidden, confidence_head=confidence, **options)

    @torch.no_grad()
    def propose_tree(
        self, anchor: Tensor, batch: QueryBatch, cache: PagedCache, *, draft_len: int, **options: Unpack[TreeOptions]
    ) -> TreeDraft:
        """Draft a tree: :meth:`block_logits`, then ``draft_tree``."""
        hidden, base_logits = self._first_rows(anchor, batch, cache, draft_len)
        return draft_tree(base_logits, anchor, head=self.network.sequential_head(), hidden=hidden, **options)

    def _first_rows(
        self, anchor: Tensor, batch: QueryBatch, cache: PagedCache, draft_len: int
    ) -> tuple[Tensor, Tensor]:
        """:meth:`block_logits` of the rows that are drafted from."""
        if not 1 <= draft_len <= self.block_size:
            raise ValueError(f"draft_len must be in 1..{self.block_size} (block_size), got {draft_len}")
        if draft_len > batch.max_query_len:
            raise ValueError(f"draft_len must be <= batch.max_query_len ({batch.max_query_len}), got {draft_len}")
        hidden, base_logits = self.block_logits(anchor, batch, cache)
        return hidden[:, :draft_len], base_logits[:, :draft_len]
