"""The draft walk against a plain loop over requests and slots, and its contracts on noise, q and bad rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.philox import gumbel
from dspark.ops.sample import sample, transform
from dspark.ops.types import (
    ConfidenceHead,
    Draft,
    GatedHead,
    MarkovHead,
    RNNHead,
    Sampling,
    SequentialHead,
    Stream,
)
from dspark.ops.walk import draft_walk, sequential_step
from tests.ops.helpers import chi_square_pvalue, make_sampling, select
from tests.tolerances import CHI_SQUARE, LOGITS

INF = float("inf")
NAN = float("nan")
V, RANK, HIDDEN = 19, 6, 10
HEADS = ["none", "markov", "gated", "rnn"]
CONFIDENCES = ["none", "hidden", "hidden and token"]
STREAMS = [Stream.TARGET, Stream.DRAFT]


@dataclass(frozen=True)
class Case:
    """Arguments of a walk."""

    base_logits: Tensor
    anchor: Tensor
    head: SequentialHead | None
    hidden: Tensor | None
    confidence_head: ConfidenceHead | None
    sampling: Sampling
    position: Tensor
    stream: Stream = Stream.TARGET
    return_logits: bool = True

    def walk(self, **options: Any) -> Draft:
        arguments = {f.name: getattr(self, f.name) for f in fields(self)} | options
        return draft_walk(arguments.pop("base_logits"), arguments.pop("anchor"), **arguments)

    def take(self, requests: Sequence[int], draft_len: int) -> Case:
        """Some of the requests, and the first slots of each."""
        rows = torch.tensor(requests, dtype=torch.int64)
        return replace(
            self,
            base_logits=self.base_logits[rows, :draft_len],
            anchor=self.anchor[rows],
            hidden=None if self.hidden is None else self.hidden[rows, :draft_len],
            sampling=select(self.sampling, rows),
            position=self.position[rows],
        )


def make_head(kind: str, g: torch.Generator) -> SequentialHead | None:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    w1, w2 = randn(V, RANK), randn(V, RANK)
    if kind == "markov":
        return MarkovHead(w1, w2)
    if kind == "gated":
        return GatedHead(w1, w2, randn(RANK, HIDDEN + RANK) / 3, randn(RANK))
    if kind == "rnn":
        return RNNHead(w1, w2, randn(3 * RANK, 2 * RANK + HIDDEN) / 3, randn(3 * RANK))
    return None


def make_case(
    head: str = "markov",
    confidence: str = "hidden and token",
    temperature: Sequence[float] = (1.0, 0.0, 0.7),
    draft_len: int = 5,
    seed: int = 0,
    **sampling: Any,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    count = len(temperature)
    sequential = make_head(head, g)
    w1 = None
    if confidence == "hidden and token":
        w1 = torch.randn(V, RANK, generator=g) if sequential is None else sequential.w1
    weight = torch.randn(HIDDEN + (0 if w1 is None else RANK), generator=g) / 2
    return Case(
        base_logits=2 * torch.randn(count, draft_len, V, generator=g),
        anchor=torch.randint(V, (count,), generator=g),
        head=sequential,
        hidden=torch.randn(count, draft_len, HIDDEN, generator=g),
        confidence_head=None if confidence == "none" else ConfidenceHead(weight, torch.tensor(0.3), w1),
        sampling=make_sampling(temperature, **{"seed": [11 * i + seed for i in range(count)], **sampling}),
        position=torch.randint(1000, (count,), generator=g),
    )


def by_hand(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``[R, G]``, scores before the transforms ``[R, G, V]`` and confidence logits ``[R, G]``, in float64.

    One request and one slot at a time, each equation as the paper prints it.
    """
    count, draft_len, _ = case.base_logits.shape
    tokens = torch.empty(count, draft_len, dtype=torch.int64)
    scores = torch.empty(count, draft_len, V, dtype=torch.float64)
    confidence = torch.empty(count, draft_len, dtype=torch.float64)
    head, score_of = case.head, case.confidence_head
    for r in range(count):
        previous = int(case.anchor[r])
        state = torch.zeros(RANK, dtype=torch.float64)
        for k in range(draft_len):
            h = torch.zeros(0) if case.hidden is None else case.hidden[r, k].double()
            bias = torch.zeros(V, dtype=torch.float64)
            if head is not None:
                x, w2 = head.w1[previous].double(), head.w2.double()
                if isinstance(head, MarkovHead):
                    bias = w2 @ x
                elif isinstance(head, GatedHead):
                    gate = head.gate_weight.double() @ torch.cat([h, x]) + head.gate_bias.double()
                    bias = w2 @ (gate.sigmoid() * x)
                else:
                    z = torch.cat([state, x, h])
                    weight, offset = head.joint_weight.double(), head.joint_bias.double()
                    gate = (weight[:RANK] @ z + offset[:RANK]).sigmoid()
                    candidate = (weight[RANK : 2 * RANK] @ z + offset[RANK : 2 * RANK]).tanh()
                    state = gate * state + (1 - gate) * candidate
                    bias = w2 @ (weight[2 * RANK :] @ z + offset[2 * RANK :]).tanh()
            scores[r, k] = case.base_logits[r, k].double() + bias
            if score_of is not None:
                features = h if score_of.w1 is None else torch.cat([h, score_of.w1[previous].double()])
                confidence[r, k] = score_of.weight.double() @ features + score_of.bias.double()
            previous = int(
                sample(
                    scores[r, k : k + 1].float(),
                    select(case.sampling, torch.tensor([r])),
                    case.position[r : r + 1] + k + 1,
                    stream=case.stream,
                    salt=case.position[r : r + 1] if case.stream is Stream.DRAFT else None,
                )
            )
            tokens[r, k] = previous
    return tokens, scores, confidence


def noise_of(case: Case) -> Tensor:
    """Gumbel noise ``[R, G, V]`` at the address that contract C3 gives each slot."""
    slots = [case.position + k + 1 for k in range(case.base_logits.shape[1])]
    salt = case.position if case.stream is Stream.DRAFT else None
    return torch.stack([gumbel(case.sampling.seed, at, V, case.stream, salt=salt) for at in slots], dim=1)


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


BAD_ROWS = {"NaN": [NAN], "+inf": [INF], "all -inf": [-INF] * V, "NaN and +inf": [NAN, INF]}


@pytest.mark.parametrize("temperature", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0)])
@pytest.mark.parametrize("values", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_p05_a_bad_row_ends_its_request_only(values: list[float], temperature: tuple[float, ...]) -> None:
    case = make_case(temperature=temperature, top_p=0.9)
    spoiled = case.base_logits.clone()
    spoiled[1, 2, : len(values)] = torch.tensor(values)
    good = case.walk()
    for return_logits in (True, False):
        bad = case.walk(base_logits=spoiled, return_logits=return_logits)
        assert (bad.tokens[1, 2:] == -1).all()
        for name in ("tokens", "logits", "confidence", "confidence_logits"):
            before, after = getattr(good, name), getattr(bad, name)
            if after is None:
                assert name == "logits"
                assert not return_logits
                continue
            if name != "tokens":
                assert (after[1, 2:] == (0 if name == "confidence" else -INF)).all()
            assert torch.equal(after[[0, 2]], before[[0, 2]])
            assert torch.equal(after[1, :2], before[1, :2])


def test_a_logit_of_minus_infinity_is_a_legal_ban() -> None:
    case = make_case("markov", temperature=[1.0, 0.0])
    banned = case.base_logits.clone()
    banned[..., 4:] = -INF
    draft = case.walk(base_logits=banned)
    assert ((draft.tokens >= 0) & (draft.tokens < 4)).all()


@pytest.mark.parametrize("head", HEADS)
def test_bad_hidden_states(head: str) -> None:
    """They spoil the tokens of the heads that read them, and everyone's confidence."""
    case = make_case(head, temperature=[0.0, 1.0])
    assert case.hidden is not None
    hidden = case.hidden.clone()
    hidden[0, 1, 3] = NAN
    good, bad = case.walk(), case.walk(hidden=hidden)
    assert bad.confidence is not None
    assert bad.confidence[0, 1] == 0
    if head in ("none", "markov"):
        assert torch.equal(bad.tokens, good.tokens)
    else:
        assert (bad.tokens[0, 1:] == -1).all()
        assert torch.equal(bad.tokens[1], good.tokens[1])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("temperature", [(0.0, 0.0, 0.0), (1.0, 1.0, 0.0)])
def test_p07_padded_requests(head: str, temperature: tuple[float, ...]) -> None:
    case = make_case(head, temperature=temperature)
    good = case.walk()
    padded = case.walk(anchor=torch.where(torch.tensor([False, True, False]), -1, case.anchor))
    assert (padded.tokens[1] == -1).all()
    assert (padded.confidence[1] == 0).all()
    assert (padded.logits[1] == -INF).all()
    for name in ("tokens", "logits", "confidence"):
        assert torch.equal(getattr(padded, name)[[0, 2]], getattr(good, name)[[0, 2]])


@pytest.mark.parametrize("head", HEADS[1:])
def test_half_precision_weights_are_widened_first(head: str) -> None:
    case = make_case(head)

    def cast(weights: Any, *dtypes: torch.dtype) -> Any:
        values = {f.name: getattr(weights, f.name) for f in fields(weights)}
        for dtype in dtypes:
            values = {name: value.to(dtype) for name, value in values.items()}
        return replace(weights, **values)

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
    leaves = {f.name: getattr(weights, f.name).requires_grad_() for f in fields(weights)}
    state, total = None, torch.tensor(0.0)
    for k in range(3):
        previous = torch.tensor([k, k + 4])
        bias, state = sequential_step(replace(weights, **leaves), previous, torch.randn(2, HIDDEN), state)
        assert bias.shape == (2, V)
        total = total + bias.square().sum()
    total.backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.abs().sum() > 0, name


def test_an_empty_batch() -> None:
    draft = make_case(temperature=[1.0]).take([], 4).walk()
    assert draft.tokens.shape == (0, 4)
    assert draft.logits is not None
    assert draft.logits.shape == (0, 4, V)


@pytest.mark.parametrize("temperature", [[0.0, 0.0], [1.0, 0.0]])
@pytest.mark.parametrize("head", HEADS)
def test_never_reads_the_device(head: str, temperature: list[float]) -> None:
    """Meta tensors have shapes and no numbers."""

    def moved(values: Any) -> Any:
        tensors = {f.name: getattr(values, f.name) for f in fields(values)}
        return replace(values, **{name: x.to("meta") for name, x in tensors.items() if isinstance(x, Tensor)})

    case = make_case(head, temperature=temperature, top_p=0.9)
    case = moved(case)
    draft = case.walk(
        head=None if case.head is None else moved(case.head),
        confidence_head=moved(case.confidence_head),
        sampling=moved(case.sampling),
        stream=Stream.DRAFT,
    )
    assert draft.tokens.shape == (2, 5)


FAULTS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "dimensions": ("none", {"base_logits": torch.zeros(2, V)}, ValueError, 'base_logits: expected shape "R G V"'),
    "no slots": ("none", {"base_logits": torch.zeros(2, 0, V)}, ValueError, "with G >= 1"),
    "integers": ("none", {"base_logits": torch.zeros(2, 5, V).long()}, TypeError, "base_logits: expected dtype"),
    "anchor": ("none", {"anchor": torch.zeros(3).long()}, ValueError, 'anchor: expected shape "R" with R = 2'),
    "float anchor": ("none", {"anchor": torch.zeros(2)}, TypeError, "anchor: expected dtype int64"),
    "position": ("none", {"position": torch.zeros(2, 5).long()}, ValueError, 'position: expected shape "R"'),
    "sampling": ("none", {"sampling": make_sampling([0.0])}, ValueError, "sampling.temperature: expected shape"),
    "stream": ("none", {"stream": Stream.ACCEPT}, ValueError, "stream: expected Stream.TARGET or Stream.DRAFT"),
    "hidden": ("gated", {"hidden": torch.zeros(2, 4, HIDDEN)}, ValueError, 'hidden: expected shape "R G h" with G = 5'),
    "no hidden, confidence": ("markov", {"hidden": None}, ValueError, "hidden: ConfidenceHead needs"),
    "no hidden, gated": ("gated", {"hidden": None, "confidence_head": None}, ValueError, "hidden: GatedHead needs"),
    "no hidden, rnn": ("rnn", {"hidden": None, "confidence_head": None}, ValueError, "hidden: RNNHead needs"),
    "vocabulary of w1": (
        "none",
        {"head": MarkovHead(torch.zeros(V + 1, 3), torch.zeros(V, 3))},
        ValueError,
        r'head.w1: expected shape "V r" with V = 19, got \[20, 3\]',
    ),
    "rank of w2": (
        "none",
        {"head": MarkovHead(torch.zeros(V, 3), torch.zeros(V, 4))},
        ValueError,
        r'head.w2: expected shape "V r" with r = 3, got \[19, 4\]',
    ),
    "gate": (
        "none",
        {"head": GatedHead(torch.zeros(V, 3), torch.zeros(V, 3), torch.zeros(3, HIDDEN), torch.zeros(3))},
        ValueError,
        r'head.gate_weight: expected shape "r \[h;r\]" with \[h;r\] = 13, got \[3, 10\]',
    ),
    "joint": (
        "none",
        {"head": RNNHead(torch.zeros(V, 3), torch.zeros(V, 3), torch.zeros(6, HIDDEN + 6), torch.zeros(9))},
        ValueError,
        r'head.joint_weight: expected shape "3r \[r;r;h\]" with 3r = 9, got \[6, 16\]',
    ),
    "confidence weight": (
        "none",
        {"confidence_head": ConfidenceHead(torch.zeros(HIDDEN), torch.tensor(0.0), torch.zeros(V, RANK))},
        ValueError,
        r'confidence_head.weight: expected shape "\[h;r\]" with \[h;r\] = 16, got \[10\]',
    ),
    "confidence bias": (
        "none",
        {"confidence_head": ConfidenceHead(torch.zeros(HIDDEN), torch.zeros(1), None)},
        ValueError,
        r'confidence_head.bias: expected shape ""',
    ),
    "backend": ("none", {"backend": "cuda"}, ValueError, "backend"),
    "no kernel": ("none", {"backend": "triton"}, ValueError, "backend: draft_walk has no Triton kernel"),
}


@pytest.mark.parametrize(("head", "changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(head: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    case = make_case(head, temperature=[1.0, 0.0])
    with pytest.raises(error, match=message):
        case.walk(**changes)


def test_sequential_step_without_hidden_states() -> None:
    with pytest.raises(ValueError, match="hidden: GatedHead needs"):
        sequential_step(make_head("gated", torch.Generator()), torch.tensor([0]), None, None)
