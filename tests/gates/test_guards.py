"""The guards themselves, and the ops under them: nothing is left unwritten, and nothing else is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dspark.ops.accept.launch import workspace_bytes
from dspark.ops.launch import RowConfig
from dspark.ops.op import OPS
from dspark.ops.sample import sample, truncate
from dspark.ops.types import Backend, DenseQ, Rows, Rule, Verdict
from dspark.testing.guards import guarded, poison_of, poisoned_empty
from tests.ops.chains import RULES
from tests.strategies import VerifyCase, verify_cases

TINY = RowConfig(block_rows=2, block_vocab=16, block_sub=4, num_warps=4)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(3),
        lambda: torch.empty_like(torch.zeros(3)),
        lambda: torch.empty_strided((3,), (2,)),
        lambda: torch.zeros(1).new_empty(3),
        lambda: torch.zeros(1).new_empty_strided((3,), (1,)),
        lambda: torch.empty(3, dtype=torch.int64).double() * math.nan,
    ],
)
def test_uninitialised_memory_is_poison(allocate: Any) -> None:
    with poisoned_empty():
        assert allocate().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.bfloat16])
def test_every_dtype_has_a_poison(dtype: torch.dtype) -> None:
    with poisoned_empty():
        values = torch.empty(4, dtype=dtype)
        zeros, full = torch.zeros(4, dtype=dtype), torch.full((4,), 1, dtype=dtype)
    assert values.isnan().all() if dtype.is_floating_point else (values == poison_of(dtype)).all()
    assert (zeros == 0).all()
    assert (full == 1).all()


@pytest.mark.parametrize("row_gap", [0, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4)])
def test_a_guarded_tensor_sees_writes_around_it(shape: tuple[int, ...], dtype: torch.dtype, row_gap: int) -> None:
    values = torch.arange(math.prod(shape)).view(shape).to(dtype)
    band = guarded(values, margin=16, row_gap=row_gap)
    assert torch.equal(band.tensor, values)
    band.tensor.fill_(7)
    band.check()
    last = sum((size - 1) * stride for size, stride in zip(shape, band.tensor.stride(), strict=True))
    offsets = [-16, -1, last + 1, last + 16] + ([shape[-1]] if row_gap and len(shape) > 1 else [])
    for offset in offsets:
        band = guarded(values, margin=16, row_gap=row_gap)
        band.tensor.as_strided((1,), (1,), 16 + offset).fill_(1)
        with pytest.raises(AssertionError, match=f"1 elements .* the first at offset {offset} "):
            band.check()


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32) if x.dtype is torch.float32 else x


def assert_same_bits(a: Verdict, b: Verdict) -> None:
    for field in Verdict._fields:
        assert torch.equal(_bits(getattr(a, field)), _bits(getattr(b, field))), field


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=6)
@given(case=verify_cases())
def test_accept_writes_all_of_its_verdict_and_nothing_else(rule: Rule, backend: Backend, case: VerifyCase) -> None:
    """Inputs are rows between canaries; the outputs and the workspace lie between canaries of their own."""
    requests, nodes = case.position.shape[0], case.max_query_len
    rows = guarded(case.logits.new_zeros(max(1, case.logits.shape[0]), case.logits.shape[1]), row_gap=4)
    logits = rows.tensor[: case.logits.shape[0]].copy_(case.logits)
    q = guarded(case.q_logits, row_gap=4)
    with poisoned_empty():
        bands = {
            "tokens": guarded(torch.empty(requests, nodes, dtype=torch.int64)),
            "num_emitted": guarded(torch.empty(requests, dtype=torch.int64)),
            "path": guarded(torch.empty(requests, nodes, dtype=torch.int64)),
            "logprobs": guarded(torch.empty(requests, nodes)),
            "status": guarded(torch.empty(requests, dtype=torch.int64)),
        }
        needed = workspace_bytes(requests, nodes, logits.shape[1], logits.shape[1], rule, TINY)
        workspace = guarded(torch.empty(needed, dtype=torch.uint8))
        out = Verdict(**{name: band.tensor for name, band in bands.items()})
        distribution = DenseQ(q.tensor) if rule in ("ratio", "block") else None
        verified = Rows(case.tokens, case.query_start, case.position, nodes)
        given = (logits, verified, rule, case.sampling, distribution, "raw", out)
        config = TINY if backend == "triton" else None
        OPS["accept"](backend, *given, workspace=workspace.tensor, config=config)
    for band in (rows, q, workspace, *bands.values()):
        band.check()
    vocab_size = logits.shape[1]
    assert ((out.tokens >= -1) & (out.tokens < vocab_size)).all()
    assert ((out.path >= -1) & (out.path < nodes)).all()
    assert ((out.num_emitted >= 0) & (out.num_emitted <= nodes)).all()
    assert ((out.status == 0) | (out.status == 1)).all()
    assert not out.logprobs.isnan().any()


@pytest.mark.triton
@settings(max_examples=6)
@given(case=verify_cases())
def test_sample_and_truncate_write_every_row(case: VerifyCase) -> None:
    request = torch.arange(case.position.shape[0]).repeat_interleave(case.query_start.diff())
    sampling = case.sampling._replace(any_truncation=True)
    position = case.position[request]
    for backend in ("reference", "triton"):
        with poisoned_empty():
            tokens = sample(case.logits, sampling, position, request=request, backend=backend)
            thresholds = truncate(case.logits, sampling, request, backend=backend)
        assert ((tokens >= -1) & (tokens < case.logits.shape[1])).all()
        good = ~case.logits.isnan().any(-1)  # of a bad row the threshold means nothing
        assert not thresholds[good].isnan().any()
