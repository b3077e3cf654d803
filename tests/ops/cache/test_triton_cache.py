"""The kernels on the paged cache in Triton's interpreter: moved bits, rounded numbers, rotated heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.cache import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.cache.launch import CacheConfig, cache_config
from dspark.ops.op import OPS
from dspark.ops.types import PagedKV
from dspark.testing.guards import guarded, poisoned_empty
from tests.ops.cache.caches import (
    CACHE_DTYPES,
    FLOAT8,
    NAN,
    STACKS,
    CommitCase,
    Sizes,
    Stack,
    assert_same_bits,
    bits,
    commit_cases,
    make_commit,
    rows_at,
)
from tests.tolerances import ROTARY

pytestmark = pytest.mark.triton

TINY = CacheConfig(block_n=4, block_h=2, num_warps=4, commit_warps=1)
LAYOUT = "layers, then keys and values"


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scaled(kv: PagedKV) -> PagedKV:
    """A float8 layer with scales; any other as it is."""
    if kv.k.dtype is not FLOAT8:
        return kv
    heads = kv.k.shape[2]
    return kv._replace(k_scale=torch.linspace(0.01, 2.0, heads), v_scale=torch.linspace(3.0, 0.1, heads))


@settings(max_examples=12)
@given(
    slots=st.lists(st.integers(-1, 11), min_size=1, max_size=6, unique_by=lambda s: s if s >= 0 else object()),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 5, 8]),
    layout=st.sampled_from(sorted(STACKS)),
    dtype=st.sampled_from(CACHE_DTYPES),
    wide=st.booleans(),
    narrow_slots=st.booleans(),
)
def test_rows_are_appended_as_the_reference_does(
    slots: list[int], heads: int, head_dim: int, layout: str, dtype: torch.dtype, wide: bool, narrow_slots: bool
) -> None:
    """Exactly; the interpreter truncates where it should round to bfloat16, so rows come in that dtype then."""
    source = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32 if wide else torch.float16
    joint = 40 * randn(len(slots), heads, 2 * head_dim, seed=len(slots))
    joint[0, 0, 0] = NAN
    k, v = joint.to(source)[..., :head_dim], joint.to(source)[..., head_dim:]
    stack = Stack.make(layout, (2, 3, 4, heads, head_dim), dtype)
    expected = stack.clone()
    to = torch.tensor(slots, dtype=torch.int32 if narrow_slots else torch.int64)
    append_kv(k, v, scaled(expected.layer(1)), to, backend="reference")
    OPS["append_kv"]("triton", k, v, scaled(stack.layer(1)), to, config=TINY)
    if dtype is source:
        assert_same_bits(stack.base, expected.base)
    else:  # one NaN is as good as another
        torch.testing.assert_close(stack.base.float(), expected.base.float(), rtol=0, atol=0, equal_nan=True)


def test_every_float8_is_rounded_as_torch_does() -> None:
    """All codes, all halfway points between two of them, and the floats beside those."""
    codes = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    middle = (codes[1:] + codes[:-1]) / 2
    edges = torch.tensor([447.9, 448.1, 463.9, 464.1, 465.0, 1e9, float("inf"), 1e-30, NAN])
    positive = torch.cat([codes, middle, middle.nextafter(codes[1:]), middle.nextafter(codes[:-1]), edges])
    values = torch.cat([positive, -positive])
    k = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 1, 128)
    kv = PagedKV(*torch.zeros(2, len(k), 1, 1, 128).to(FLOAT8))
    OPS["append_kv"]("triton", k, k, kv, torch.arange(len(k)))
    expected = k.clamp(-448, 448).to(FLOAT8)
    assert torch.equal(kv.k.float().nan_to_num(500), expected.float()[:, None].nan_to_num(500))
    assert torch.equal(kv.k.float().signbit(), expected.float()[:, None].signbit())


def test_p06_offsets_beyond_32_bits() -> None:
    """The second page lies more than 2^31 elements after the first; only what is touched takes memory."""
    far = [torch.empty(2**31 + 64, dtype=torch.float16).as_strided((2, 4, 2, 4), (2**31, 8, 4, 1)) for _ in range(2)]
    kv, k = PagedKV(*far), randn(2, 2, 4).half()
    OPS["append_kv"]("triton", k, k + 1, kv, torch.tensor([5, 3]), config=TINY)
    assert torch.equal(kv.k[1, 1], k[0])
    assert torch.equal(kv.v[0, 3], k[1] + 1)
    OPS["commit_kv"]("triton", kv, *make_commit([[0, 1]], [2], [3, 5]).arguments)
    OPS["commit_kv"]("triton", kv, *make_commit([[0, 2]], [3], [0, 3, 5]).arguments, config=TINY)
    assert torch.equal(kv.k[0, 3], k[0])
    kv.k[0, 0], kv.v[0, 0] = 7.0, 8.0
    OPS["copy_pages"]("triton", kv, torch.tensor([0]), torch.tensor([1]), config=TINY)
    assert torch.equal(kv.v[1], kv.v[0])


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@settings(max_examples=8)
@given(case=commit_cases(24), layout=st.sampled_from(sorted(STACKS)), heads=st.integers(1, 3))
def test_paths_are_moved_by_definition(dtype: torch.dtype, case: CommitCase, layout: str, heads: int) -> None:
    stack = Stack.make(layout, (2, 6, 4, heads, 5), dtype)
    expected = stack.clone()
    case.apply(expected)
    OPS["commit_kv"]("triton", stack.kv, *case.arguments, config=TINY)
    assert_same_bits(stack.base, expected.base)


def test_a_wrong_order_would_show() -> None:
    """The case that the others rely on: rows 1, 2, 3 receive what 2, 3, 5 held, so that targets are sources too."""
    case = make_commit([[0, 2, 3, 5]], [6], [8, 1, 4, 6, 0, 3])
    stack = Stack.make(LAYOUT, (1, 3, 4, 2, 5))
    expected, backwards = stack.clone(), stack.clone()
    case.apply(expected)
    for i, node in ((3, 5), (2, 3), (1, 2)):
        for pages in (backwards.kv.k[0], backwards.kv.v[0]):
            source, target = int(case.slots[node]), int(case.slots[i])
            pages[target // 4, target % 4] = pages[source // 4, source % 4]
    assert not torch.equal(bits(backwards.base), bits(expected.base))
    OPS["commit_kv"]("triton", stack.kv, *case.arguments)
    assert_same_bits(stack.base, expected.base)


@pytest.mark.parametrize("path", [[0, -1, 3], [0, 0, 1], [0, 2, 9], [-1, 2, 3]], ids=str)
def test_p07_entries_that_name_no_later_row_move_nothing(path: list[int]) -> None:
    kv = PagedKV(*torch.arange(6.0).repeat(2).view(2, 2, 3, 1, 1))
    slots = torch.arange(6)
    arguments = torch.tensor([path]), torch.tensor([3]), rows_at(torch.tensor([0, 4]), slots, 3), slots
    expected = PagedKV(kv.k.clone(), kv.v.clone())
    commit_kv(expected, *arguments, backend="reference")
    commit_kv(kv, *arguments, backend="triton")
    assert torch.equal(kv.k, expected.k)
    assert torch.equal(kv.v, expected.v)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("layout", STACKS)
def test_pages_are_copied_whole(layout: str, dtype: torch.dtype) -> None:
    stack = Stack.make(layout, (2, 6, 4, 3, 5), dtype)
    expected = stack.clone()
    pages = torch.tensor([-1, 0, 3, 2]), torch.tensor([4, 5, 1, -1])
    copy_pages(expected.kv, *pages, backend="reference")
    assert not torch.equal(bits(expected.base), bits(stack.base))
    OPS["copy_pages"]("triton", stack.kv, *pages, config=TINY)
    assert_same_bits(stack.base, expected.base)


@settings(max_examples=10)
@given(
    slots=st.lists(st.integers(-1, 11), min_size=1, max_size=4, unique_by=lambda s: s if s >= 0 else object()),
    query_heads=st.integers(1, 5),
    heads=st.integers(1, 3),
    half=st.sampled_from([1, 3, 4]),
    norms=st.sampled_from(["", "q", "k", "qk"]),
    in_place=st.booleans(),
)
def test_rotated_as_the_reference_does(
    slots: list[int], query_heads: int, heads: int, half: int, norms: str, in_place: bool
) -> None:
    rows, dim = len(slots), 2 * half
    q, k, v = randn(rows, query_heads, dim), randn(rows, heads, dim, seed=1), randn(rows, heads, dim, seed=2)
    cos, sin = randn(2, rows, 1, dim, seed=3)
    weights = randn(2, dim, seed=4)
    q_norm, k_norm = weights[0] if "q" in norms else None, weights[1] if "k" in norms else None
    eps = 1e-5 if norms else None
    to = torch.tensor(slots)
    stack = Stack.make(LAYOUT, (1, 3, 4, heads, dim))
    expected = stack.clone()
    options = {"cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    out = rope_append_kv(q, k, v, expected.layer(0), to, **options, backend="reference")  # type: ignore[arg-type]
    mine = q.clone() if in_place else torch.full_like(q, NAN)
    rotary = (cos, sin, q_norm, k_norm, eps)
    OPS["rope_append_kv"]("triton", mine if in_place else q, k, v, stack.layer(0), to, *rotary, mine, config=TINY)
    torch.testing.assert_close(mine, out, rtol=0, atol=ROTARY)
    torch.testing.assert_close(stack.base, expected.base, rtol=0, atol=ROTARY, equal_nan=True)
    assert_same_bits(stack.kv.v, expected.kv.v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FLOAT8], ids=str)
def test_rotated_rows_are_rounded_once_to_the_cache(dtype: torch.dtype) -> None:
    source = torch.float16 if dtype is not torch.bfloat16 else torch.bfloat16
    q, k, v = randn(3, 4, 8).to(source), randn(3, 2, 8, seed=1).to(source), randn(3, 2, 8, seed=2).to(source)
    cos, sin = randn(2, 3, 1, 8, seed=3).to(source)
    stack = Stack.make(LAYOUT, (1, 2, 4, 2, 8), dtype)
    stack.base.zero_()
    expected, slots = stack.clone(), torch.tensor([5, -1, 2])
    out = rope_append_kv(q, k, v, scaled(expected.layer(0)), slots, cos=cos, sin=sin, backend="reference")
    mine = rope_append_kv(q, k, v, scaled(stack.layer(0)), slots, cos=cos, sin=sin, backend="triton")
    assert_one_step_apart(mine, out)
    assert_one_step_apart(stack.base, expected.base)
    assert_same_bits(stack.kv.v, expected.kv.v)


def assert_one_step_apart(a: Tensor, b: Tensor) -> None:
    """The interpreter truncates where it should round to bfloat16."""
    if a.dtype is torch.bfloat16:
        assert ((a.view(torch.int16).int() - b.view(torch.int16).int()).abs() <= 1).all()
    else:
        assert torch.equal(a.float(), b.float())


def test_nothing_is_written_around_the_pages_or_left_out() -> None:
    sizes: Sizes = (1, 3, 4, 2, 5)
    k_band, v_band = (guarded(torch.zeros(sizes), row_gap=3) for _ in range(2))
    kv = PagedKV(k_band.tensor[0], v_band.tensor[0])
    k, v = randn(2, 3, 2, 5)
    append_kv(k, v, kv, torch.tensor([11, -1, 0]), backend="triton")
    commit_kv(kv, *make_commit([[0, 2]], [3], [0, 5, 11]).arguments, backend="triton")
    copy_pages(kv, torch.tensor([2]), torch.tensor([1]), backend="triton")
    for band in (k_band, v_band):
        band.check()
    rows = guarded(randn(3, 4, 6), row_gap=2)
    kv, cos = PagedKV(*torch.zeros(2, 3, 4, 2, 6)), torch.ones(3, 1, 6)
    with poisoned_empty():
        out = rope_append_kv(
            rows.tensor, *torch.zeros(2, 3, 2, 6), kv, torch.tensor([0, -1, 2]), cos=cos, sin=cos, backend="triton"
        )
    rows.check()
    assert out.isfinite().all()


def test_poisoned_pads_do_not_reach_the_cache() -> None:
    """P12: rows without a slot may hold anything."""
    stack = Stack.make(LAYOUT, (1, 2, 4, 2, 4))
    before = stack.base.clone()
    poison = torch.full((5, 2, 4), NAN)
    nowhere = torch.full((5,), -1)
    append_kv(poison, poison, stack.layer(0), nowhere, backend="triton")
    ones = torch.ones(5, 1, 4)
    rope_append_kv(poison, poison, poison, stack.layer(0), nowhere, cos=ones, sin=ones, backend="triton")
    path, none = torch.full((2, 3), -1), torch.zeros(2, dtype=torch.int64)
    no_rows, five = (rows_at(start, nowhere, 3) for start in (torch.zeros(3).long(), torch.tensor([0, 5])))
    commit_kv(stack.kv, path, none, no_rows, nowhere, backend="triton")
    commit_kv(stack.kv, torch.tensor([[0, 2, 4]]), torch.tensor([3]), five, nowhere, backend="triton")
    assert_same_bits(stack.base, before)


def test_the_kernels_refuse_strided_heads() -> None:
    k = torch.zeros(2, 2, 8)[..., ::2]
    kv = PagedKV(*torch.zeros(2, 2, 4, 2, 4))
    with pytest.raises(ValueError, match="k: the kernels need a contiguous last axis"):
        append_kv(k, k, kv, torch.tensor([0, 1]), backend="triton")
    strided = PagedKV(*torch.zeros(2, 2, 4, 2, 8)[..., ::2])
    with pytest.raises(ValueError, match=r"kv\.k: the kernels need a contiguous last axis"):
        copy_pages(strided, torch.tensor([0]), torch.tensor([1]), backend="triton")


@pytest.mark.parametrize("heads", [1, 2, 8, 40])
@pytest.mark.parametrize("head_dim", [4, 64, 96, 128, 256])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_configurations_are_powers_of_two_within_bounds(heads: int, head_dim: int, itemsize: int) -> None:
    config = cache_config(heads, head_dim, itemsize)
    block_d = 1 << (head_dim - 1).bit_length()
    for size in (config.block_n, config.block_h, config.num_warps, config.commit_warps):
        assert size & (size - 1) == 0
    assert config.block_n * block_d <= 4096
    assert config.block_h * block_d <= 2048
    assert 1 <= config.commit_warps <= 8
