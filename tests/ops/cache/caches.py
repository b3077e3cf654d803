"""Paged caches of all layouts and dtypes, calls of the ops on them, and what each should do, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.types import PagedKV, Rows

NAN = float("nan")
FLOAT8 = torch.float8_e4m3fn
CACHE_DTYPES = [torch.float32, torch.float16, torch.bfloat16, FLOAT8]

Sizes = tuple[int, int, int, int, int]
"""``L P S Hkv D``."""

STACKS: dict[str, Callable[[Sizes, torch.dtype], tuple[Tensor, Tensor]]] = {
    "layers, then keys and values": lambda s, dtype: _split(_random((s[0], 2, *s[1:]), dtype), 1),
    "keys and values in one page": lambda s, dtype: _split(_random((s[0], s[1], 2, *s[2:]), dtype), 2),
    "heads before tokens": lambda s, dtype: _transposed(_random((2, s[0], s[1], s[3], s[2], s[4]), dtype)),
    "pages from the middle": lambda s, dtype: _middle(_random((2, s[0], s[1] + 3, *s[2:]), dtype)),
}
"""Ways to lay a stack of layers out, with random numbers in it, some of them NaN."""


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    pages = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    pages.view(-1)[::7] = NAN
    return pages.to(dtype)


def _split(storage: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    return storage.select(axis, 0), storage.select(axis, 1)


def _transposed(storage: Tensor) -> tuple[Tensor, Tensor]:
    return storage[0].transpose(2, 3), storage[1].transpose(2, 3)


def _middle(storage: Tensor) -> tuple[Tensor, Tensor]:
    return storage[0, :, 1:-2], storage[1, :, 1:-2]


@dataclass(frozen=True)
class Stack:
    """Every layer of a cache, and the whole buffers that they lie in."""

    kv: PagedKV
    base: Tensor

    @classmethod
    def make(cls, layout: str, sizes: Sizes, dtype: torch.dtype = torch.float32) -> Stack:
        k, v = STACKS[layout](sizes, dtype)
        return cls(PagedKV(k, v), k._base if k._base is not None else k)

    def layer(self, index: int) -> PagedKV:
        return PagedKV(self.kv.k[index], self.kv.v[index])

    def clone(self) -> Stack:
        base = self.base.clone()
        k, v = (base.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (self.kv.k, self.kv.v))
        return Stack(PagedKV(k, v), base)

    def slots(self) -> Iterator[Tensor]:
        """Keys and values of each layer by slot, ``[P * S, Hkv, D]``; copies."""
        for layer in range(self.kv.k.shape[0]):
            yield self.kv.k[layer].flatten(0, 1)
            yield self.kv.v[layer].flatten(0, 1)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(bits(got), bits(expected))


def put(pages: Tensor, slot: int, row: Tensor) -> None:
    """Write a row of one layer's pages."""
    pages[slot // pages.shape[1], slot % pages.shape[1]] = row


def rows_at(query_start: Tensor, slots: Tensor, nodes: int) -> Rows:
    """A verified batch of so many rows; what they hold does not matter."""
    return Rows(torch.zeros_like(slots, dtype=torch.int64), query_start, torch.zeros_like(query_start[1:]), nodes)


@dataclass(frozen=True)
class CommitCase:
    """A verified batch of trees whose paths were accepted."""

    path: Tensor
    num_emitted: Tensor
    query_start: Tensor
    slots: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Rows, Tensor]:
        return self.path, self.num_emitted, rows_at(self.query_start, self.slots, self.path.shape[1]), self.slots

    def apply(self, stack: Stack) -> None:
        """By definition, reading everything before anything is written."""
        slots, start = self.slots.tolist(), self.query_start.tolist()
        for pages in (*stack.kv.k, *stack.kv.v):
            old = pages.clone().flatten(0, 1)
            for r, count in enumerate(self.num_emitted.tolist()):
                for i, node in enumerate(self.path[r, :count].tolist()):
                    source, target = slots[start[r] + node], slots[start[r] + i]
                    if source >= 0 and target >= 0:
                        put(pages, target, old[source])


@st.composite
def commit_cases(draw: st.DrawFn, num_slots: int, kind: str = "tree") -> CommitCase:
    """Paths through trees, chains or a mix, of ragged requests, some of them padded or short of slots."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    paths = []
    for n in lengths:
        later = draw(st.sets(st.integers(1, n - 1))) if n > 1 and kind == "tree" else set()
        count = draw(st.integers(0, n))
        paths.append(([0, *sorted(later)] if kind == "tree" else list(range(n)))[:count])
    order = draw(st.permutations(range(num_slots)))
    slots = list(order[: sum(lengths)])
    for missing in draw(st.sets(st.integers(0, max(0, len(slots) - 1)), max_size=2)) if slots else ():
        slots[missing] = -1
    slots += [-1] * draw(st.integers(0 if slots else 1, 2))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return make_commit(paths, lengths, slots, dtype, nodes=max(1, *lengths) + draw(st.integers(0, 2)))


def make_commit(
    paths: Sequence[Sequence[int]],
    lengths: Sequence[int],
    slots: Sequence[int],
    dtype: torch.dtype = torch.int64,
    nodes: int | None = None,
) -> CommitCase:
    nodes = max(map(len, paths)) if nodes is None else nodes
    path = torch.tensor([[*p, *[-1] * (nodes - len(p))] for p in paths])
    start = torch.tensor([0, *lengths]).cumsum(0)
    return CommitCase(path, torch.tensor([len(p) for p in paths]), start, torch.tensor(slots, dtype=dtype))
