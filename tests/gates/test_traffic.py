"""The traffic gate: bytes and launches, counted in the interpreter, are the cost model's, to the byte."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from dspark.ops.cost import (
    AcceptCall,
    ProcessCall,
    QKind,
    SampleCall,
    Search,
    accept_cost,
    process_cost,
    sample_cost,
)
from dspark.ops.sample import truncate
from dspark.ops.types import Rule
from dspark.testing.traffic import counted_traffic
from tests.gates.traffic.accept import accept_case
from tests.gates.traffic.case import Case, measure
from tests.gates.traffic.search import simulate
from tests.gates.traffic_table import CASES, GROUPS, table
from tests.ops.helpers import make_sampling

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
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__.rpartition(".")[2])
def test_the_model_is_what_is_counted_at_the_stated_shapes(group: ModuleType) -> None:
    for case in group.stated_cases():
        assert_counted_is_modelled(case)


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


@pytest.mark.parametrize("num_rows", [1, 8, 512])
def test_plain_sampling_is_within_two_per_cent_of_the_lower_bound(num_rows: int) -> None:
    for greedy in (0, num_rows):
        for given in (False, True):
            cost = sample_cost(SampleCall(num_rows, 151_936, greedy=greedy, request=given, salt=given))
            assert cost.lower_bound <= cost.total <= cost.lower_bound * 1.02


def test_bans_are_within_two_per_cent_of_the_lower_bound_and_penalties_are_not() -> None:
    bans = process_cost(ProcessCall([8] * 4, 151_936, eos=2, too_short=8, banned=4))
    assert bans.lower_bound <= bans.total <= bans.lower_bound * 1.02
    counted = process_cost(ProcessCall([8] * 4, 151_936, frequency=True))  # each of 8 rows reads its request's counts
    assert counted.lower_bound * 1.5 < counted.total < counted.lower_bound * 1.57
    masked = process_cost(ProcessCall([8] * 4, 151_936, allowed=True))  # each lane asks for its token's word
    assert masked.lower_bound * 1.6 < masked.total < masked.lower_bound * 1.66


@pytest.mark.parametrize("rule", ["coupled", "match", "ratio", "block"])
def test_truncation_costs_its_search_and_a_second_look_at_what_is_kept(rule: Rule) -> None:
    """Over the untruncated call, whose bound it shares: nothing else grows by more than 2 % of it."""
    call = AcceptCall(lengths=[8], emitted=[8], rule=rule, vocab_size=151_936)
    search = Search(passes=9, searched=5 * 151_936, kept=2 * 4096)
    plain, truncated = accept_cost(call), accept_cost(replace(call, search=[search] * 8))
    assert truncated.lower_bound == plain.lower_bound
    assert truncated.launches == plain.launches + 2
    beyond = truncated.total - plain.total - 2 * 8 * (search.searched + search.kept)
    assert 0 < beyond < 0.02 * plain.lower_bound


def test_the_simulated_search_finds_thresholds_of_a_sort() -> None:
    """And reads what its passes must: a tile that all pivots lie above is not among it."""
    row = torch.randn(9000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    row[4096:8192] -= 40
    for top_k, top_p in ((1, 1.0), (7, 1.0), (0, 0.3), (50, 0.9)):
        found, threshold = simulate(row.numpy(), torch.bfloat16, 0.7, top_k, top_p, 0.0)
        sampling = make_sampling([0.7], top_k, top_p, seed=[1])
        assert threshold == truncate(row.bfloat16()[None], sampling, backend="reference").item()
        assert found.kept in (4096, 4096 + 808)
        assert 0 < found.passes <= 18
        assert found.searched <= found.passes * (4096 + 808)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_sparse_q_is_read_once_per_tile_of_a_residual(rule: Rule) -> None:
    call = AcceptCall(lengths=[8], emitted=[1], rule=rule, vocab_size=151_936, q="sparse", num_sparse=32)
    cost = accept_cost(call)
    assert cost.lower_bound <= cost.total <= cost.lower_bound * 1.04
