"""The certified walk: bitwise the exact walk's tokens on every input, and certificates that are worth having."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.draft import (
    BiasTable,
    build_bias_table,
    cached_bias_table,
    certified_launch,
    draft_walk_certified,
    draft_walk_certified_workspace,
)
from dspark.ops.draft.certified_launch import CandidateConfig
from dspark.ops.draft.certified_reference import certified_steps, slack_of, walk_certified
from dspark.ops.draft.certified_table import TABLE_FILE, load_bias_table, save_bias_table
from dspark.ops.draft.walk_reference import WalkInputs, walk
from dspark.ops.launch import recorded_launches
from dspark.ops.op import OPS
from dspark.ops.types import Draft, MarkovHead
from dspark.testing.guards import forbid_sync, guarded, poisoned_empty
from tests.ops.draft.cases import DRAFTS, SHIPPED
from tests.ops.draft.triton_walks import TINY, TOKENS, blank, inputs_of, run
from tests.ops.draft.walks import STREAMS, Case, V, make_case, make_head
from tests.ops.helpers import make_sampling

INF, NAN = float("inf"), float("nan")
SMALL = CandidateConfig(block_vocab=16, group=4, per_tile=3, block_rank=16, block_hidden=16, walk=TINY)


def case_of(seed: int, **options: Any) -> Case:
    return make_case("markov", **{"temperature": (1.0, 0.0), "draft_len": 3, "seed": seed, **options})


def head_of(case: Case) -> MarkovHead:
    assert isinstance(case.head, MarkovHead)
    return case.head


Change = Callable[[Case, BiasTable], tuple[Case, BiasTable]]


def _tied(case: Case, table: BiasTable) -> tuple[Case, BiasTable]:
    """Pairs of tokens that are alike in everything."""
    head = head_of(case)
    w2, base = head.w2.clone(), case.base_logits.clone()
    w2[1::2], base[..., 1::2] = w2[:-1:2], base[..., :-1:2]
    head = MarkovHead(head.w1, w2)
    return replace(case, head=head, base_logits=base), build_bias_table(head, top_m=table.tokens.shape[1])


def _far(case: Case, table: BiasTable) -> tuple[Case, BiasTable]:
    """Biases so large that tokens from the tail of the base scores win, and the bound is beaten by few."""
    head = MarkovHead(head_of(case).w1 * 20, head_of(case).w2)
    return replace(case, head=head), build_bias_table(head, top_m=table.tokens.shape[1])


def _spoilt(case: Case, table: BiasTable) -> tuple[Case, BiasTable]:
    base = case.base_logits.clone()
    base[0, 1, V - 1] = NAN
    return replace(case, base_logits=base), table


def _infinite(case: Case, table: BiasTable) -> tuple[Case, BiasTable]:
    base = case.base_logits.clone()
    base[0, 1, 2], base[-1, 0, :] = INF, -INF
    return replace(case, base_logits=base), table


def _padded(case: Case, table: BiasTable) -> tuple[Case, BiasTable]:
    return replace(case, anchor=torch.where(torch.arange(len(case.anchor)) == 0, -1, case.anchor)), table


def _bad_weights(case: Case, table: BiasTable) -> tuple[Case, BiasTable]:
    """A number in a row of W2 that is nobody's candidate spoils every slot of the exact walk."""
    head = head_of(case)
    w2, base = head.w2.clone(), case.base_logits.clone()
    w2[V - 1, 0] = NAN
    base[..., V - 1] = -50.0
    head = MarkovHead(head.w1, w2)
    return replace(case, head=head, base_logits=base), build_bias_table(head, top_m=table.tokens.shape[1])


CHANGES: dict[str, Change] = {
    "none": lambda case, table: (case, table),
    "ties": _tied,
    "large biases": _far,
    "NaN": _spoilt,
    "infinite": _infinite,
    "padding": _padded,
    "bad weights": _bad_weights,
}


def assert_exact(tokens: Tensor, certified: Tensor, exact: Tensor, fallback: bool) -> None:
    """Certified slots hold the exact walk's tokens; with fallback all of them do, and without the others hold -1."""
    proven = torch.arange(tokens.shape[1]) < certified[:, None]
    assert torch.equal(tokens, exact if fallback else torch.where(proven, exact, -1))
    assert (exact[proven] >= 0).all()


@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=15)
@given(data=st.data())
def test_tokens_are_those_of_the_exact_walk(name: str, data: st.DataObject) -> None:
    temperature = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3))
    case = case_of(data.draw(st.integers(0, 10_000)), temperature=temperature, draft_len=data.draw(st.integers(2, 6)))
    case = replace(case, stream=data.draw(st.sampled_from(STREAMS)))
    table = build_bias_table(head_of(case), top_m=data.draw(st.sampled_from([1, 3, V])))
    case, table = CHANGES[name](case, table)
    inputs, top_k = inputs_of(case, **TOKENS), data.draw(st.sampled_from([1, 4, 30]))
    exact = walk(*inputs)
    for fallback in (True, False):
        tokens, confidence, _, certified = walk_certified(*arguments(inputs, table, top_k, fallback))
        assert_exact(tokens, certified, exact.tokens, fallback)
        assert confidence is not None
        assert exact.confidence is not None
        proven = torch.arange(tokens.shape[1]) < certified[:, None]
        assert torch.equal(confidence, exact.confidence if fallback else exact.confidence * proven)


def arguments(inputs: WalkInputs, table: BiasTable, top_k: int, fallback: bool) -> tuple[Any, ...]:
    """The declared arguments of the op but for its results."""
    base_logits, anchor, head, *block = inputs[: WalkInputs._fields.index("vocabulary")]
    return base_logits, anchor, head, table, *block, top_k, fallback


def run_certified(
    inputs: WalkInputs,
    table: BiasTable,
    top_k: int,
    fallback: bool,
    results: tuple[Tensor | None, ...] = (None,) * 4,
    **options: Any,
) -> tuple[Draft, Tensor]:
    tokens, confidence, logits, certified = OPS["draft_walk_certified"](
        "triton", *arguments(inputs, table, top_k, fallback), *results, config=SMALL, **options
    )
    return Draft(tokens, None, confidence, logits), certified


@pytest.mark.triton
@pytest.mark.parametrize(
    ("name", "fallback"),
    [("none", False), ("ties", True), ("infinite", True), ("NaN", False)],  # padding: below
)
def test_kernels_draw_the_tokens_of_the_exact_kernels(name: str, fallback: bool) -> None:
    case = case_of(7, draft_len=2)
    case, table = CHANGES[name](case, build_bias_table(head_of(case), top_m=3))
    inputs = inputs_of(case, **TOKENS)
    exact = run(inputs)
    _, expected = certified_steps(inputs, table, 5)
    draft, certified = run_certified(inputs, table, 5, fallback)
    assert_exact(draft.tokens, certified, exact.tokens, fallback)
    assert torch.equal(certified, expected)
    proven = torch.arange(2) < certified[:, None]
    torch.testing.assert_close(draft.confidence, exact.confidence if fallback else exact.confidence * proven)


def test_a_bound_that_leaves_out_the_table_is_wrong() -> None:
    """Without the largest bias of the other tokens, tokens that only their bias lifts are missed."""
    found = 0
    for seed in range(30):
        case, table = _far(case_of(seed), build_bias_table(head_of(case_of(seed)), top_m=1))
        inputs = inputs_of(case)
        exact = walk(*inputs).tokens
        careless = table._replace(bound=torch.zeros_like(table.bound), biases=table.biases * 0)
        tokens, certified = certified_steps(inputs, careless, 3)
        proven = torch.arange(tokens.shape[1]) < certified[:, None]
        found += int((tokens != exact)[proven].sum())
    assert found > 0


@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-2])
def test_a_near_tie_is_left_to_the_exact_walk(gap: float) -> None:
    case = case_of(1, temperature=[0.0], draft_len=1)
    base = torch.full_like(case.base_logits, -100.0)
    base[..., 3], base[..., 9] = 4.0 + gap, 4.0
    w1 = torch.zeros_like(head_of(case).w1)
    head = MarkovHead(w1, head_of(case).w2)
    inputs = inputs_of(replace(case, base_logits=base, head=head))
    _, certified = certified_steps(inputs, build_bias_table(head, top_m=4), 4)
    assert certified.tolist() == [int(gap > 1e-3)]


def test_the_margin_covers_what_two_orders_of_a_sum_differ_by() -> None:
    """Dot products of 256 terms in float32, summed in 4 ways, against float64: a tenth of the slack is not reached."""
    g = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 1e3):
        x, w = scale * torch.randn(256, generator=g), torch.randn(400, 256, generator=g)
        exact = (w.double() * x.double()).sum(-1)
        norm = x.double().norm() * w.double().norm(dim=-1).max()
        product = w * x
        sums = [w @ x, product.sum(-1), product.cumsum(-1)[:, -1], product.flip(-1).cumsum(-1)[:, -1]]
        for one in sums:
            assert (one.double() - exact).abs().max() < 0.1 * slack_of(256) * norm


def test_the_table_holds_the_largest_biases() -> None:
    head = make_head("markov", torch.Generator().manual_seed(0))
    assert isinstance(head, MarkovHead)
    biases = head.w1 @ head.w2.T
    for top_m, chunk in ((4, 5), (V, 100), (V + 5, 7)):
        table = build_bias_table(head, top_m=top_m, chunk=chunk)
        kept = min(top_m, V)
        torch.testing.assert_close(table.biases, biases.gather(-1, table.tokens.long()))
        rest = biases.scatter(-1, table.tokens.long(), -INF).amax(-1)
        torch.testing.assert_close(table.bound, rest)
        assert table.tokens.shape == (V, kept)
        assert (biases.abs() <= table.norm[:, None]).all()


def test_a_table_is_kept_beside_the_weights(tmp_path: Path) -> None:
    head = make_head("markov", torch.Generator().manual_seed(0))
    assert isinstance(head, MarkovHead)
    table = cached_bias_table(head, tmp_path, top_m=4)
    again = load_bias_table(head, tmp_path / TABLE_FILE, top_m=4)
    for field in BiasTable._fields:
        assert torch.equal(getattr(table, field), getattr(again, field))
    other = MarkovHead(head.w1, head.w2 + 1)
    with pytest.raises(ValueError, match="a table of other weights"):
        load_bias_table(other, tmp_path / TABLE_FILE, top_m=4)
    with pytest.raises(ValueError, match="expected 3 biases per token, got 4"):
        load_bias_table(head, tmp_path / TABLE_FILE, top_m=3)
    assert not torch.equal(cached_bias_table(other, tmp_path, top_m=4).biases, table.biases)
    with pytest.raises(ValueError, match="a table of other weights"):
        load_bias_table(head, tmp_path / TABLE_FILE, top_m=4)
    (tmp_path / "torn").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_bias_table(head, tmp_path / "torn", top_m=4)
    with pytest.raises(FileNotFoundError):
        load_bias_table(head, tmp_path / "missing", top_m=4)
    save_bias_table(table, head, tmp_path / "copy")
    assert load_bias_table(head, tmp_path / "copy", top_m=4).tokens.dtype == torch.int32


def call(case: Case, table: BiasTable, **options: Any) -> Any:
    given = {f.name: getattr(case, f.name) for f in fields(case) if f.name != "return_logits"} | options
    return draft_walk_certified(given.pop("base_logits"), given.pop("anchor"), table=table, **given)


def test_the_public_op_by_the_reference() -> None:
    case = case_of(3)
    result = call(case, build_bias_table(head_of(case), top_m=4), top_k=6)
    assert torch.equal(result.draft.tokens, case.walk().tokens)
    assert result.draft.logits is None
    assert (result.certified >= 0).all()


@pytest.mark.triton
def test_the_public_op_by_the_kernels() -> None:
    case = case_of(3, draft_len=1)
    table = build_bias_table(head_of(case), top_m=4)
    size = draft_walk_certified_workspace(case.base_logits, head=head_of(case), sampling=case.sampling, top_k=6)
    workspace = torch.empty(size, dtype=torch.uint8)
    with forbid_sync():
        result = call(case, table, top_k=6, workspace=workspace, fallback=False, backend="triton")
    expected = call(case, table, top_k=6, fallback=False)
    assert torch.equal(result.draft.tokens, expected.draft.tokens)
    assert torch.equal(result.certified, expected.certified)
    with pytest.raises(ValueError, match="workspace: expected shape"):
        call(case, table, top_k=6, workspace=workspace[:-1], backend="triton")


@pytest.mark.triton
def test_outputs_are_written_in_full_and_nothing_else_is() -> None:
    case = case_of(4, temperature=(1.0, 0.0), draft_len=2)
    inputs = inputs_of(replace(case, anchor=torch.tensor([-1, 3])), **TOKENS)
    table = build_bias_table(head_of(case), top_m=3)
    with poisoned_empty():
        out = blank(inputs)
        results = (out.tokens, out.confidence, out.confidence_logits, torch.empty_like(inputs.anchor))
        bands = [guarded(x) for x in results if x is not None]
        written = tuple(band.tensor for band in bands)
        size = 4 * sum(certified_launch.plan({}, *arguments(inputs, table, 5, True), *written, config=SMALL).sizes)
        workspace = guarded(torch.empty(size, dtype=torch.uint8))
        draft, _ = run_certified(inputs, table, 5, True, written, workspace=workspace.tensor)
    for band in (workspace, *bands):
        band.check()
    assert torch.equal(draft.tokens, run(inputs).tokens)
    assert draft.confidence is not None
    assert not draft.confidence.isnan().any()


@pytest.mark.triton
@pytest.mark.parametrize(("call", "launches"), [("walk, certified", 3), ("walk, certified with fallback", DRAFTS + 4)])
def test_launches_of_a_block(call: str, launches: int) -> None:
    (case,) = (case for case in SHIPPED if str(case) == call)
    with recorded_launches() as found:
        case.op("triton", *case.values("meta"))
    assert len(found) == launches


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "head": ({"head": make_head("gated", torch.Generator())}, TypeError, "head: expected MarkovHead, got GatedHead"),
    "truncation": (
        {"sampling": make_sampling([1.0, 0.0], top_k=3)},
        ValueError,
        "sampling: the certified walk does not truncate",
    ),
    "top_k": ({"top_k": 1025}, ValueError, "top_k: expected 1 to 1024, got 1025"),
    "no hidden": ({"hidden": None}, ValueError, "hidden: ConfidenceHead needs"),
}


@pytest.mark.parametrize(("changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    case = case_of(0)
    with pytest.raises(error, match=message):
        call(case, build_bias_table(head_of(case), top_m=2), **changes)


def test_other_heads_have_no_table() -> None:
    with pytest.raises(TypeError, match="head: expected a MarkovHead, got RNNHead"):
        build_bias_table(make_head("rnn", torch.Generator()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top_m, chunk: expected at least 1"):
        build_bias_table(head_of(case_of(0)), top_m=0)
