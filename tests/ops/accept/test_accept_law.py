"""Every rule emits with the target's law, and only tokens of the target's support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.accept import launch as accept_launch
from dspark.ops.accept.reference import block_verdict, ratio_verdict
from dspark.ops.call import FLOATS
from dspark.ops.launch import RowConfig
from dspark.ops.op import OPS
from dspark.ops.philox import uniform
from dspark.ops.sample import sample, statistics_launch
from dspark.ops.sample.reference import inverse_cdf, transform
from dspark.ops.types import (
    Backend,
    DenseQ,
    DraftDistribution,
    PointMass,
    Rows,
    Rule,
    Sampling,
    SparseQ,
    Stream,
    Verdict,
)
from tests.ops.chains import Form, make_batch, on_backends, on_cases, on_rules, randn
from tests.ops.helpers import chi_square_pvalue, make_sampling, select
from tests.tolerances import CHI_SQUARE, LAW, SIGMAS

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


def law_of_two_drafts(p: Tensor, q: Tensor) -> Tensor:
    """``[V, V]``: the joint law of two tokens under block verification, the second in this round or a plain one."""
    vocab_size = len(p)
    first, second = torch.cartesian_prod(torch.arange(vocab_size), torch.arange(vocab_size)).T
    weight = q[first] * q[second]
    drafts = torch.stack([first, second, torch.full_like(first, -1)], 1)  # [V * V, 3]
    rows_q = torch.stack([q, q, torch.zeros_like(q)]).expand(len(drafts), -1, -1)
    chance, residual = block_verdict(p.expand(len(drafts), 3, -1), rows_q, drafts)
    both = weight * chance[:, 1]
    one = weight * (1 - chance[:, 1]) * chance[:, 0]
    none = weight * (1 - chance[:, 1]) * (1 - chance[:, 0])
    law = torch.zeros(vocab_size, vocab_size, dtype=p.dtype)
    law.index_put_((first, second), both, accumulate=True)
    law.index_add_(0, first, one[:, None] * residual[:, 1])
    return law + (none @ residual[:, 0])[:, None] * p


@pytest.mark.parametrize("support", SUPPORTS)
@given(
    p=st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5), q=st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5)
)
def test_p21_exact_law_of_block_for_every_relation_of_the_supports(
    support: str, p: list[float], q: list[float]
) -> None:
    mask_p, mask_q = (torch.tensor(mask, dtype=torch.float64) for mask in SUPPORTS[support])
    target = normalise(torch.tensor(p, dtype=torch.float64) * mask_p)
    draft = normalise(torch.tensor(q, dtype=torch.float64) * mask_q)
    law = law_of_two_drafts(target, draft)
    assert (law - target[:, None] * target).abs().sum() / 2 < LAW
    assert (law[mask_p == 0] == 0).all()
    assert (law[:, mask_p == 0] == 0).all()


def test_block_of_equal_distributions_keeps_everything() -> None:
    p = normalise(torch.tensor([0.3, 0.2, 0.5, 1e-9], dtype=torch.float64))
    chance, residual = block_verdict(p.expand(3, -1), p.expand(3, -1), torch.tensor([2, 3, 0]))
    assert chance[:2].tolist() == [1.0, 1.0]
    assert torch.equal(residual, p.expand(3, -1)), "a degenerate residual is p"


def test_block_ends_before_a_bad_row_or_a_draft_that_is_none() -> None:
    p = normalise(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], dtype=torch.float64))
    q = normalise(torch.tensor([[0.6, 0.2, 0.2], [0.2, 0.3, 0.5], [0.3, 0.3, 0.4]], dtype=torch.float64))
    short, residual = block_verdict(p[:2], q[:2], torch.tensor([0, -1]))
    assert torch.equal(short, torch.tensor([5 / 6, 0.0], dtype=torch.float64))
    bad = q.clone()
    bad[1, 1] = NAN
    empty = q.clone()
    empty[1] = 0
    for draft, token in ((q, -1), (q, 3), (bad, 0), (empty, 0)):
        chance, last = block_verdict(p, draft, torch.tensor([0, token, 1]))
        assert torch.equal(chance[:2], short)
        assert chance[2] == 0
        assert torch.equal(last[:2], residual)
    spoilt = p.clone()
    spoilt[1, 0] = NAN
    chance, last = block_verdict(spoilt, q, torch.tensor([0, 1, 1]))
    assert torch.equal(chance[:2], short)
    assert last[1].isnan().any(), "nothing is drawn from it"


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


def verify(
    rule: Rule,
    target: Tensor,
    drafts: Tensor,
    q: DraftDistribution | None,
    seed: Tensor,
    position: Tensor,
    backend: Backend,
) -> Verdict:
    """Every request has the same models, which do not look at the tokens: ``target [N, V]``, ``drafts [R, N - 1]``."""
    num_requests = len(seed)
    return accept(
        target.repeat(num_requests, 1),
        Rows(
            tokens=torch.cat([torch.zeros_like(drafts[:, :1]), drafts], 1).flatten(),
            query_start=torch.arange(num_requests + 1) * len(target),
            position=position,
            max_query_len=len(target),
        ),
        rule=rule,
        sampling=plain_sampling(seed),
        q=q if rule in RULES_OF_Q else None,
        backend=backend,
    )


def plain_sampling(seed: Tensor) -> Sampling:
    ones = torch.ones(len(seed))
    return Sampling(ones, torch.zeros_like(seed), ones, 0 * ones, seed, any_truncation=False)


def draw_drafts(rule: Rule, logits: Tensor, sampling: Sampling, position: Tensor) -> Tensor:
    """Drafts ``[R, G]`` from ``logits [G, V]``, with the noise that the rule's drafter takes."""
    stream, salt = (Stream.TARGET, None) if rule == "coupled" else (Stream.DRAFT, position)
    rows = len(position)
    return torch.stack(
        [
            sample(row.expand(rows, -1), sampling, position + k + 1, stream=stream, salt=salt)
            for k, row in enumerate(logits)
        ],
        1,
    )


@pytest.fixture
def wide_programs() -> Iterator[None]:
    """Thousands of requests per program: the interpreter takes as long for one row as for many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accept_launch, "row_config", lambda vocab_size: RowConfig(4096, 16, 16, 4))
        patch.setattr(accept_launch, "requests_per_program", lambda nodes_p2, columns: 2048)
        patch.setattr(statistics_launch, "draws_per_program", lambda columns: 4096)
        OPS["accept"]._calls.clear()
        yield
    OPS["accept"]._calls.clear()


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.usefixtures("wide_programs")
@on_rules
def test_p01_noise_of_draft_and_target_is_separate(rule: Rule, backend: Backend) -> None:
    """Each token that is emitted has the target's law, given that its place was reached.

    The drafter is as unlike the target as can be, on a narrow vocabulary: shared random numbers show there.
    """
    vocab_size, rows, calls = 16, 50_000, 2 if backend == "triton" else 4
    target = randn(3, vocab_size, seed=21, scale=1.5)
    draft = -target[:2]
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    emitted, biased = [], []
    for call in range(calls):
        seed = torch.arange(rows) if call % 2 else torch.full((rows,), call)
        position = torch.full((rows,), 100 + call) if call % 2 else 10 * torch.arange(rows)
        dense = DenseQ(draft.expand(rows, -1, -1))
        drafts = draw_drafts(rule, draft, plain_sampling(seed), position)
        emitted.append(verify(rule, target, drafts, dense, seed, position, backend).tokens)
        if call == 0 and rule in RULES_OF_Q:
            # What the fault looks like: the drafter reads the number that the residual will read.
            u = uniform(seed[:, None], position[:, None] + torch.arange(1, 3), Stream.RESIDUAL)
            shared = inverse_cdf(q.expand(rows, -1, -1), u)
            biased.append(verify(rule, target, shared, dense, seed, position, backend).tokens[:, 0])
    tokens = torch.cat(emitted)
    assert tokens.numel() >= 200_000
    for place in range(3):
        reached = tokens[tokens[:, place] >= 0, place]
        assert len(reached) > 500 or place == 2
        if len(reached) > 500:
            assert chi_square_pvalue(reached, p[place]) > CHI_SQUARE
    if rule in RULES_OF_Q:
        assert chi_square_pvalue(torch.cat(biased), p[0]) < 1e-100


@on_backends
@on_rules
def test_p01_noise_of_one_round_and_the_next_is_separate(rule: Rule, backend: Backend) -> None:
    """Where a first round emits one token, a second gives the next: together they have the target's law."""
    rows = 40_000
    p = torch.tensor([0.7, 0.3])
    target, draft = p.log().expand(3, -1), torch.zeros(2, 2)
    seed, position = torch.arange(rows), torch.full((rows,), 7)

    def run(anchor: Tensor, count: int) -> Tensor:
        drafts = draw_drafts(rule, draft[:count], plain_sampling(seed), anchor)
        dense = DenseQ(draft.expand(rows, -1, -1))
        return verify(rule, target[: count + 1], drafts, dense, seed, anchor, backend).tokens

    first, second = run(position, 2), run(position + 1, 1)
    next_token = torch.where(first[:, 1] >= 0, first[:, 1], second[:, 0])
    assert 0.1 < (first[:, 1] < 0).double().mean() < 0.9
    assert chi_square_pvalue(2 * first[:, 0] + next_token, (p[:, None] * p).flatten()) > CHI_SQUARE


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_p02_warped_drafter_keeps_the_targets_law(rule: Rule, form: str, backend: Backend) -> None:
    vocab_size, rows = 16, 40_000
    target = randn(3, vocab_size, seed=5, scale=1.0)
    draft = randn(2, vocab_size, seed=6, scale=1.0)
    seed, position = torch.arange(rows), torch.full((rows,), 3)
    drafter = make_sampling([0.8], 4, 0.9)
    each = select(drafter, torch.zeros_like(seed))._replace(seed=seed)
    drafts = draw_drafts(rule, draft, each, position)
    scores = transform(draft, drafter, torch.zeros(2, dtype=torch.int64))  # [2, V]
    q: DraftDistribution = DenseQ(scores.expand(rows, -1, -1))
    if form == "sparse":
        logprobs, tokens = scores.double().log_softmax(-1).float().topk(4)
        q = SparseQ(tokens.expand(rows, -1, -1), logprobs.expand(rows, -1, -1))
    p = target.double().softmax(-1)
    verdict = verify(rule, target, drafts, q, seed, position, backend)
    for place in range(3):
        reached = verdict.tokens[verdict.tokens[:, place] >= 0, place]
        assert chi_square_pvalue(reached, p[place]) > CHI_SQUARE
    # The fault: q as it was before the drafter's transforms.
    raw = verify(rule, target, drafts, DenseQ(draft.expand(rows, -1, -1)), seed, position, backend)
    assert chi_square_pvalue(raw.tokens[:, 0], p[0]) < 1e-100


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
def test_a_point_mass_has_the_targets_law(rule: Rule, backend: Backend) -> None:
    """Drafts that are the same for every seed: greedy ones, or looked up."""
    rows = 40_000
    target = randn(3, 6, seed=9, scale=1.0)
    seed = torch.arange(rows)
    drafts = torch.stack([target[0].argmax(), target[1].argmin()]).expand(rows, -1)
    verdict = verify(rule, target, drafts, PointMass(), seed, torch.zeros_like(seed), backend)
    p = target.double().softmax(-1)
    for place in range(3):
        reached = verdict.tokens[verdict.tokens[:, place] >= 0, place]
        assert chi_square_pvalue(reached, p[place]) > CHI_SQUARE


@on_backends
@on_rules
def test_acceptance_is_what_the_rule_promises(rule: Rule, backend: Backend) -> None:
    """Of one draft from random (p, q) at total variation TV. ``ratio`` and ``block``: 1 - TV, the most there is.

    ``coupled``: between (1 - TV) / (1 + TV) and 1 - TV (Daliri, Musco, Suresh, theorem 3), and for the race of
    exponentials that Gumbel noise is, exactly the sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x).
    ``match``: the sum of p q.
    """
    rows, vocab_size = 20_000, 8
    for trial in range(6):
        target = randn(2, vocab_size, seed=40 + trial, scale=1.0)
        draft = target[:1] + randn(1, vocab_size, seed=60 + trial, scale=0.3 + trial / 3)
        p, q = target[0].double().softmax(-1), draft[0].double().softmax(-1)
        distance = (p - q).abs().sum() / 2
        seed, position = torch.arange(rows) + rows * trial, torch.full((rows,), 5)
        drafts = draw_drafts(rule, draft, plain_sampling(seed), position)
        dense = DenseQ(draft.expand(rows, -1, -1))
        verdict = verify(rule, target, drafts, dense, seed, position, backend)
        rate = (verdict.num_emitted == 2).double().mean()
        if rule == "coupled":
            ratios = torch.maximum(p / p[:, None], q / q[:, None])  # [x, y]
            chance = (1 / ratios.sum(1)).sum()
            assert (1 - distance) / (1 + distance) <= chance <= 1 - distance
        else:
            chance = (p * q).sum() if rule == "match" else 1 - distance
        assert (rate - chance).abs() < SIGMAS * (chance * (1 - chance) / rows).sqrt()


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
@pytest.mark.parametrize("dtype", FLOATS)
def test_p03_q_is_the_tensor_that_was_sampled_from(rule: Rule, dtype: torch.dtype, backend: Backend) -> None:
    """With q = p bit for bit every ratio is 1; any other rounding or transform of q would reject some of these."""
    num_requests, draft_len, vocab_size = 60, 6, 11
    seeds = list(range(num_requests))
    # Of 16 bits, the scores that were sampled from are the drafter's logits themselves.
    exact = dtype == torch.float32
    sampling = make_sampling(
        [0.8 if exact else 1.0] * num_requests, 7 if exact else 0, 0.95 if exact else 1, seed=seeds
    )
    request = torch.arange(num_requests).repeat_interleave(draft_len)
    batch = make_batch([draft_len] * num_requests, sampling, vocab_size=vocab_size, backend=backend)
    batch = replace(batch, logits=batch.logits.to(dtype))
    drawn_at = batch.position[request] + torch.arange(draft_len).repeat(num_requests) + 1
    drafts = sample(batch.logits, sampling, drawn_at, request=request, stream=Stream.DRAFT)
    tokens = drafts.view(num_requests, draft_len).roll(1, 1).flatten()
    scores = transform(batch.logits, sampling, request) if exact else batch.logits
    scores = scores.view(num_requests, draft_len, vocab_size)
    batch = replace(batch, tokens=tokens, draft_logits=scores)
    assert (batch.accept(rule).num_emitted == draft_len).all()
    nudged = replace(batch, draft_logits=(scores.float() + 0.2 * randn(*scores.shape)))
    assert (nudged.accept(rule).num_emitted < draft_len).any()


@on_backends
@on_cases
@pytest.mark.parametrize("drafter_top_k", [1, 3, 0])
def test_p21_every_emitted_token_is_in_the_targets_support(
    rule: Rule, form: Form, drafter_top_k: int, backend: Backend
) -> None:
    num_requests, vocab_size = 100, 12
    lengths = [4] * num_requests
    seeds = list(range(num_requests))
    drafter = make_sampling([1.3] * num_requests, drafter_top_k, seed=seeds)
    batch = make_batch(lengths, drafter, vocab_size=vocab_size, seed=3, rule=rule, form=form, backend=backend)
    target = make_sampling([0.9] * num_requests, 3, seed=seeds)
    verdict = replace(batch, sampling=target).accept(rule)
    kept = transform(batch.logits, target, torch.arange(num_requests).repeat_interleave(4)) > -INF
    rows = batch.query_start[:-1, None] + verdict.path.clamp(min=0)
    assert kept[rows, verdict.tokens.clamp(min=0)][verdict.tokens >= 0].all()
    assert (verdict.num_emitted > 1).any()
    assert (verdict.num_emitted < 4).any()


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
def test_law_after_a_bad_draft_row_is_p(rule: Rule, backend: Backend) -> None:
    vocab_size, rows = 16, 40_000
    target = randn(2, vocab_size, seed=8, scale=1.0)
    seed = torch.arange(rows)
    bad = DenseQ(torch.full((rows, 1, vocab_size), NAN))
    drafts = torch.zeros(rows, 1, dtype=torch.int64)
    verdict = verify(rule, target, drafts, bad, seed, torch.zeros_like(seed), backend)
    assert (verdict.num_emitted == 1).all()
    assert chi_square_pvalue(verdict.tokens[:, 0], target[0].double().softmax(-1)) > CHI_SQUARE
