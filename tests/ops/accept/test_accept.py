"""Acceptance: each rule against the rule read aloud; log-probabilities, determinism, padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.accept import RULES_OF_Q, accept
from dspark.ops.philox import uniform
from dspark.ops.sample import sample
from dspark.ops.sample.reference import transform
from dspark.ops.types import Backend, DenseQ, Logprobs, Rows, Rule, Sampling, Status, Stream, Verdict
from tests.ops.chains import (
    CASES,
    MIXED_LENGTHS,
    RULES,
    SEEDED,
    Batch,
    Form,
    assert_same,
    assert_well_formed,
    make_batch,
    mixed_sampling,
    on_backends,
    on_cases,
    on_rules,
    randn,
    rows_of,
)
from tests.ops.helpers import make_sampling, select
from tests.tolerances import LOGPROBS

NAN = float("nan")


def p_row(batch: Batch, request: int, node: int) -> Tensor:
    """``[V]`` float64: the target's distribution at a node."""
    one = select(batch.sampling, torch.tensor([request]))
    return transform(batch.logits[batch.rows(request)][node : node + 1], one)[0].double().softmax(-1)


def draw(batch: Batch, request: int, node: int, weights: Tensor) -> int:
    """Inverse CDF with the number of the token that a node gives."""
    u = uniform(batch.sampling.seed[request], batch.position[request] + node + 1, Stream.RESIDUAL)
    return int((weights.cumsum(-1) <= u * weights.sum()).sum())


def walk_seeded(batch: Batch, request: int, rule: Rule) -> list[int]:
    """Plain samples for as long as the next draft is what was sampled."""
    emitted: list[int] = []
    rows = batch.rows(request)
    for i in range(batch.lengths[request]):
        if rule == "match":
            drawn = draw(batch, request, i, p_row(batch, request, i))
        else:
            one = select(batch.sampling, torch.tensor([request]))
            drawn = int(sample(batch.logits[rows][i : i + 1], one, batch.position[request : request + 1] + i + 1))
        emitted.append(drawn)
        if i + 1 == batch.lengths[request] or batch.tokens[rows][i + 1] != drawn:
            break
    return emitted


def walk_ratio(batch: Batch, request: int) -> list[int]:
    """One draft after another, with one number at a time."""
    emitted: list[int] = []
    for i in range(batch.lengths[request]):
        weights = p = p_row(batch, request, i)
        if i + 1 < batch.lengths[request]:
            q = batch.q_row(request, i)
            x = int(batch.tokens[batch.rows(request)][i + 1])
            u = uniform(batch.sampling.seed[request], batch.position[request] + i + 1, Stream.ACCEPT)
            if u * q[x] < p[x]:
                emitted.append(x)
                continue
            weights = (p - q).clamp(min=0)
        emitted.append(draw(batch, request, i, weights))
        break
    return emitted


def walk_block(batch: Batch, request: int) -> list[int]:
    """Algorithm 2 of arXiv 2403.10444, line by line."""
    drafts = batch.tokens[batch.rows(request)][1:].tolist()
    if batch.lengths[request] == 0:
        return []
    p = [p_row(batch, request, i) for i in range(len(drafts) + 1)]
    q = [batch.q_row(request, i) for i in range(len(drafts))]
    weight, tau = [1.0], 0
    for i, x in enumerate(drafts, start=1):
        weight.append(min(weight[-1] * float(p[i - 1][x] / q[i - 1][x]), 1.0))
        chance = weight[i]
        if i < len(drafts) and weight[i] < 1:
            mass = float((weight[i] * p[i] - q[i]).clamp(min=0).sum())
            chance = mass / (mass + 1 - weight[i])
        anchor = batch.position[request]
        if uniform(batch.sampling.seed[request], anchor + i, Stream.ACCEPT, salt=anchor) < chance:
            tau = i
    weights = p[tau] if tau == len(drafts) else (weight[tau] * p[tau] - q[tau]).clamp(min=0)
    return [*drafts[:tau], draw(batch, request, tau, weights)]


def walk(batch: Batch, request: int, rule: Rule) -> list[int]:
    """The rule, read aloud."""
    if rule in SEEDED:
        return walk_seeded(batch, request, rule)
    return walk_ratio(batch, request) if rule == "ratio" else walk_block(batch, request)


def take_over_samples(batch: Batch, rule: Rule, chosen: Tensor) -> None:
    """Make some drafts, those of the rows ``chosen [T]``, what the target will draw there."""
    batch.tokens[1:] = torch.where(chosen[1:], batch.plain(rule).tokens[:-1, 0], batch.tokens[1:])


@on_backends
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=5, max_size=5),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 10_000),
    copied=st.lists(st.booleans(), min_size=25, max_size=25),
    case=st.sampled_from(CASES),
)
def test_accept_equals_the_rule_read_aloud(
    backend: Backend,
    lengths: list[int],
    temperatures: list[float],
    top_k: int,
    top_p: float,
    seed: int,
    copied: list[bool],
    case: tuple[Rule, Form],
) -> None:
    rule, form = case
    sampling = make_sampling(temperatures[: len(lengths)], top_k, top_p, seed=[seed + r for r in range(len(lengths))])
    batch = make_batch(lengths, sampling, vocab_size=6, seed=seed, rule=rule, form=form, backend=backend)
    if rule in SEEDED:
        take_over_samples(batch, rule, torch.tensor(copied)[: sum(lengths)])
    verdict = batch.accept(rule)
    assert_well_formed(verdict, batch)
    for r in range(len(lengths)):
        assert verdict.tokens[r, : int(verdict.num_emitted[r])].tolist() == walk(batch, r, rule)


@on_backends
@pytest.mark.parametrize("agree", [True, False])
@on_cases
def test_accept_equals_the_rule_read_aloud_for_many_requests(
    rule: Rule, form: Form, agree: bool, backend: Backend
) -> None:
    lengths = [length for length in range(7) for _ in range(8)]
    sampling = make_sampling([(0.0, 0.6, 1.0, 1.5)[r % 4] for r in range(56)], 8, 0.97, seed=list(range(56)))
    batch = make_batch(lengths, sampling, agree=agree, rule=rule, form=form, backend=backend)
    verdict = batch.accept(rule)
    assert_well_formed(verdict, batch)
    for r in range(56):
        assert verdict.tokens[r, : int(verdict.num_emitted[r])].tolist() == walk(batch, r, rule)


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
@pytest.mark.parametrize("form", ["mapped", "sparse"])
def test_the_form_of_q_does_not_matter(rule: Rule, form: Form, backend: Backend) -> None:
    sampling = make_sampling([1.0, 0.0, 0.7, 1.4] * 10, 6, 0.95, seed=list(range(40)))
    batch = make_batch([5] * 40, sampling, rule=rule, form="mapped", backend=backend)
    dense, other = replace(batch, form="dense").accept(rule), replace(batch, form=form).accept(rule)
    assert torch.equal(dense.tokens, other.tokens)
    assert dense.num_emitted.unique().tolist() == [1, 2, 3, 4, 5]


@on_backends
@pytest.mark.parametrize("rule", SEEDED)
def test_p20_plain_samples_are_emitted_whatever_was_drafted(rule: Rule, backend: Backend) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), backend=backend)
    plain = batch.plain(rule).tokens[:, 0]
    perfect = batch.tokens.clone()
    for r in range(8):
        perfect[batch.rows(r)][1:] = plain[batch.rows(r)][:-1]
    for tokens in (batch.tokens, perfect, torch.full_like(perfect, -1), perfect.roll(1)):
        verdict = replace(batch, tokens=tokens).accept(rule)
        for r, length in enumerate(MIXED_LENGTHS):
            n = int(verdict.num_emitted[r])
            assert verdict.tokens[r, :n].tolist() == plain[batch.rows(r)][:n].tolist()
            if tokens is perfect:
                assert n == length


@on_backends
@on_cases
def test_padded_requests_and_rows_emit_nothing(rule: Rule, form: Form, backend: Backend) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), rule=rule, form=form, backend=backend)
    padded = replace(
        batch,
        logits=torch.cat([batch.logits, torch.full((5, 11), NAN)]),
        tokens=torch.cat([batch.tokens, torch.full((5,), -1)]),
        draft_logits=batch.draft_logits.clone(),
    )
    padded.draft_logits[[2, 5]] = NAN
    verdict = padded.accept(rule)
    assert_same(verdict, batch.accept(rule))
    for r in (2, 5):
        assert verdict.num_emitted[r] == 0
        assert verdict.status[r] == Status.OK


@on_backends
@on_rules
def test_a_padded_request_before_poisoned_rows(rule: Rule, backend: Backend) -> None:
    batch = make_batch([2, 0], make_sampling([1.0, 1.0]), rule=rule, backend=backend)
    poisoned = replace(
        batch,
        logits=torch.cat([batch.logits, torch.full((3, 11), NAN)]),
        tokens=torch.cat([batch.tokens, torch.full((3,), -1)]),
    )
    assert_same(poisoned.accept(rule), batch.accept(rule))
    assert poisoned.accept(rule).status.tolist() == [Status.OK] * 2


@on_backends
@on_rules
def test_rows_past_max_query_len_are_ignored(rule: Rule, backend: Backend) -> None:
    batch = make_batch([6] * 10, make_sampling([1.0] * 10, seed=list(range(10))), rule=rule, backend=backend)
    keep = torch.arange(6).repeat(10) < 2
    short = replace(batch, logits=batch.logits[keep], tokens=batch.tokens[keep], lengths=[2] * 10)
    assert batch.accept(rule).num_emitted.max() > 2
    assert_same(batch.accept(rule, max_query_len=2), short.accept(rule))


@on_backends
@on_rules
def test_no_rows_and_no_requests(rule: Rule, backend: Backend) -> None:
    none = torch.empty(0, dtype=torch.int64)
    verdict = accept(
        torch.empty(0, 5),
        Rows(none, torch.zeros(3, dtype=torch.int64), torch.tensor([4, 5]), 3),
        rule=rule,
        sampling=make_sampling([1.0, 0.0]),
        q=DenseQ(torch.zeros(2, 2, 5)) if rule in RULES_OF_Q else None,
        backend=backend,
    )
    assert verdict.tokens.tolist() == verdict.path.tolist() == [[-1] * 3] * 2
    assert verdict.num_emitted.tolist() == verdict.status.tolist() == [0, 0]
    verdict = accept(
        torch.zeros(2, 5),
        Rows(torch.tensor([-1, -1]), torch.zeros(1, dtype=torch.int64), none, 1),
        rule=rule,
        sampling=make_sampling([]),
        backend=backend,
    )
    assert verdict.tokens.shape == (0, 1)


@on_backends
@on_cases
def test_widths_beyond_the_longest_request(rule: Rule, form: Form, backend: Backend) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), rule=rule, form=form, backend=backend)
    expected = batch.accept(rule)
    wide = replace(batch, draft_logits=torch.cat([batch.draft_logits, torch.full((8, 4, 11), NAN)], 1))
    verdict = wide.accept(rule, max_query_len=9)
    assert_same(verdict, expected, 6)
    assert (verdict.tokens[:, 6:] == -1).all()


@on_backends
@pytest.mark.parametrize("rule", RULES_OF_Q)
def test_without_drafts_no_q_is_needed(rule: Rule, backend: Backend) -> None:
    batch = make_batch([1, 1, 0, 1], make_sampling([1.0, 0.0, 1.0, 0.5], seed=[1, 2, 3, 4]), backend=backend)
    assert_same(batch.accept(rule, q=None), batch.accept(rule))
    assert batch.accept(rule, q=None).num_emitted.tolist() == [1, 1, 0, 1]


@on_backends
@on_rules
@pytest.mark.parametrize("logprobs", ["raw", "processed"])
def test_results_are_written_into_out(rule: Rule, logprobs: Logprobs, backend: Backend) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), rule=rule, backend=backend)
    shape = (len(MIXED_LENGTHS), max(MIXED_LENGTHS))
    whole = [torch.full(shape if two else shape[:1], 77) for two in (True, False, True, False)]
    out = Verdict(whole[0], whole[1], whole[2], torch.full(shape, NAN), whole[3])
    before = list(out)
    assert batch.accept(rule, out=out, logprobs=logprobs) is out
    assert all(a is b for a, b in zip(before, out, strict=True))
    assert_same(out, batch.accept(rule, logprobs=logprobs))


@on_backends
@on_cases
def test_p08_emitted_is_one_more_than_accepted(rule: Rule, form: Form, backend: Backend) -> None:
    lengths = [length for length in range(1, 7) for _ in range(50)]
    # Less random drafts where their own probability is the chance that they are accepted.
    sampling = make_sampling([0.3 if form == "point" else 1.0] * 300, seed=list(range(300)))
    batch = make_batch(lengths, sampling, rule=rule, form=form, backend=backend)
    if rule == "match":
        take_over_samples(batch, rule, randn(sum(lengths)) > -1)
    verdict = batch.accept(rule)
    assert_well_formed(verdict, batch)
    seen = {(length, int(n)) for length, n in zip(lengths, verdict.num_emitted, strict=True)}
    assert seen == {(length, n) for length in range(1, 7) for n in range(1, length + 1)}, "every count occurs"


@on_backends
@on_cases
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p15_logprobs_are_the_targets_for_every_emitted_token(
    rule: Rule, form: Form, mode: Logprobs, dtype: torch.dtype, backend: Backend
) -> None:
    """Accepted drafts, residual tokens and bonuses alike, and the same that plain decoding gives for that token."""
    temperatures = [(1.0, 0.7, 0.0, 1.4)[r % 4] for r in range(24)]
    sampling = make_sampling(temperatures, [0, 5] * 12, 0.95, 0.01, seed=list(range(24)))
    batch = make_batch([1, 2, 4, 4] * 6, sampling, rule=rule, form=form, backend=backend)
    batch = replace(batch, logits=batch.logits.to(dtype))
    if rule == "match":
        take_over_samples(batch, rule, randn(len(batch.tokens)) > -1)
    verdict, plain = batch.accept(rule, logprobs=mode), batch.plain(rule, logprobs=mode)
    request = torch.arange(24).repeat_interleave(torch.tensor(batch.lengths))
    scores = batch.logits if mode == "raw" else transform(batch.logits, sampling, request)
    logprobs = scores.double().log_softmax(-1)
    seen = {"accepted": 0, "residual": 0, "bonus": 0, "also drawn plainly": 0}
    for r, n in enumerate(verdict.num_emitted.tolist()):
        for i in range(n):
            token, row = verdict.tokens[r, i], batch.rows(r).start + i
            assert abs(verdict.logprobs[r, i] - logprobs[row, token]) < LOGPROBS
            seen["accepted" if i < n - 1 else "bonus" if n == batch.lengths[r] else "residual"] += 1
            if plain.tokens[row, 0] == token:
                assert abs(plain.logprobs[row, 0] - verdict.logprobs[r, i]) < LOGPROBS
                seen["also drawn plainly"] += 1
            if mode == "processed" and temperatures[r] == 0:
                assert verdict.logprobs[r, i] == 0
    assert min(seen.values()) > 2, seen


@on_backends
@on_cases
def test_p20_verdict_is_bitwise_the_same_alone_and_permuted(rule: Rule, form: Form, backend: Backend) -> None:
    sampling = mixed_sampling()
    batch = make_batch(MIXED_LENGTHS, sampling, vocab_size=259, rule=rule, form=form, backend=backend)
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


@on_backends
@pytest.mark.parametrize("rule", ["coupled", "match", "ratio"])  # block looks ahead
def test_p20_shorter_verification_emits_a_prefix(rule: Rule, backend: Backend) -> None:
    batch = make_batch([6] * 30, make_sampling([1.0] * 30, seed=list(range(30))), rule=rule, backend=backend)
    if rule == "match":
        take_over_samples(batch, rule, randn(len(batch.tokens)) > -1)
    full = batch.accept(rule)
    keep = torch.arange(6).repeat(30)
    for length in range(1, 6):
        short = replace(
            batch, logits=batch.logits[keep < length], tokens=batch.tokens[keep < length], lengths=[length] * 30
        ).accept(rule)
        # A bonus by ratio is drawn otherwise than an accepted draft.
        agree = length - 1 if rule == "ratio" else length
        assert torch.equal(short.num_emitted, full.num_emitted.clamp(max=length))
        assert torch.equal(short.tokens[:, :agree], full.tokens[:, :agree])


@on_backends
@on_cases
def test_temperature_zero_mixed_with_sampled_rows(rule: Rule, form: Form, backend: Backend) -> None:
    sampling = make_sampling([0.0, 1.0] * 3, 0, 0.9, seed=list(range(6)))
    batch = make_batch([5] * 6, sampling, rule=rule, form=form, backend=backend)
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
    promised = cold.accept(rule, sampling=cold.sampling._replace(all_greedy=True))
    assert_same(promised, cold.accept(rule))


@on_backends
@on_cases
def test_drafts_are_accepted_at_temperature_zero_only_if_they_are_the_argmax(
    rule: Rule, form: Form, backend: Backend
) -> None:
    target = make_sampling([0.0] * 60, seed=list(range(60)))
    drafter = make_sampling([1.0] * 60, seed=list(range(60)))
    batch = replace(make_batch([4] * 60, drafter, form=form, backend=backend), sampling=target)
    verdict = batch.accept(rule)
    assert_same(verdict, batch.accept("coupled"))
    assert (verdict.num_emitted > 1).any()


@on_backends
@on_rules
def test_the_positions_are_the_addresses_of_the_noise(rule: Rule, backend: Backend) -> None:
    batch = make_batch([3] * 50, make_sampling([1.0] * 50, seed=7), backend=backend)
    moved = batch.accept(rule, position=batch.position + 1000)
    assert not torch.equal(moved.tokens, batch.accept(rule).tokens)


@on_backends
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_p08_accept_numbers_of_block_hold_the_anchors_position(rule: Rule, backend: Backend) -> None:
    """A draft at the same place, drafted after another anchor, is judged by another number; not so under ratio."""
    sampling = make_sampling([1.0] * 60, seed=list(range(60)))
    long = make_batch([3] * 60, sampling, vocab_size=2, rule=rule, agree=False, backend=backend)
    keep = torch.arange(3).repeat(60) > 0  # the first draft becomes the anchor
    short = replace(
        long,
        logits=long.logits[keep],
        tokens=long.tokens[keep],
        lengths=[2] * 60,
        position=long.position + 1,
        draft_logits=long.draft_logits[:, 1:],
    )
    one, two = long.accept(rule), short.accept(rule)
    both = one.num_emitted > 1  # so the second draft was judged in both
    differ = (one.num_emitted[both] == 3) != (two.num_emitted[both] == 2)
    assert 5 < both.sum() < 60
    assert bool(differ.any()) == (rule == "block")


@on_backends
@on_rules
def test_any_layout_of_the_logits(rule: Rule, backend: Backend) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), backend=backend)
    transposed = replace(
        batch, logits=batch.logits.T.contiguous().T, draft_logits=batch.draft_logits.mT.contiguous().mT
    )
    assert_same(transposed.accept(rule), batch.accept(rule))


@on_backends
def test_arguments_are_not_written(backend: Backend) -> None:
    batch = make_batch(MIXED_LENGTHS, mixed_sampling(), backend=backend)
    before = [t.clone() for t in (batch.logits, batch.tokens, batch.position, batch.draft_logits)]
    for rule in RULES:
        batch.accept(rule)
    for old, new in zip(before, (batch.logits, batch.tokens, batch.position, batch.draft_logits), strict=True):
        assert torch.equal(old, new)


@on_rules
def test_graph_safe_reads_no_values(rule: Rule) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    f32 = torch.float32
    sampling = Sampling(meta(2, dtype=f32), meta(2), meta(2, dtype=f32), meta(2, dtype=f32), meta(2))
    verdict = accept(
        meta(6, 9, dtype=f32),
        Rows(meta(6), meta(3), meta(2), 4),
        rule=rule,
        sampling=sampling,
        q=DenseQ(meta(2, 3, 9, dtype=f32)) if rule in RULES_OF_Q else None,
    )
    assert verdict.tokens.shape == (2, 4)


@on_cases
def test_compiles_into_one_graph(rule: Rule, form: Form) -> None:
    batch = make_batch([4, 1, 3], make_sampling([1.0, 0.0, 0.7], 5, seed=[1, 2, 3]), rule=rule, form=form)
    torch.compiler.reset()
    compiled = torch.compile(accept, fullgraph=True, backend="eager")
    verdict = compiled(
        batch.logits,
        Rows(batch.tokens, batch.query_start, batch.position, 4),
        rule=rule,
        sampling=batch.sampling,
        q=batch.q() if rule in RULES_OF_Q else None,
        backend="reference",
    )
    assert_same(verdict, batch.accept(rule))


@on_rules
def test_one_debug_line_names_the_path(rule: Rule, caplog: pytest.LogCaptureFixture) -> None:
    batch = make_batch([2], make_sampling([1.0]))
    with caplog.at_level("DEBUG", logger="dspark.ops.op"):
        batch.accept(rule, backend="auto")
    assert [r.getMessage() for r in caplog.records] == ["accept: reference backend (asked for auto, device cpu)"]
