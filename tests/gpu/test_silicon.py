"""The kernels on a GPU: the reference's decisions in every dtype, replayed graphs, memory that is left alone.

Run by ``benchmarks/gpu.sh``, or with ``DSPARK_TEST_DEVICE=cuda pytest tests/gpu``; skipped anywhere else.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.ops import DenseQ, DraftDistribution, PointMass, Rule, Sampling, SparseQ, Verdict, sample, truncate
from dspark.ops.accept import accept_workspace
from dspark.testing.guards import guarded
from tests.ops.helpers import make_sampling, verify
from tests.tolerances import LOGPROBS, SILICON_DECISIONS

pytestmark = pytest.mark.skipif(
    os.environ.get("DSPARK_TEST_DEVICE") != "cuda" or not torch.cuda.is_available(),
    reason="needs a GPU and DSPARK_TEST_DEVICE=cuda",
)

REQUESTS, NODES = 64, 8
CASES = [("coupled", "none"), ("match", "none")] + [
    (rule, q) for rule in ("ratio", "block") for q in ("dense", "sparse", "point")
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCABS = [1000, 32_000, 151_936]
LIKELY = 8.0


def make_q(kind: str, drafts: Tensor, vocab_size: int, dtype: torch.dtype, generator: torch.Generator) -> Any:
    if kind == "dense":
        scores = torch.randn(REQUESTS, NODES - 1, vocab_size, generator=generator)
        scores.scatter_(2, drafts.unsqueeze(2), LIKELY)
        return DenseQ(scores.to(dtype))
    if kind == "sparse":
        tokens = torch.cat([drafts.unsqueeze(2), (drafts.unsqueeze(2) + torch.arange(1, 8)) % vocab_size], 2)
        return SparseQ(tokens, torch.randn(tokens.shape, generator=generator).log_softmax(-1))
    return PointMass() if kind == "point" else None


def make_problem(
    rule: Rule, q: str, vocab_size: int, dtype: torch.dtype, *, truncated: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Arguments of ``accept`` on the CPU: a ragged batch in which drafts are likely but not certain."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, NODES + 1, (REQUESTS,), generator=generator)
    num_rows = int(lengths.sum())
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    likely = torch.randint(vocab_size, (num_rows,), generator=generator)
    logits[torch.arange(num_rows), likely] += LIKELY + 2
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = likely.roll(1)
    place = (query_start[:-1, None] + 1 + torch.arange(NODES - 1)).clamp(max=num_rows - 1)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.3]).repeat(REQUESTS // 4).tolist()
    sampling = make_sampling(temperature, 40 * truncated, 0.9 if truncated else 1.0, seed=list(range(REQUESTS)))
    return {
        "target_logits": logits.to(dtype),
        "tokens": tokens,
        "query_start": query_start,
        "rule": rule,
        "sampling": sampling,
        "position": torch.arange(REQUESTS) * 7 + 3,
        "max_query_len": NODES,
        "q": make_q(q, tokens[place], vocab_size, dtype, generator),
    }


def on_gpu(value: Any) -> Any:
    """A copy on the GPU, of a tensor or of a group of tensors."""
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, (Sampling, DenseQ, SparseQ, Verdict)):
        return type(value)(*map(on_gpu, value))
    return value


def run(arguments: dict[str, Any], **options: Any) -> Verdict:
    return verify(**{name: on_gpu(value) for name, value in arguments.items()}, backend="triton", **options)


def assert_agrees(verdict: Verdict, expected: Verdict) -> None:
    """All but a few requests decide alike; a few may, where an exponential is rounded the other way."""
    same = torch.ones(REQUESTS, dtype=torch.bool)
    for name in ("tokens", "num_emitted", "path", "status"):
        same &= (getattr(verdict, name).cpu() == getattr(expected, name)).view(REQUESTS, -1).all(1)
    assert (~same).float().mean() <= SILICON_DECISIONS, (~same).nonzero().flatten().tolist()
    difference = (verdict.logprobs.cpu() - expected.logprobs)[same].abs().max()
    assert difference <= LOGPROBS


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "q"), CASES)
def test_accept_decides_as_the_reference(rule: Rule, q: str, dtype: torch.dtype, vocab_size: int) -> None:
    arguments = make_problem(rule, q, vocab_size, dtype)
    verdict = run(arguments)
    assert_agrees(verdict, verify(**arguments, backend="reference"))
    assert (verdict.num_emitted > 1).any()


@pytest.mark.parametrize("rule", ["coupled", "match", "ratio", "block"])
def test_accept_decides_as_the_reference_under_truncation(rule: Rule) -> None:
    q = "dense" if rule in ("ratio", "block") else "none"
    arguments = make_problem(rule, q, 32_000, torch.bfloat16, truncated=True)
    assert_agrees(run(arguments), verify(**arguments, backend="reference"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_sample_and_truncate(vocab_size: int, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(REQUESTS, vocab_size, generator=torch.Generator().manual_seed(1))).to(dtype)
    sampling = make_sampling([0.0, 1.0] * (REQUESTS // 2), 40, 0.9, 0.01, seed=list(range(REQUESTS)))
    position = torch.arange(REQUESTS)
    tokens = sample(logits.cuda(), on_gpu(sampling), position.cuda(), backend="triton").cpu()
    expected = sample(logits, sampling, position, backend="reference")
    assert (tokens != expected).float().mean() <= SILICON_DECISIONS
    cut = truncate(logits.cuda(), on_gpu(sampling), backend="triton").cpu()
    scores = logits.float() / torch.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    kept = (scores >= cut[:, None]).sum(1)
    expected_kept = (scores >= truncate(logits, sampling, backend="reference")[:, None]).sum(1)
    assert (kept != expected_kept).float().mean() <= SILICON_DECISIONS


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_a_request_is_bitwise_the_same_alone(rule: Rule, q: str) -> None:
    arguments = make_problem(rule, q, 32_000, torch.bfloat16)
    together = run(arguments)
    start = arguments["query_start"].tolist()
    for r in (0, 1, 5, 63):
        rows = slice(start[r], start[r + 1])
        some: DraftDistribution | None = arguments["q"]
        if isinstance(some, DenseQ):
            some = DenseQ(some.logits[r : r + 1])
        elif isinstance(some, SparseQ):
            some = SparseQ(some.tokens[r : r + 1], some.logprobs[r : r + 1])
        sampling = arguments["sampling"]
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        alone = run(
            arguments
            | {
                "target_logits": arguments["target_logits"][rows],
                "tokens": arguments["tokens"][rows],
                "query_start": torch.tensor([0, start[r + 1] - start[r]]),
                "sampling": sampling._replace(**{name: getattr(sampling, name)[r : r + 1] for name in names}),
                "position": arguments["position"][r : r + 1],
                "q": some,
            }
        )
        for field in Verdict._fields:
            assert torch.equal(getattr(alone, field)[0], getattr(together, field)[r]), field


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_a_replayed_graph_is_the_eager_result(rule: Rule, q: str) -> None:
    """P12: the inputs are rotated under a captured round; the replay equals an eager call bit for bit."""
    rounds = [make_problem(rule, q, 32_000, torch.bfloat16, seed=seed) for seed in range(3)]
    num_rows = max(len(r["tokens"]) for r in rounds)
    for r in rounds:  # one shape: padded rows belong to nobody
        missing = num_rows - len(r["tokens"])
        r["target_logits"] = torch.cat([r["target_logits"], r["target_logits"].new_full((missing, 32_000), torch.nan)])
        r["tokens"] = torch.cat([r["tokens"], r["tokens"].new_full((missing,), -1)])
    static = {name: on_gpu(value) for name, value in rounds[0].items()}
    workspace = torch.empty(accept_workspace(REQUESTS, NODES, 32_000, rule=rule), dtype=torch.uint8, device="cuda")
    out = verify(**static, workspace=workspace, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify(**static, out=out, workspace=workspace, backend="triton")
    for r in rounds[1:] + rounds[:1]:
        for name, value in r.items():
            _copy_into(static[name], value)
        graph.replay()
        expected = run(r)
        for field in Verdict._fields:
            assert torch.equal(getattr(out, field), getattr(expected, field)), field


def _copy_into(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        target.copy_(source)
    elif isinstance(target, (Sampling, DenseQ, SparseQ)):
        for field in target._fields:
            _copy_into(getattr(target, field), getattr(source, field))


@pytest.mark.parametrize(("rule", "q"), CASES)
def test_nothing_around_the_buffers_is_written(rule: Rule, q: str) -> None:
    """Small, so that a memory checker can run it too."""
    arguments = make_problem(rule, q, 1000, torch.bfloat16)
    expected = run(arguments)
    logits = guarded(arguments["target_logits"].cuda(), row_gap=8)
    bands = {field: guarded(torch.zeros_like(getattr(expected, field))) for field in Verdict._fields}
    workspace = guarded(
        torch.zeros(accept_workspace(REQUESTS, NODES, 1000, rule=rule), dtype=torch.uint8, device="cuda")
    )
    out = Verdict(**{name: band.tensor for name, band in bands.items()})
    gpu = {name: on_gpu(value) for name, value in arguments.items()} | {"target_logits": logits.tensor}
    verify(**gpu, out=out, workspace=workspace.tensor, backend="triton")
    for band in (logits, workspace, *bands.values()):
        band.check()
    for field in Verdict._fields:
        assert torch.equal(getattr(out, field), getattr(expected, field)), field
