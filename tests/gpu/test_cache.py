"""The kernels on the paged cache on a GPU: the reference's bits, rotated heads, and replayed graphs.

Run by ``benchmarks/gpu.sh``, or with ``DSPARK_TEST_DEVICE=cuda pytest tests/gpu``; skipped anywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.ops import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.types import PagedKV, Rows
from tests.ops.cache.caches import CACHE_DTYPES, FLOAT8, STACKS, CommitCase, Sizes, Stack, assert_same_bits, make_commit
from tests.tolerances import ROTARY

pytestmark = pytest.mark.skipif(
    os.environ.get("DSPARK_TEST_DEVICE") != "cuda" or not torch.cuda.is_available(),
    reason="needs a GPU and DSPARK_TEST_DEVICE=cuda",
)

REQUESTS, NODES, QUERY_HEADS = 24, 16, 16
ROWS = REQUESTS * NODES
SIZES: Sizes = (3, 32, 16, 4, 128)


def on_gpu(stack: Stack) -> Stack:
    base = stack.base.cuda()
    k, v = (base.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (stack.kv.k, stack.kv.v))
    return Stack(PagedKV(k, v), base)


def trees(seed: int) -> CommitCase:
    """Random rising paths, among them chains and padded requests; rows are scattered over the cache."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SIZES[1] * SIZES[2], generator=generator)[:ROWS].tolist()
    paths: list[Sequence[int]] = [[], range(NODES)]
    for _ in range(REQUESTS - 2):
        later = (1 + (torch.rand(NODES - 1, generator=generator) < 0.5).nonzero().flatten()).tolist()
        paths.append([0, *later])
    return make_commit(paths, [NODES] * REQUESTS, slots, nodes=NODES)


def new_rows(heads: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, heads, SIZES[4], generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("layout", STACKS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_bits_are_those_of_the_reference(layout: str, dtype: torch.dtype) -> None:
    expected = Stack.make(layout, SIZES, dtype)
    stack = on_gpu(expected)
    case = trees(1)
    slots = torch.where(torch.arange(ROWS) % 7 == 3, -1, case.slots)
    k, v = new_rows(SIZES[3], torch.float32), 100 * new_rows(SIZES[3], torch.float32, 1)
    scales = torch.linspace(0.02, 3.0, SIZES[3]) if dtype is FLOAT8 else None
    layer, gpu_layer = expected.layer(1), stack.layer(1)
    append_kv(k, v, PagedKV(layer.k, layer.v, scales, scales), slots)
    gpu_scales = None if scales is None else scales.cuda()
    append_kv(k.cuda(), v.cuda(), PagedKV(gpu_layer.k, gpu_layer.v, gpu_scales, gpu_scales), slots.cuda())
    assert_same_bits(stack.base.cpu(), expected.base)
    case.apply(expected)
    commit_kv(stack.kv, *(on_device(x) for x in case.arguments))
    assert_same_bits(stack.base.cpu(), expected.base)
    source, target = torch.tensor([3, 0, -1]), torch.tensor([8, 9, 10])
    copy_pages(expected.kv, source, target)
    copy_pages(stack.kv, source.cuda(), target.cuda())
    assert_same_bits(stack.base.cpu(), expected.base)


def rotary_arguments(seed: int) -> dict[str, Any]:
    cos, sin = torch.randn(2, ROWS, 1, SIZES[4], generator=torch.Generator().manual_seed(seed))
    weights = torch.randn(2, SIZES[4], generator=torch.Generator().manual_seed(seed))
    return {"cos": cos, "sin": sin, "q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}


def on_device(value: Tensor | Rows) -> Any:
    return Rows(*(x.cuda() for x in value[:3]), value.max_query_len) if isinstance(value, Rows) else value.cuda()


def moved(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def test_rotated_as_the_reference_does() -> None:
    expected = Stack.make("layers, then keys and values", SIZES)
    expected.base.zero_()
    stack, options, slots = on_gpu(expected), rotary_arguments(0), trees(2).slots
    q, k, v = (new_rows(heads, torch.float32, heads) for heads in (QUERY_HEADS, SIZES[3], SIZES[3]))
    out = rope_append_kv(q, k, v, expected.layer(0), slots, **options)
    mine = rope_append_kv(q.cuda(), k.cuda(), v.cuda(), stack.layer(0), slots.cuda(), **moved(options))
    torch.testing.assert_close(mine.cpu(), out, rtol=ROTARY, atol=ROTARY)
    torch.testing.assert_close(stack.base.cpu(), expected.base, rtol=ROTARY, atol=ROTARY)


def test_a_replayed_graph_is_the_eager_result() -> None:
    """P12: rows, slots and paths change under a captured round, pads among them."""
    layout, dtype = "layers, then keys and values", torch.bfloat16
    rounds = []
    for seed in range(3):
        case = trees(seed)
        q, k = new_rows(QUERY_HEADS, dtype, seed), new_rows(SIZES[3], dtype, seed + 9)
        slots = torch.where(torch.arange(ROWS) >= ROWS - 5 * seed, -1, case.slots)
        options = {"q": q, "k": k, "v": k + 1, **rotary_arguments(seed)}
        rest = {"path": case.path, "num_emitted": case.num_emitted, "query_start": case.query_start, "slots": slots}
        rounds.append(moved({**options, **rest, "out": torch.zeros_like(q)}))

    def step(stack: Stack, a: dict[str, Any]) -> None:
        path = ("path", "num_emitted", "query_start")
        rope_append_kv(kv=stack.layer(1), **{name: x for name, x in a.items() if name not in path})
        commit_kv(stack.kv, *CommitCase(*(a[name] for name in path), a["slots"]).arguments)

    captured = on_gpu(Stack.make(layout, SIZES, dtype))
    start = captured.base.clone()
    static = {name: x.clone() if isinstance(x, Tensor) else x for name, x in rounds[0].items()}
    step(captured, static)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, static)
    for a in rounds[1:] + rounds[:1]:
        captured.base.copy_(start)
        for name, x in a.items():
            if isinstance(x, Tensor):
                static[name].copy_(x)
        graph.replay()
        eager = on_gpu(Stack.make(layout, SIZES, dtype))
        step(eager, a)
        assert_same_bits(captured.base, eager.base)
        assert_same_bits(static["out"], a["out"])
