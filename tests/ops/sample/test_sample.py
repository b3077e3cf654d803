"""Sampling: transformers' warpers, the right law, one token per row whatever the row holds."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark.ops.philox import gumbel
from dspark.ops.sample import sample, truncate
from dspark.ops.sample.reference import inverse_cdf, perturbed_argmax, transform
from dspark.ops.types import Sampling, Stream
from tests.ops.helpers import chi_square_pvalue, make_sampling, select
from tests.tolerances import CHI_SQUARE, CUT

INF = float("inf")
NAN = float("nan")


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """What ``generate`` of transformers does with these parameters."""
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    return LogitsProcessorList(warpers)(cast(Any, None), cast(Any, logits))


def assert_differs_on_an_edge_only(kept: Tensor, theirs: Tensor, scores: Tensor, sampling: Sampling) -> None:
    """Where the supports differ, float64 says that the token lies on the top-p or min-p edge."""
    differs = kept != theirs
    if not differs.any():
        return
    either = kept | theirs
    probs = scores.double().masked_fill(~either, -INF).softmax(-1)  # top-k is exact in both
    larger = scores.unsqueeze(-2) > scores.unsqueeze(-1)  # [T, V, V], entry (i, j): token j scores more than token i
    mass_before = (larger * probs.unsqueeze(-2)).sum(-1)
    on_top_p = (mass_before - sampling.top_p[:, None]).abs() < CUT
    on_min_p = (probs / probs.amax(-1, keepdim=True) - sampling.min_p[:, None]).abs() < CUT
    assert (on_top_p | on_min_p)[differs].all()


@given(
    vocab_size=st.integers(1, 200),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 210),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    seed=st.integers(0, 1000),
)
def test_transform_equals_transformers_warpers(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    rows = 4
    logits = randn(rows, vocab_size, seed=seed)
    sampling = make_sampling([temperature] * rows, top_k, top_p, min_p)
    scores = transform(logits, sampling)
    expected = warp(logits, temperature, top_k, top_p, min_p)
    kept, theirs = scores > -INF, expected > -INF
    assert kept.any(-1).all()
    torch.testing.assert_close(scores[kept & theirs], expected[kept & theirs], rtol=1e-6, atol=0)
    assert_differs_on_an_edge_only(kept, theirs, logits / temperature, sampling)


@given(
    data=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 0.9]),
)
def test_ties_of_top_k_and_min_p_are_kept_as_transformers_keeps_them(data: list[int], top_k: int, min_p: float) -> None:
    logits = torch.tensor([data], dtype=torch.float32)
    scores = transform(logits, make_sampling([1.0], top_k, 1.0, min_p))
    assert torch.equal(scores, warp(logits, 1.0, top_k, 1.0, min_p))


@given(data=st.lists(st.integers(-2, 2), min_size=1, max_size=12), top_p=st.floats(0.0, 0.99))
def test_ties_of_top_p_are_all_kept(data: list[int], top_p: float) -> None:
    logits = torch.tensor([data], dtype=torch.float32)
    kept = transform(logits, make_sampling([1.0], 0, top_p, 0.0)) > -INF
    theirs = warp(logits, 1.0, 0, top_p, 0.0) > -INF
    level = logits[kept].min()
    assert torch.equal(kept, logits >= level), "a level is kept whole or not at all"
    assert logits[theirs].min() == level or abs(logits.softmax(-1)[logits > level].sum() - top_p) < CUT
    assert (kept >= theirs).all() or abs(logits.softmax(-1)[logits >= level].sum() - top_p) < CUT


def test_ties_written_out() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    probs = logits.softmax(-1)[0]

    def kept(**parameters: float) -> list[int]:
        scores = transform(logits, make_sampling([1.0], **parameters))[0]  # type: ignore[arg-type]
        return torch.nonzero(scores > -INF).flatten().tolist()

    assert kept(top_k=2) == [0, 1, 2, 3]
    assert kept(top_p=probs[0].item() + 0.01) == [0, 1, 2, 3]
    assert kept(top_p=probs[0].item() - 0.01) == [0]
    assert kept(min_p=(probs[1] / probs[0]).item() - 0.01) == [0, 1, 2, 3]
    assert kept(min_p=(probs[1] / probs[0]).item() + 0.01) == [0]


def test_warpers_apply_in_order() -> None:
    # Top-p acts on what top-k left, renormalised: .4/.7 passes .5, so only the largest stays.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (transform(logits, make_sampling([1.0], 2, 0.5)) > -INF).tolist() == [[True, False, False, False]]
    assert (transform(logits, make_sampling([1.0], 0, 0.5)) > -INF).tolist() == [[True, True, False, False]]
    # Temperature comes before top-p: at 2 the row is flatter and three tokens are needed for .7.
    assert (transform(logits, make_sampling([2.0], 0, 0.7)) > -INF).sum() == 3
    assert (transform(logits, make_sampling([1.0], 0, 0.7)) > -INF).sum() == 2


def test_truncate_is_the_threshold_that_transform_applies() -> None:
    rows, vocab_size = 64, 50
    logits = randn(rows, vocab_size)
    generator = torch.Generator().manual_seed(1)
    sampling = make_sampling(
        [0.5 + t / 20 for t in range(rows)],
        torch.randint(0, 60, (rows,), generator=generator).tolist(),
        torch.rand(rows, generator=generator).tolist(),
        (torch.rand(rows, generator=generator) ** 4).tolist(),
    )
    threshold = truncate(logits, sampling)
    scaled = logits * (1 / sampling.temperature)[:, None]
    expected = scaled.masked_fill(scaled < threshold[:, None], -INF)
    assert torch.equal(transform(logits, sampling), expected)


def test_truncate_off_and_greedy_rows_keep_all() -> None:
    logits = randn(4, 9)
    assert truncate(logits, make_sampling([1.0, 1.0, 0.0, 1.0], [0, 9, 2, 3])).tolist()[:3] == [-INF] * 3
    assert truncate(logits, make_sampling([1.0] * 4)).tolist() == [-INF] * 4
    assert truncate(logits, make_sampling([0.0] * 4, 2)).tolist() == [-INF] * 4


@pytest.mark.parametrize(
    "parameters",
    [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"min_p": 2.0}, {"top_k": 1, "top_p": 0.0, "min_p": 1.0}],
)
def test_the_largest_score_always_survives(parameters: dict[str, float]) -> None:
    logits = randn(8, 30)
    scores = transform(logits, make_sampling([0.7] * 8, **parameters))  # type: ignore[arg-type]
    assert torch.equal((scores > -INF).sum(-1), torch.ones(8, dtype=torch.int64))
    assert torch.equal(scores.argmax(-1), logits.argmax(-1))


def test_a_warper_that_is_off_cuts_nothing() -> None:
    # In float32 the first token's mass is 1 exactly; its neighbours stay all the same.
    logits = torch.tensor([[0.0, -40.0, -50.0, -60.0], [0.0, -40.0, -50.0, -60.0]])
    scores = transform(logits, make_sampling([1.0, 1.0], [0, 3]))
    assert (scores > -INF).tolist() == [[True] * 4, [True, True, True, False]]


def test_greedy_rows_are_one_hot_at_the_first_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -INF], [1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[-INF, 0.0, -INF, -INF], [0.0, -INF, -INF, -INF]])
    assert torch.equal(transform(logits, make_sampling([0.0, 0.0], 3, 0.4)), expected)
    mixed = make_sampling([0.0, 0.0, 1.0], 3, 0.4)
    assert torch.equal(transform(torch.cat([logits, logits[:1]]), mixed)[:2], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_upcast_first(dtype: torch.dtype) -> None:
    logits = randn(5, 40).to(dtype)
    sampling = make_sampling([0.0, 0.3, 0.9, 1.0, 2.0], 20, 0.9, 0.01)
    assert torch.equal(transform(logits, sampling), transform(logits.float(), sampling))
    position = torch.arange(5)
    assert torch.equal(sample(logits, sampling, position), sample(logits.float(), sampling, position))


def test_sample_is_the_argmax_of_transform_plus_noise() -> None:
    logits, position, request = randn(6, 33), torch.arange(6) + 50, torch.tensor([2, 2, 0, 1, 1, 1])
    sampling = make_sampling([0.8, 0.0, 1.3], 12, 0.95, seed=[4, 5, -6])
    for stream, salt in ((Stream.TARGET, None), (Stream.DRAFT, torch.arange(6) * 3)):
        noise = gumbel(sampling.seed[request], position, 33, stream, salt=salt)
        expected = (transform(logits, sampling, request) + noise).argmax(-1)
        assert torch.equal(sample(logits, sampling, position, request=request, stream=stream, salt=salt), expected)
    assert torch.equal(sample(logits, sampling, position, request=request)[3:], logits[3:].argmax(-1))


def test_law_of_sample_with_mixed_temperatures_and_truncation() -> None:
    vocab_size, draws = 16, 50_000
    logits = randn(3, vocab_size, seed=3)
    sampling = make_sampling([1.0, 0.0, 0.6], [0, 0, 9], [1.0, 1.0, 0.9], seed=[11, 12, 13])
    request = torch.arange(3).repeat(draws)
    position = torch.arange(draws).repeat_interleave(3)
    tokens = sample(logits[request], sampling, position, request=request).view(draws, 3)
    assert (tokens[:, 1] == logits[1].argmax()).all()
    for row in (0, 2):
        probs = transform(logits, sampling).double().softmax(-1)[row]
        assert chi_square_pvalue(tokens[:, row], probs) > CHI_SQUARE
        # The check has teeth: a temperature 10 % off fails it.
        warmer = transform(logits, sampling._replace(temperature=sampling.temperature * 1.1)).double().softmax(-1)[row]
        assert chi_square_pvalue(tokens[:, row], warmer) < CHI_SQUARE


def test_all_greedy_computes_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, position = randn(4, 20), torch.arange(4)
    greedy = make_sampling([0.0] * 4, 5)
    assert greedy.all_greedy
    expected = sample(logits, greedy._replace(all_greedy=False), position)

    def no_noise(*_: object, **__: object) -> Tensor:
        raise AssertionError("noise was computed")

    monkeypatch.setattr(import_module("dspark.ops.sample.reference"), "gumbel", no_noise)
    assert torch.equal(sample(logits, greedy, position), expected)
    assert torch.equal(expected, logits.argmax(-1))


def bad_rows(vocab_size: int) -> Tensor:
    """One row per kind of bad number."""
    rows = randn(5, vocab_size, seed=9)
    rows[0, 2] = NAN
    rows[1, 2] = INF
    rows[2] = -INF
    rows[3] = NAN
    rows[4, [1, 2]] = torch.tensor([NAN, INF])
    return rows


@pytest.mark.parametrize(("temperature", "all_greedy"), [(0.8, False), (0.0, False), (0.0, True)])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_p05_bad_rows_give_minus_one_and_touch_no_other(
    temperature: float, truncation: dict[str, float], all_greedy: bool
) -> None:
    vocab_size = 17
    good, bad = randn(5, vocab_size), bad_rows(vocab_size)
    good[0, 3] = -INF  # a masked token is no fault
    logits = torch.stack([good, bad], 1).flatten(0, 1)
    sampling = make_sampling([temperature] * 10, **truncation, seed=list(range(10)))  # type: ignore[arg-type]
    sampling = sampling._replace(all_greedy=all_greedy)
    position = torch.arange(10)
    tokens = sample(logits, sampling, position)
    even = torch.arange(0, 10, 2)
    assert torch.equal(tokens[0::2], sample(good, select(sampling, even), position[even]))
    assert tokens[0::2].min() >= 0
    assert tokens[1::2].tolist() == [-1] * 5
    scores = transform(logits, sampling)
    assert torch.equal(scores[0::2], transform(good, select(sampling, even)))
    assert scores[1::2].softmax(-1).isnan().all(), "a bad row stays recognisable"


def test_a_score_that_overflows_is_a_bad_row() -> None:
    logits = torch.tensor([[1e30, 0.0], [1.0, 0.0]])
    assert sample(logits, make_sampling([1e-10, 1e-10]), torch.arange(2)).tolist() == [-1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p07_padded_rows_give_minus_one(temperature: float) -> None:
    logits, position = randn(4, 20), torch.tensor([3, -1, 4, -1])
    sampling = make_sampling([temperature] * 2, 5, seed=[1, 2])
    tokens = sample(logits, sampling, position, request=torch.tensor([1, -1, 0, -7]))
    assert tokens[[1, 3]].tolist() == [-1, -1]
    alone = sample(logits[[0, 2]], sampling, position[[0, 2]], request=torch.tensor([1, 0]))
    assert torch.equal(tokens[[0, 2]], alone)


def test_p20_row_is_bitwise_the_same_alone_permuted_and_padded() -> None:
    rows, vocab_size = 19, 1031
    logits = randn(rows, vocab_size)
    generator = torch.Generator().manual_seed(2)
    sampling = make_sampling(
        [0.0 if t % 5 == 0 else 0.3 + t / 10 for t in range(rows)],
        torch.randint(0, 100, (rows,), generator=generator).tolist(),
        (0.5 + torch.rand(rows, generator=generator)).clamp(max=1).tolist(),
        seed=list(range(rows)),
    )
    position = torch.arange(rows) * 7
    scores, tokens = transform(logits, sampling), sample(logits, sampling, position)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(transform(logits[order], select(sampling, order)), scores[order])
    assert torch.equal(sample(logits[order], select(sampling, order), position[order]), tokens[order])
    padded = torch.cat([logits, torch.full((1, vocab_size), NAN)])
    request = torch.cat([torch.arange(rows), torch.tensor([-1])])
    assert torch.equal(sample(padded, sampling, torch.cat([position, position[:1]]), request=request)[:-1], tokens)
    for row in range(rows):
        one = torch.tensor([row])
        assert torch.equal(transform(logits[one], select(sampling, one)), scores[one])
        assert torch.equal(sample(logits[one], select(sampling, one), position[one]), tokens[one])


def test_any_layout_of_the_logits() -> None:
    logits = randn(6, 40)
    sampling = make_sampling([0.0, 0.5, 1.0, 1.0, 2.0, 0.7], 10, 0.9)
    wide = torch.full((6, 90), NAN)
    wide[:, 3:83:2] = logits
    for view in (wide[:, 3:83:2], logits.T.contiguous().T):
        assert not view.is_contiguous()
        assert torch.equal(sample(view, sampling, torch.arange(6)), sample(logits, sampling, torch.arange(6)))


def test_no_rows() -> None:
    sampling = make_sampling([1.0, 0.0], 5)
    empty = torch.empty(0, dtype=torch.int64)
    assert sample(torch.empty(0, 8), sampling, empty, request=empty).shape == (0,)


def test_perturbed_argmax_takes_leading_dimensions_and_the_first_of_equals() -> None:
    scores = torch.zeros(2, 3, 5)
    assert perturbed_argmax(scores).tolist() == [[0] * 3] * 2
    noise = torch.zeros(2, 3, 5)
    noise[1, 2, 4] = 1.0
    assert perturbed_argmax(scores, noise).tolist() == [[0, 0, 0], [0, 0, 4]]


def test_inverse_cdf_cuts_the_unit_interval_in_the_right_lengths() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0], dtype=torch.float64)
    n = 1 << 12
    u = (torch.arange(n) + 0.5).double() / n
    for scale in (1.0, 3.7, 1e-9):
        tokens = inverse_cdf((probs * scale).expand(n, -1), u)
        assert torch.equal(torch.bincount(tokens, minlength=7).double() / n, probs)


def test_inverse_cdf_at_the_ends_and_of_bad_rows() -> None:
    tiny, almost_one = 2.0**-53, 1 - 2.0**-53
    probs = torch.rand(1000, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probs[:, :3] = 0
    probs[:, -3:] = 0
    for u, token in ((tiny, 3), (almost_one, 296)):
        assert (inverse_cdf(probs, torch.full((1000,), u, dtype=torch.float64)) == token).all()
    bad = torch.tensor([[NAN, 1.0], [0.0, 0.0], [0.5, NAN], [NAN, NAN]], dtype=torch.float64)
    assert inverse_cdf(bad, torch.full((4,), 0.3, dtype=torch.float64)).tolist() == [-1] * 4


def test_rows_without_requests_are_the_requests() -> None:
    with pytest.raises(ValueError, match=r'logits: expected shape "R V" with R = 2, got \[3, 8\]'):
        sample(randn(3, 8), make_sampling([1.0, 0.5]), torch.arange(3))
    with pytest.raises(ValueError, match="stream: expected 0 to 3, got 4"):
        sample(randn(2, 8), make_sampling([1.0, 0.5]), torch.arange(2), stream=4)  # type: ignore[arg-type]


def test_kernels_are_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.ops.op._INTERPRETED", False)
    with pytest.raises(ValueError, match="backend: the Triton kernels run on a GPU, got tensors on cpu"):
        sample(randn(2, 5), make_sampling([1.0, 1.0]), torch.arange(2), backend="triton")
