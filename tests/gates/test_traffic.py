"""The traffic gate: bytes and launches, counted in the interpreter, are the cost model's, to the byte."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from dspark.ops.cost import AcceptCall, QKind, accept_cost
from dspark.ops.types import Rule
from dspark.testing.traffic import counted_traffic
from tests.gates.traffic.accept import accept_case
from tests.gates.traffic.case import Case, measure
from tests.gates.traffic_table import CASES, stated_cases, table

pytestmark = pytest.mark.triton


def test_only_lanes_that_are_not_masked_off_count() -> None:
    from tests.gates.toy_kernels import masked_copy_kernel

    x = torch.tensor([1.0, -1.0, 2.0, -2.0, 3.0, 4.0], dtype=torch.float16)
    y, count = torch.zeros(6, dtype=torch.float16), torch.zeros(1, dtype=torch.int32)
    with counted_traffic() as traffic:
        masked_copy_kernel[(2,)](x_ptr=x, y_ptr=y, count_ptr=count, n=6, BLOCK=4)
    assert count.item() == 2
    assert (traffic.read, traffic.written) == (6 * 2 + 2 * 4, 4 * 2 + 2 * 4)
    assert traffic.kernels == ["masked_copy_kernel"]
    assert traffic.arguments == {
        "masked_copy_kernel.x_ptr": [12, 0],
        "masked_copy_kernel.y_ptr": [0, 8],
        "masked_copy_kernel.count_ptr": [8, 8],
    }


def test_unmasked_and_scalar_accesses_count_by_the_width_of_their_dtype() -> None:
    from tests.gates.toy_kernels import row_sum_kernel

    x, out = torch.randn(3, 10).bfloat16(), torch.empty(3)
    with counted_traffic() as traffic:
        row_sum_kernel[(3,)](x, out, 10, 10, BLOCK_C=4)
    assert (traffic.read, traffic.written) == (3 * 10 * 2, 3 * 4)
    torch.testing.assert_close(out, x.float().sum(1))


def test_what_torch_launches_beside_the_kernels_counts() -> None:
    with counted_traffic() as traffic:
        torch.empty(3).view(3, 1).zero_().add(1)
    assert traffic.torch_ops == ["zero_", "add"]
    assert traffic.launches == 2


def test_counting_ends_with_the_block() -> None:
    from tests.gates.toy_kernels import row_sum_kernel

    with counted_traffic() as traffic:
        pass
    row_sum_kernel[(1,)](torch.ones(4), torch.empty(1), 4, 4, BLOCK_C=4)
    assert (traffic.read, traffic.launches) == (0, 0)


def test_compiled_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"), counted_traffic():
        pass


def assert_counted_is_modelled(case: Case) -> None:
    row, traffic = measure(case)
    assert not traffic.torch_ops, "an op launches torch's kernels beside its own"
    assert row.agrees, f"\n{table([row])}\n{traffic.arguments}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.rule}, {case.shape}")
def test_the_model_is_what_is_counted(case: Case) -> None:
    assert_counted_is_modelled(case)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(stated_cases())))
def test_the_model_is_what_is_counted_at_the_stated_shapes(index: int) -> None:
    assert_counted_is_modelled(stated_cases()[index])


def test_a_wrong_model_is_seen() -> None:
    row, _ = measure(accept_case("coupled", [2, 1], 100))
    assert row.agrees
    assert not replace(row, modelled_read=row.modelled_read + 4).agrees
    assert not replace(row, modelled_launches=row.modelled_launches + 1).agrees


STATED: list[tuple[Rule, QKind]] = [
    ("coupled", "dense"),
    ("match", "dense"),
    *((rule, q) for rule in ("ratio", "block") for q in ("dense", "point")),
]


@pytest.mark.parametrize("accepted", [0, 3, 7])
@pytest.mark.parametrize(("rule", "q"), STATED)
def test_the_model_is_within_two_per_cent_of_the_lower_bound(rule: Rule, q: QKind, accepted: int) -> None:
    call = AcceptCall(lengths=[8], emitted=[accepted + 1], rule=rule, vocab_size=151_936, q=q)
    cost = accept_cost(call)
    assert cost.lower_bound <= cost.total <= cost.lower_bound * 1.02


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_sparse_q_is_read_once_per_tile_of_a_residual(rule: Rule) -> None:
    call = AcceptCall(lengths=[8], emitted=[1], rule=rule, vocab_size=151_936, q="sparse", num_sparse=32)
    cost = accept_cost(call)
    assert cost.lower_bound <= cost.total <= cost.lower_bound * 1.04
