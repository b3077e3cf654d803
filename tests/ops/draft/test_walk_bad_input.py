"""Rows, requests and arguments that a draft walk cannot use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops.draft import sequential_step
from dspark.ops.draft.walk_tables import WalkTables
from dspark.ops.types import ConfidenceHead, Draft, DraftVocabulary, MarkovHead, Stream
from tests.ops.draft.walks import HEADS, HIDDEN, RANK, V, make_case, make_head

INF = float("inf")
NAN = float("nan")
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


def test_an_empty_batch() -> None:
    draft = make_case(temperature=[1.0]).take([], 4).walk()
    assert draft.tokens.shape == (0, 4)
    assert draft.logits is not None
    assert draft.logits.shape == (0, 4, V)


FAULTS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "no steps": (
        "none",
        {"base_logits": torch.zeros(2, 0, V), "hidden": torch.zeros(2, 0, HIDDEN)},
        ValueError,
        'base_logits: expected shape "R G V" with G >= 1',
    ),
    "stream": (
        "none",
        {"stream": Stream.ACCEPT},
        ValueError,
        "stream: expected one of <Stream.TARGET: 0>, <Stream.DRAFT",
    ),
    "no hidden, confidence": ("markov", {"hidden": None}, ValueError, "hidden: ConfidenceHead needs"),
    "no hidden, gated": ("gated", {"hidden": None, "confidence_head": None}, ValueError, "hidden: GatedHead needs"),
    "no hidden, rnn": ("rnn", {"hidden": None, "confidence_head": None}, ValueError, "hidden: RNNHead needs"),
    "vocabulary of w1": (
        "none",
        {"head": MarkovHead(torch.zeros(V + 1, 3), torch.zeros(V, 3)), "confidence_head": None},
        ValueError,
        r'head.w1: expected shape "V1 r" with V1 = 19, got \[20, 3\]',
    ),
    "vocabulary of the confidence's w1": (
        "none",
        {"confidence_head": ConfidenceHead(torch.zeros(HIDDEN + 3), torch.tensor(0.0), torch.zeros(V + 1, 3))},
        ValueError,
        r'confidence_head.w1: expected shape "V1 e" with V1 = 19, got \[20, 3\]',
    ),
    "confidence weight": (
        "none",
        {"confidence_head": ConfidenceHead(torch.zeros(HIDDEN), torch.tensor(0.0), torch.zeros(V, RANK))},
        ValueError,
        r'confidence_head.weight: expected shape "h\+e" with h\+e = 16, got \[10\]',
    ),
    "backend": ("none", {"backend": "cuda"}, ValueError, "backend"),
    "logits_dtype": (
        "none",
        {"logits_dtype": torch.int64},
        ValueError,
        "logits_dtype: expected one of float32, float16",
    ),
    "unused logits_dtype": (
        "none",
        {"return_logits": False, "logits_dtype": torch.float16},
        ValueError,
        "logits_dtype: no logits are returned",
    ),
    "unused confidence_hidden": (
        "none",
        {"confidence_head": None, "confidence_hidden": torch.zeros(2, 5, 3)},
        ValueError,
        "confidence_hidden: there is no confidence_head to read it",
    ),
    "confidence_hidden": ("none", {"confidence_hidden": torch.zeros(2, 5, 3)}, ValueError, "confidence_head.weight: "),
    "unused table": ("markov", {"tables": WalkTables(gate=torch.zeros(V, RANK))}, ValueError, "MarkovHead has no gate"),
    "table of the gate": (
        "gated",
        {"tables": WalkTables(gate=torch.zeros(V, 2))},
        ValueError,
        r'tables.gate: expected shape "V1 g" with g = 6, got \[19, 2\]',
    ),
    "unused table of the confidence": (
        "none",
        {"confidence_head": None, "tables": WalkTables(confidence=torch.zeros(V))},
        ValueError,
        "tables.confidence: no confidence reads the previous token",
    ),
    "rows of w1": (
        "none",
        {"vocabulary": DraftVocabulary(torch.arange(V), torch.arange(V, dtype=torch.int32), "d2t")},  # type: ignore[arg-type]
        ValueError,
        "vocabulary.w1_rows: expected one of 'target', 'draft', got 'd2t'",
    ),
    "out": (
        "none",
        {"out": Draft(torch.zeros(2, 5).long(), None, None)},
        TypeError,
        'out.logits: expected a tensor "R G V"',
    ),
    "unasked out": (
        "none",
        {"return_logits": False, "out": Draft(torch.zeros(2, 5).long(), torch.zeros(2, 5, V), None)},
        ValueError,
        "out.logits: expected None without return_logits",
    ),
    "workspace": ("none", {"workspace": torch.zeros(4)}, TypeError, "workspace: expected dtype uint8"),
}
"""What the declared shapes and dtypes do not say; of those, see ``tests/ops/test_declared.py``."""


@pytest.mark.parametrize(("head", "changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(head: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    case = make_case(head, temperature=[1.0, 0.0])
    with pytest.raises(error, match=message):
        case.walk(**changes)


def test_sequential_step_without_hidden_states() -> None:
    with pytest.raises(ValueError, match="hidden: GatedHead needs"):
        sequential_step(make_head("gated", torch.Generator()), torch.tensor([0]), None, None)
