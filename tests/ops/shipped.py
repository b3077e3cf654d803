"""The kernels that ship: representative calls of the ops, whose launches are the registry's entries.

A call is made with tensors that hold nothing (device "meta") and without running a kernel, so an entry cannot differ
from what its op launches. The calls, and what is asked of their kernels, stand in each family's ``cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dspark.ops.launch import recorded_launches
from dspark.testing.registry import Budget, KernelEntry, entry_of_launch
from tests.ops.accept import cases as accept
from tests.ops.attention import cases as attention
from tests.ops.cache import cases as cache
from tests.ops.case import Case
from tests.ops.draft import cases as draft
from tests.ops.draft import tree_cases
from tests.ops.sample import cases as sample
from tests.ops.schedule import cases as schedule

CALLS: dict[str, Callable[[], Any]] = {}
_BUDGETS: dict[str, Mapping[str, Budget]] = {}
_CLAIMS: dict[str, Mapping[str, tuple[str, ...]]] = {}


def _launch(case: Case) -> None:
    case.op("triton", *case.values("meta"))


for _family in (attention, accept, sample, cache, schedule, draft, tree_cases):
    CALLS |= {str(case): partial(_launch, case) for case in _family.SHIPPED}
    _BUDGETS |= _family.BUDGETS
    _CLAIMS |= _family.CLAIMS


def shipped_kernels(calls: Sequence[str] = tuple(CALLS)) -> tuple[KernelEntry, ...]:
    """The entries of some calls, by default of all; a launch that two calls share is the first one's.

    Needs triton, and TRITON_INTERPRET=1 where there is no GPU: the ops refuse to launch kernels that could not run.
    """
    entries: list[KernelEntry] = []
    seen: list[Any] = []
    for call in CALLS:
        with recorded_launches() as launches:
            CALLS[call]()
        counts: dict[str, int] = {}
        for launch in launches:
            function = launch.kernel.fn.__name__
            counts[function] = counts.get(function, 0) + 1
            number = f" {counts[function]}" if counts[function] > 1 else ""
            entry = entry_of_launch(
                f"{call}: {function.removesuffix('_kernel')}{number}",
                launch,
                _BUDGETS.get(function, {}),
                _CLAIMS.get(f"{call}: {function}", _CLAIMS.get(function)) if "50257" not in call else None,
            )
            compiled = (entry.kernel, entry.signature, entry.constexprs, entry.aligned, entry.num_warps)
            if compiled not in seen:
                seen.append(compiled)
                if call in calls:
                    entries.append(entry)
    return tuple(entries)
