"""Acceptance: the coupled rule is plain sampling, the ratio rule has the target's law, and bad input stays local."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.accept import accept, ratio_verdict
from dspark.ops.philox import uniform
from dspark.ops.sample import inverse_cdf, sample, transform
from dspark.ops.types import Rule, Sampling, Status, Stream, Verdict
from tests.ops.helpers import chi_square_pvalue, make_sampling, select
from tests.tolerances import CHI_SQUARE, LAW, LOGPROBS

INF = float("inf")
NAN = float("nan")
RULES: tuple[Rule, ...] = ("coupled", "ratio")


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass(frozen=True)
class Batch:
    """A verify batch by request: ``lengths`` rows each (the anchor's included)."""

    logits: Tensor  # [T, V]
    tokens: Tensor  # [T]
    lengths: list[int]
    position: Tensor  # [R]
    sampling: Sampling
    draft_logits: Tensor  # [R, G, V]

    @property
    def query_start(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def max_query_len(self) -> int:
        return max(1, *self.lengths)

    def rows(self, request: int) -> slice:
        start = self.query_start[request].item()
        return slice(int(start), int(start) + self.lengths[request])

    def accept(self, rule: Rule, **changes: Any) -> Verdict:
        arguments: dict[str, Any] = {
            "rule": rule,
            "sampling": self.sampling,
            "position": self.position,
            "max_query_len": self.max_query_len,
            "draft_logits": self.draft_logits if rule == "ratio" else None,
        }
        return accept(self.logits, self.tokens, self.query_start, **(arguments | changes))

    def take(self, order: list[int]) -> Batch:
        """The requests of ``order``, in that order."""
        index = torch.tensor(order, dtype=torch.int64)
        return Batch(
            torch.cat([self.logits[self.rows(r)] for r in order]),
            torch.cat([self.tokens[self.rows(r)] for r in order]),
            [self.lengths[r] for r in order],
            self.position[index],
            select(self.sampling, index),
            self.draft_logits[index],
        )


def make_batch(
    lengths: list[int],
    sampling: Sampling,
    *,
    rule: Rule = "ratio",
    vocab_size: int = 11,
    seed: int = 0,
    agree: bool = True,
) -> Batch:
    """Random logits, and drafts sampled as the rule wants from draft logits that resemble the target's or do not."""
    num_requests, num_rows, num_drafts = len(lengths), sum(lengths), max(1, *lengths)
    logits = randn(num_rows, vocab_size, seed=seed)
    position = torch.arange(num_requests) * 13 + 5
    draft_logits = randn(num_requests, num_drafts, vocab_size, seed=seed + 1, scale=0.5 if agree else 2.0)
    batch = Batch(logits, torch.zeros(num_rows, dtype=torch.int64), lengths, position, sampling, draft_logits)
    request = torch.arange(num_requests).repeat_interleave(num_drafts)
    for r in range(num_requests):
        drafted = logits[batch.rows(r)][:num_drafts]
        if agree:
            draft_logits[r, : len(drafted)] += drafted
    scores = transform(draft_logits.flatten(0, 1), sampling, request)
    drawn_at = (position[:, None] + torch.arange(num_drafts) + 1).flatten()
    stream = Stream.TARGET if rule == "coupled" else Stream.DRAFT
    drafts = sample(draft_logits.flatten(0, 1), sampling, drawn_at, request=request, stream=stream)
    drafts = drafts.view(num_requests, num_drafts)
    for r in range(num_requests):
        batch.tokens[batch.rows(r)][1:] = drafts[r, : max(lengths[r] - 1, 0)]
    return replace(batch, draft_logits=scores.view_as(draft_logits))


MIXED_LENGTHS = [4, 1, 0, 6, 2, 0, 3, 6]


def mixed_sampling(**changes: Any) -> Sampling:
    parameters: dict[str, Any] = {"top_k": [0, 5, 0, 7, 0, 0, 3, 0], "top_p": 0.95, "seed": list(range(8))}
    return make_sampling([1.0, 0.0, 1.0, 0.7, 1.4, 0.0, 1.0, 0.0], **(parameters | changes))


def rows_of(verdict: Verdict, request: int) -> dict[str, list[float]]:
    return {name: getattr(verdict, name)[request].tolist() for name in vars(verdict)}


def assert_same(a: Verdict, b: Verdict, width: int | None = None) -> None:
    for name in ("tokens", "path", "logprobs"):
        assert torch.equal(getattr(a, name)[:, :width], getattr(b, name)[:, :width]), name
    assert torch.equal(a.num_emitted, b.num_emitted)
    assert torch.equal(a.status, b.status)


def assert_well_formed(verdict: Verdict, batch: Batch) -> None:
    """P8: the counts are consistent, padding is -1, and accepted tokens are the drafts."""
    num_requests, width = len(batch.lengths), batch.max_query_len
    assert verdict.tokens.shape == verdict.path.shape == verdict.logprobs.shape == (num_requests, width)
    assert (
        verdict.tokens.dtype == verdict.path.dtype == verdict.num_emitted.dtype == verdict.status.dtype == torch.int64
    )
    assert verdict.logprobs.dtype == torch.float32
    for r, length in enumerate(batch.lengths):
        n = int(verdict.num_emitted[r])
        tokens = verdict.tokens[r].tolist()
        if verdict.status[r] == Status.OK:
            assert min(length, 1) <= n <= length
        else:
            assert n < length
        assert tokens[n:] == [-1] * (width - n)
        assert all(0 <= t < batch.logits.shape[1] for t in tokens[:n])
        assert verdict.path[r].tolist() == list(range(n)) + [-1] * (width - n)
        assert tokens[: max(n - 1, 0)] == batch.tokens[batch.rows(r)][1:].tolist()[: max(n - 1, 0)]
        assert (verdict.logprobs[r, n:] == 0).all()


def walk_coupled(batch: Batch, request: int) -> list[int]:
    """The rule, read aloud: plain samples for as long as the next draft is what was sampled."""
    emitted: list[int] = []
    rows = batch.rows(request)
    for i in range(batch.lengths[request]):
        drawn = sample(
            batch.logits[rows][i : i + 1],
            select(batch.sampling, torch.tensor([request])),
            batch.position[request : request + 1] + i + 1,
        ).item()
        if drawn < 0:
            break
        emitted.append(int(drawn))
        if i + 1 == batch.lengths[request] or batch.tokens[rows][i + 1] != drawn:
            break
    return emitted


def walk_ratio(batch: Batch, request: int) -> list[int]:
    """The rule, read aloud, with one number at a time."""
    emitted: list[int] = []
    rows, seed = batch.rows(request), batch.sampling.seed[request]
    one = select(batch.sampling, torch.tensor([request]))
    for i in range(batch.lengths[request]):
        p = transform(batch.logits[rows][i : i + 1], one)[0].double().softmax(-1)
        position = batch.position[request] + i + 1
        weights = p
        if i + 1 < batch.lengths[request]:
            q = batch.draft_logits[request, i].double().softmax(-1)
            x = int(batch.tokens[rows][i + 1])
            if uniform(seed, position, Stream.ACCEPT) * q[x] < p[x]:
                emitted.append(x)
                continue
            weights = (p - q).clamp(min=0)
        target = uniform(seed, position, Stream.RESIDUAL) * weights.sum()
        emitted.append(int((weights.cumsum(-1) <= target).sum()))
        break
    return emitted


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=5, max_size=5),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 10_000),
    copied=st.lists(st.booleans(), min_size=25, max_size=25),
    rule=st.sampled_from(RULES),
)
def test_accept_equals_the_rule_read_aloud(
    lengths: list[int],
    temperatures: list[float],
    top_k: int,
    top_p: float,
    seed: int,
    copied: list[bool],
    rule: Rule,
) -> None:
    sampling = make_sampling(temperatures[: len(lengths)], top_k, top_p, seed=[seed + r for r in range(len(lengths))])
    batch = make_batch(lengths, sampling, vocab_size=6, seed=seed, rule=rule)
    if rule == "coupled":
        # Some drafts become what the target will draw there, so that every accepted length occurs.
        for r, length in enumerate(lengths):
            drawn = sample(
                batch.logits[batch.rows(r)],
                sampling,
                batch.position[r] + 1 + torch.arange(length),
                request=torch.full((length,), r),
            )
            copy = torch.tensor(copied[5 * r : 5 * r + length], dtype=torch.bool)[1:]
            tokens = batch.tokens[batch.rows(r)]
            tokens[1:] = torch.where(copy, drawn[:-1], tokens[1:])
    verdict = batch.accept(rule)
    assert_well_formed(verdict, batch)
    walk = walk_coupled if rule == "coupled" else walk_ratio
    for r in range(len(lengths)):
        assert verdict.tokens[r, : int(verdict.num_emitted[r])].tolist() == walk(batch, r)


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_accept_equals_the_rule_read_aloud_for_many_requests(rule: Rule, agree: bool) -> None:
    lengths = [length for length in range(7) for _ in range(20)]
    sampling = make_sampling([(0.0, 0.6, 1.0, 1.5)[r % 4] for r in range(140)], 8, 0.97, seed=list(range(140)))
    batch = make_batch(lengths, sampling, agree=agree, rule=rule)
    verdict = batch.accept(rule)
    assert_well_formed(verdict, batch)
    walk = walk_coupled if rule == "coupled" else walk_ratio
    for r in range(140):
        assert verdict.tokens[r, : int(verdict.num_emitted[r])].tolist() == walk(batch, r)


def test_coupled_emits_plain_samples_whatever_was_drafted() -> None:
    sampling = mixed_sampling()
    batch = make_batch(MIXED_LENGTHS, sampling)
    request = torch.arange(8).repeat_interleave(torch.tensor(MIXED_LENGTHS))
    first = batch.query_start[request]
    plain = sample(
        batch.logits, sampling, batch.position[request] + torch.arange(len(request)) - first + 1, request=request
    )
    perfect = batch.tokens.clone()
    for r in range(8):
        perfect[batch.rows(r)][1:] = plain[batch.rows(r)][:-1]
    for tokens in (batch.tokens, perfect, torch.full_like(perfect, -1), perfect.roll(1)):
        verdict = replace(batch, tokens=tokens).accept("coupled")
        for r, length in enumerate(MIXED_LENGTHS):
            n = int(verdict.num_emitted[r])
            assert verdict.tokens[r, :n].tolist() == plain[batch.rows(r)][:n].tolist()
            if tokens is perfect:
                assert n == length


def test_padded_requests_and_rows_emit_nothing() -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling())
    padded = Batch(
        torch.cat([batch.logits, torch.full((5, 11), NAN)]),
        torch.cat([batch.tokens, torch.full((5,), -1)]),
        MIXED_LENGTHS,
        batch.position,
        batch.sampling,
        batch.draft_logits.clone(),
    )
    padded.draft_logits[[2, 5]] = NAN
    for rule in RULES:
        verdict = padded.accept(rule)
        assert_same(verdict, batch.accept(rule))
        for r in (2, 5):
            assert verdict.num_emitted[r] == 0
            assert verdict.status[r] == Status.OK


@pytest.mark.parametrize("rule", RULES)
def test_a_padded_request_before_poisoned_rows(rule: Rule) -> None:
    batch = make_batch([2, 0], make_sampling([1.0, 1.0]), rule=rule)
    poisoned = replace(
        batch,
        logits=torch.cat([batch.logits, torch.full((3, 11), NAN)]),
        tokens=torch.cat([batch.tokens, torch.full((3,), -1)]),
    )
    assert_same(poisoned.accept(rule), batch.accept(rule))
    assert poisoned.accept(rule).status.tolist() == [Status.OK] * 2


@pytest.mark.parametrize("rule", RULES)
def test_rows_past_max_query_len_are_ignored(rule: Rule) -> None:
    batch = make_batch([6] * 10, make_sampling([1.0] * 10, seed=list(range(10))), rule=rule)
    keep = torch.arange(6).repeat(10) < 2
    short = replace(batch, logits=batch.logits[keep], tokens=batch.tokens[keep], lengths=[2] * 10)
    assert batch.accept(rule).num_emitted.max() > 2
    assert_same(batch.accept(rule, max_query_len=2), short.accept(rule))


@pytest.mark.parametrize("rule", RULES)
def test_no_rows_and_no_requests(rule: Rule) -> None:
    none = torch.empty(0, dtype=torch.int64)
    draft_logits = torch.zeros(2, 2, 5) if rule == "ratio" else None
    verdict = accept(
        torch.empty(0, 5),
        none,
        torch.zeros(3, dtype=torch.int64),
        rule=rule,
        sampling=make_sampling([1.0, 0.0]),
        position=torch.tensor([4, 5]),
        max_query_len=3,
        draft_logits=draft_logits,
    )
    assert verdict.tokens.tolist() == verdict.path.tolist() == [[-1] * 3] * 2
    assert verdict.num_emitted.tolist() == verdict.status.tolist() == [0, 0]
    verdict = accept(
        torch.zeros(2, 5),
        torch.tensor([-1, -1]),
        torch.zeros(1, dtype=torch.int64),
        rule=rule,
        sampling=make_sampling([]),
        position=none,
        max_query_len=1,
    )
    assert verdict.tokens.shape == (0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_widths_beyond_the_longest_request(rule: Rule) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), rule=rule)
    expected = batch.accept(rule)
    wide = torch.cat([batch.draft_logits, torch.full((8, 4, 11), NAN)], 1) if rule == "ratio" else None
    verdict = batch.accept(rule, max_query_len=9, draft_logits=wide)
    assert_same(verdict, expected, 6)
    assert (verdict.tokens[:, 6:] == -1).all()


def test_ratio_without_drafts_needs_no_draft_logits() -> None:
    batch = make_batch([1, 1, 0, 1], make_sampling([1.0, 0.0, 1.0, 0.5], seed=[1, 2, 3, 4]))
    assert_same(batch.accept("ratio", draft_logits=None), batch.accept("ratio"))
    assert batch.accept("ratio", draft_logits=None).num_emitted.tolist() == [1, 1, 0, 1]


# The ratio rule's law.


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


# Bad numbers and ids.

BAD_VALUES = {"nan": NAN, "inf": INF, "all -inf": -INF}


def spoil(rows: Tensor, kind: str) -> None:
    """Make a row (any leading shape) bad, in place."""
    if kind == "all -inf":
        rows[:] = -INF
    else:
        rows[..., 2] = BAD_VALUES[kind]


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_target_row(rule: Rule, kind: str, temperature: float) -> None:
    sampling = make_sampling([temperature] * 3, 6, 0.9, seed=[1, 2, 3])
    batch = make_batch([5, 5, 5], sampling, rule=rule)
    # Request 1's drafts are certain to be accepted: copies of what is drawn, from the same distribution.
    middle = batch.rows(1)
    drawn = sample(
        batch.logits[middle], sampling, batch.position[1] + 1 + torch.arange(5), request=torch.ones(5).long()
    )
    batch.tokens[middle][1:] = drawn[:-1]
    batch.draft_logits[1] = transform(batch.logits[middle], sampling, torch.ones(5).long())
    clean = batch.accept(rule)
    assert clean.num_emitted[1] == 5
    for bad_node in range(5):
        logits = batch.logits.clone()
        spoil(logits[middle][bad_node], kind)
        verdict = replace(batch, logits=logits).accept(rule)
        assert_well_formed(verdict, batch)
        assert verdict.status.tolist() == [Status.OK, Status.BAD_LOGITS, Status.OK]
        assert verdict.num_emitted[1] == bad_node
        assert verdict.tokens[1, :bad_node].tolist() == clean.tokens[1, :bad_node].tolist()
        for r in (0, 2):
            assert rows_of(verdict, r) == rows_of(clean, r)


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("rule", RULES)
def test_p05_bad_target_row_past_the_first_rejection_has_no_effect(rule: Rule, kind: str) -> None:
    batch = make_batch([6] * 20, make_sampling([1.0] * 20, seed=list(range(20))), agree=False, rule=rule)
    clean = batch.accept(rule)
    logits = batch.logits.clone()
    for r in range(20):
        spoil(logits[batch.rows(r)][int(clean.num_emitted[r]) :], kind)
    assert (clean.num_emitted < 6).any()
    assert_same(replace(batch, logits=logits).accept(rule), clean)


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_draft_row_is_rejected_and_replaced_from_p(kind: str, temperature: float) -> None:
    sampling = make_sampling([temperature] * 3, 6, 0.9, seed=[1, 2, 3])
    batch = make_batch([4, 4, 4], sampling)
    clean = batch.accept("ratio")
    for bad_slot in range(3):
        draft_logits = batch.draft_logits.clone()
        spoil(draft_logits[1, bad_slot], kind)
        verdict = batch.accept("ratio", draft_logits=draft_logits)
        assert_well_formed(verdict, batch)
        assert verdict.status.tolist() == [Status.OK] * 3
        for r in (0, 2):
            assert rows_of(verdict, r) == rows_of(clean, r)
        if clean.num_emitted[1] <= bad_slot:
            assert rows_of(verdict, 1) == rows_of(clean, 1)
            continue
        assert verdict.num_emitted[1] == bad_slot + 1
        row = batch.rows(1).start + bad_slot
        p = transform(batch.logits[row : row + 1], sampling, torch.tensor([1])).double().softmax(-1)
        u = uniform(sampling.seed[1:2], batch.position[1:2] + bad_slot + 1, Stream.RESIDUAL)
        assert verdict.tokens[1, bad_slot] == inverse_cdf(p, u)


def test_law_after_a_bad_draft_row_is_p() -> None:
    vocab_size, rows = 16, 50_000
    target = randn(2, vocab_size, seed=8, scale=1.0)
    seed = torch.arange(rows)
    verdict = noise_rows(target, torch.full((vocab_size,), NAN), torch.zeros_like(seed), seed, torch.zeros_like(seed))
    assert (verdict.num_emitted == 1).all()
    assert chi_square_pvalue(verdict.tokens[:, 0], target[0].double().softmax(-1)) > CHI_SQUARE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("placeholder", [-1, 11, 2**40, -(2**40)])
def test_p07_ids_outside_the_vocabulary_are_rejected(rule: Rule, placeholder: int) -> None:
    batch = make_batch([4, 4], make_sampling([1.0, 0.0], seed=[3, 4]), rule=rule)
    same = batch.accept(rule)
    for slot in range(3):
        tokens = batch.tokens.clone()
        tokens[[0, 4]] = placeholder  # anchors are not read
        tokens[1 + slot] = placeholder
        verdict = replace(batch, tokens=tokens).accept(rule)
        assert_well_formed(verdict, batch)
        assert verdict.status.tolist() == [Status.OK] * 2
        assert verdict.num_emitted[0] == min(int(same.num_emitted[0]), slot + 1)
        assert rows_of(verdict, 1) == rows_of(same, 1)


@pytest.mark.parametrize("rule", RULES)
def test_p08_emitted_is_one_more_than_accepted(rule: Rule) -> None:
    lengths = [length for length in range(1, 7) for _ in range(50)]
    batch = make_batch(lengths, make_sampling([1.0] * 300, seed=list(range(300))), rule=rule)
    verdict = batch.accept(rule)
    assert_well_formed(verdict, batch)
    seen = {(length, int(n)) for length, n in zip(lengths, verdict.num_emitted, strict=True)}
    assert seen == {(length, n) for length in range(1, 7) for n in range(1, length + 1)}, "every count occurs"


# Log-probabilities, determinism, mixed temperatures.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p15_logprobs_are_those_of_the_untransformed_target(rule: Rule, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), rule=rule)
    batch = replace(batch, logits=batch.logits.to(dtype))
    verdict = batch.accept(rule)
    logprobs = batch.logits.double().log_softmax(-1)
    checked = {"accepted": 0, "last": 0}
    for r, n in enumerate(verdict.num_emitted.tolist()):
        for i in range(n):
            expected = logprobs[batch.rows(r)][i, verdict.tokens[r, i]]
            assert abs(verdict.logprobs[r, i] - expected) < LOGPROBS
            checked["last" if i == n - 1 else "accepted"] += 1
    assert min(checked.values()) > 2


@pytest.mark.parametrize("rule", RULES)
def test_p20_verdict_is_bitwise_the_same_alone_and_permuted(rule: Rule) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), vocab_size=259, rule=rule)
    verdict = batch.accept(rule)
    order = [5, 3, 0, 7, 1, 6, 2, 4]
    permuted = batch.take(order).accept(rule)
    for new, old in enumerate(order):
        assert rows_of(permuted, new) == rows_of(verdict, old)
    for r in range(8):
        alone = batch.take([r]).accept(rule)
        width = max(1, MIXED_LENGTHS[r])
        for name in ("tokens", "path", "logprobs"):
            assert torch.equal(getattr(alone, name)[0], getattr(verdict, name)[r, :width])
        assert alone.num_emitted[0] == verdict.num_emitted[r]


@pytest.mark.parametrize("rule", RULES)
def test_p20_shorter_verification_emits_a_prefix(rule: Rule) -> None:
    batch = make_batch([6] * 30, make_sampling([1.0] * 30, seed=list(range(30))), rule=rule)
    full = batch.accept(rule)
    keep = torch.arange(6).repeat(30)
    for length in range(1, 6):
        short = replace(
            batch, logits=batch.logits[keep < length], tokens=batch.tokens[keep < length], lengths=[length] * 30
        ).accept(rule)
        agree = (
            length if rule == "coupled" else length - 1
        )  # a bonus by ratio is drawn otherwise than an accepted draft
        assert torch.equal(short.num_emitted, full.num_emitted.clamp(max=length))
        assert torch.equal(short.tokens[:, :agree], full.tokens[:, :agree])


@pytest.mark.parametrize("rule", RULES)
def test_temperature_zero_mixed_with_sampled_rows(rule: Rule) -> None:
    batch = make_batch([5] * 6, make_sampling([0.0, 1.0] * 3, 0, 0.9, seed=list(range(6))), rule=rule)
    verdict = batch.accept(rule)
    for r in (0, 2, 4):
        greedy = batch.logits[batch.rows(r)].argmax(-1).tolist()
        drafts = batch.tokens[batch.rows(r)][1:].tolist()
        agreed = next((i for i in range(4) if greedy[i] != drafts[i]), 4)
        assert verdict.tokens[r].tolist() == greedy[: agreed + 1] + [-1] * (4 - agreed)
    hot = batch.take([1, 3, 5]).accept(rule)
    for new, old in enumerate((1, 3, 5)):
        assert rows_of(hot, new) == rows_of(verdict, old)
    cold = batch.take([0, 2, 4])
    promised = cold.accept(rule, sampling=replace(cold.sampling, all_greedy=True))
    assert_same(promised, cold.accept(rule))


def test_ratio_accepts_sampled_drafts_at_temperature_zero_only_if_they_are_the_argmax() -> None:
    target = make_sampling([0.0] * 100, seed=list(range(100)))
    drafter = make_sampling([1.0] * 100, seed=list(range(100)))
    batch = replace(make_batch([4] * 100, drafter), sampling=target)
    verdict = batch.accept("ratio")
    coupled = batch.accept("coupled")
    assert_same(verdict, coupled)
    assert (verdict.num_emitted > 1).any()


def test_the_positions_are_the_addresses_of_the_noise() -> None:
    batch = make_batch([3] * 50, make_sampling([1.0] * 50, seed=7))
    for rule in RULES:
        moved = batch.accept(rule, position=batch.position + 1000)
        assert not torch.equal(moved.tokens, batch.accept(rule).tokens)


def test_any_layout_of_the_logits() -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling())
    transposed = replace(
        batch, logits=batch.logits.T.contiguous().T, draft_logits=batch.draft_logits.mT.contiguous().mT
    )
    for rule in RULES:
        assert_same(transposed.accept(rule), batch.accept(rule))


def test_arguments_are_not_written() -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling())
    before = [t.clone() for t in (batch.logits, batch.tokens, batch.position, batch.draft_logits)]
    for rule in RULES:
        batch.accept(rule)
    for old, new in zip(before, (batch.logits, batch.tokens, batch.position, batch.draft_logits), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("rule", RULES)
def test_graph_safe_reads_no_values(rule: Rule) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    f32 = torch.float32
    sampling = Sampling(meta(2, dtype=f32), meta(2), meta(2, dtype=f32), meta(2, dtype=f32), meta(2))
    verdict = accept(
        meta(6, 9, dtype=f32),
        meta(6),
        meta(3),
        rule=rule,
        sampling=sampling,
        position=meta(2),
        max_query_len=4,
        draft_logits=meta(2, 3, 9, dtype=f32) if rule == "ratio" else None,
    )
    assert verdict.tokens.shape == (2, 4)


def test_one_debug_line_names_the_path(caplog: pytest.LogCaptureFixture) -> None:
    batch = make_batch([2], make_sampling([1.0]))
    with caplog.at_level("DEBUG", logger="dspark.ops.backend"):
        batch.accept("ratio")
    assert [r.getMessage() for r in caplog.records] == ["accept: reference backend (asked for auto, device cpu)"]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "rule: expected one of 'coupled', 'ratio', got 'block'", {"rule": "block"}),
        (ValueError, "max_query_len: expected at least 1, got 0", {"max_query_len": 0}),
        (ValueError, "draft_logits: rule 'ratio' needs the draft's scores \"R G V\", got None", {"draft_logits": None}),
        (ValueError, "draft_logits: rule 'coupled' does not use", {"rule": "coupled"}),
        (
            ValueError,
            r'draft_logits: expected shape "R G V" with V = 11, got \[2, 3, 10\]',
            {"draft_logits": torch.zeros(2, 3, 10)},
        ),
        (ValueError, 'draft_logits: expected shape "R G V" with R = 2', {"draft_logits": torch.zeros(3, 3, 11)}),
        (ValueError, "G >= max_query_len - 1 = 2", {"draft_logits": torch.zeros(2, 1, 11)}),
        (ValueError, r'target_logits: expected shape "T V" \(2 dimensions\)', {"target_logits": torch.zeros(5)}),
        (TypeError, "target_logits: expected dtype float32 or", {"target_logits": torch.zeros(5, 11).double()}),
        (ValueError, r'tokens: expected shape "T" with T = 5, got \[4\]', {"tokens": torch.zeros(4).long()}),
        (TypeError, "tokens: expected dtype int64, got int32", {"tokens": torch.zeros(5).int()}),
        (
            ValueError,
            r'query_start: expected shape "R\+1" with R\+1 = 3, got \[2\]',
            {"query_start": torch.tensor([0, 5])},
        ),
        (TypeError, "query_start: expected dtype int64, got int32", {"query_start": torch.tensor([0, 3, 5]).int()}),
        (TypeError, "position: expected dtype int64", {"position": torch.zeros(2)}),
        (ValueError, 'sampling.temperature: expected shape "R" with R = 2', {"sampling": make_sampling([1.0] * 3)}),
        (ValueError, "backend: accept has no Triton kernel", {"backend": "triton"}),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    batch = make_batch([3, 2], make_sampling([1.0, 0.0]))
    arguments: dict[str, Any] = {
        "target_logits": batch.logits,
        "tokens": batch.tokens,
        "query_start": batch.query_start,
        "rule": "ratio",
        "sampling": batch.sampling,
        "position": batch.position,
        "max_query_len": 3,
        "draft_logits": batch.draft_logits,
    }
    tensors = ("target_logits", "tokens", "query_start")

    def call(given: dict[str, Any]) -> Verdict:
        return accept(*(given[t] for t in tensors), **{k: v for k, v in given.items() if k not in tensors})

    call(arguments)
    with pytest.raises(error, match=message):
        call(arguments | changes)
