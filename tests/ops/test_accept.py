"""Acceptance: each rule against the rule read aloud; log-probabilities, determinism, padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.accept import accept
from dspark.ops.philox import uniform
from dspark.ops.sample import sample, transform
from dspark.ops.types import Rule, Sampling, Status, Stream
from tests.ops.chains import (
    MIXED_LENGTHS,
    RULES,
    Batch,
    assert_same,
    assert_well_formed,
    make_batch,
    mixed_sampling,
    rows_of,
)
from tests.ops.helpers import make_sampling, select
from tests.tolerances import LOGPROBS

NAN = float("nan")


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


@pytest.mark.parametrize("rule", RULES)
def test_p08_emitted_is_one_more_than_accepted(rule: Rule) -> None:
    lengths = [length for length in range(1, 7) for _ in range(50)]
    batch = make_batch(lengths, make_sampling([1.0] * 300, seed=list(range(300))), rule=rule)
    verdict = batch.accept(rule)
    assert_well_formed(verdict, batch)
    seen = {(length, int(n)) for length, n in zip(lengths, verdict.num_emitted, strict=True)}
    assert seen == {(length, n) for length in range(1, 7) for n in range(1, length + 1)}, "every count occurs"


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
