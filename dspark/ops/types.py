"""Data that travels between ops: what a batch, a draft and a verdict are.

Shape letters are the same everywhere: ``R`` requests, ``T`` ragged verify rows, ``G`` draft length (γ), ``N`` nodes per
request (``G + 1`` for a chain), ``V`` vocabulary, ``Hq``/``Hkv`` heads, ``D`` head dim, ``P`` pages, ``S`` page size,
``B`` block-table columns, ``r`` Markov rank, ``h`` hidden size. Token id -1 and slot -1 are padding and are never used
as an index.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]
Rule = Literal["coupled", "ratio", "block", "match", "recursive"]
RULES_OF_TREES: tuple[Rule, ...] = ("coupled", "match", "recursive")
"""Rules that verify trees."""

Logprobs = Literal["raw", "processed"]
W1Rows = Literal["target", "draft"]


class Stream(IntEnum):
    """What a random number is for; part of its counter, so two uses never share a word (contract C3)."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


class Status(IntEnum):
    """Why a request's verdict ended as it did."""

    OK = 0
    BAD_LOGITS = 1
    """A target row that the request reached held NaN, +inf or nothing but -inf; nothing was drawn from it."""


class PagedKV(NamedTuple):
    """One layer's paged keys and values; slot ``s`` is row ``s % S`` of page ``s // S``.

    Attributes:
        k, v: ``[P, S, Hkv, D]`` of one float dtype; float8_e4m3fn with scales. Ops that move what is stored take the
            layers of a cache at once, ``[L, P, S, Hkv, D]``.
        k_scale, v_scale: ``[Hkv]`` float32, by which a stored number is multiplied; only with float8.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[-3]


class QueryBatch(NamedTuple):
    """``T`` ragged query rows of ``R`` requests over a paged cache.

    Row ``i`` of request ``r`` (global row ``query_start[r] + i``) follows ``context_len[r]`` committed tokens. Rows
    past ``query_start[R]`` are padding.

    Attributes:
        query_start: ``[R + 1]`` int64, first row of each request; equal neighbours mean no rows.
        context_len: ``[R]`` int64, committed tokens whose keys and values are in the cache.
        block_table: ``[R, B]`` int64, page of each ``S`` tokens; -1 where there is none.
        positions: ``[T]`` int64, absolute position of each row (for a chain: ``context_len + i``).
        slots: ``[T]`` int64, where each row's keys and values go; -1 writes nothing.
        ancestors: ``[T]`` or ``[T, W]`` int64, bit ``j % 64`` of word ``j // 64`` set when the row sees row ``j`` of
            its own request (itself included), ``[T]`` for up to 64 rows; None for a causal chain of any length.
        max_query_len: the most rows that any request has (known on the host).
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    positions: Tensor
    slots: Tensor
    ancestors: Tensor | None
    max_query_len: int


class Rows(NamedTuple):
    """The verified rows of a batch: of each request its anchor and then its drafts (the nodes of its tree in order).

    Row ``i`` of request ``r`` is row ``query_start[r] + i`` of the batch. A request without rows is padding, and so are
    rows past ``query_start[R]``.

    Attributes:
        tokens: ``[T]`` int64, the token of each row; an id outside of the vocabulary, such as -1, is never accepted.
        query_start: ``[R + 1]`` int64, first row of each request.
        position: ``[R]`` int64, absolute position of each anchor.
        max_query_len: the most rows that any request has (known on the host); 1 is the anchor alone, and further rows
            are ignored.
    """

    tokens: Tensor
    query_start: Tensor
    position: Tensor
    max_query_len: int


class Sampling(NamedTuple):
    """Sampling parameters of ``R`` requests as tensors, applied in the order of transformers' warpers.

    Attributes:
        temperature: ``[R]`` float32; 0 is greedy.
        top_k: ``[R]`` int64; 0 is off.
        top_p: ``[R]`` float32; 1 is off.
        min_p: ``[R]`` float32; 0 is off.
        seed: ``[R]`` int64, key of the request's random numbers.
        all_greedy: promise that every temperature is 0, so that no noise need be computed.
        any_truncation: False promises that top_k, top_p and min_p are off everywhere.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    all_greedy: bool = False
    any_truncation: bool = True

    @property
    def truncates(self) -> bool:
        """Whether any row may be truncated."""
        return self.any_truncation and not self.all_greedy


class Processors(NamedTuple):
    """What changes a target's logits before sampling: penalties, banned tokens, masks. A field that is None is off.

    ``[R, ...]`` fields describe the request as its anchor leaves it; :func:`dspark.ops.process_logits` adds the drafts
    before each row itself. Of every field the last axis is contiguous.

    Attributes:
        output_counts: ``[R, V]`` int32, how often the request has emitted each token, the anchor included if it was
            emitted (and not part of the prompt). Needed by each of the penalties.
        prompt_mask: ``[R, V]`` bool, which tokens occur in the prompt; read by ``repetition_penalty`` alone.
        repetition_penalty: ``[R]`` float32 > 0; 1 is off. A token of the prompt or the output gets ``x / penalty``
            where ``x >= 0`` and ``x * penalty`` where ``x < 0`` (Keskar et al., arXiv 1909.05858, section 4.1).
        presence_penalty: ``[R]`` float32, taken once from each token of the output; 0 is off.
        frequency_penalty: ``[R]`` float32, taken from a token as often as the output has it; 0 is off.
        min_new_tokens: ``[R]`` int64, end tokens get -inf until this many tokens are emitted; 0 is off. Needs
            ``num_emitted`` and ``eos_tokens``.
        num_emitted: ``[R]`` int64, tokens emitted so far, the anchor included if it was emitted.
        eos_tokens: ``[R, E]`` int64, each request's end tokens, -1 padding.
        banned_tokens: ``[R, K]`` int64, tokens that get -inf, -1 padding. Meant for a few; many belong in a mask.
        allowed_mask: ``[T, ceil(V / 32)]`` int32, one bit per token and *row* (as XGrammar packs them: token ``v`` is
            bit ``v % 32`` of word ``v // 32``). Tokens whose bit is 0 get -inf.
    """

    output_counts: Tensor | None = None
    prompt_mask: Tensor | None = None
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    min_new_tokens: Tensor | None = None
    num_emitted: Tensor | None = None
    eos_tokens: Tensor | None = None
    banned_tokens: Tensor | None = None
    allowed_mask: Tensor | None = None

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on, so that the counts are read."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return any(penalty is not None for penalty in penalties)


class MarkovHead(NamedTuple):
    """``B(x) = W2 · W1[x]`` (eq. 5): ``w1 [V, r]``, ``w2 [V, r]``."""

    w1: Tensor
    w2: Tensor


class GatedHead(NamedTuple):
    """``B(x) = W2 · (σ(gate([h; W1[x]])) ⊙ W1[x])``: ``gate_weight [r, h + r]``, ``gate_bias [r]``."""

    w1: Tensor
    w2: Tensor
    gate_weight: Tensor
    gate_bias: Tensor


class RNNHead(NamedTuple):
    """Recurrent head (eq. 6): ``joint_weight [3r, 2r + h]`` over ``[state; W1[x]; h]``, rows gate, candidate,
    output; ``joint_bias [3r]``."""

    w1: Tensor
    w2: Tensor
    joint_weight: Tensor
    joint_bias: Tensor


SequentialHead = MarkovHead | GatedHead | RNNHead


class ConfidenceHead(NamedTuple):
    """``c_k = σ(w · [h_k ; W1[x_{k-1}]] + b)`` (eq. 7): ``weight [h (+ r)]``, ``bias []``; ``w1 [V, r]`` or None."""

    weight: Tensor
    bias: Tensor
    w1: Tensor | None


class DraftVocabulary(NamedTuple):
    """A drafter's own, smaller vocabulary, and where its tokens are in the target's.

    Attributes:
        target_ids: ``[Vd]`` int64, the target's id of each draft id; no two are the same.
        draft_ids: ``[V]`` int32, the draft id of each target id, -1 where there is none: what
            :class:`DenseQ` takes.
        w1_rows: whose ids number the rows of ``W1``: ``"target"``, so that every token has an embedding (speculators),
            or ``"draft"``. Then an anchor that the drafter's vocabulary lacks has none, and counts as a row of zeros.
    """

    target_ids: Tensor
    draft_ids: Tensor
    w1_rows: W1Rows

    @classmethod
    def from_offsets(cls, d2t: Tensor, target_vocab_size: int, *, w1_rows: W1Rows) -> DraftVocabulary:
        """From the ``d2t`` tensor of EAGLE-3 and speculators: the target's id is the draft id plus its entry.

        Args:
            d2t: ``[Vd]`` integers.
            target_vocab_size: ``V``.
            w1_rows: see the class.

        Raises:
            ValueError: an id lies outside of the target's vocabulary, or two are the same. Reads the device.

        >>> DraftVocabulary.from_offsets(torch.tensor([0, 2, 2]), 6, w1_rows="target").target_ids.tolist()
        [0, 3, 4]
        """
        ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
        inside = (ids >= 0) & (ids < target_vocab_size)
        if not bool(inside.all()) or len(set(ids.tolist())) < len(ids):
            raise ValueError(f"d2t: expected different ids in [0, {target_vocab_size}) as id + d2t[id]")
        draft_ids = torch.full((target_vocab_size,), -1, dtype=torch.int32, device=ids.device)
        draft_ids[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        return cls(ids, draft_ids, w1_rows)


class Draft(NamedTuple):
    """A drafted block.

    Attributes:
        tokens: ``[R, G]`` int64; -1 where nothing was drafted.
        logits: ``[R, G, V]`` float or None: the scores that the tokens were sampled from, after temperature and
            truncation (cut tokens -inf, a greedy row -inf but for its token). ``softmax(logits)`` is q (contract C2).
        confidence: ``[R, G]`` float32 in [0, 1] or None: chance that draft k survives given that 1..k-1 did.
        confidence_logits: ``[R, G]`` float32 or None: the same before the sigmoid.
        margin: ``[R, G]`` float32 in [0, 1] or None: how far the likeliest token leads the second, ``p1 - p2`` of the
            softmax of the step's scores before temperature and truncation; 0 where nothing was drafted.
        lse: ``[R, G]`` float32 or None: log-sum-exp of each row of ``logits``; 0 in greedy rows, -inf where nothing was
            drafted.
    """

    tokens: Tensor
    logits: Tensor | None
    confidence: Tensor | None
    confidence_logits: Tensor | None = None
    margin: Tensor | None = None
    lse: Tensor | None = None


class Tree(NamedTuple):
    """Drafted trees of ``R`` requests, ``N`` places for nodes each.

    Nodes are in topological order (a parent before its children) and packed: a request's are the first ``num_nodes``.
    Node 0 is the anchor. Siblings hold different tokens, in the order in which they were drawn. A chain is the tree in
    which node ``i`` has parent ``i - 1``.

    Attributes:
        tokens: ``[R, N]`` int64; -1 where there is no node.
        parents: ``[R, N]`` int64, each node's parent; -1 at node 0 and where there is no node.
        ancestors: ``[R, N]`` int64, bit ``j`` set when node ``j`` is the node itself or an ancestor; ``[R, N, W]`` for
            more than 64 nodes, bit ``j % 64`` of word ``j // 64``. 0 where there is no node.
        depth: ``[R, N]`` int64, edges from the anchor; -1 where there is no node.
        num_nodes: ``[R]`` int64, 0 for a padded request.
    """

    tokens: Tensor
    parents: Tensor
    ancestors: Tensor
    depth: Tensor
    num_nodes: Tensor

    def first(self, count: int) -> Tree:
        """The trees of the first ``count`` places: ``[R, count]``. Whatever the order, a parent is before its child."""
        ancestors = self.ancestors[:, :count]
        if ancestors.ndim == 3:
            ancestors = ancestors[..., 0] if count <= 64 else ancestors[..., : -(-count // 64)]
        return Tree(
            tokens=self.tokens[:, :count],
            parents=self.parents[:, :count],
            ancestors=ancestors,
            depth=self.depth[:, :count],
            num_nodes=self.num_nodes.clamp(max=count),
        )


class TreeDraft(NamedTuple):
    """Drafted trees, and what their nodes were sampled from.

    Attributes:
        tree: the trees.
        logits: ``[R, N, V]`` float32 or None: row ``i`` holds the scores that node ``i``'s children were sampled from,
            without replacement, after temperature and truncation; ``softmax(logits)`` is the q of the first of them
            (contract C2). -inf in rows of nodes without children.
    """

    tree: Tree
    logits: Tensor | None


class DenseQ(NamedTuple):
    """The draft distribution as the scores that the drafts were sampled from; their softmax is q (contract C2).

    Attributes:
        logits: ``[R, G, Vd]`` float32, float16 or bfloat16, in the dtype that was sampled; cut tokens are -inf.
        draft_ids: ``[V]`` int32, each target token's column in ``logits``, -1 where the drafter's vocabulary lacks it
            (then q is 0); None: the vocabularies are the same.
    """

    logits: Tensor
    draft_ids: Tensor | None = None


class SparseQ(NamedTuple):
    """The draft distribution as the ``K`` tokens that have any probability.

    Attributes:
        tokens: ``[R, G, K]`` int64 target tokens, each at most once in a row; -1 is padding.
        logprobs: ``[R, G, K]`` float32, their log-probabilities; a row's probabilities sum to 1.
    """

    tokens: Tensor
    logprobs: Tensor


class PointMass(NamedTuple):
    """Every draft was certain (greedy drafts, look-up): q is 1 at the draft and 0 elsewhere."""


DraftDistribution = DenseQ | SparseQ | PointMass


class Verdict(NamedTuple):
    """What a verification round emits.

    Attributes:
        tokens: ``[R, N]`` int64, emitted ids (accepted drafts, then the bonus or residual token); -1 beyond.
        num_emitted: ``[R]`` int64; 0 for padded requests.
        path: ``[R, N]`` int64, ``path[r, i]`` is the node (row of the request) whose logits gave ``tokens[r, i]``, so
            the nodes whose keys and values are now committed are ``path[r, :num_emitted[r]]``; -1 beyond.
        logprobs: ``[R, N]`` float32, log-probability of each emitted token under the target's distribution before
            (``"raw"``) or after (``"processed"``) the sampling transforms; 0 beyond.
        status: ``[R]`` int64 of :class:`Status`.
    """

    tokens: Tensor
    num_emitted: Tensor
    path: Tensor
    logprobs: Tensor
    status: Tensor
