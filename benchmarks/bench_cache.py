"""The ops on the paged cache: the references, what a call costs the host, and the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import gpu_timing
from benchmarks.setup import ROWS, Benchmark
from dspark.models.block_table import BlockTables
from dspark.models.pool import PagePool
from dspark.ops import PagedKV, Rows, append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.launch import recorded_launches
from dspark.testing import bounds

QUERY_HEADS, HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 32, 8, 128, 16, 36
TREE_PATH = [0, 2, 5, 7]
COPIED = 8
OPS = ("append_kv", "rope_append_kv", "commit_kv, chains", "commit_kv, trees", "copy_pages")


def make_call(op: str, requests: int, device: str, layers: int = LAYERS) -> tuple[Callable[[], Any], int]:
    """A call on a cache of its own, and what it must move: each request has one page, and ``ROWS`` rows in it."""
    rows = requests * ROWS
    storage = torch.zeros(layers, 2, requests + COPIED, PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    stack = PagedKV(storage[:, 0], storage[:, 1])
    layer = PagedKV(storage[0, 0], storage[0, 1])
    shape: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM}
    slots = (torch.arange(requests)[:, None] * PAGE_SIZE + torch.arange(ROWS)).flatten().to(device)
    joint = torch.randn(rows, QUERY_HEADS + 2 * HEADS, HEAD_DIM, device=device).bfloat16()
    q, k, v = joint.split([QUERY_HEADS, HEADS, HEADS], dim=1)
    if op == "append_kv":
        return lambda: append_kv(k, v, layer, slots, backend="triton"), bounds.append_kv(rows, rows, **shape)
    if op == "rope_append_kv":
        angle = torch.randn(rows, 1, HEAD_DIM, device=device).bfloat16()
        weight = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device=device)
        options: dict[str, Any] = {"cos": angle, "sin": angle, "q_norm": weight, "k_norm": weight, "eps": 1e-6}
        return (
            lambda: rope_append_kv(q, k, v, layer, slots, **options, backend="triton"),
            bounds.rope_append_kv(rows, rows, query_heads=QUERY_HEADS, **shape),
        )
    if op == "copy_pages":
        target = requests + torch.arange(COPIED, device=device)
        source = (target - requests) % requests
        bound = bounds.copy_pages(COPIED, PAGE_SIZE, **shape, layers=layers)
        return lambda: copy_pages(stack, source, target, backend="triton"), bound
    nodes = list(range(ROWS)) if op.endswith("chains") else TREE_PATH
    path = torch.tensor([[*nodes, *[-1] * (ROWS - len(nodes))]] * requests, device=device)
    emitted = torch.full((requests,), len(nodes), device=device)
    start, position = torch.arange(requests + 1, device=device) * ROWS, torch.zeros_like(emitted)
    verified = Rows(torch.zeros(rows, dtype=torch.int64, device=device), start, position, path.shape[1])
    bound = bounds.commit_kv([nodes] * requests, **shape, layers=layers)
    return lambda: commit_kv(stack, path, emitted, verified, slots, backend="triton"), bound


@pytest.mark.parametrize("op", OPS)
def test_host_overhead(benchmark: Benchmark, requests: int, op: str) -> None:
    """Checks and the arguments of the launch, of which there is one; the launch itself does nothing."""
    call, _ = make_call(op, requests, "cpu", layers=2)
    with recorded_launches() as launches:

        def run() -> None:
            launches.clear()
            call()

        run()  # the first one imports the kernels
        benchmark(run)
        assert len(launches) == 1


@pytest.mark.parametrize("op", ["commit_kv, chains", "commit_kv, trees"])
def test_reference(benchmark: Benchmark, requests: int, op: str) -> None:
    heads, dim = 2, 16
    storage = torch.randn(4, 2, requests, PAGE_SIZE, heads, dim)
    slots = (torch.arange(requests)[:, None] * PAGE_SIZE + torch.arange(ROWS)).flatten()
    nodes = list(range(ROWS)) if op.endswith("chains") else TREE_PATH
    path, emitted = torch.tensor([nodes] * requests), torch.full((requests,), len(nodes))
    start, tokens = torch.arange(requests + 1) * ROWS, torch.zeros(requests * ROWS, dtype=torch.int64)
    rows = Rows(tokens, start, torch.zeros_like(emitted), len(nodes))
    benchmark(commit_kv, PagedKV(storage[:, 0], storage[:, 1]), path, emitted, rows, slots)


def test_admission_of_a_known_prompt(benchmark: Benchmark) -> None:
    """Hashing 2,048 tokens, finding their pages and giving them back."""
    tables = BlockTables(PagePool(256), PAGE_SIZE)
    prompt = torch.randint(1000, (2049,)).tolist()
    first = tables.admit(prompt, 2100)
    assert first is not None
    first.commit([], target=2048)
    first.release()

    def admit() -> int:
        table = tables.admit(prompt, 2100)
        assert table is not None
        table.release()
        return table.hit

    assert benchmark(admit) == 2048


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_device_time(benchmark: Any, num_requests: int, op: str) -> None:
    layers = LAYERS if op in ("copy_pages", "commit_kv, chains", "commit_kv, trees") else 1
    made = [make_call(op, num_requests, "cuda", layers) for _ in range(8)]
    benchmark.extra_info |= {"R": num_requests, "op": op}
    gpu_timing.measure(benchmark, [call for call, _ in made], made[0][1], 0)
