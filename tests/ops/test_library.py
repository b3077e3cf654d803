"""``torch.ops.dspark``: opcheck, and graphs that ``torch.compile`` does not break."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops import Processors, Sampling, process_logits, sample, truncate
from dspark.ops.library import rows as library
from tests.ops.accept.test_triton_accept import problem
from tests.ops.helpers import make_sampling

SAMPLING = make_sampling([1.0, 0.0, 0.7], [0, 0, 3], seed=[1, 2, 3])


def check(op: Any, *arguments: Any) -> None:
    results = torch.library.opcheck(op, arguments, raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("stream", [0, 1])
def test_opcheck_sample(stream: int) -> None:
    logits, position = torch.randn(3, 40), torch.arange(3)
    out = torch.zeros(3, dtype=torch.int64)
    request = None if stream == 0 else torch.tensor([2, -1, 0])
    salt = None if stream == 0 else torch.arange(3)
    flat = library.flat(SAMPLING)
    check(torch.ops.dspark.sample.default, logits, *flat, position, request, stream, salt, out, None, "reference")


def test_opcheck_truncate() -> None:
    out = torch.zeros(3)
    arguments = (torch.randn(3, 40), *library.flat(SAMPLING), None, out, None, "reference")
    check(torch.ops.dspark.truncate.default, *arguments)


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_sample_and_truncate_compile_as_one_graph() -> None:
    logits, position = torch.randn(3, 40), torch.arange(3)

    def step(logits: torch.Tensor, position: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits * 2, sampling, position), truncate(logits * 2, sampling)

    for mine, theirs in zip(compiled(step)(logits, position, SAMPLING), step(logits, position, SAMPLING), strict=True):
        assert torch.equal(mine, theirs)


PENALISED = Processors(
    output_counts=torch.randint(3, (3, 20), dtype=torch.int32),
    repetition_penalty=torch.tensor([1.0, 1.2, 0.8]),
    banned_tokens=torch.tensor([[3, -1], [4, 5], [-1, -1]]),
)


def test_opcheck_process_logits() -> None:
    a = problem([2, 0, 3], 20, SAMPLING, "coupled")
    given = library._flat_processors(PENALISED)
    out = torch.zeros(5, 20)
    rows = (a["target_logits"], a["tokens"], a["query_start"])
    check(torch.ops.dspark.process_logits.default, *rows, given, 3, out, "reference")


def test_process_logits_compiles_as_one_graph() -> None:
    a = problem([2, 0, 3], 20, SAMPLING, "coupled")

    def step(logits: torch.Tensor) -> torch.Tensor:
        return process_logits(logits, a["tokens"], a["query_start"], processors=PENALISED, max_query_len=3)

    assert torch.equal(compiled(step)(a["target_logits"]), step(a["target_logits"]))
