"""The kernels of ``draft_tree`` in Triton's interpreter: the reference's trees, on every kind of input."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.kernels.draft import tree as kernels
from dspark.ops.draft.tree import draft_tree, draft_tree_workspace
from dspark.ops.draft.tree_launch import levels_of, sizes_of
from dspark.ops.draft.tree_reference import GREEDY_STEP, LOG_UNITS
from dspark.ops.launch import recorded_launches
from dspark.ops.op import OPS
from dspark.ops.philox import gumbel
from dspark.ops.types import MarkovHead, Rule, Stream, Tree, TreeDraft
from dspark.testing.guards import guarded, poisoned_empty
from tests.ops.case import Case as OpCase
from tests.ops.draft import tree_cases
from tests.ops.draft.triton_trees import (
    assert_agrees,
    assert_same_bits,
    assert_same_trees,
    blank,
    inputs_of,
    reference,
    run,
)
from tests.ops.draft.triton_walks import PARTS, TINY
from tests.ops.draft.walks import Case, V, make_case
from tests.ops.trees import TREE_RULES

pytestmark = pytest.mark.triton

NAN, INF = float("nan"), float("inf")
on_rules = pytest.mark.parametrize("rule", TREE_RULES)
on_two_rules = pytest.mark.parametrize("rule", ["coupled", "recursive"])  # all kernels between them


def small(head: str = "markov", **options: Any) -> Case:
    return make_case(head, "none", **{"temperature": (1.0, 0.0), "draft_len": 2, **options})


@on_rules
@settings(max_examples=3)
@given(data=st.data())
def test_drafts_as_the_reference(rule: Rule, data: st.DataObject) -> None:
    case = small(
        data.draw(st.sampled_from(["none", "markov"])),
        temperature=data.draw(st.lists(st.sampled_from([0.0, 0.6, 1.0, 1.5]), min_size=1, max_size=3)),
        draft_len=data.draw(st.integers(1, 3)),
        seed=data.draw(st.integers(0, 10_000)),
    )
    requests, draft_len, _ = case.base_logits.shape
    case = replace(
        case, anchor=case.anchor.clone().index_fill(0, torch.tensor([0]), data.draw(st.sampled_from([-1, 4])))
    )
    nodes, branching = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 5))
    changes: dict[str, Any] = {"beam": min(data.draw(st.integers(1, 14)), max(nodes - 1, 1))}
    if data.draw(st.booleans()):
        changes["budget"] = torch.arange(requests) * 4 - 1
    if rule == "recursive" and data.draw(st.booleans()):
        per_request = (requests,) if data.draw(st.booleans()) else ()
        changes["acceptance"] = torch.rand(*per_request, draft_len, branching).mul(3).round().div(3)
    assert_agrees(inputs_of(case, rule, nodes, branching, **changes), data.draw(st.sampled_from([TINY, PARTS])))


@pytest.mark.parametrize(("rule", "dtype"), [("coupled", torch.bfloat16), ("recursive", torch.float16)])
def test_half_precision(rule: Rule, dtype: torch.dtype) -> None:
    case = small(seed=3)
    assert isinstance(case.head, MarkovHead)
    head = MarkovHead(case.head.w1.to(dtype), case.head.w2.to(dtype))
    assert_agrees(inputs_of(case, rule, 7, 3, base_logits=case.base_logits.to(dtype), head=head))


@pytest.mark.parametrize(("head", "rule"), [("none", "coupled"), ("markov", "coupled"), ("markov", "recursive")])
def test_one_child_per_node_is_the_walk(head: str, rule: Rule) -> None:
    case = small(head, temperature=(1.0, 0.7), draft_len=3)
    block = case.walk(stream=Stream.TARGET if rule == "coupled" else Stream.DRAFT)
    drafted = assert_agrees(inputs_of(case, rule, 4, 1))
    assert torch.equal(drafted.tree.tokens[:, 1:], block.tokens)


def test_p03_the_returned_scores_are_those_sampled_from() -> None:
    """Bit for bit: with the same noise, each node's children are the largest in turn."""
    case = small(temperature=(1.0, 0.0, 0.3), seed=5)
    inputs = inputs_of(case, "recursive", 9, 3)
    draft = run(inputs)
    tree, logits = draft.tree, draft.logits
    assert logits is not None
    for r in (0, 2):
        for node in range(4):
            children = tree.tokens[r, tree.parents[r] == node]
            at = case.position[r] + tree.depth[r, node] + 1
            keys = logits[r, node] + gumbel(case.sampling.seed[r], at, V, Stream.DRAFT, salt=case.position[r])
            assert keys.topk(len(children)).indices.tolist() == children.tolist()
    certain = tree.tokens[1, tree.parents[1] == 0]
    assert logits[1, 0, certain].tolist() == [-64.0 * rank for rank in range(len(certain))]


@on_rules
def test_ties_go_to_the_smaller_token_in_any_tile(rule: Rule) -> None:
    case = small("none", temperature=(0.0, 0.0))
    base = torch.zeros_like(case.base_logits)
    base[:, :, [3, 15, 16, 18]] = 1.0
    tree = assert_agrees(inputs_of(case, rule, 6, 5, base_logits=base)).tree
    assert tree.tokens[0, 1:].tolist() == ([3, 15, 16, 18, 0] if rule != "recursive" else [3, 3, 15, 15, 3])


@on_two_rules
def test_p05_bad_rows_and_rows_of_few_tokens(rule: Rule) -> None:
    """NaN, +inf, nothing finite, two finite: children end there, and where a place stays empty none follows."""
    case = small(temperature=(1.0, 0.7, 0.0, 1.0, 1.0), seed=2)
    base = case.base_logits.clone()
    base[0, 1, 17], base[1, 0, 3], base[2, 1] = NAN, INF, -INF
    base[3, 0, :17] = -INF
    tree = assert_agrees(inputs_of(case, rule, 9, 3, base_logits=base)).tree
    assert tree.num_nodes[1] == 1
    assert tree.depth[[0, 2]].max() == 1
    assert (tree.depth[3] == 1).sum() == 2
    clean = run(inputs_of(case.take([4], 2), rule, 9, 3)).tree
    assert torch.equal(tree.tokens[4], clean.tokens[0])


def test_p07_anchors_that_are_no_tokens_are_no_index() -> None:
    case = replace(small(temperature=(1.0, 0.0, 1.0)), anchor=torch.tensor([-1, 5, V + 2**40]))
    tree = assert_agrees(inputs_of(case, "coupled", 6, 2)).tree
    assert tree.num_nodes.tolist() == [0, 6, 0]


def test_trees_of_many_nodes_and_children_in_a_wide_vocabulary() -> None:
    g = torch.Generator().manual_seed(1)
    case = small("none", temperature=(0.8,))
    base = torch.randn(1, 2, 3000, generator=g)
    w1, w2 = (torch.randn(3000, 16, generator=g) / 4 for _ in range(2))
    config = replace(TINY, block_rows=16, block_vocab=1024)
    inputs = inputs_of(case, "coupled", 70, 16, base_logits=base, head=MarkovHead(w1, w2))
    tree = assert_agrees(inputs, config).tree
    assert tree.ancestors.shape == (1, 70, 2)
    assert tree.depth.max() == 2


@pytest.mark.parametrize(("rule", "requests"), [("coupled", [3]), ("recursive", [4, 0])])
def test_c8_a_request_is_bitwise_the_same_in_any_batch(rule: Rule, requests: list[int]) -> None:
    """Alone, permuted, and in more requests than one block of rows holds."""
    case = small(temperature=(1.0, 0.0, 0.7, 1.0, 0.4))
    whole = run(inputs_of(case, rule, 6, 2))
    assert_same_bits(run(inputs_of(case.take(requests, 2), rule, 6, 2)), whole, others=requests)


@on_two_rules
def test_all_of_the_trees_and_nothing_else_is_written(rule: Rule) -> None:
    """Inputs are rows between canaries; the outputs and the workspace lie between canaries of their own."""
    case = replace(small(temperature=(1.0, 0.7, 0.0)), anchor=torch.tensor([3, -1, 4]))
    assert isinstance(case.head, MarkovHead)
    w1, w2 = (guarded(w, row_gap=4) for w in (case.head.w1, case.head.w2))
    base = guarded(case.base_logits, row_gap=4)
    budget = torch.tensor([4, 9, 0])
    inputs = inputs_of(
        case, rule, 6, 2, base_logits=base.tensor, head=MarkovHead(w1.tensor, w2.tensor), budget=budget
    )  # fmt: skip
    with poisoned_empty():
        written = blank(inputs)
        bands = [guarded(field) for field in written.tree]
        scores = None if written.logits is None else guarded(written.logits, row_gap=4)
        size = 4 * sum(sizes_of(base.tensor, inputs.head, rule, 6, 2, inputs.beam, TINY).regions)
        workspace = guarded(torch.empty(size, dtype=torch.uint8))
        out = TreeDraft(Tree(*(band.tensor for band in bands)), None if scores is None else scores.tensor)
        OPS["draft_tree"]("triton", *inputs, *out, workspace=workspace.tensor, config=TINY)
    for band in (w1, w2, base, workspace, *bands, *([] if scores is None else [scores])):
        band.check()
    expected = reference(inputs)
    assert_same_trees(inputs, out.tree, expected.tree)
    assert out.logits is None or not out.logits.isnan().any()
    with pytest.raises(ValueError, match=r'workspace: expected shape "bytes" with bytes >= '):
        OPS["draft_tree"]("triton", *inputs, *out, workspace=workspace.tensor[:-1], config=TINY)


def test_p06_rows_beyond_32_bit_offsets() -> None:
    case = small("none", temperature=(1.0, 0.0), seed=2)
    base = case.base_logits.half()
    # Never touched but in these few places, so the memory is not really there.
    far = torch.empty(2**31 + 2**30 + V, dtype=torch.float16).as_strided((2, 2, V), (2**31, 2**30, 1))
    far.copy_(base)
    expected = run(inputs_of(case, "coupled", 3, 2, base_logits=base))
    assert_same_bits(run(inputs_of(case, "coupled", 3, 2, base_logits=far)), expected)


def call(case: Case, rule: Rule = "coupled", **options: Any) -> TreeDraft:
    """The public op, by the kernels as they ship."""
    arguments: dict[str, Any] = {
        "head": case.head,
        "hidden": case.hidden,
        "sampling": case.sampling._replace(any_truncation=False),
        "position": case.position,
        "rule": rule,
        "num_nodes": 6,
        "branching": 2,
        "backend": "triton",
    }
    return draft_tree(case.base_logits, case.anchor, **(arguments | options))


@on_two_rules
def test_the_public_op_takes_the_kernels(rule: Rule) -> None:
    case = small()
    out = blank(inputs_of(case, rule, 6, 2))
    size = draft_tree_workspace(case.base_logits, head=case.head, rule=rule, num_nodes=6, branching=2)
    workspace = torch.empty(size, dtype=torch.uint8)
    assert call(case, rule, out=out, workspace=workspace) is out
    expected = call(case, rule, backend="reference")
    assert torch.equal(out.tree.tokens, expected.tree.tokens)
    again = call(case, rule, out=blank(inputs_of(case, rule, 6, 2)), backend="reference")
    assert_same_bits(again, expected)


@pytest.mark.parametrize("case", tree_cases.SHIPPED, ids=str)
def test_launches(case: OpCase) -> None:
    with recorded_launches() as found:
        case.op("triton", *case.values("meta"))
    assert len(found) == 3 * tree_cases.DRAFTS + 1 + (case.words == "recursive")


def test_both_sides_count_alike() -> None:
    assert (kernels.greedy_step(), kernels.log_units()) == (GREEDY_STEP, LOG_UNITS)


def test_an_empty_batch_launches_nothing() -> None:
    with recorded_launches() as launches:
        assert call(small().take([], 2)).tree.tokens.shape == (0, 6)
    assert not launches


def test_sizes_of_levels() -> None:
    """No more of a level is kept than may be in the tree, and no more expanded than the beam says."""
    for beam in (1, 3, 7):
        levels = levels_of(3, 8, 3, beam)
        assert [level.kept for level in levels] == [3, *(min(3 * min(beam, level.held), 7) for level in levels[1:])]
        for above, level in pairwise(levels):
            assert (level.first, level.held) == (above.first + above.held, above.kept)
            assert level.nodes == above.next_nodes == min(beam, above.kept)
    assert [level.kept for level in levels_of(2, 1, 4, 1)] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "rnn"}, "backend: the kernels of draft_tree do not serve a RNNHead; use 'auto' or 'reference'"),
        ({"top_k": 3}, r"do not serve truncation \(sampling.any_truncation\)"),
        ({"base": "columns"}, "base_logits: the kernels need a contiguous last axis"),
        ({"out": "logits"}, "logits: expected None without rule=recursive"),
        ({"out": "places"}, 'tree.tokens: expected shape "R N" with N = 6, got'),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    case = small(changes.get("head", "markov"), top_k=changes.get("top_k", 0))
    options: dict[str, Any] = {"sampling": case.sampling} if "top_k" in changes else {}
    if "base" in changes:
        case = replace(case, base_logits=case.base_logits.transpose(1, 2).contiguous().transpose(1, 2))
    if "out" in changes:
        rule: Rule = "recursive" if changes["out"] == "logits" else "coupled"
        options["out"] = blank(inputs_of(case, rule, 6 if rule == "recursive" else 5, 2))
    with pytest.raises(ValueError, match=message):
        call(case, **options)


def test_other_trees_are_not_taken_for_ties() -> None:
    inputs = inputs_of(small(seed=4), "coupled", 8, 3)
    tree = reference(inputs).tree
    assert_same_trees(inputs, tree, tree)
    for name, change in (("tokens", torch.tensor([0] * 7 + [1])), ("parents", torch.tensor([0] * 7 + [-1]))):
        wrong = Tree(*(field.clone() for field in tree))
        getattr(wrong, name)[0] += change
        with pytest.raises(AssertionError):
            assert_same_trees(inputs, wrong, tree)
