"""The ratio rule emits with the target's law, and only tokens of the target's support."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.accept import accept, ratio_verdict
from dspark.ops.philox import uniform
from dspark.ops.sample import inverse_cdf, sample, transform
from dspark.ops.types import Rule, Sampling, Stream, Verdict
from tests.ops.chains import (
    RULES,
    make_batch,
    randn,
)
from tests.ops.helpers import chi_square_pvalue, make_sampling, select
from tests.tolerances import CHI_SQUARE, LAW

INF = float("inf")
NAN = float("nan")


def normalise(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def law_of_one_draft(p: Tensor, q: Tensor) -> Tensor:
    """Distribution of the first emitted token when the draft is drawn from q."""
    vocab_size = len(p)
    token = torch.arange(vocab_size)
    accept_prob, residual = ratio_verdict(p.expand(vocab_size, -1), q.expand(vocab_size, -1), token)
    return q * accept_prob + (q * (1 - accept_prob)) @ residual


SUPPORTS = {
    "inside": ([1, 1, 1, 1, 0], [0, 1, 1, 0, 0]),
    "equal": ([1, 1, 1, 0, 0], [1, 1, 1, 0, 0]),
    "beyond": ([0, 1, 1, 0, 0], [1, 1, 1, 1, 0]),
    "crossing": ([1, 1, 1, 0, 0], [0, 0, 1, 1, 1]),
    "disjoint": ([1, 1, 0, 0, 0], [0, 0, 1, 1, 1]),
}


@pytest.mark.parametrize("support", SUPPORTS)
@given(
    p=st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5), q=st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5)
)
def test_p21_exact_law_for_every_relation_of_the_supports(support: str, p: list[float], q: list[float]) -> None:
    mask_p, mask_q = (torch.tensor(mask, dtype=torch.float64) for mask in SUPPORTS[support])
    target = normalise(torch.tensor(p, dtype=torch.float64) * mask_p)
    draft = normalise(torch.tensor(q, dtype=torch.float64) * mask_q)
    law = law_of_one_draft(target, draft)
    assert (law - target).abs().sum() / 2 < LAW
    assert (law[mask_p == 0] == 0).all()


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-11, 1e-14])
def test_law_of_nearly_equal_distributions(gap: float) -> None:
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    q = p + torch.tensor([gap, -gap, 0.0], dtype=torch.float64)
    assert (law_of_one_draft(p, q) - p).abs().sum() / 2 < LAW * 1e-2


def test_law_of_equal_distributions_and_point_masses() -> None:
    p = normalise(torch.tensor([0.3, 0.2, 0.5, 1e-9], dtype=torch.float64))
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    nudged = normalise(p * torch.tensor([1 + 1e-15, 1, 1 - 1e-15, 1], dtype=torch.float64))
    for target, draft in ((p, p), (p, nudged), (nudged, p), (one_hot, one_hot), (one_hot, p), (p, one_hot)):
        assert (law_of_one_draft(target, draft) - target).abs().sum() / 2 < LAW
    accept_prob, residual = ratio_verdict(p, p, torch.tensor(2))
    assert accept_prob == 1
    assert torch.equal(residual, p), "a degenerate residual is p"


def test_verdict_of_no_draft_and_bad_draft_rows_is_to_draw_from_p() -> None:
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    bad = torch.tensor([0.2, NAN, 0.5], dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    for draft, token in ((q, -1), (q, 3), (bad, 0), (bad, 1), (zero, 0)):
        accept_prob, residual = ratio_verdict(p, draft, torch.tensor(token))
        assert accept_prob == 0
        assert torch.equal(residual, p)


def noise_rows(target: Tensor, draft_scores: Tensor, drafts: Tensor, seed: Tensor, position: Tensor) -> Verdict:
    """One draft per request: ``target [2, V]``, ``draft_scores [V]``, the rest ``[R]``."""
    num_requests, vocab_size = len(seed), target.shape[1]
    ones = torch.ones(num_requests)
    return accept(
        target.repeat(num_requests, 1),
        torch.stack([torch.zeros_like(drafts), drafts], 1).flatten(),
        torch.arange(num_requests + 1) * 2,
        rule="ratio",
        sampling=Sampling(ones, torch.zeros_like(seed), ones, 0 * ones, seed, any_truncation=False),
        position=position,
        max_query_len=2,
        draft_logits=draft_scores.expand(num_requests, 1, vocab_size),
    )


def test_p01_noise_of_draft_and_residual_is_separate() -> None:
    vocab_size, rows, calls = 16, 50_000, 4
    target = randn(2, vocab_size, seed=21, scale=1.5)
    draft = -target[0]
    p = target.double().softmax(-1)
    emitted, biased = [], []
    for call in range(calls):
        seed = torch.arange(rows) if call % 2 else torch.full((rows,), call)
        position = torch.full((rows,), 100 + call) if call % 2 else torch.arange(rows)
        plain = Sampling(torch.ones(rows), 0 * seed, torch.ones(rows), torch.zeros(rows), seed, any_truncation=False)
        logits = draft.expand(rows, vocab_size)
        drafts = sample(logits, plain, position + 1, stream=Stream.DRAFT, salt=position)
        emitted.append(noise_rows(target, draft, drafts, seed, position))
        # What the fault looks like: the drafter reads the number that the residual will read.
        shared = inverse_cdf(draft.double().softmax(-1).expand(rows, -1), uniform(seed, position + 1, Stream.RESIDUAL))
        biased.append(noise_rows(target, draft, shared, seed, position).tokens[:, 0])
    first = torch.cat([v.tokens[:, 0] for v in emitted])
    assert chi_square_pvalue(first, p[0]) > CHI_SQUARE
    assert chi_square_pvalue(torch.cat(biased), p[0]) < 1e-100
    second = torch.cat([v.tokens[:, 1] for v in emitted])
    assert chi_square_pvalue(second[second >= 0], p[1]) > CHI_SQUARE
    accepted = (second >= 0).double().mean()
    overlap = torch.minimum(p[0], draft.double().softmax(-1)).sum()
    assert (accepted - overlap).abs() < 5 * (overlap * (1 - overlap) / (rows * calls)) ** 0.5


def test_p02_warped_drafter_keeps_the_targets_law() -> None:
    vocab_size, rows = 16, 60_000
    target = randn(2, vocab_size, seed=5, scale=1.0)
    draft = randn(1, vocab_size, seed=6, scale=1.0)
    seed = torch.arange(rows)
    drafter = replace(make_sampling([0.8], 4, 0.9), temperature=torch.full((rows,), 0.8), seed=seed)
    drafter = replace(drafter, top_k=torch.full((rows,), 4), top_p=torch.full((rows,), 0.9), min_p=torch.zeros(rows))
    position = torch.full((rows,), 3)
    drafts = sample(draft.expand(rows, -1), drafter, position + 1, stream=Stream.DRAFT, salt=position)
    scores = transform(draft, select(drafter, torch.tensor([0])))[0]
    p = target[0].double().softmax(-1)
    assert chi_square_pvalue(noise_rows(target, scores, drafts, seed, position).tokens[:, 0], p) > CHI_SQUARE
    # The fault: q as it was before the drafter's transforms.
    assert chi_square_pvalue(noise_rows(target, draft[0], drafts, seed, position).tokens[:, 0], p) < 1e-100


def test_p03_q_is_the_tensor_that_was_sampled_from() -> None:
    # With q = p bit for bit every ratio is 1; any other rounding or transform of q would reject some of these.
    num_requests, draft_len, vocab_size = 200, 6, 11
    sampling = make_sampling([0.8] * num_requests, 7, 0.95, seed=list(range(num_requests)))
    request = torch.arange(num_requests).repeat_interleave(draft_len)
    batch = make_batch([draft_len] * num_requests, sampling, vocab_size=vocab_size)
    drawn_at = batch.position[request] + torch.arange(draft_len).repeat(num_requests) + 1
    drafts = sample(batch.logits, sampling, drawn_at, request=request, stream=Stream.DRAFT)
    tokens = drafts.view(num_requests, draft_len).roll(1, 1).flatten()
    scores = transform(batch.logits, sampling, request).view(num_requests, draft_len, vocab_size)
    verdict = replace(batch, tokens=tokens, draft_logits=scores).accept("ratio")
    assert (verdict.num_emitted == draft_len).all()


def test_p03_draft_scores_of_another_dtype_are_refused() -> None:
    batch = make_batch([2], make_sampling([1.0]))
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(TypeError, match="draft_logits: expected dtype float32"):
            batch.accept("ratio", draft_logits=batch.draft_logits.to(dtype))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter_top_k", [1, 3, 0])
def test_p21_every_emitted_token_is_in_the_targets_support(rule: Rule, drafter_top_k: int) -> None:
    num_requests, vocab_size = 200, 12
    lengths = [4] * num_requests
    seeds = list(range(num_requests))
    drafter = make_sampling([1.3] * num_requests, drafter_top_k, seed=seeds)
    batch = make_batch(lengths, drafter, vocab_size=vocab_size, seed=3, rule=rule)
    target = make_sampling([0.9] * num_requests, 3, seed=seeds)
    verdict = replace(batch, sampling=target).accept(rule)
    kept = transform(batch.logits, target, torch.arange(num_requests).repeat_interleave(4)) > -INF
    rows = batch.query_start[:-1, None] + verdict.path.clamp(min=0)
    assert kept[rows, verdict.tokens.clamp(min=0)][verdict.tokens >= 0].all()
    assert (verdict.num_emitted > 1).any()
    assert (verdict.num_emitted < 4).any()


def test_law_after_a_bad_draft_row_is_p() -> None:
    vocab_size, rows = 16, 50_000
    target = randn(2, vocab_size, seed=8, scale=1.0)
    seed = torch.arange(rows)
    verdict = noise_rows(target, torch.full((vocab_size,), NAN), torch.zeros_like(seed), seed, torch.zeros_like(seed))
    assert (verdict.num_emitted == 1).all()
    assert chi_square_pvalue(verdict.tokens[:, 0], target[0].double().softmax(-1)) > CHI_SQUARE
