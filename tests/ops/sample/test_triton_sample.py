"""The kernels of ``sample`` and ``truncate`` in Triton's interpreter, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.launch import RowConfig, row_config, tiles_per_program
from dspark.ops.op import OPS
from dspark.ops.sample import sample, sample_workspace, statistics_launch, truncate
from dspark.ops.types import Sampling, Stream
from tests.ops.chains import randn
from tests.ops.helpers import make_sampling
from tests.tolerances import CUT

pytestmark = pytest.mark.triton

TINY = RowConfig(block_rows=2, block_vocab=16, block_sub=4, num_warps=4)
INF = float("inf")
NAN = float("nan")


def rows_of(
    logits: Tensor,
    sampling: Sampling,
    position: Tensor,
    request: Tensor | None = None,
    salt: Tensor | None = None,
    stream: Stream = Stream.TARGET,
) -> tuple[Any, ...]:
    return logits, sampling, position, request, stream, salt


def drawn(rows: tuple[Any, ...], config: RowConfig | None = TINY) -> Tensor:
    out: Tensor = OPS["sample"]("triton", *rows, torch.full(rows[0].shape[:1], -77), config=config)
    return out


def thresholds(logits: Tensor, sampling: Sampling, config: RowConfig | None = TINY) -> Tensor:
    out: Tensor = OPS["truncate"]("triton", logits, sampling, None, torch.full((len(logits),), NAN), config=config)
    return out


@settings(max_examples=15)
@given(
    request=st.lists(st.integers(-1, 2), min_size=1, max_size=6),
    vocab_size=st.integers(1, 40),
    temperature=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.7]), min_size=3, max_size=3),
    seed=st.integers(-(2**63), 2**63 - 4),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    stream=st.sampled_from([Stream.TARGET, Stream.DRAFT]),
    salted=st.booleans(),
)
def test_draws_as_the_reference(
    request: list[int],
    vocab_size: int,
    temperature: list[float],
    seed: int,
    dtype: torch.dtype,
    stream: Stream,
    salted: bool,
) -> None:
    count = len(request)
    logits = randn(count, vocab_size, seed=seed % 1000).to(dtype)
    sampling = make_sampling(temperature, seed=[seed, seed + 1, seed + 2])
    position = torch.arange(count) * 7 + 2**33
    salt = torch.arange(count) + 3 if salted else None
    of = torch.tensor(request)
    expected = sample(logits, sampling, position, request=of, stream=stream, salt=salt, backend="reference")
    assert torch.equal(drawn(rows_of(logits, sampling, position, of, salt, stream)), expected)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_p05_bad_rows_give_no_token_and_leave_others_alone(value: float) -> None:
    logits = randn(4, 20)
    sampling = make_sampling([1.0, 1.0, 0.0, 0.7], 6, seed=[1, 2, 3, 4])
    position = torch.arange(4)
    before = drawn(rows_of(logits, sampling, position))
    bad = logits.clone()
    bad[1:3] = value if value == -INF else bad[1:3]
    bad[1:3, 11] = value
    after = drawn(rows_of(bad, sampling, position))
    assert after.tolist() == [before[0], -1, -1, before[3]]
    assert torch.equal(after, sample(bad, sampling, position, backend="reference"))


def test_scores_that_overflow_make_a_bad_row() -> None:
    logits = torch.tensor([[1e30, 0.0], [1.0, 0.0]])
    sampling = make_sampling([1e-20, 1e-3], seed=[1, 2])
    position = torch.arange(2)
    assert drawn(rows_of(logits, sampling, position)).tolist() == [-1, 0]
    assert sample(logits, sampling, position, backend="reference").tolist() == [-1, 0]


def test_the_first_of_equal_logits_wins_across_tiles() -> None:
    logits = torch.zeros(2, 40)
    logits[:, [13, 14, 33]] = 2.0
    greedy = make_sampling([0.0, 0.0])
    assert drawn(rows_of(logits, greedy, torch.arange(2))).tolist() == [13, 13]


def test_noise_is_skipped_only_where_no_token_can_win() -> None:
    """The last tiles are far below the first ones, and more tiles per program mean more skipping."""
    vocab_size, count = 256, 3
    logits = randn(count, vocab_size, seed=3) - torch.arange(vocab_size) * 0.5
    sampling = make_sampling([1.0] * count, seed=[1, 2, 3])
    position = torch.arange(count)
    expected = sample(logits, sampling, position, backend="reference")
    assert torch.equal(drawn(rows_of(logits, sampling, position)), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics_launch, "tiles_per_program", lambda programs: 8)
        assert torch.equal(drawn(rows_of(logits, sampling, position)), expected)
        assert torch.equal(
            drawn(rows_of(logits.flip(1), sampling, position)),
            sample(logits.flip(1), sampling, position, backend="reference"),
        )


def test_configurations_depend_on_the_vocabulary_and_tile_counts_on_the_grid() -> None:
    assert row_config(1) == row_config(16)
    assert row_config(262_144).tiles(262_144) == 64
    assert [tiles_per_program(n) for n in (1, 4095, 4096, 10**6)] == [1, 1, 2, 8]


@settings(max_examples=20)
@given(
    data=st.lists(st.integers(-4, 4), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_top_k_thresholds_are_exact_on_ties(data: list[int], top_k: int, dtype: torch.dtype) -> None:
    logits = (torch.tensor([data]) * 0.75).to(dtype)
    sampling = make_sampling([0.8], top_k, seed=[1])
    assert torch.equal(thresholds(logits, sampling), truncate(logits, sampling, backend="reference"))


@settings(max_examples=20)
@given(
    vocab_size=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0, 0.2, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_thresholds_equal_the_reference(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, scale: float, seed: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    logits = randn(1, vocab_size, seed=seed, scale=scale).to(dtype)
    sampling = make_sampling([temperature], top_k, top_p, min_p, seed=[1])
    ours = thresholds(logits, sampling)
    theirs = truncate(logits, sampling, backend="reference")
    scores = logits.float() * (1 / (sampling.temperature if temperature > 0 else torch.ones(1)))
    differs = (scores >= ours[:, None]) != (scores >= theirs[:, None])
    if differs.any():  # only a token on the edge of top-p or min-p may go either way
        lower = torch.minimum(ours, theirs)
        probs = scores.double().masked_fill(scores < lower[:, None], -INF).softmax(-1)
        above = (probs * (scores > scores[differs].max())).sum()
        assert (above - top_p).abs() < CUT or (probs[differs] / probs.max() - min_p).abs().max() < CUT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_that_tie_though_their_logits_differ_are_kept_together(dtype: torch.dtype) -> None:
    """Top-k keeps both, so top-p is of the mass of both."""
    zeros = torch.tensor([[0.6931, 0.0, -0.0, -5.0]]).to(dtype)
    sampling = make_sampling([1.0], 2, 0.6, seed=[1])
    assert torch.equal(thresholds(zeros, sampling), truncate(zeros, sampling, backend="reference"))
    temperature = 0.7
    inverse = torch.ones(1) / temperature
    z = torch.linspace(0.5, 1.5, 4001)
    below = torch.nextafter(z, torch.zeros_like(z))
    z, below = (x[z * inverse == below * inverse] for x in (z, below))
    assert len(z) > 10
    merged = torch.stack([z + temperature * 0.6931, z, below, z - 9], 1)[:4]
    sampling = make_sampling([temperature] * 4, 2, 0.6, seed=[1, 2, 3, 4])
    assert torch.equal(thresholds(merged, sampling), truncate(merged, sampling, backend="reference"))


def test_strided_vectors_serve() -> None:
    logits, position = randn(3, 20, seed=5), torch.arange(6)
    spread = torch.tensor([1, 7, 2, 7, 3, 7])
    sampling = make_sampling([1.0] * 3, seed=[1, 2, 3])
    strided = sampling._replace(seed=spread[::2], temperature=torch.ones(1).expand(3))
    expected = sample(logits, sampling, position[::2], backend="reference")
    assert torch.equal(sample(logits, strided, position[::2], backend="triton"), expected)
    with pytest.raises(ValueError, match="out: expected a contiguous tensor"):
        sample(logits, sampling, position[::2], out=torch.empty(6, dtype=torch.int64)[::2], backend="triton")


def test_truncated_and_whole_rows_of_one_batch() -> None:
    logits = randn(5, 40, seed=2)
    sampling = make_sampling(
        [1.0, 1.0, 0.0, 0.6, 1.0], [0, 5, 5, 0, 40], [1.0, 1.0, 0.5, 0.5, 1.0], seed=list(range(5))
    )
    position = torch.arange(5)
    expected = sample(logits, sampling, position, backend="reference")
    assert torch.equal(drawn(rows_of(logits, sampling, position)), expected)
    padded = torch.tensor([3, -1, 1])
    assert thresholds(logits, sampling)[0] == -INF
    assert torch.equal(
        drawn(rows_of(logits[:3], sampling, position[:3], padded)),
        sample(logits[:3], sampling, position[:3], request=padded, backend="reference"),
    )


def test_public_ops_take_out_and_workspace() -> None:
    logits = randn(3, 50, seed=4)
    sampling = make_sampling([1.0, 0.0, 0.7], 7, seed=[1, 2, 3])
    position = torch.arange(3)
    workspace = torch.empty(sample_workspace(3, 50), dtype=torch.uint8)
    for backend in ("reference", "triton"):
        tokens, levels = torch.full((3,), -77), torch.full((3,), NAN)
        assert sample(logits, sampling, position, out=tokens, workspace=workspace, backend=backend) is tokens
        assert truncate(logits, sampling, out=levels, workspace=workspace, backend=backend) is levels
        assert torch.equal(tokens, sample(logits, sampling, position, backend="reference"))
        assert torch.equal(levels, truncate(logits, sampling, backend="reference"))
    with pytest.raises(ValueError, match="workspace: expected shape"):
        sample(logits, sampling, position, workspace=workspace[:-1], backend="triton")
    with pytest.raises(TypeError, match="out: expected dtype int64"):
        sample(logits, sampling, position, out=torch.empty(3))
    with pytest.raises(ValueError, match='out: expected shape "T"'):
        truncate(logits, sampling, out=torch.empty(2))


def test_whole_rows_need_no_search() -> None:
    logits = randn(2, 50, seed=4)
    off = make_sampling([1.0, 1.0])._replace(any_truncation=False)
    assert truncate(logits, off, backend="triton").tolist() == [-INF, -INF]
