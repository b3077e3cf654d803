"""The ops on the paged cache as ``torch.ops.dspark``: opcheck, and one graph under ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.ops import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.types import PagedKV

SLOTS = torch.tensor([5, -1, 0])
ROWS = torch.randn(3, 2, 4)
PATH = (torch.tensor([[0, 2]]), torch.tensor([2]), torch.tensor([0, 3]), torch.tensor([5, 3, 0]))
PAGES = (torch.tensor([1, -1]), torch.tensor([0, 1]))


def pages() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 4, 2, 4), torch.ones(2, 4, 2, 4)


ANGLE, WEIGHT, QUERIES = torch.ones(3, 1, 4), torch.ones(4), torch.randn(3, 6, 4)
CALLS: dict[str, Any] = {
    "append_kv": lambda k, v: (ROWS, ROWS, k, v, SLOTS, None, None, "reference"),
    "rope_append_kv": lambda k, v: (
        QUERIES,
        ROWS,
        ROWS,
        k,
        v,
        SLOTS,
        None,
        None,
        ANGLE,
        ANGLE,
        WEIGHT,
        None,
        1e-6,
        torch.zeros(3, 6, 4),
        "reference",
    ),
    "commit_kv": lambda k, v: (k, v, *PATH, "reference"),
    "copy_pages": lambda k, v: (k, v, *PAGES, "reference"),
}


@pytest.mark.parametrize("op", CALLS)
def test_opcheck(op: str) -> None:
    arguments = CALLS[op](*pages())
    found = torch.library.opcheck(getattr(torch.ops.dspark, op).default, arguments, raise_exception=False)
    assert set(found.values()) == {"SUCCESS"}, found


def test_a_step_compiles_as_one_graph() -> None:
    """Keys and values are halves of one buffer there, as in :class:`dspark.models.cache.PagedCache`."""

    def step(k: Tensor, q: Tensor, storage: Tensor) -> Tensor:
        kv = PagedKV(storage[0], storage[1])
        append_kv(k * 2, k, kv, SLOTS)
        out = rope_append_kv(q, k, k, kv, SLOTS + 1, cos=ANGLE, sin=ANGLE, k_norm=WEIGHT, eps=1e-6)
        commit_kv(kv, *PATH)
        copy_pages(kv, *PAGES)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    storage, expected = torch.zeros(2, 2, 2, 4, 2, 4)
    out = compiled(ROWS, QUERIES, storage)
    assert torch.equal(out, step(ROWS, QUERIES, expected))
    assert torch.equal(storage, expected)
    assert expected.any()
