"""The kernels of ``accept`` in Triton's interpreter: the same decisions as the reference, on every kind of input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.accept import accept_workspace
from dspark.ops.accept.launch import workspace_bytes
from dspark.ops.launch import RowConfig
from dspark.ops.types import DenseQ, DraftDistribution, PointMass, Rule, Sampling, SparseQ, Status, Verdict
from dspark.testing.traffic import counted_traffic
from tests.ops.chains import MIXED_LENGTHS, RULES, assert_same, make_batch, mixed_sampling, randn
from tests.ops.helpers import make_sampling, select, verify, verify_cut
from tests.tolerances import LOGPROBS

pytestmark = pytest.mark.triton

TINY = RowConfig(block_rows=2, block_vocab=16, block_sub=4, num_warps=4)
INF = float("inf")
NAN = float("nan")
Q_KINDS = ("dense", "mapped", "sparse", "point")


def empty_verdict(num_requests: int, nodes: int) -> Verdict:
    """A verdict that holds what no op would write."""
    tokens = torch.full((num_requests, nodes), -77)
    number = torch.full((num_requests,), -77)
    return Verdict(tokens, number, tokens.clone(), torch.full((num_requests, nodes), NAN), number.clone())


def run(arguments: dict[str, Any], config: RowConfig | None = TINY, workspace: Tensor | None = None) -> Verdict:
    """What the kernels say, cut as ``config`` says."""
    out = empty_verdict(arguments["position"].shape[0], arguments["max_query_len"])
    return verify_cut(arguments, out, config, workspace)


def assert_agrees(arguments: dict[str, Any], config: RowConfig | None = TINY) -> Verdict:
    """The kernels and the reference decide alike; log-probabilities agree to rounding."""
    expected = verify(**arguments, backend="reference")
    out = run(arguments, config)
    for name in ("tokens", "num_emitted", "path", "status"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    torch.testing.assert_close(out.logprobs, expected.logprobs, rtol=0, atol=LOGPROBS)
    return out


def make_q(kind: str, num_requests: int, drafts: int, vocab_size: int, seed: int) -> DraftDistribution:
    if kind == "dense":
        return DenseQ(randn(num_requests, drafts, vocab_size, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    if kind == "mapped":
        width = max(1, vocab_size // 2)
        ids = torch.full((vocab_size,), -1, dtype=torch.int32)
        ids[torch.randperm(vocab_size, generator=generator)[:width]] = torch.arange(width, dtype=torch.int32)
        return DenseQ(randn(num_requests, drafts, width, seed=seed), ids)
    if kind == "sparse":
        count = min(3, vocab_size)
        order = torch.rand(num_requests, drafts, vocab_size, generator=generator).argsort(-1)
        tokens = order[..., :count].contiguous()
        logprobs = randn(num_requests, drafts, count, seed=seed).log_softmax(-1)
        return SparseQ(
            torch.cat([tokens, tokens.new_full((num_requests, drafts, 1), -1)], -1),
            torch.nn.functional.pad(logprobs, (0, 1)),
        )
    return PointMass()


def problem(
    lengths: list[int],
    vocab_size: int,
    sampling: Sampling,
    rule: Rule,
    *,
    q: str = "dense",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    agree: float = 0.7,
) -> dict[str, Any]:
    """Arguments of ``accept``; a share ``agree`` of the drafts are the target's most likely tokens."""
    num_rows, nodes = sum(lengths), max(1, *lengths)
    generator = torch.Generator().manual_seed(seed)
    logits = randn(num_rows, vocab_size, seed=seed).to(dtype)
    drafts = torch.randint(vocab_size, (num_rows,), generator=generator)
    likely = logits.float().argmax(-1).roll(1)
    return {
        "target_logits": logits,
        "tokens": torch.where(torch.rand(num_rows, generator=generator) < agree, likely, drafts),
        "query_start": torch.tensor([0, *lengths]).cumsum(0),
        "rule": rule,
        "sampling": sampling,
        "position": torch.arange(len(lengths)) * 13 + 5,
        "max_query_len": nodes,
        "q": make_q(q, len(lengths), nodes, vocab_size, seed + 1) if rule in ("ratio", "block") else None,
        "logprobs": "raw",
    }


CASES = [(rule, "dense") for rule in ("coupled", "match")] + [(r, q) for r in ("ratio", "block") for q in Q_KINDS]


@pytest.mark.parametrize(("rule", "q"), CASES)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    vocab_size=st.integers(1, 40),
    temperature=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.7]), min_size=4, max_size=4),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    logprobs=st.sampled_from(["raw", "processed"]),
)
def test_decides_as_the_reference(
    rule: Rule,
    q: str,
    lengths: list[int],
    vocab_size: int,
    temperature: list[float],
    seed: int,
    dtype: torch.dtype,
    logprobs: str,
) -> None:
    sampling = make_sampling(temperature[: len(lengths)], seed=[seed + i for i in range(len(lengths))])
    arguments = problem(lengths, vocab_size, sampling, rule, q=q, seed=seed, dtype=dtype)
    assert_agrees(arguments | {"logprobs": logprobs})


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=4)
@given(
    vocab_size=st.integers(1, 40),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 0.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 10_000),
    logprobs=st.sampled_from(["raw", "processed"]),
)
def test_decides_as_the_reference_under_truncation(
    rule: Rule, vocab_size: int, top_k: int, top_p: float, min_p: float, seed: int, logprobs: str
) -> None:
    sampling = make_sampling([0.8, 0.0, 1.2], [top_k, 2, 0], [top_p, 0.5, 1.0], min_p, seed=[seed, 1, 2])
    sampling = sampling._replace(any_truncation=True)
    arguments = problem([2, 1, 2], vocab_size, sampling, rule, seed=seed, dtype=torch.float16)
    assert_agrees(arguments | {"logprobs": logprobs})


@pytest.mark.parametrize("rule", RULES)
def test_shipped_configuration_through_the_public_op(rule: Rule) -> None:
    vocab_size = 5000  # two tiles, the second one ragged
    arguments = problem([3, 0, 2], vocab_size, make_sampling([1.0, 1.0, 0.0], seed=[3, 4, 5]), rule)
    expected = verify(**arguments, backend="reference")
    verdict = verify(**arguments, backend="triton")
    for name in ("tokens", "num_emitted", "path", "status"):
        assert torch.equal(getattr(verdict, name), getattr(expected, name)), name


@pytest.mark.parametrize(("rule", "q"), [("coupled", "dense"), pytest.param("ratio", "point", marks=pytest.mark.slow)])
def test_a_vocabulary_of_262144(rule: Rule, q: str) -> None:
    sampling = make_sampling([1.0], seed=[3])
    assert_agrees(problem([2], 262_144, sampling, rule, q=q, dtype=torch.float16, agree=0.0), config=None)


@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_rows(rule: Rule) -> None:
    arguments = problem([3, 2], 40, make_sampling([1.0, 0.7], seed=[1, 2]), rule, dtype=torch.bfloat16)
    if rule in ("ratio", "block"):
        arguments["q"] = DenseQ(arguments["q"].logits.bfloat16())
    assert_agrees(arguments)


@pytest.mark.parametrize("rule", RULES)
def test_strided_rows(rule: Rule) -> None:
    arguments = problem([3, 2], 20, make_sampling([1.0, 0.0], seed=[1, 2]), rule)
    expected = run(arguments)
    wide = randn(5, 3, 24, seed=9)
    wide[:, 1, :20] = arguments["target_logits"]
    arguments["target_logits"] = wide[:, 1, :20]
    if arguments["q"] is not None:
        drafts = randn(2, 2, 2 * 3, 24, seed=9)
        drafts[:, 1, ::2, :20] = arguments["q"].logits
        arguments["q"] = DenseQ(drafts[:, 1, ::2, :20])
    assert_same(run(arguments), expected)


@pytest.mark.parametrize("rule", RULES)
def test_sampled_and_greedy_requests_of_one_batch(rule: Rule) -> None:
    for sampling in (mixed_sampling(top_k=0, top_p=1.0), mixed_sampling(top_p=1.0)):
        batch = make_batch(MIXED_LENGTHS, sampling, rule=rule, vocab_size=24)
        verdict = batch.accept(rule, backend="triton")
        expected = batch.accept(rule, backend="reference")
        assert torch.equal(verdict.tokens, expected.tokens)
        assert torch.equal(verdict.num_emitted, expected.num_emitted)


@pytest.mark.parametrize(("rule", "q"), CASES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_target_rows_end_their_request_alone(rule: Rule, q: str, value: float, temperature: float) -> None:
    sampling = make_sampling([temperature] * 3, seed=[1, 2, 3])
    arguments = problem([3, 3, 2], 20, sampling, rule, q=q, agree=1.0)
    before = run(arguments)
    bad = arguments["target_logits"].clone()
    bad[4, :] = value if value == -INF else bad[4]
    bad[4, 17] = value
    verdict = assert_agrees(arguments | {"target_logits": bad})
    for field in Verdict._fields:
        for r in (0, 2):
            assert torch.equal(getattr(verdict, field)[r], getattr(before, field)[r]), field
    assert verdict.num_emitted[1] == min(int(before.num_emitted[1]), 1)
    assert (verdict.status[1] == Status.BAD_LOGITS) == (before.num_emitted[1] > 1)
    assert ((verdict.tokens >= -1) & (verdict.tokens < 20)).all()


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("q", ["dense", "mapped", "sparse"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_p05_bad_draft_rows_reject_their_draft(rule: Rule, q: str, value: float) -> None:
    arguments = problem([4, 4], 20, make_sampling([1.0, 1.0], seed=[1, 2]), rule, q=q, agree=1.0)
    given_q = arguments["q"]
    values = (given_q.logits if isinstance(given_q, DenseQ) else given_q.logprobs).clone()
    values[0, 1] = value
    arguments["q"] = given_q._replace(**{"logits" if isinstance(given_q, DenseQ) else "logprobs": values})
    verdict = assert_agrees(arguments)
    assert verdict.num_emitted[0] <= 2
    assert verdict.status.tolist() == [Status.OK, Status.OK]


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_p07_ids_outside_the_vocabulary_are_never_an_index(rule: Rule, q: str) -> None:
    arguments = problem([3, 3, 3], 20, make_sampling([1.0, 0.0, 1.0], seed=[1, 2, 3]), rule, q=q)
    arguments["tokens"] = torch.tensor([-1, -1, 20, -1, 2**40, 3, -(2**40), 19, -1])
    if q == "sparse" and arguments["q"] is not None:
        tokens = arguments["q"].tokens.clone()
        tokens[:, 0, 0], tokens[:, 1, 0] = -(2**40), 2**40
        arguments["q"] = arguments["q"]._replace(tokens=tokens)
    if q == "mapped" and arguments["q"] is not None:
        ids = arguments["q"].draft_ids.clone()
        ids[:3] = torch.tensor([-5, 2**30, -(2**30)], dtype=torch.int32)
        arguments["q"] = arguments["q"]._replace(draft_ids=ids)
    verdict = assert_agrees(arguments)
    assert (verdict.num_emitted <= 2).all()


def test_p06_rows_beyond_32_bit_offsets() -> None:
    vocab_size, stride = 24, 2**30
    arguments = problem([3, 1], vocab_size, make_sampling([1.0, 1.0], 5, seed=[1, 2]), "coupled", dtype=torch.float16)
    expected = run(arguments)
    # Never touched but in these few places, so the memory is not really there.
    far = torch.empty(3 * stride + vocab_size, dtype=torch.float16).as_strided((4, vocab_size), (stride, 1))
    far.copy_(arguments["target_logits"])
    assert_same(run(arguments | {"target_logits": far}), expected)


def take(arguments: dict[str, Any], order: list[int], pad: int, nodes: int) -> dict[str, Any]:
    """A call of the requests of ``order`` (-1: one without rows), then ``pad`` rows that belong to nobody."""
    start, logits = arguments["query_start"].tolist(), arguments["target_logits"]
    counts = [start[r + 1] - start[r] if r >= 0 else 0 for r in order]
    rows = [i for r in order if r >= 0 for i in range(start[r], start[r + 1])]
    index = torch.tensor([max(r, 0) for r in order])
    q = arguments["q"]
    if isinstance(q, DenseQ):
        q = DenseQ(q.logits[index], q.draft_ids)
    elif isinstance(q, SparseQ):
        q = SparseQ(q.tokens[index], q.logprobs[index])
    return arguments | {
        "target_logits": torch.cat([logits[rows], torch.full((pad, logits.shape[1]), NAN, dtype=logits.dtype)]),
        "tokens": torch.cat([arguments["tokens"][rows], torch.full((pad,), -1)]),
        "query_start": torch.tensor([0, *counts]).cumsum(0),
        "sampling": select(arguments["sampling"], index),
        "position": arguments["position"][index],
        "max_query_len": nodes,
        "q": q,
    }


BATCHES = [([-1, 1, 2, -1, 0], 5, 9), ([0], 0, 3), ([3], 0, 1)]
"""Requests, padded rows, and ``max_query_len``."""


def often(rule: Rule, q: str, top_k: int | list[int]) -> Any:
    """A case for every run where it is of the usual form, else one for the long run."""
    usual = q == "dense" and (top_k == 0 or rule in ("coupled", "ratio"))
    return pytest.param(rule, q, top_k, marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize(
    ("rule", "q", "top_k"),
    [*(often(*case, 0) for case in CASES), *(often(rule, "dense", [4, 0, 0, 0]) for rule in RULES)],
)
def test_p19_a_request_is_bitwise_the_same_in_any_batch(rule: Rule, q: str, top_k: int | list[int]) -> None:
    """Alone, permuted, padded, and beside requests with more drafts (contract C8)."""
    sampling = make_sampling([1.0, 0.0, 0.7, 1.3], top_k, seed=[4, 5, 6, 7])
    arguments = problem([3, 2, 4, 1], 40, sampling, rule, q=q, agree=0.9, dtype=torch.float16)
    if rule in ("ratio", "block"):
        arguments["q"] = make_q(q, 4, 8, 40, seed=2)
    config = RowConfig(block_rows=16, block_vocab=16, block_sub=8, num_warps=4)
    together = run(arguments, config)
    for order, pad, nodes in BATCHES:
        verdict = run(take(arguments, order, pad, nodes), config)
        for i, r in enumerate(order):
            if r < 0:
                assert verdict.num_emitted[i] == 0
                assert verdict.status[i] == Status.OK
                continue
            for field in Verdict._fields:
                mine, theirs = getattr(verdict, field)[i], getattr(together, field)[r]
                if mine.ndim:
                    mine, theirs = mine[:4], theirs[:nodes]
                assert torch.equal(mine, theirs), (field, order, nodes, i)


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_a_workspace_of_the_stated_size_serves_and_nothing_beyond_it_is_touched(rule: Rule, q: str) -> None:
    arguments = problem([3, 0, 2], 40, make_sampling([1.0, 1.0, 0.7], seed=[4, 5, 6]), rule, q=q)
    width = arguments["q"].logits.shape[-1] if isinstance(arguments["q"], DenseQ) else 40
    needed = workspace_bytes(3, 3, 40, width, rule, TINY)
    buffer = torch.full((needed + 64,), 0xA5, dtype=torch.uint8)
    assert_same(run(arguments, workspace=buffer[:needed]), run(arguments))
    assert (buffer[needed:] == 0xA5).all()
    with pytest.raises(ValueError, match=r"workspace: expected shape \"bytes\" with bytes >= "):
        run(arguments, workspace=buffer[: needed - 1])


def test_public_workspace_size_is_what_the_shipped_configuration_takes() -> None:
    arguments = problem([2, 1], 40, make_sampling([1.0, 1.0], seed=[4, 5]), "ratio")
    workspace = torch.empty(accept_workspace(2, 2, 40, rule="ratio"), dtype=torch.uint8)
    verdict = verify(**arguments, workspace=workspace, backend="triton")
    assert_same(verdict, verify(**arguments, backend="triton"))


@pytest.mark.parametrize("rule", RULES)
def test_out_is_written_and_returned(rule: Rule) -> None:
    arguments = problem([2, 1], 20, make_sampling([1.0, 0.0], seed=[4, 5]), rule)
    for backend in ("reference", "triton"):
        out = empty_verdict(2, 2)
        assert verify(**arguments, out=out, backend=backend) is out
        assert_same(out, verify(**arguments, backend=backend))


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_rows_beyond_max_query_len_are_ignored_and_their_drafts_not_read(rule: Rule, q: str) -> None:
    arguments = problem([3, 2], 20, make_sampling([1.0, 1.0], seed=[4, 5]), rule, q=q, agree=1.0)
    arguments["max_query_len"] = 2
    if rule in ("ratio", "block"):
        arguments["q"] = make_q(q, 2, 1, 20, seed=7)
    verdict = assert_agrees(arguments)
    assert verdict.num_emitted.max() <= 2
    if q == "dense":
        rows = torch.tensor([0, 1, 3, 4])
        fewer = {name: arguments[name][rows] for name in ("target_logits", "tokens")}
        with counted_traffic() as all_rows:
            run(arguments)
        with counted_traffic() as two_rows:
            run(arguments | fewer | {"query_start": torch.tensor([0, 2, 4])})
        assert all_rows.read == two_rows.read


def test_without_rows_or_requests() -> None:
    nothing = problem([0, 0], 20, make_sampling([1.0, 1.0]), "ratio")
    verdict = run(nothing)
    assert verdict.num_emitted.tolist() == [0, 0]
    assert verdict.tokens.tolist() == [[-1], [-1]]
    assert verdict.status.tolist() == [0, 0]
