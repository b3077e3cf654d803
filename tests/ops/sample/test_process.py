"""Logits processors: against transformers and vLLM's formula, the kernel against the reference, prefix by prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from dspark.ops import Processors, Rows, count_tokens, process_logits
from dspark.ops.op import OPS
from dspark.ops.sample.process_launch import ProcessConfig, process_config

INF = float("inf")
NAN = float("nan")
VOCAB = 37
TINY = ProcessConfig(block_v=32, num_warps=1)


@dataclass(frozen=True)
class Asked:
    """One request: what it has seen and emitted, the drafts that follow, and what it asks for."""

    prompt: list[int]
    emitted: list[int]
    drafts: list[int]
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()

    @property
    def anchor(self) -> int:
        return (self.prompt + self.emitted)[-1]


REQUESTS = [
    Asked([3, 4, 3], [9, 9, 1], [1, 9, 20], repetition=1.3, presence=0.5, frequency=0.25),
    Asked([7], [], [7, 8], repetition=0.8, min_new_tokens=2, eos=(5, 6), banned=(0, 11)),
    Asked([1, 2], [2], [], presence=-0.4, banned=(36,)),
    Asked([30, 31], [32, 33, 34], [30, -1, 35, 35], frequency=1.5, min_new_tokens=5, eos=(30,)),
    Asked([10] * 5, [10], [10, 10], repetition=2.0, frequency=-0.5, min_new_tokens=9, eos=(2,), banned=(1, 2, 3)),
]


def padded(lists: list[tuple[int, ...]]) -> Tensor:
    width = max(len(row) for row in lists)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in lists], dtype=torch.int64)


def processors_of(requests: list[Asked], vocab: int = VOCAB) -> Processors:
    counts = torch.zeros(len(requests), vocab, dtype=torch.int32)
    prompt_mask = torch.zeros(len(requests), vocab, dtype=torch.bool)
    for r, request in enumerate(requests):
        for token in request.emitted:
            counts[r, token] += 1
        prompt_mask[r, request.prompt] = True
    return Processors(
        output_counts=counts,
        prompt_mask=prompt_mask,
        repetition_penalty=torch.tensor([r.repetition for r in requests]),
        presence_penalty=torch.tensor([r.presence for r in requests]),
        frequency_penalty=torch.tensor([r.frequency for r in requests]),
        min_new_tokens=torch.tensor([r.min_new_tokens for r in requests]),
        num_emitted=torch.tensor([len(r.emitted) for r in requests]),
        eos_tokens=padded([r.eos for r in requests]),
        banned_tokens=padded([r.banned for r in requests]),
    )


def made_rows(tokens: Tensor, query_start: Tensor, max_query_len: int) -> Rows:
    """Rows whose anchors stand anywhere: no processor asks where."""
    return Rows(tokens, query_start, torch.zeros(len(query_start) - 1, dtype=torch.int64), max_query_len)


def rows_of(requests: list[Asked]) -> Rows:
    """The ragged rows of the requests."""
    chains = [[r.anchor, *r.drafts] for r in requests]
    lengths = [len(chain) for chain in chains]
    tokens = torch.tensor([token for chain in chains for token in chain])
    return made_rows(tokens, torch.tensor([0, *lengths]).cumsum(0), max(lengths))


def pack(allowed: list[set[int]], vocab: int = VOCAB) -> Tensor:
    """Bitmasks as XGrammar packs them, one row for each set."""
    words = torch.zeros(len(allowed), -(-vocab // 32), dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= 1 << (token % 32)
    return words.where(words < 2**31, words - 2**32).int()


def expected_row(scores: Tensor, request: Asked, num_drafts: int) -> Tensor:
    """One row by transformers' processors, and by the formula of vLLM's penalties for the two that it lacks."""
    output = request.emitted + request.drafts[:num_drafts]
    known = [token for token in request.prompt + output if token >= 0]
    x = RepetitionPenaltyLogitsProcessor(request.repetition)(torch.tensor([known]), scores[None].float())
    counts = torch.bincount(torch.tensor([t for t in output if t >= 0], dtype=torch.int64), minlength=len(scores))
    x = x - request.frequency * counts - request.presence * (counts > 0)
    masks = LogitsProcessorList()
    if request.eos:
        masks.append(
            MinNewTokensLengthLogitsProcessor(
                len(request.prompt), request.min_new_tokens, torch.tensor(request.eos), device="cpu"
            )
        )
    if request.banned:
        masks.append(NoBadWordsLogitsProcessor([[token] for token in request.banned]))
        masks.append(SuppressTokensLogitsProcessor(list(request.banned)))
    return masks(torch.tensor([request.prompt + output]), x)[0]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, except that one NaN is as good as another."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(torch.int32), b.masked_fill(nan, 0).view(torch.int32)
    )


BACKENDS = ["reference", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_p14_rows_equal_transformers_and_vllm(dtype: torch.dtype, backend: Any) -> None:
    rows = rows_of(REQUESTS)
    logits = randn(len(rows.tokens), VOCAB).to(dtype)
    result = process_logits(logits, rows, processors=processors_of(REQUESTS), backend=backend)
    assert result.dtype == torch.float32
    for r, request in enumerate(REQUESTS):
        for i in range(1 + len(request.drafts)):
            row = int(rows.query_start[r]) + i
            assert torch.equal(result[row], expected_row(logits[row], request, i)), (r, i)


@pytest.mark.parametrize("backend", BACKENDS)
def test_p14_a_row_is_what_plain_decoding_gives_after_the_same_tokens(backend: Any) -> None:
    """One token at a time, the state advanced by each, equals the ragged batch bit for bit."""
    rows = rows_of(REQUESTS)
    logits, processors = randn(len(rows.tokens), VOCAB), processors_of(REQUESTS)
    batch = process_logits(logits, rows, processors=processors, backend=backend)
    for r, request in enumerate(REQUESTS):
        state = processors_of([request])
        assert state.output_counts is not None
        assert state.num_emitted is not None
        for i in range(1 + len(request.drafts)):
            row = rows.query_start[r] + i
            alone = process_logits(
                logits[row][None], made_rows(rows.tokens[row][None], torch.tensor([0, 1]), 1), processors=state
            )
            assert same_bits(batch[row][None], alone), (r, i)
            if i < len(request.drafts):
                count_tokens(state.output_counts, rows.tokens[row + 1].view(1, 1), torch.tensor([1]))
                state.num_emitted.add_(1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_p14_later_drafts_do_not_count(backend: Any) -> None:
    rows = rows_of(REQUESTS)
    logits, processors = randn(len(rows.tokens), VOCAB), processors_of(REQUESTS)

    def result(tokens: Tensor) -> Tensor:
        return process_logits(logits, rows._replace(tokens=tokens), processors=processors, backend=backend)

    before = result(rows.tokens)
    for r, request in enumerate(REQUESTS):
        for i in range(1, 1 + len(request.drafts)):
            row = int(rows.query_start[r]) + i
            after = result(rows.tokens.index_fill(0, torch.tensor([row]), 17))
            changed = (after != before).any(-1).nonzero().flatten().tolist()
            assert set(changed) <= set(range(row, int(rows.query_start[r + 1]))), (r, i)
            if request.frequency and rows.tokens[row] != 17:
                assert row in changed


@pytest.mark.parametrize("backend", BACKENDS)
def test_p18_each_row_has_its_own_mask(backend: Any) -> None:
    """Ragged lengths, an empty request among them: row t allows token t alone."""
    lengths = [3, 0, 1, 5, 2]
    query_start = torch.tensor([0, *lengths]).cumsum(0)
    num_rows = sum(lengths)
    mask = pack([{3 * t} for t in range(num_rows)])
    logits = randn(num_rows, VOCAB)
    result = process_logits(
        logits,
        made_rows(torch.zeros(num_rows, dtype=torch.int64), query_start, 5),
        processors=Processors(allowed_mask=mask),
        backend=backend,
    )
    expected = torch.full_like(logits, -INF)
    for t in range(num_rows):
        expected[t, 3 * t] = logits[t, 3 * t]
    assert torch.equal(result, expected)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged batches with any subset of the processors, ids outside the vocabulary, odd numbers and padded rows."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    vocab = draw(st.sampled_from([1, 5, 32, 33, 64, 70]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    R, T = len(lengths), max(1, sum(lengths) + draw(st.integers(0, 2)))
    wide = 3 * torch.randn(T, vocab + draw(st.sampled_from([0, 3, 16])), generator=generator)
    strange = torch.tensor([0.0, -0.0, NAN, INF, -INF])
    if draw(st.booleans()):
        wide = torch.where(
            torch.rand(wide.shape, generator=generator) < 0.1, strange[integers(0, 5, *wide.shape)], wide
        )
    logits = wide.to(draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))[:, :vocab]
    everything = Processors(
        output_counts=integers(0, 3, R, vocab, dtype=torch.int32),
        prompt_mask=integers(0, 2, R, vocab, dtype=torch.bool),
        repetition_penalty=uniform(0.5, 2.0, R),
        presence_penalty=uniform(-2, 2, R),
        frequency_penalty=uniform(-2, 2, R),
        min_new_tokens=integers(0, 6, R),
        num_emitted=integers(0, 4, R),
        eos_tokens=integers(-1, vocab + 1, R, 2),
        banned_tokens=integers(-1, vocab + 1, R, draw(st.integers(0, 2))),
        allowed_mask=integers(-(2**31), 2**31, T, -(-vocab // 32), dtype=torch.int32),
    )
    off = draw(st.sets(st.sampled_from(["prompt_mask", *OPTIONAL])))
    return {
        "logits": logits,
        "rows": made_rows(
            integers(-1, min(vocab, 6) + 1, T), torch.tensor([0, *lengths]).cumsum(0), draw(st.integers(1, 4))
        ),
        "processors": everything._replace(**dict.fromkeys(off)),
    }


OPTIONAL = [
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "banned_tokens",
    "allowed_mask",
]


@given(problem=problems())
def test_kernel_equals_reference_bit_for_bit(problem: dict[str, Any]) -> None:
    expected = process_logits(**problem, backend="reference")
    guarded = torch.full((len(expected), expected.shape[1] + 8), 123.0)
    out = guarded[:, : expected.shape[1]].fill_(NAN)
    OPS["process_logits"]("triton", *problem.values(), out, config=TINY)
    assert same_bits(out, expected)
    assert (guarded[:, expected.shape[1] :] == 123).all()


@given(problem=problems())
def test_c8_a_request_alone_gives_the_same_rows(problem: dict[str, Any]) -> None:
    together = process_logits(**problem)
    batch: Rows = problem["rows"]
    start = batch.query_start.tolist()
    for r in range(len(start) - 1):
        rows = slice(start[r], start[r + 1])
        own = {
            name: value[rows] if name == "allowed_mask" else value[r : r + 1]
            for name, value in problem["processors"]._asdict().items()
            if value is not None
        }
        alone = process_logits(
            problem["logits"][rows],
            made_rows(batch.tokens[rows], torch.tensor([0, start[r + 1] - start[r]]), batch.max_query_len),
            processors=Processors(**own),
        )
        assert same_bits(together[rows], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_no_request_are_copied(backend: Any) -> None:
    logits = randn(7, VOCAB)
    result = process_logits(
        logits,
        made_rows(torch.zeros(7, dtype=torch.int64), torch.tensor([0, 0, 3, 5]), 2),
        processors=Processors(banned_tokens=torch.arange(VOCAB).expand(3, -1).contiguous()),
        backend=backend,
    )
    assert (result[[0, 1, 3, 4]] == -INF).all()
    assert torch.equal(result[[2, 5, 6]], logits[[2, 5, 6]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_that_asks_for_nothing_keeps_its_logits(backend: Any) -> None:
    requests = [REQUESTS[0], Asked([3], [4, 4], [4, 5]), REQUESTS[3]]
    rows = rows_of(requests)
    logits = randn(len(rows.tokens), VOCAB)
    logits[4:7, :5] = torch.tensor([NAN, INF, -INF, -0.0, 0.0])
    result = process_logits(logits, rows, processors=processors_of(requests), backend=backend)
    assert same_bits(result[4:7], logits[4:7])


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_be_the_logits(backend: Any) -> None:
    rows = rows_of(REQUESTS)
    logits, processors = randn(len(rows.tokens), VOCAB), processors_of(REQUESTS)
    expected = process_logits(logits, rows, processors=processors)
    given_logits = logits.clone()
    for out in (torch.full_like(logits, NAN), given_logits):
        result = process_logits(given_logits, rows, processors=processors, out=out, backend=backend)
        assert result is out
        assert same_bits(out, expected)


def test_c7_counting_reads_nothing_on_the_host() -> None:
    """Fake tensors have no values: reading one raises."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        counts = torch.zeros(5, VOCAB, dtype=torch.int32)
        num = mode.from_tensor(torch.tensor([3, 1, 0, 2, 1]))
        count_tokens(counts, torch.empty(5, 3, dtype=torch.int64), num)
    assert counts.shape == (5, VOCAB)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"output_counts": torch.zeros(2, 6)}, TypeError, "output_counts: expected dtype int32, got float32"),
        ({"tokens": torch.zeros(3, 4).long()}, ValueError, 'tokens: expected shape "R N" with R = 2'),
        ({"num": torch.zeros(2)}, TypeError, "num: expected dtype int64, got float32"),
    ],
)
def test_counting_names_a_bad_argument(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"output_counts": torch.zeros(2, 6, dtype=torch.int32), "tokens": torch.zeros(2, 4).long()}
    with pytest.raises(error, match=message):
        count_tokens(**(given | {"num": torch.zeros(2).long()} | changes))


ALL = processors_of(REQUESTS)._replace(allowed_mask=pack([{1}] * sum(1 + len(request.drafts) for request in REQUESTS)))


@given(
    tokens=st.lists(st.lists(st.integers(-2, 7), min_size=4, max_size=4), min_size=1, max_size=3),
    num=st.lists(st.integers(0, 5), min_size=3, max_size=3),
)
def test_p07_counting_skips_padding(tokens: list[list[int]], num: list[int]) -> None:
    counts = torch.ones(len(tokens), 6, dtype=torch.int32)
    count_tokens(counts, torch.tensor(tokens), torch.tensor(num[: len(tokens)]))
    expected = [[1 + row[:n].count(v) for v in range(6)] for row, n in zip(tokens, num, strict=False)]
    assert counts.tolist() == expected


@pytest.mark.parametrize(("vocab", "block_v"), [(1, 128), (200, 256), (2048, 2048), (50257, 2048), (262144, 2048)])
def test_the_config_depends_on_the_vocabulary_alone(vocab: int, block_v: int) -> None:
    config = process_config(vocab)
    assert config.block_v == block_v
    assert 1 <= config.num_warps <= 4
