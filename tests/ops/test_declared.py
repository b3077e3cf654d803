"""What every op owes to its declaration: the errors, the library's entry, graph safety, one result on both backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops.launch import recorded_launches
from dspark.ops.op import OPS
from dspark.testing.guards import forbid_sync
from tests.ops.accept import cases as accept
from tests.ops.attention import cases as attention
from tests.ops.cache import cases as cache
from tests.ops.case import Case, Fault, faults, tensors_of
from tests.ops.draft import cases as draft
from tests.ops.draft import tree_cases
from tests.ops.sample import cases as sample
from tests.ops.schedule import cases as schedule

CASES = [case for family in (accept, attention, cache, sample, schedule, draft, tree_cases) for case in family.SMALL]
REFERENCED = [*CASES, *tree_cases.REFERENCED]
"""And what only a reference does."""
FAULTS = [
    pytest.param(case, fault, id=f"{case}: {fault.argument} {fault.what}")
    for case in REFERENCED
    for fault in faults(case.op, case.values("cpu"))
]


def test_every_op_has_a_case() -> None:
    assert {case.name for case in CASES} == set(OPS)


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_bad_input_is_named(case: Case, fault: Fault) -> None:
    """The message begins with an argument; with the one at fault, but where two disagree and either may be meant."""
    name = r"[\w.]+" if fault.what.startswith(("size", "device")) else fault.argument.replace(".", r"\.")
    with pytest.raises(fault.error, match=rf"^{name}: "), recorded_launches():
        case.op("triton" if fault.needs_kernels else "reference", *fault.values)


@pytest.mark.parametrize("case", REFERENCED, ids=str)
def test_opcheck(case: Case) -> None:
    values = allocated(case, case.values("cpu"))
    library_op = getattr(torch.ops.dspark, case.name).default
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if any(x.dtype is torch.float8_e4m3fn for x in tensors_of(values)):
        utils = utils[1:]  # torch cannot compare tensors of float8
    arguments = tuple(case.op.flatten("reference", values))
    found = torch.library.opcheck(library_op, arguments, test_utils=utils, raise_exception=False)
    assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("case", REFERENCED, ids=str)
def test_compiles_as_one_graph(case: Case) -> None:
    torch._dynamo.reset()
    eager, traced = case.values("cpu"), case.values("cpu")
    expected = case.op("reference", *eager)
    compiled = torch.compile(case.op, fullgraph=True, backend="aot_eager")
    assert_same((compiled("reference", *traced), traced), (expected, eager))


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_reads_the_device(case: Case, backend: Any) -> None:
    """Neither on tensors that hold something (contract C7) nor on such as have only a shape."""
    values = case.values("cpu")
    with recorded_launches():
        with forbid_sync():
            case.op(backend, *values)
        case.op(backend, *case.values("meta"))


def allocated(case: Case, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with results to write into."""
    inputs = len(values) - len(case.op.results)
    results = case.op("reference", *values) if case.op.results else ()
    results = (results,) if len(case.op.results) == 1 else results
    return (*values[:inputs], *results)


def assert_same(got: object, expected: object) -> None:
    for mine, theirs in zip(tensors_of(got), tensors_of(expected), strict=True):
        assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
