"""What ``verify_attention`` moves and launches: bytes requested from memory, exactly, and the least that it must move.

Counted are the loads and stores of the kernels as they are written, with tables of int64 in which no page is missing
and without a window; what a cache serves twice counts twice. The lower bound is the keys and values of each request
once, its queries and its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.ops.attention.launch import AttentionConfig, attention_config, part_sizes
from dspark.ops.cost.types import Cost

_INDEX = 8  # bytes of a page number, a start, a length, an ancestor word
_WORD_BITS = 64


@dataclass(frozen=True)
class AttentionCall:
    """A call of ``verify_attention`` under the fixed rule.

    Attributes:
        contexts, lengths: committed tokens and rows of each request.
        num_heads, kv_heads, head_dim, page_size: of the layer.
        max_query_len: of the batch; None: the longest of ``lengths``.
        columns: width of the block table; None: as many as the longest request needs.
        itemsize, kv_itemsize: bytes per number of the queries and of the cache.
        words: ancestor words per row, 0 for a causal chain.
        lse, sinks: whether there are; sinks are of 4 bytes.
        scales: whether the cache has scales.
        padding: rows of the batch that belong to no request.
        chunk: of the call.
    """

    contexts: Sequence[int]
    lengths: Sequence[int]
    num_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    max_query_len: int | None = None
    columns: int | None = None
    itemsize: int = 2
    kv_itemsize: int = 2
    words: int = 0
    lse: bool = False
    sinks: bool = False
    scales: bool = False
    padding: int = 0
    chunk: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.kv_heads

    @property
    def longest(self) -> int:
        """The most rows of a request."""
        return max(self.lengths) if self.max_query_len is None else self.max_query_len

    @property
    def capacity(self) -> int:
        """Cache positions that a row of the block table covers."""
        if self.columns is not None:
            return self.columns * self.page_size
        tokens = max(c + n for c, n in zip(self.contexts, self.lengths, strict=True))
        return -(-tokens // self.page_size) * self.page_size


def attention_cost(call: AttentionCall, config: AttentionConfig | None = None) -> Cost:
    """The cost of a call.

    >>> cost = attention_cost(AttentionCall(contexts=[8192], lengths=[8]))
    >>> cost.launches, round(cost.total / cost.lower_bound, 3)
    (2, 1.122)
    """
    return _Model(call, config or _config(call)).cost()


def attention_workspace_bytes(call: AttentionCall, config: AttentionConfig | None = None) -> int:
    """Bytes of scratch memory that the call takes.

    >>> attention_workspace_bytes(AttentionCall(contexts=[131_072 - 1] * 256, lengths=[1] * 256)) / 1e6
    728.43264
    """
    sizes = {
        "T": sum(call.lengths) + call.padding,
        "Hq": call.num_heads,
        "D": call.head_dim,
        "B": -(-call.capacity // call.page_size),
        "S": call.page_size,
    }
    return 4 * sum(part_sizes(sizes, config or _config(call)))


def _config(call: AttentionCall) -> AttentionConfig:
    return attention_config(call.group, call.head_dim, call.longest, call.page_size, call.itemsize, call.chunk)


class _Model:
    """The kernels' loads and stores, added up in the order in which the kernels make them."""

    def __init__(self, call: AttentionCall, config: AttentionConfig) -> None:
        self.call, self.config = call, config
        self.chunks = config.chunks(call.capacity)
        self.chunk_keys = config.chunk if self.chunks > 1 else call.capacity + config.block_keys
        self.read = self.written = 0

    def cost(self) -> Cost:
        call = self.call
        for context, length in zip(call.contexts, call.lengths, strict=True):
            self._pass(context, length)
            if self.chunks > 1:
                self._merge(context, length)
        self.written += call.padding * call.num_heads * self._result
        return Cost(self.read, self.written, 1 + (self.chunks > 1), self._lower_bound())

    @property
    def _result(self) -> int:
        """Bytes of a finished line."""
        return self.call.head_dim * self.call.itemsize + 4 * self.call.lse

    @property
    def _part(self) -> int:
        """Bytes of a line's part."""
        return 4 * self.call.head_dim + 8

    def _pass(self, context: int, length: int) -> None:
        """One request in the pass over the keys."""
        call, size = self.call, self.config.block_lines
        blocks = self.config.blocks(call.longest, call.group)
        self.read += call.kv_heads * self.chunks * blocks * 3 * _INDEX
        end = min(context + length, call.capacity)
        for block in range(-(-length * call.group // size)):
            lines = min(size, length * call.group - block * size)
            whole, seen = min(context, call.capacity), end
            if not call.words:
                first, last = block * size // call.group, (block * size + size - 1) // call.group
                whole = min(context + min(first + 1, length), call.capacity)
                seen = min(context + min(last + 1, length), call.capacity)
            for chunk in range(self.chunks):
                self._chunk(chunk * self.chunk_keys, context, end, whole, seen, lines)

    def _chunk(self, first: int, context: int, end: int, whole: int, seen: int, lines: int) -> None:
        """One program's chunk of keys, from position ``first``."""
        call, keys = self.call, self.config.block_keys
        split = end > self.chunk_keys
        last = min(-(-seen // keys) * keys, first + self.chunk_keys)
        if first >= last and (first or split):
            return
        bytes_read = lines * call.head_dim * call.itemsize + 8 * call.scales + 4 * lines * call.sinks
        held = max(0, min(last, end) - first)
        bytes_read += held * 2 * call.head_dim * call.kv_itemsize
        paged = call.page_size % keys == 0
        bytes_read += _INDEX * (-(-max(0, last - first) // keys) if paged else held)
        if call.words:
            for start in range(max(first, whole // keys * keys), last, keys):
                word = (start - context) // _WORD_BITS
                bytes_read += lines * _INDEX * sum(0 <= w < call.words for w in (word, word + 1))
        self.read += call.kv_heads * bytes_read
        self.written += call.kv_heads * lines * (self._part if split else self._result)

    def _merge(self, context: int, length: int) -> None:
        """One request in the merge."""
        call = self.call
        self.read += call.longest * call.num_heads * 3 * _INDEX
        end = min(context + length, call.capacity)
        if end <= self.chunk_keys:
            return
        for node in range(length):
            row_end = end if call.words else min(context + node + 1, call.capacity)
            self.read += call.num_heads * (-(-row_end // self.chunk_keys) * self._part + 4 * call.sinks)
            self.written += call.num_heads * self._result

    def _lower_bound(self) -> int:
        call = self.call
        tokens = sum(min(c + n, call.capacity) for c, n in zip(call.contexts, call.lengths, strict=True) if n)
        keys = tokens * call.kv_heads * 2 * call.head_dim * call.kv_itemsize
        return keys + sum(call.lengths) * call.num_heads * (call.head_dim * call.itemsize + self._result)
