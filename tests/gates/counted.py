"""All calls whose traffic is counted; here those of drafting, attention, scheduling and the paged cache.

What a kernel reads and what it skips follows from the inputs, which are the same each time, so a count is one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dspark import ops
from dspark.ops.op import OPS
from dspark.ops.schedule.launch import ScheduleConfig
from dspark.ops.schedule.reference import ScheduleMode
from dspark.ops.types import MarkovHead, PagedKV, QueryBatch, Rows, Rule, SequentialHead
from dspark.testing import bounds
from tests.gates import counted_rows
from tests.gates.counted_rows import LARGE, batch_of, sampling_of
from tests.gates.counts import Counted, Made

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def _schedule(config: ScheduleConfig | None, confidence: Tensor, *given: Any) -> partial[Any]:
    out = torch.empty(len(confidence), dtype=torch.int64)
    return partial(OPS["schedule_prefix"], "triton", confidence, *given, out, config=config)


def schedule(
    mode: ScheduleMode, requests: int, draft_len: int, *, adjusted: bool = False, chunked: bool = False
) -> Counted:
    """``schedule_prefix``, with caps, floors and weights if ``adjusted``, of pools as they come or in small chunks."""

    def make() -> Made:
        generator = torch.Generator().manual_seed(0)
        confidence = torch.rand(requests, draft_len, generator=generator) ** 0.25
        speed = 1 / (10 + torch.arange(requests * (1 + draft_len) + 1, dtype=torch.float64))
        caps = torch.full((requests,), draft_len) if adjusted else None
        floors = torch.arange(requests) % 2 if adjusted else None
        weights = torch.rand(requests, generator=generator) if adjusted else None
        budget = torch.tensor(requests) if mode == "budget" else None
        config = ScheduleConfig(block_requests=4, block_drafts=4, block_ranked=8) if chunked else None
        entries = requests * draft_len + 1 - requests // 2 * adjusted
        return _schedule(config, confidence, speed, mode, budget, caps, floors, weights), (
            lambda _: bounds.schedule_prefix(
                requests, draft_len, by_request=20 * adjusted, entries=0 if mode == "budget" else entries
            )
        )

    words = f"{mode}{' adjusted' if adjusted else ''}"
    return Counted(f"schedule_prefix {words}, {requests} of {draft_len}{' in chunks' if chunked else ''}", make)


def attention(
    contexts: Sequence[int], lengths: Sequence[int], heads: tuple[int, int, int], *, words: int = 0,
    page_size: int = 16, max_query_len: int | None = None, columns: int | None = None, padding: int = 0,
    dtype: torch.dtype = BFLOAT16, cache_dtype: torch.dtype = BFLOAT16, lse: bool = False, sinks: bool = False,
    chunk: int | None = None,
) -> Counted:  # fmt: skip
    """``verify_attention`` on zeros; every request has pages of its own, and of a tree each row sees itself alone."""
    num_heads, kv_heads, head_dim = heads
    ends = [c + n for c, n in zip(contexts, lengths, strict=True)]

    def make() -> Made:
        requests, num_rows = len(lengths), sum(lengths) + padding
        table = torch.arange(requests * (columns or -(-max(ends) // page_size))).view(requests, -1)
        k, v = torch.zeros(2, table.numel(), page_size, kv_heads, head_dim).to(cache_dtype)
        scale = torch.ones(kv_heads) if cache_dtype == torch.float8_e4m3fn else None
        integers = torch.zeros(num_rows, dtype=torch.int64)
        batch = QueryBatch(
            query_start=torch.tensor([0, *lengths]).cumsum(0),
            context_len=torch.tensor(contexts),
            block_table=table,
            positions=integers,
            slots=integers,
            ancestors=integers[:, None].repeat(1, words) if words else None,
            max_query_len=max_query_len or max(lengths),
        )
        run: partial[Any] = partial(
            ops.verify_attention, torch.zeros(num_rows, num_heads, head_dim).to(dtype), PagedKV(k, v, scale, scale),
            batch, sinks=torch.zeros(num_heads) if sinks else None, return_lse=lse, chunk=chunk, backend="triton",
        )  # fmt: skip
        keys = sum(end for end, length in zip(ends, lengths, strict=True) if length)
        return run, lambda _: bounds.verify_attention(
            keys, sum(lengths), num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim, itemsize=dtype.itemsize,
            kv_itemsize=cache_dtype.itemsize, lse=lse,
        )  # fmt: skip

    rows = "+".join(f"{c}:{n}" for c, n in zip(contexts, lengths, strict=True))
    kind = "tree" if words else "chain"
    return Counted(f"verify_attention {kind}, {rows}, {num_heads}/{kv_heads}x{head_dim}, S {page_size}", make)


def walk(
    head: Literal["none", "markov", "gated", "rnn"], requests: int, draft_len: int, vocab_size: int, rank: int, *,
    greedy: bool = False, dtype: torch.dtype = BFLOAT16, weights: torch.dtype = BFLOAT16,
    logits: torch.dtype | None = None, statistics: bool = False, hidden_size: int = 0,
    confidence: Literal["hidden", "hidden and token"] | None = None, tables: bool = False,
    certified: tuple[int, int] | None = None,
) -> Counted:  # fmt: skip
    """``draft_walk`` on random numbers, or its certified form of so many candidates and entries of the table."""

    def make() -> Made:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(weights)

        made = _head(head, vocab_size, rank, hidden_size, randn)
        confident = None
        if confidence is not None:
            w1 = made.w1 if made is not None and confidence == "hidden and token" else None
            weight = randn(hidden_size + (0 if w1 is None else rank))
            confident = ops.ConfidenceHead(weight, randn(1)[0], w1)
        scale = 30.0 if certified else 1.0  # so that the base scores decide, and every step is certified
        base = (scale * torch.randn(requests, draft_len, vocab_size, generator=generator)).to(dtype)
        anchor = torch.randint(vocab_size, (requests,), generator=generator)
        hidden = None
        if hidden_size:
            hidden = torch.randn(requests, draft_len, hidden_size, generator=generator).to(BFLOAT16)
        given: dict[str, Any] = {
            "head": made, "hidden": hidden, "confidence_head": confident, "stream": ops.Stream.TARGET,
            "sampling": sampling_of([0.0 if greedy else 1.0] * requests),
            "position": torch.zeros(requests, dtype=torch.int64), "backend": "triton",
        }  # fmt: skip
        if certified is not None:
            assert isinstance(made, MarkovHead)
            top_k, top_m = certified
            table = ops.build_bias_table(made, top_m=top_m)
            run = partial(ops.draft_walk_certified, base, anchor, table=table, top_k=top_k, fallback=False, **given)

            def bound(result: ops.CertifiedDraft) -> int:
                assert result.certified.tolist() == [draft_len] * requests
                return bounds.draft_walk_certified(requests, draft_len, vocab_size, itemsize=dtype.itemsize)

            return run, bound
        exact = partial(
            ops.draft_walk, base, anchor, return_logits=logits is not None, logits_dtype=logits or FLOAT32,
            return_margin=statistics, return_lse=statistics,
            tables=ops.build_walk_tables(made, confident) if tables else None, **given,
        )  # fmt: skip
        return exact, lambda _: bounds.draft_walk(
            requests, draft_len, vocab_size, rank, itemsize=dtype.itemsize, weight_itemsize=weights.itemsize,
            logits_itemsize=logits.itemsize if logits else 0,
        )  # fmt: skip

    op = "draft_walk_certified" if certified else "draft_walk"
    words = f"{head}{' greedy' if greedy else ''}{' tables' if tables else ''}"
    return Counted(f"{op} {words}, R {requests}, G {draft_len}, V {vocab_size}, r {rank}", make)


def _head(kind: str, vocab_size: int, rank: int, hidden: int, randn: Any) -> SequentialHead | None:
    if kind == "none":
        return None
    w1, w2 = randn(vocab_size, rank), randn(vocab_size, rank)
    if kind == "gated":
        return ops.GatedHead(w1, w2, randn(rank, hidden + rank), randn(rank))
    if kind == "rnn":
        return ops.RNNHead(w1, w2, randn(3 * rank, 2 * rank + hidden), randn(3 * rank))
    return MarkovHead(w1, w2)


def draft_tree(
    rule: Rule, requests: int, draft_len: int, vocab_size: int, num_nodes: int, branching: int, rank: int = 256, *,
    dtype: torch.dtype = BFLOAT16, greedy: bool = False, budget: bool = False, acceptance: bool = False,
) -> Counted:  # fmt: skip
    """``draft_tree`` on random numbers, with a Markov head of the base logits' dtype, or with none."""

    def make() -> Made:
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(requests, draft_len, vocab_size, generator=generator).to(dtype)
        weights = [torch.randn(vocab_size, rank, generator=generator).to(dtype) for _ in range(2 if rank else 0)]
        integer = torch.zeros(requests, dtype=torch.int64)
        run = partial(
            ops.draft_tree, base, integer + 5, head=MarkovHead(*weights) if rank else None, hidden=None,
            sampling=sampling_of([0.0 if greedy else 1.0] * requests), position=integer, rule=rule,
            num_nodes=num_nodes, branching=branching, budget=integer + num_nodes - 1 if budget else None,
            acceptance=torch.rand(draft_len, branching, generator=generator) if acceptance else None, backend="triton",
        )  # fmt: skip
        score_rows = requests * num_nodes * (rule == "recursive")
        return run, lambda _: bounds.draft_tree(
            requests, draft_len, vocab_size, rank, score_rows=score_rows, itemsize=dtype.itemsize,
            weight_itemsize=dtype.itemsize,
        )  # fmt: skip

    words = f"{rule}{' greedy' if greedy else ''}{'' if rank else ', no head'}"
    shape = f"R {requests}, G {draft_len}, V {vocab_size}, N {num_nodes}, K {branching}"
    return Counted(f"draft_tree {words}, {shape}", make)


def _commit(kv: PagedKV, path: Tensor, num_emitted: Tensor, rows: Rows, slots: Tensor) -> partial[Any]:
    return partial(ops.commit_kv, kv, path, num_emitted, rows, slots, backend="triton")


def _stack(pages: int, layers: int, heads: int, head_dim: int, dtype: torch.dtype = BFLOAT16) -> PagedKV:
    storage = torch.zeros(layers, 2, pages, 16, heads, head_dim).to(dtype)
    return PagedKV(storage[:, 0], storage[:, 1])


def append(
    num_rows: int, written: int, heads: int, head_dim: int, *, query_heads: int = 0, norms: bool = True,
    dtype: torch.dtype = BFLOAT16,
) -> Counted:  # fmt: skip
    """``append_kv``, or with query heads ``rope_append_kv``, of bfloat16; the rows not written have no slot."""

    def make() -> Made:
        kv = _stack(1, 1, heads, head_dim, dtype)
        scale = torch.ones(heads) if dtype == torch.float8_e4m3fn else None
        kv = PagedKV(kv.k[0], kv.v[0], scale, scale)
        slots = torch.tensor([*range(written), *[-1] * (num_rows - written)])
        q = torch.zeros(num_rows, query_heads or heads, head_dim, dtype=BFLOAT16)
        k = q[:, :heads]
        shape: dict[str, Any] = {"heads": heads, "head_dim": head_dim}
        if not query_heads:
            return partial(ops.append_kv, k, k, kv, slots, backend="triton"), lambda _: bounds.append_kv(
                num_rows, written, **shape, kv_itemsize=dtype.itemsize, scaled=scale is not None
            )
        angle, weight = torch.ones(num_rows, 1, head_dim, dtype=BFLOAT16), torch.ones(head_dim, dtype=BFLOAT16)
        norm: dict[str, Any] = {"q_norm": weight, "k_norm": weight, "eps": 1e-6} if norms else {}
        run = partial(ops.rope_append_kv, q, k, k, kv, slots, cos=angle, sin=angle, **norm, backend="triton")
        return run, lambda _: bounds.rope_append_kv(
            num_rows, written, query_heads=query_heads, **shape, norms=2 * norms
        )

    op = f"rope_append_kv{' normed' if norms else ''}, Hq {query_heads}" if query_heads else "append_kv"
    where = f"rows {num_rows}-{num_rows - written}, Hkv {heads}, D {head_dim}, {str(dtype).removeprefix('torch.')}"
    return Counted(f"{op}, {where}", make)


def commit(lengths: Sequence[int], paths: Sequence[Sequence[int]], layers: int, heads: int, head_dim: int) -> Counted:
    """``commit_kv`` of accepted paths of trees of so many rows."""
    moved = sum(node > i for path in paths for i, node in enumerate(path))

    def make() -> Made:
        nodes, slots = max(lengths), torch.arange(sum(lengths))
        path = torch.tensor([[*p, *[-1] * (nodes - len(p))] for p in paths])
        emitted = torch.tensor([len(p) for p in paths])
        run = _commit(_stack(1, layers, heads, head_dim), path, emitted, batch_of(lengths, slots), slots)
        return run, lambda _: bounds.commit_kv(paths, heads=heads, head_dim=head_dim, layers=layers)

    rows = "+".join(map(str, lengths))
    return Counted(f"commit_kv moved {moved}, rows {rows}, L {layers}, Hkv {heads}, D {head_dim}", make)


def copy(pages: int, layers: int, heads: int, head_dim: int) -> Counted:
    """``copy_pages`` onto as many others."""

    def make() -> Made:
        source, target = torch.arange(2 * pages).view(2, -1)
        run = partial(ops.copy_pages, _stack(2 * pages, layers, heads, head_dim), source, target, backend="triton")
        return run, lambda _: bounds.copy_pages(pages, 16, heads=heads, head_dim=head_dim, layers=layers)

    return Counted(f"copy_pages, pages {pages}, L {layers}, Hkv {heads}, D {head_dim}", make)


_MODES: tuple[ScheduleMode, ...] = ("early_stop", "global", "budget")
_WITH: dict[str, Any] = {"hidden_size": 40, "confidence": "hidden and token"}

SMALL = [
    *counted_rows.SMALL,
    append(5, 3, 2, 24),
    append(5, 3, 2, 24, dtype=torch.float8_e4m3fn),
    append(4, 3, 2, 24, query_heads=6),
    append(2, 0, 3, 8, query_heads=3, norms=False),
    commit([3, 0, 4, 2], [[0, 1], [], [0, 2, 3], [0]], 2, 3, 8),
    copy(2, 2, 3, 8),
    *(schedule(mode, 5, 3, adjusted=mode != "global") for mode in _MODES),
    *(schedule(mode, 10, 3, adjusted=mode != "global", chunked=True) for mode in _MODES),
    schedule("global", 600, 7),
    draft_tree("coupled", 3, 2, 300, 7, 2, 16, budget=True),
    draft_tree("recursive", 2, 2, 300, 6, 2, 16, acceptance=True),
    draft_tree("recursive", 2, 2, 150, 20, 3, 40, dtype=FLOAT32),
    draft_tree("recursive", 2, 2, 150, 4, 1, 24, greedy=True),
    draft_tree("match", 2, 2, 150, 6, 3, 0),
    attention([130, 5, 0], [2, 1, 0], (2, 1, 16), max_query_len=3, chunk=64, padding=2, lse=True),
    attention([130, 70], [2, 1], (4, 2, 16), words=1, chunk=64, sinks=True, page_size=64),
    attention([70], [5], (4, 2, 16), words=2, columns=9, cache_dtype=torch.float8_e4m3fn),
    attention([31], [70], (2, 1, 8), page_size=32, dtype=FLOAT32, cache_dtype=FLOAT32),
    walk("markov", 3, 2, 300, 16, **_WITH),
    walk("markov", 2, 2, 300, 24, greedy=True, logits=BFLOAT16, statistics=True),
    walk("markov", 17, 2, 300, 16),
    walk("markov", 17, 2, 200, 40, dtype=FLOAT32, weights=FLOAT32, logits=FLOAT32, greedy=True),
    walk("none", 2, 2, 300, 0, hidden_size=40, confidence="hidden"),
    walk("gated", 2, 2, 150, 40, tables=True, **_WITH),
    walk("gated", 2, 2, 150, 40, hidden_size=40, greedy=True),
    *(walk("rnn", 2, 2, 150, 40, hidden_size=40, greedy=True, tables=tables) for tables in (False, True)),
    walk("markov", 1, 2, 1500, 16, certified=(12, 10), **_WITH),
]
"""Calls of every kind: ragged ones, split and not; of vocabularies of several tiles, the last one ragged."""

_HEADS = [(4, 1, 128), (5, 1, 128), (2, 1, 256)]
STATED = [
    *counted_rows.STATED,
    append(8, 8, 8, 128),
    append(8, 8, 8, 128, query_heads=32),
    commit([8], [range(8)], 4, 8, 128),
    commit([8], [[0, 2, 5, 7]], 4, 8, 128),
    copy(1, 4, 8, 128),
    *(schedule(mode, 64, 7) for mode in _MODES),
    schedule("early_stop", 512, 16),
    *(schedule(mode, 1024, 16) for mode in _MODES),
    draft_tree("coupled", 1, 1, LARGE, 5, 4),
    draft_tree("coupled", 1, 2, 4096, 3, 1),
    draft_tree("coupled", 2, 7, 4096, 32, 4),
    *(attention([2048], [8], heads, words=1) for heads in ((32, 8, 128), (40, 8, 128), (16, 8, 256))),
    *(attention([2048], [rows], (32, 8, 128), words=int(rows > 1)) for rows in (1, 4, 16, 64)),
    *(
        attention([context], [rows], heads, words=int(rows > 1))
        for heads in _HEADS
        for context in (1024, 8192)
        for rows in (1, 4, 8)
    ),
    *(attention([8192], [8], heads) for heads in _HEADS),
    walk("markov", 8, 1, LARGE, 256),
]
"""The shapes that bounds are stated for. Of drafting over a large vocabulary one step or level, since counts are linear
in the block's length; of attention over long contexts one key head, since they are linear in those."""
