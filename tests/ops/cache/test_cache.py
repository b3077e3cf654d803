"""The references of the ops on the paged cache: what is written, and that nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.models.config import ModelConfig
from dspark.models.rotary import Rotary
from dspark.models.transformer import Attention
from dspark.ops.cache import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.types import PagedKV
from tests.ops.cache.caches import (
    CACHE_DTYPES,
    FLOAT8,
    NAN,
    STACKS,
    CommitCase,
    Stack,
    assert_same_bits,
    bits,
    commit_cases,
    make_commit,
    rows_at,
)
from tests.tolerances import ROTARY

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


def assert_same_pages(got: PagedKV, expected: PagedKV) -> None:
    assert_same_bits(got.k, expected.k)
    assert_same_bits(got.v, expected.v)


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
    assert_same_pages(kv, expected)


@pytest.mark.parametrize("slots", [[-1, 0], [0, -1], [-1, -1, 0, 5], [-1, 5, -1]], ids=str)
def test_p07_skipped_rows_beside_slot_zero(slots: list[int]) -> None:
    """-1 is never an index, neither of the last slot nor of the first."""
    k, v = new_rows(len(slots))
    kv = used_cache(2, 4)
    expected = copy(kv)
    write_by_hand(k, v, expected, slots)
    append_kv(k, v, kv, torch.tensor(slots))
    assert_same_pages(kv, expected)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_p07_all_rows_skipped(count: int) -> None:
    kv = used_cache(2, 4)
    expected = copy(kv)
    append_kv(*new_rows(count), kv, torch.full((count,), -1))
    assert_same_pages(kv, expected)


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
    assert_same_pages(kv, expected)


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
    "one scale": ({"k_scale": torch.ones(HEADS)}, ValueError, "kv.k_scale: only a float8_e4m3fn cache has scales"),
}


@pytest.mark.parametrize(("changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    k, v = new_rows(3)
    kv = used_cache(2, 4)
    expected = copy(kv)
    bad = PagedKV(kv.k, changes.get("pages", kv.v), changes.get("k_scale"))
    with pytest.raises(error, match=message):
        append_kv(
            changes.get("k", k),
            changes.get("v", v),
            bad,
            changes.get("slots", torch.tensor([0, 1, 2])),
            backend=changes.get("backend", "auto"),
        )
    assert_same_pages(kv, expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_float8_holds_the_number_over_its_scale(scaled: bool) -> None:
    k, v = new_rows(3)
    k[0, 0, 0], k[0, 1, 0], k[1, 0, 0], v[1, 1, 1] = 1e6, -1e6, NAN, float("inf")
    scales = (torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])) if scaled else (None, None)
    kv = used_cache(2, 4, FLOAT8)
    kv = PagedKV(kv.k, kv.v, *scales)
    append_kv(k, v, kv, torch.tensor([6, -1, 1]))
    for pages, new, scale in ((kv.k, k, scales[0]), (kv.v, v, scales[1])):
        for row, slot in ((0, 6), (2, 1)):
            for head in range(HEADS):
                expected = (new[row, head] / (1 if scale is None else scale[head])).clamp(-448, 448).to(FLOAT8)
                assert_same_bits(pages[slot // 4, slot % 4, head], expected)


def test_float8_saturates_and_keeps_nan() -> None:
    k = torch.tensor([1e6, -1e6, NAN, float("inf")]).expand(1, HEADS, DIM)
    kv = used_cache(1, 1, FLOAT8)
    append_kv(k, k, kv, torch.tensor([0]))
    assert kv.k[0, 0, 0].float().nan_to_num(7.0).tolist() == [448.0, -448.0, 7.0, 448.0]


SCALE_FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "alone": ({"v_scale": None}, ValueError, 'kv.v_scale: expected shape "Hkv", as the other scale has, got None'),
    "shape": ({"v_scale": torch.ones(3)}, ValueError, r'kv.v_scale: expected shape "Hkv" with Hkv = 2'),
    "dtype": ({"k_scale": torch.ones(2).half()}, TypeError, "kv.k_scale: expected dtype float32"),
}


@pytest.mark.parametrize(("changes", "error", "message"), SCALE_FAULTS.values(), ids=SCALE_FAULTS.keys())
def test_bad_scales(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    kv = used_cache(1, 4, FLOAT8)
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(2), **changes}
    with pytest.raises(error, match=message):
        append_kv(*new_rows(3), PagedKV(kv.k, kv.v, **scales), torch.tensor([0, 1, 2]))


def attention_layer(qk_norm: bool) -> tuple[ModelConfig, Attention]:
    config = ModelConfig(8, 16, 16, 1, 4, HEADS, head_dim=6, qk_norm=qk_norm)
    torch.manual_seed(0)
    layer = Attention(config)
    if qk_norm:
        for norm in (layer.q_norm, layer.k_norm):
            torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    return config, layer


@pytest.mark.parametrize("qk_norm", [False, True])
def test_rotated_as_the_attention_layer_does(qk_norm: bool) -> None:
    """``Attention.queries`` and ``keys_values``, of which only the projections are left to the caller."""
    config, layer = attention_layer(qk_norm)
    x, positions = torch.randn(5, 16), torch.tensor([0, 3, 100, 4096, 7])
    slots = torch.tensor([3, -1, 0, 6, 5])
    cos, sin = Rotary(config)(positions, torch.float32)
    with torch.no_grad():
        q_expected = layer.queries(x, cos, sin)
        k_expected, v_expected = layer.keys_values(x, cos, sin)
        q, k, v = (p(x).unflatten(-1, (-1, 6)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    kv = PagedKV(*torch.full((2, 2, 4, HEADS, 6), NAN))
    weights = {"q_norm": layer.q_norm.weight.detach(), "k_norm": layer.k_norm.weight.detach()} if qk_norm else {}
    norms: dict[str, Any] = {**weights, "eps": 1e-6} if qk_norm else {}
    out = rope_append_kv(q, k, v, kv, slots, cos=cos, sin=sin, **norms)
    torch.testing.assert_close(out, q_expected, rtol=0, atol=ROTARY)
    written = [0, 2, 3, 4]
    torch.testing.assert_close(kv.k.flatten(0, 1)[slots[written]], k_expected[written], rtol=0, atol=ROTARY)
    assert torch.equal(kv.v.flatten(0, 1)[slots[written]], v_expected[written])
    for pages in (kv.k, kv.v):
        assert pages.flatten(0, 1)[[1, 2, 4, 7]].isnan().all()
    in_place = q.clone()
    assert rope_append_kv(in_place, k, v, kv, slots, cos=cos, sin=sin, **norms, out=in_place) is in_place
    assert torch.equal(in_place, out)


def rotary_arguments(**changes: Any) -> dict[str, Any]:
    k, v = new_rows(3)
    arguments = {"q": torch.randn(3, 4, DIM), "k": k, "v": v, "kv": used_cache(2, 4), "slots": torch.tensor([0, 1, 2])}
    return arguments | {"cos": torch.ones(3, 1, DIM), "sin": torch.ones(3, 1, DIM)} | changes


ROTARY_FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q rows": ({"q": torch.zeros(2, 4, DIM)}, ValueError, r'k: expected shape "T Hkv D" with T = 2'),
    "q dtype": ({"q": torch.zeros(3, 4, DIM).half()}, TypeError, "q: expected dtype float32, got float16"),
    "cos": ({"cos": torch.ones(3, DIM)}, ValueError, r'cos: expected shape "T 1 D"'),
    "sin": ({"sin": torch.ones(3, 1, 2)}, ValueError, r'sin: expected shape "T 1 D" with D = 4'),
    "norm": ({"q_norm": torch.ones(3), "eps": 1e-6}, ValueError, r'q_norm: expected shape "D" with D = 4'),
    "no eps": ({"k_norm": torch.ones(DIM)}, ValueError, "eps: expected a number with q_norm or k_norm"),
    "eps alone": ({"eps": 1e-6}, ValueError, "eps: expected .* None without them, got 1e-06"),
    "out": ({"out": torch.zeros(3, 2, DIM)}, ValueError, r'out: expected shape "T Hq D" with Hq = 4'),
    "integers": ({"cos": torch.ones(3, 1, DIM).long()}, TypeError, "cos: expected dtype"),
    "keys": ({"k": torch.zeros(3, 3, DIM)}, ValueError, r'k: expected shape "T Hkv D" with Hkv = 2'),
}


@pytest.mark.parametrize(("changes", "error", "message"), ROTARY_FAULTS.values(), ids=ROTARY_FAULTS.keys())
def test_bad_rotary_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rope_append_kv(**rotary_arguments(**changes))


def test_an_odd_head_cannot_be_rotated() -> None:
    k = torch.zeros(1, 1, 3)
    kv, cos = PagedKV(*torch.zeros(2, 1, 1, 1, 3)), torch.ones(1, 1, 3)
    with pytest.raises(ValueError, match='q: expected shape "T Hq D" with an even D'):
        rope_append_kv(k, k, k, kv, torch.tensor([0]), cos=cos, sin=cos)


@pytest.mark.parametrize("layout", STACKS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@settings(max_examples=6)
@given(case=commit_cases(24))
def test_a_path_is_moved_to_the_slots_after_the_context(layout: str, dtype: torch.dtype, case: CommitCase) -> None:
    stack = Stack.make(layout, (2, 6, 4, HEADS, DIM), dtype)
    expected, one_by_one = stack.clone(), stack.clone()
    case.apply(expected)
    commit_kv(stack.kv, *case.arguments)
    assert_same_bits(stack.base, expected.base)
    for layer in range(2):
        commit_kv(one_by_one.layer(layer), *case.arguments)
    assert_same_bits(one_by_one.base, expected.base)


@given(case=commit_cases(24, "chain"))
def test_of_a_chain_nothing_is_moved(case: CommitCase) -> None:
    stack = Stack.make("heads before tokens", (1, 6, 4, HEADS, DIM))
    before = stack.base.clone()
    commit_kv(stack.kv, *case.arguments)
    assert_same_bits(stack.base, before)


def test_a_path_that_is_moved_onto_itself() -> None:
    """Sources and targets overlap: row 1 receives what row 2 held, row 2 what row 3 held."""
    kv = PagedKV(*torch.arange(6.0).repeat(2).view(2, 2, 3, 1, 1))
    case = make_commit([[0, 2, 3, 5]], [6], range(6))
    commit_kv(kv, *case.arguments)
    assert kv.k.flatten().tolist() == [0.0, 2.0, 3.0, 5.0, 4.0, 5.0]


BAD_PATHS = [[0, -1, 3], [0, 0, 1], [0, 2, 9], [-1, 2, 3]]


@pytest.mark.parametrize("path", BAD_PATHS, ids=str)
def test_p07_entries_that_name_no_later_row_move_nothing(path: list[int]) -> None:
    kv = PagedKV(*torch.arange(6.0).repeat(2).view(2, 2, 3, 1, 1))
    expected = [float(p) if i < p < 4 else float(i) for i, p in enumerate(path)] + [3.0, 4.0, 5.0]
    slots = torch.arange(6)
    commit_kv(kv, torch.tensor([path]), torch.tensor([3]), rows_at(torch.tensor([0, 4]), slots, 3), slots)
    assert kv.k.flatten().tolist() == expected


def test_p12_padded_requests_and_rows_are_not_touched() -> None:
    stack = Stack.make("keys and values in one page", (2, 2, 4, HEADS, DIM))
    before = stack.base.clone()
    path, none = torch.full((3, 4), -1), torch.zeros(3, dtype=torch.int64)
    nowhere = torch.full((5,), -1)
    commit_kv(stack.kv, path, none, rows_at(torch.zeros(4, dtype=torch.int64), nowhere, 4), nowhere)
    assert_same_bits(stack.base, before)


@pytest.mark.parametrize("layout", STACKS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_pages_are_copied_whole(layout: str, dtype: torch.dtype) -> None:
    stack = Stack.make(layout, (2, 6, 4, HEADS, DIM), dtype)
    expected = stack.clone()
    for pages in (*expected.kv.k, *expected.kv.v):
        pages[5], pages[1] = pages[0].clone(), pages[3].clone()
    copy_pages(stack.kv, torch.tensor([-1, 0, 3, 2]), torch.tensor([4, 5, 1, -1]))
    assert_same_bits(stack.base, expected.base)


@pytest.mark.parametrize("count", [0, 3])
def test_p07_no_page_to_copy(count: int) -> None:
    stack = Stack.make("heads before tokens", (1, 2, 4, HEADS, DIM))
    before = stack.base.clone()
    nothing = torch.full((count,), -1)
    copy_pages(stack.kv, nothing, nothing)
    assert_same_bits(stack.base, before)


PAGE_FAULTS: dict[str, tuple[Callable[[PagedKV], None], type[Exception], str]] = {
    "target shape": (
        lambda kv: copy_pages(kv, torch.zeros(2).long(), torch.zeros(3).long()),
        ValueError,
        r'target: expected shape "n" with n = 2',
    ),
    "target dtype": (
        lambda kv: copy_pages(kv, torch.zeros(2).long(), torch.zeros(2).int()),
        TypeError,
        "target: expected dtype int64, got int32",
    ),
    "layers": (
        lambda kv: copy_pages(PagedKV(kv.k[None], kv.v), *torch.zeros(2, 1).long()),
        ValueError,
        r'kv.v: expected shape "L P S Hkv D"',
    ),
    "backend": (
        lambda kv: copy_pages(kv, *torch.zeros(2, 1).long(), backend="fast"),  # type: ignore[arg-type]
        ValueError,
        "backend",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), PAGE_FAULTS.values(), ids=PAGE_FAULTS.keys())
def test_bad_page_arguments(call: Callable[[PagedKV], None], error: type[Exception], message: str) -> None:
    kv = used_cache(2, 4)
    before = bits(kv.k).clone()
    with pytest.raises(error, match=message):
        call(kv)
    assert torch.equal(bits(kv.k), before)
