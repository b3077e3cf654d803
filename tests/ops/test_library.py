"""``torch.ops.dspark``: opcheck, and graphs that ``torch.compile`` does not break."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops import (
    DenseQ,
    PointMass,
    Processors,
    Rule,
    Sampling,
    SparseQ,
    Verdict,
    accept,
    process_logits,
    sample,
    truncate,
)
from dspark.ops.library import rows as library
from dspark.ops.library.accept import flat_q, unflat_q
from tests.ops.accept.test_triton_accept import CASES, empty_verdict, problem
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


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_opcheck_accept(rule: Rule, q: str) -> None:
    a = problem([2, 0, 3], 20, SAMPLING, rule, q=q)
    out = empty_verdict(3, 3)
    out.logprobs.zero_()
    check(
        torch.ops.dspark.accept.default,
        a["target_logits"],
        a["tokens"],
        a["query_start"],
        rule,
        *library.flat(SAMPLING),
        a["position"],
        *flat_q(a["q"]),
        "raw",
        out.tokens,
        out.num_emitted,
        out.path,
        out.logprobs,
        out.status,
        None,
        "reference",
    )


@pytest.mark.parametrize(
    "q", [None, PointMass(), DenseQ(torch.zeros(1, 1, 2)), SparseQ(torch.zeros(1), torch.zeros(1))]
)
def test_a_draft_distribution_survives_flattening(q: Any) -> None:
    assert unflat_q(*flat_q(q)) == q


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_accept_compiles_as_one_graph(rule: Rule, q: str) -> None:
    arguments = problem([2, 0, 3], 20, SAMPLING, rule, q=q)

    def step(arguments: dict[str, Any]) -> Verdict:
        return accept(**arguments)

    expected, verdict = step(arguments), compiled(step)(arguments)
    for field in Verdict._fields:
        assert torch.equal(getattr(verdict, field), getattr(expected, field)), field


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
