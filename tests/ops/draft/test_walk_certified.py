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

from dspark.ops.draft.certified import draft_walk_certified, draft_walk_certified_workspace
from dspark.ops.draft.certified_launch import CandidateConfig, certified_workspace_bytes, walk_certified_triton
from dspark.ops.draft.certified_reference import certified_steps, slack_of, walk_certified_reference
from dspark.ops.draft.certified_table import (
    TABLE_FILE,
    BiasTable,
    build_bias_table,
    cached_bias_table,
    load_bias_table,
    save_bias_table,
)
from dspark.ops.draft.walk_inputs import WalkInputs, WalkOutputs
from dspark.ops.draft.walk_reference import walk_reference
from dspark.ops.launch import recorded_launches
from dspark.ops.types import MarkovHead
from dspark.testing.guards import forbid_sync, guarded, poisoned_empty
from tests.ops.draft.triton_walks import TINY, blank, inputs_of, run
from tests.ops.draft.walks import STREAMS, Case, V, make_case, make_head
from tests.ops.helpers import make_sampling
from tests.ops.shipped_walk import CALLS, DRAFTS

INF, NAN = float("inf"), float("nan")
SMALL = CandidateConfig(block_vocab=16, group=4, per_tile=3, block_rank=16, block_hidden=16)
TOKENS = WalkOutputs(False)


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
    inputs, top_k = inputs_of(case), data.draw(st.sampled_from([1, 4, 30]))
    exact = walk_reference(inputs, TOKENS)
    for fallback in (True, False):
        draft, certified = walk_certified_reference(inputs, table, top_k, fallback)
        assert_exact(draft.tokens, certified, exact.tokens, fallback)
        assert draft.confidence is not None
        assert exact.confidence is not None
        proven = torch.arange(draft.tokens.shape[1]) < certified[:, None]
        assert torch.equal(draft.confidence, exact.confidence if fallback else exact.confidence * proven)


def run_certified(inputs: WalkInputs, table: BiasTable, top_k: int, fallback: bool) -> tuple[Any, Tensor]:
    out, certified = blank(inputs, TOKENS), torch.full_like(inputs.anchor, -77)
    walk_certified_triton(inputs, table, top_k, fallback, out, certified, None, SMALL, TINY)
    return out, certified


@pytest.mark.triton
@pytest.mark.parametrize(
    ("name", "fallback"),
    [("none", False), ("ties", True), ("infinite", True), ("NaN", False)],  # padding: below
)
def test_kernels_draw_the_tokens_of_the_exact_kernels(name: str, fallback: bool) -> None:
    case = case_of(7, draft_len=2)
    case, table = CHANGES[name](case, build_bias_table(head_of(case), top_m=3))
    inputs = inputs_of(case)
    exact = run(inputs, TOKENS)
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
        exact = walk_reference(inputs, TOKENS).tokens
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
    inputs = inputs_of(replace(case, anchor=torch.tensor([-1, 3])))
    table = build_bias_table(head_of(case), top_m=3)
    with poisoned_empty():
        out = blank(inputs, TOKENS)
        bands = {f: guarded(x) for f, x in out._asdict().items() if x is not None}
        size = certified_workspace_bytes(inputs.base_logits, head_of(case), inputs.sampling, 5, SMALL, TINY)
        workspace, certified = guarded(torch.empty(size, dtype=torch.uint8)), guarded(torch.empty_like(inputs.anchor))
        out = out._replace(**{name: band.tensor for name, band in bands.items()})
        arguments = (inputs, table, 5, True, out, certified.tensor, workspace.tensor, SMALL, TINY)
        walk_certified_triton(*arguments)
    for band in (workspace, certified, *bands.values()):
        band.check()
    assert torch.equal(out.tokens, run(inputs, TOKENS).tokens)
    assert out.confidence is not None
    assert not out.confidence.isnan().any()


@pytest.mark.triton
@pytest.mark.parametrize(("call", "launches"), [("walk, certified", 3), ("walk, certified with fallback", DRAFTS + 4)])
def test_launches_of_a_block(call: str, launches: int) -> None:
    with recorded_launches() as found:
        CALLS[call]()
    assert len(found) == launches


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "head": ({"head": make_head("gated", torch.Generator())}, TypeError, "head: expected a MarkovHead, got GatedHead"),
    "truncation": (
        {"sampling": make_sampling([1.0, 0.0], top_k=3)},
        ValueError,
        "sampling: the certified walk does not truncate",
    ),
    "top_k": ({"top_k": 0}, ValueError, "top_k: expected 1 to 1024, got 0"),
    "table": ({"table": None}, TypeError, "table: expected a BiasTable, got NoneType"),
    "table's sizes": (
        {"table": BiasTable(torch.zeros(3, 2).int(), torch.zeros(3, 2), torch.zeros(3), torch.zeros(3))},
        ValueError,
        'table.tokens: expected shape "V M" with V = 19',
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    case = case_of(0)
    table = changes.pop("table", build_bias_table(head_of(case), top_m=2))
    with pytest.raises(error, match=message):
        call(case, table, **changes)


def test_other_heads_have_no_table() -> None:
    with pytest.raises(TypeError, match="head: expected a MarkovHead, got RNNHead"):
        build_bias_table(make_head("rnn", torch.Generator()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top_m, chunk: expected at least 1"):
        build_bias_table(head_of(case_of(0)), top_m=0)
