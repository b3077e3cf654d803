"""What makes a verdict bitwise independent of its batch (contract C8): the same kernel, or sums that cannot round.

The passes over a row of logits are one compiled kernel for every number of requests and of drafts. Kernels that are
shaped by the number of drafts add in an order that the compiler chooses for each shape; their sums are exact instead.
"""

from __future__ import annotations

import math

import pytest
import torch

from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.launch import recorded_launches
from dspark.ops.sample import sample
from dspark.ops.types import DenseQ, Rows, Rule, Sampling
from dspark.testing.registry import KernelEntry, entry_of_launch, meta
from tests.ops.chains import RULES

pytestmark = pytest.mark.triton

EXACT = {"chain_verdict_kernel", "ratio_kernel", "ratio_verdict_kernel", "threshold_kernel"}
"""Kernels with a variant for each number of drafts."""


def sampling(requests: int) -> Sampling:
    number = meta(requests, dtype=torch.float32)
    return Sampling(number, meta(requests), number, number, meta(requests))


def compiled(rule: Rule, requests: int, nodes: int, vocab_size: int) -> dict[str, tuple[object, ...]]:
    """What decides the code of each kernel that a call of these sizes launches, by kernel and how often it came."""
    rows = requests * nodes
    dense = DenseQ(meta(requests, 16, vocab_size, dtype=torch.bfloat16))
    with recorded_launches() as launches:
        accept(
            meta(rows, vocab_size, dtype=torch.bfloat16),
            Rows(meta(rows), meta(requests + 1), meta(requests), nodes),
            rule=rule,
            sampling=sampling(requests),
            q=dense if rule in RULES_OF_Q else None,
            backend="triton",
        )
    code: dict[str, tuple[object, ...]] = {}
    for launch in launches:
        entry: KernelEntry = entry_of_launch("", launch, {})
        use = entry.constexprs.get("PASS"), entry.constexprs.get("DRAFT")
        code[f"{entry.kernel.partition(':')[2]} {use}"] = (
            entry.signature, entry.constexprs, entry.aligned, entry.num_warps, entry.num_stages, entry.options,
        )  # fmt: skip
    return code


@pytest.mark.parametrize("vocab_size", [151_936, 50_257, 40])
@pytest.mark.parametrize("rule", RULES)
def test_passes_over_rows_are_one_kernel_for_every_batch_and_number_of_drafts(rule: Rule, vocab_size: int) -> None:
    reference = compiled(rule, 64, 8, vocab_size)
    seen = set()
    for requests, nodes in ((1, 1), (1, 2), (3, 5), (64, 9), (1, 17), (512, 8)):
        for name, code in compiled(rule, requests, nodes, vocab_size).items():
            if name.split()[0] not in EXACT:
                assert code == reference[name], (name, requests, nodes)
                seen.add(name)
    assert {name for name in reference if name.split()[0] not in EXACT} == seen


def test_sampling_is_one_kernel_for_every_batch() -> None:
    code = []
    for rows in (1, 2, 64, 4096):
        with recorded_launches() as launches:
            logits = meta(rows, 151_936, dtype=torch.bfloat16)
            sample(logits, sampling(rows), meta(rows), backend="triton")
        entries = [entry_of_launch("", launch, {}) for launch in launches]
        code.append([(e.signature, e.constexprs, e.aligned, e.num_warps) for e in entries])
    assert all(other == code[0] for other in code)


def test_tiles_merge_to_the_same_bits_in_any_order() -> None:
    from tests.ops.triton_rows import merge_sums_kernel

    rows, tiles = 8, 64
    generator = torch.Generator().manual_seed(0)
    tile_max = torch.randn(rows, tiles, generator=generator) * 4
    tile_sum = 1 + 4095 * torch.rand(rows, tiles, generator=generator)
    plain = tile_sum.double() * (tile_max - tile_max.amax(1, keepdim=True)).double().exp()
    merged, added = set(), set()
    for seed in range(8):
        order = torch.randperm(tiles, generator=generator.manual_seed(seed))
        out = torch.empty(rows, dtype=torch.float64)
        merge_sums_kernel[(1,)](
            tile_max[:, order].contiguous(), tile_sum[:, order].contiguous(), out, BLOCK_R=rows, TILES=tiles
        )
        merged.add(tuple(out.tolist()))
        added.add(tuple(plain[:, order].cumsum(1)[:, -1].tolist()))
        assert (out / plain.sum(1) - 1).abs().max() < 2**-29
    assert len(merged) == 1
    assert len(added) > 1, "plain sums do depend on the order: a kernel without rounded terms would fail"


@pytest.mark.parametrize("limit", [2, 1024, 64 * 4096])
def test_rounded_terms_add_up_exactly(limit: int) -> None:
    from tests.ops.triton_rows import summable_kernel

    generator = torch.Generator().manual_seed(limit)
    x = torch.rand(1024, generator=generator, dtype=torch.float64) ** 40
    x *= limit / x.sum()  # the heaviest that a row may be
    rounded = torch.empty_like(x)
    summable_kernel[(1,)](x, rounded, LIMIT=limit, BLOCK=1024)
    assert (rounded - x).abs().max() <= limit * 2.0**-53
    running = rounded.cumsum(0)
    assert all(running[i] == math.fsum(rounded[: i + 1].tolist()) for i in range(0, 1024, 31))
    assert rounded.flip(0).cumsum(0)[-1] == running[-1]
