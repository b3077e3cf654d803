"""The draft walk against a plain loop over requests and slots, and its contracts on noise and q."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.draft import sequential_step
from dspark.ops.sample import sample
from dspark.ops.sample.reference import transform
from dspark.ops.types import MarkovHead, Stream
from tests.ops.draft.walks import HEADS, HIDDEN, STREAMS, Case, V, by_hand, make_case, make_head, noise_of
from tests.ops.helpers import chi_square_pvalue, make_sampling
from tests.tolerances import CHI_SQUARE, LOGITS

INF = float("inf")
CONFIDENCES = ["none", "hidden", "hidden and token"]


@given(data=st.data())
def test_equals_a_loop_over_requests_and_slots(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    temperatures = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.3]), min_size=count, max_size=count))
    case = make_case(
        data.draw(st.sampled_from(HEADS)),
        data.draw(st.sampled_from(CONFIDENCES)),
        temperatures,
        data.draw(st.integers(1, 7)),
        data.draw(st.integers(0, 10_000)),
        top_k=data.draw(st.sampled_from([0, 5])),
        top_p=data.draw(st.sampled_from([1.0, 0.8])),
    )
    case = replace(case, stream=data.draw(st.sampled_from(STREAMS)))
    tokens, scores, confidence = by_hand(case)
    draft = case.walk()
    assert torch.equal(draft.tokens, tokens)
    assert draft.logits is not None
    for k in range(scores.shape[1]):
        expected = transform(scores[:, k].float(), case.sampling)
        torch.testing.assert_close(draft.logits[:, k], expected, atol=LOGITS, rtol=0)
    if case.confidence_head is None:
        assert draft.confidence is None
        assert draft.confidence_logits is None
    else:
        assert draft.confidence is not None
        torch.testing.assert_close(draft.confidence_logits, confidence.float(), atol=LOGITS, rtol=0)
        torch.testing.assert_close(draft.confidence, confidence.sigmoid().float(), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_logits_are_optional_and_change_nothing(head: str) -> None:
    for temperature in ((0.0, 0.0), (1.0, 0.0)):
        case = make_case(head, temperature=temperature)
        with_logits, without = case.walk(), case.walk(return_logits=False)
        assert without.logits is None
        assert torch.equal(with_logits.tokens, without.tokens)
        assert torch.equal(with_logits.confidence, without.confidence)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("head", HEADS)
def test_p03_the_returned_logits_are_the_tensor_sampled_from(head: str, stream: Stream) -> None:
    """Bit for bit: the same noise on the returned logits gives every token again, greedy rows included."""
    case = replace(make_case(head, temperature=(1.0, 0.0, 0.3, 2.0), draft_len=7, top_p=0.9), stream=stream)
    draft = case.walk()
    assert draft.logits is not None
    assert draft.logits.dtype == torch.float32
    assert torch.equal((draft.logits + noise_of(case)).argmax(-1), draft.tokens)


def test_p03_half_precision_logits_are_widened_first() -> None:
    case = make_case()
    half = replace(case, base_logits=case.base_logits.bfloat16())
    wide = replace(case, base_logits=case.base_logits.bfloat16().float())
    assert torch.equal(half.walk().logits, wide.walk().logits)
    assert torch.equal(half.walk().tokens, wide.walk().tokens)


@pytest.mark.parametrize("warper", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
def test_p02_q_is_what_a_warped_drafter_samples_from(warper: dict[str, float]) -> None:
    """Drafts of 20,000 seeds follow softmax of the returned logits, slot by slot."""
    count = 20_000
    one = make_case(temperature=[0.8], draft_len=2, **warper)
    sampling = make_sampling([0.8] * count, seed=list(range(count)), **warper)
    case = replace(
        one,
        base_logits=one.base_logits.expand(count, -1, -1),
        anchor=one.anchor.expand(count),
        hidden=None,
        confidence_head=None,
        sampling=sampling,
        position=one.position.expand(count),
        stream=Stream.DRAFT,
    )
    draft = case.walk()
    assert draft.logits is not None
    q = draft.logits.double().softmax(-1)
    assert (q == 0).any()
    assert chi_square_pvalue(draft.tokens[:, 0], q[0, 0]) > CHI_SQUARE
    first = draft.tokens[:, 0].bincount().argmax()
    after = draft.tokens[:, 0] == first
    assert chi_square_pvalue(draft.tokens[after, 1], q[after][0, 1]) > CHI_SQUARE


def test_p01_slots_draw_independent_noise() -> None:
    """With one distribution in every slot, pairs of neighbours follow the product law."""
    count = 20_000
    logits = torch.tensor([0.0, 1.0, -0.5, 0.3]).expand(count, 2, -1)
    case = Case(
        base_logits=logits,
        anchor=torch.zeros(count, dtype=torch.int64),
        head=None,
        hidden=None,
        confidence_head=None,
        sampling=make_sampling([1.0] * count, seed=list(range(count))),
        position=torch.full((count,), 40),
    )
    for stream in STREAMS:
        tokens = case.walk(stream=stream).tokens
        p = logits[0, 0].double().softmax(-1)
        assert chi_square_pvalue(tokens[:, 0] * 4 + tokens[:, 1], (p[:, None] * p).flatten()) > CHI_SQUARE


@pytest.mark.parametrize("head", HEADS)
def test_greedy_rows_among_sampled_ones(head: str) -> None:
    mixed = make_case(head, temperature=(0.0, 1.0, 0.0))
    greedy = replace(mixed, sampling=make_sampling([0.0] * 3))
    assert greedy.sampling.all_greedy
    a, b = mixed.walk(), greedy.walk()
    rows = torch.tensor([0, 2])
    assert torch.equal(a.tokens[rows], b.tokens[rows])
    assert a.logits is not None
    assert b.logits is not None
    assert torch.equal(a.logits[rows], b.logits[rows])
    assert torch.equal(a.confidence[rows], b.confidence[rows])
    one_hot = torch.full_like(b.logits, -INF).scatter_(-1, b.tokens[..., None], 0.0)
    assert torch.equal(b.logits, one_hot)


def test_greedy_ties_take_the_first() -> None:
    for temperature in ([0.0, 0.0], [0.0, 1.0]):
        case = make_case("none", "none", temperature)
        assert (case.walk(base_logits=torch.ones(2, 5, V)).tokens[0] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_coupled_stream_is_plain_sampling(temperature: float) -> None:
    """Where drafter and target have the same scores, every draft is what plain decoding samples at that position."""
    case = make_case(temperature=[temperature] * 3, draft_len=6, top_k=8)
    draft = case.walk()
    for k in range(6):
        previous = case.anchor if k == 0 else draft.tokens[:, k - 1]
        assert isinstance(case.head, MarkovHead)
        target_logits = case.base_logits[:, k] + case.head.w1[previous] @ case.head.w2.T
        plain = sample(target_logits, case.sampling, case.position + k + 1)
        assert torch.equal(draft.tokens[:, k], plain)


def test_p20_noise_belongs_to_the_position_on_the_target_stream() -> None:
    """A block that starts one token later draws the same tokens at the same positions."""
    case = make_case("none", "none", [1.0], draft_len=6)
    later = replace(
        case,
        base_logits=case.base_logits[:, 1:],
        hidden=None,
        position=case.position + 1,
    )
    assert torch.equal(case.walk().tokens[:, 1:], later.walk().tokens)


def test_draft_noise_is_not_used_again_by_a_later_round() -> None:
    """On the draft stream the same position gets other noise when the block starts elsewhere."""
    count = 200
    case = make_case("none", "none", [1.0] * count, draft_len=2)
    case = replace(case, stream=Stream.DRAFT, base_logits=torch.zeros(count, 2, V))
    earlier = replace(case, position=case.position - 1)
    same = (case.walk().tokens[:, 0] == earlier.walk().tokens[:, 1]).float().mean()
    assert same < 3 / V


@pytest.mark.parametrize("head", HEADS)
def test_c8_requests_and_slots_do_not_depend_on_the_rest_of_the_batch(head: str) -> None:
    case = make_case(head, temperature=(1.0, 0.0, 0.7, 1.0), draft_len=6)
    whole = case.walk()
    for requests, draft_len in (([2], 6), ([3, 0, 1], 6), ([1, 2], 3), ([0], 1)):
        part = case.take(requests, draft_len).walk()
        assert torch.equal(part.tokens, whole.tokens[requests, :draft_len])
        torch.testing.assert_close(part.logits, whole.logits[requests, :draft_len], atol=LOGITS, rtol=0)
        torch.testing.assert_close(part.confidence, whole.confidence[requests, :draft_len], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("head", HEADS[1:])
def test_half_precision_weights_are_widened_first(head: str) -> None:
    case = make_case(head)

    def cast(weights: Any, *dtypes: torch.dtype) -> Any:
        values = weights._asdict()
        for dtype in dtypes:
            values = {name: value.to(dtype) for name, value in values.items()}
        return weights._replace(**values)

    drafts = [
        case.walk(head=cast(case.head, *dtypes), confidence_head=cast(case.confidence_head, *dtypes))
        for dtypes in ((torch.bfloat16,), (torch.bfloat16, torch.float32))
    ]
    for name in ("tokens", "logits", "confidence"):
        assert torch.equal(getattr(drafts[0], name), getattr(drafts[1], name))


@pytest.mark.parametrize("head", HEADS[1:])
def test_sequential_step_is_differentiable(head: str) -> None:
    """Training runs the same step, teacher-forced."""
    weights = make_head(head, torch.Generator().manual_seed(0))
    assert weights is not None
    leaves = {f: x.requires_grad_() for f, x in weights._asdict().items()}
    state, total = None, torch.tensor(0.0)
    for k in range(3):
        previous = torch.tensor([k, k + 4])
        bias, state = sequential_step(weights._replace(**leaves), previous, torch.randn(2, HIDDEN), state)
        assert bias.shape == (2, V)
        total = total + bias.square().sum()
    total.backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.abs().sum() > 0, name


@pytest.mark.parametrize("temperature", [[0.0, 0.0], [1.0, 0.0]])
@pytest.mark.parametrize("head", HEADS)
def test_never_reads_the_device(head: str, temperature: list[float]) -> None:
    """Meta tensors have shapes and no numbers."""

    def moved(values: Any) -> Any:
        if isinstance(values, Case):
            return replace(values, **{f.name: moved(getattr(values, f.name)) for f in fields(values)})
        if isinstance(values, tuple):
            return type(values)(*map(moved, values))
        return values.to("meta") if isinstance(values, Tensor) else values

    draft = moved(make_case(head, temperature=temperature, top_p=0.9)).walk(stream=Stream.DRAFT)
    assert draft.tokens.shape == (2, 5)
