"""Appending to the paged cache: what is written, and that nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.cache import append_kv
from dspark.ops.types import PagedKV

NAN = float("nan")
HEADS, DIM = 2, 4


def new_rows(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, count, HEADS, DIM, generator=torch.Generator().manual_seed(count))
    return k.to(dtype), v.to(dtype)


def used_cache(num_pages: int, page_size: int, dtype: torch.dtype = torch.float32) -> PagedKV:
    """Pages full of numbers, some of them NaN."""
    pages = torch.randn(2, num_pages, page_size, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    pages[:, :, ::2, 0] = NAN
    return PagedKV(pages[0], pages[1])


def copy(kv: PagedKV) -> PagedKV:
    return PagedKV(kv.k.clone(), kv.v.clone())


def assert_same_bits(got: PagedKV, expected: PagedKV) -> None:
    for x, y in ((got.k, expected.k), (got.v, expected.v)):
        as_int = torch.int32 if x.dtype == torch.float32 else torch.int16
        assert torch.equal(x.contiguous().view(as_int), y.contiguous().view(as_int))


def write_by_hand(k: Tensor, v: Tensor, kv: PagedKV, slots: list[int]) -> None:
    for row, slot in enumerate(slots):
        if slot >= 0:
            kv.k[slot // kv.page_size, slot % kv.page_size] = k[row]
            kv.v[slot // kv.page_size, slot % kv.page_size] = v[row]


@given(data=st.data())
def test_writes_its_rows_and_nothing_else(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 16, 32]))
    num_pages = data.draw(st.integers(1, 3))
    written = data.draw(st.lists(st.integers(0, num_pages * page_size - 1), unique=True, max_size=8))
    skipped = data.draw(st.integers(0, 3))
    slots = data.draw(st.permutations([*written, *[-1] * skipped]))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    k, v = new_rows(len(slots))
    k[[s < 0 for s in slots]] = NAN
    kv = used_cache(num_pages, page_size)
    expected = copy(kv)
    write_by_hand(k, v, expected, slots)
    append_kv(k, v, kv, torch.tensor(slots, dtype=dtype))
    assert_same_bits(kv, expected)


@pytest.mark.parametrize("slots", [[-1, 0], [0, -1], [-1, -1, 0, 5], [-1, 5, -1]], ids=str)
def test_p07_skipped_rows_beside_slot_zero(slots: list[int]) -> None:
    """-1 is never an index, neither of the last slot nor of the first."""
    k, v = new_rows(len(slots))
    kv = used_cache(2, 4)
    expected = copy(kv)
    write_by_hand(k, v, expected, slots)
    append_kv(k, v, kv, torch.tensor(slots))
    assert_same_bits(kv, expected)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_p07_all_rows_skipped(count: int) -> None:
    kv = used_cache(2, 4)
    expected = copy(kv)
    append_kv(*new_rows(count), kv, torch.full((count,), -1))
    assert_same_bits(kv, expected)


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], PagedKV]]] = {
    "layer of a stack": ((5, 2, 3, 4, HEADS, DIM), lambda x: PagedKV(x[3, 0], x[3, 1])),
    "keys and values in one page": ((3, 2, 4, HEADS, DIM), lambda x: PagedKV(x[:, 0], x[:, 1])),
    "pages from the middle": ((2, 7, 4, HEADS, DIM), lambda x: PagedKV(x[0, 2:5], x[1, 2:5])),
    "heads before tokens": ((2, 3, HEADS, 4, DIM), lambda x: PagedKV(x[0].transpose(1, 2), x[1].transpose(1, 2))),
}


@pytest.mark.parametrize(("shape", "view"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_views_write_through_and_spare_their_neighbours(
    shape: tuple[int, ...], view: Callable[[Tensor], PagedKV]
) -> None:
    storage = torch.randn(shape)
    expected = storage.clone()
    slots = [11, -1, 0, 4]
    k, v = new_rows(4)
    write_by_hand(k, v, view(expected), slots)
    append_kv(k, v, view(storage), torch.tensor(slots))
    assert torch.equal(storage, expected)


def test_rows_may_be_strided_views() -> None:
    """As they are when one projection makes queries, keys and values together."""
    joint = torch.randn(3, HEADS, 3 * DIM)
    k, v = joint[..., DIM : 2 * DIM], joint[..., 2 * DIM :]
    kv = used_cache(2, 4)
    append_kv(k, v, kv, torch.tensor([7, 2, 3]))
    assert torch.equal(kv.k.flatten(0, 1)[[7, 2, 3]], k)
    assert torch.equal(kv.v.flatten(0, 1)[[7, 2, 3]], v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_to_the_cache(dtype: torch.dtype) -> None:
    k, v = new_rows(3)
    kv = used_cache(2, 4, dtype)
    expected = copy(kv)
    write_by_hand(k.to(dtype), v.to(dtype), expected, [6, -1, 1])
    append_kv(k, v, kv, torch.tensor([6, -1, 1]))
    assert_same_bits(kv, expected)


def test_p06_offsets_beyond_32_bits() -> None:
    """The second page lies more than 2^31 elements after the first; only what is touched takes memory."""
    far = [
        torch.empty(2**31 + 64, dtype=torch.float16).as_strided((2, 4, HEADS, DIM), (2**31, HEADS * DIM, DIM, 1))
        for _ in range(2)
    ]
    kv = PagedKV(*far)
    k, v = new_rows(2, torch.float16)
    append_kv(k, v, kv, torch.tensor([5, 3]))
    assert torch.equal(kv.k[1, 1], k[0])
    assert torch.equal(kv.v[0, 3], v[1])


def test_never_reads_the_device() -> None:
    """Meta tensors have shapes and no numbers."""
    k, v = (x.to("meta") for x in new_rows(3))
    kv = used_cache(2, 4)
    append_kv(k, v, PagedKV(kv.k.to("meta"), kv.v.to("meta")), torch.tensor([1, -1, 2]).to("meta"))


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "row count": ({"v": torch.zeros(2, HEADS, DIM)}, ValueError, r'v: expected shape "T Hkv D" with T = 3'),
    "slot count": ({"slots": torch.zeros(2).long()}, ValueError, r'slots: expected shape "T" with T = 3'),
    "heads": ({"k": torch.zeros(3, 4, DIM)}, ValueError, r'k: expected shape "T Hkv D" with Hkv = 2'),
    "dimensions": ({"k": torch.zeros(3, 8)}, ValueError, r'k: expected shape "T Hkv D"'),
    "pages": ({"pages": torch.zeros(1, 4, HEADS, DIM)}, ValueError, r'kv.v: expected shape "P S Hkv D" with P = 2'),
    "float slots": ({"slots": torch.zeros(3)}, TypeError, "slots: expected dtype int64 or int32, got float32"),
    "mixed dtypes": ({"v": torch.zeros(3, HEADS, DIM).half()}, TypeError, "v: expected dtype float32, got float16"),
    "integer rows": ({"k": torch.zeros(3, HEADS, DIM).long()}, TypeError, "k: expected dtype"),
    "backend": ({"backend": "fast"}, ValueError, "backend"),
    "no kernel": ({"backend": "triton"}, ValueError, "backend: append_kv has no Triton kernel"),
}


@pytest.mark.parametrize(("changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    k, v = new_rows(3)
    kv = used_cache(2, 4)
    expected = copy(kv)
    bad = PagedKV(kv.k, changes.get("pages", kv.v))
    with pytest.raises(error, match=message):
        append_kv(
            changes.get("k", k),
            changes.get("v", v),
            bad,
            changes.get("slots", torch.tensor([0, 1, 2])),
            backend=changes.get("backend", "auto"),
        )
    assert_same_bits(kv, expected)
