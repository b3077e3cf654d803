"""The kernels of ``accept`` over trees in Triton's interpreter: the same decisions as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.ops.accept import accept_workspace
from dspark.ops.accept.tree_launch import workspace_bytes
from dspark.ops.launch import RowConfig, recorded_launches
from dspark.ops.types import DenseQ, Rule, Status, Verdict
from dspark.testing.guards import guarded, poisoned_empty
from tests.ops.accept.test_triton_accept import empty_verdict
from tests.ops.chains import assert_same, make_batch
from tests.ops.helpers import make_sampling, select, verify, verify_cut
from tests.ops.trees import TREE_RULES, tree_of, tree_problem
from tests.tolerances import LOGPROBS

pytestmark = pytest.mark.triton

TINY = RowConfig(block_rows=4, block_vocab=16, block_sub=4, num_warps=4)
NAN, INF = float("nan"), float("inf")
on_rules = pytest.mark.parametrize("rule", TREE_RULES)
on_two_rules = pytest.mark.parametrize("rule", ["match", "recursive"])  # all kernels between them


def run(arguments: dict[str, Any], config: RowConfig | None = TINY, workspace: Tensor | None = None) -> Verdict:
    """What the kernels say, cut as ``config`` says."""
    out = empty_verdict(arguments["position"].shape[0], arguments["max_query_len"])
    return verify_cut(arguments, out, config, workspace)


def assert_agrees(arguments: dict[str, Any], config: RowConfig | None = TINY) -> Verdict:
    """The kernels and the reference decide alike; log-probabilities agree to rounding."""
    expected = verify(**arguments, backend="reference")
    out = run(arguments, config)
    for name in ("tokens", "num_emitted", "path", "status"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    torch.testing.assert_close(out.logprobs, expected.logprobs, rtol=0, atol=LOGPROBS)
    return out


@on_rules
@settings(max_examples=4)
@given(
    nodes=st.integers(1, 9),
    vocab_size=st.integers(2, 30),
    branching=st.integers(1, 4),
    temperature=st.lists(st.sampled_from([0.0, 0.6, 1.0, 1.5]), min_size=2, max_size=2),
    short=st.integers(0, 9),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    logprobs=st.sampled_from(["raw", "processed"]),
)
def test_decides_as_the_reference(
    rule: Rule,
    nodes: int,
    vocab_size: int,
    branching: int,
    temperature: list[float],
    short: int,
    seed: int,
    dtype: torch.dtype,
    logprobs: str,
) -> None:
    sampling = make_sampling([*temperature, 1.0], seed=[seed, seed + 1, 7])
    arguments = tree_problem(
        rule,
        sampling,
        nodes=nodes,
        vocab_size=vocab_size,
        branching=branching,
        seed=seed,
        dtype=dtype,
        lengths=[nodes, min(short, nodes), nodes],
    )
    assert_agrees(arguments | {"logprobs": logprobs})


@pytest.mark.parametrize("rule", ["coupled", "recursive"])
def test_decides_as_the_reference_under_truncation(rule: Rule) -> None:
    sampling = make_sampling([0.8, 1.2], [3, 0], [1.0, 0.7], [0.0, 0.1], seed=[5, 2])
    arguments = tree_problem(rule, sampling, nodes=4, vocab_size=24, seed=2, dtype=torch.float16, branching=2)
    assert_agrees(arguments | {"logprobs": "processed"})


def test_rejections_are_met_in_every_number() -> None:
    """Trees in which p and q differ: what is drawn after one, two and three rejected children, and after none."""
    arguments = tree_problem(
        "recursive",
        make_sampling([1.0] * 8, seed=list(range(8))),
        parents=[-1, 0, 0, 0, 1],
        vocab_size=9,
        noise=4.0,
        seed=3,
    )
    assert set(assert_agrees(arguments).path[:, 1].tolist()) == {-1, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_anchor_alone_needs_no_q(temperature: float) -> None:
    arguments = tree_problem("recursive", make_sampling([temperature] * 2, seed=[3, 4]), nodes=1, vocab_size=20)
    assert_agrees(arguments | {"q": None})


def test_a_drafters_own_vocabulary() -> None:
    arguments = tree_problem("recursive", make_sampling([1.0, 0.7], seed=[3, 4]), vocab_size=20, seed=3)
    ids = torch.full((20,), -1, dtype=torch.int32)
    ids[torch.arange(0, 20, 2)] = torch.arange(10, dtype=torch.int32).flip(0)
    arguments["tokens"] = arguments["tokens"] // 2 * 2
    arguments["q"] = DenseQ(arguments["q"].logits[..., :10], ids)
    assert_agrees(arguments)


@pytest.mark.parametrize(("rule", "chain_rule"), [("coupled", "coupled"), ("match", "match"), ("recursive", "ratio")])
def test_a_chain_shaped_tree_gives_the_chains_verdict_bit_for_bit(rule: Rule, chain_rule: Rule) -> None:
    sampling = make_sampling([1.0, 0.0, 0.7], seed=[6, 1, 2])
    batch = make_batch([4, 3, 4], sampling, rule=chain_rule, seed=4, vocab_size=21)
    tree = tree_of([[-1, 0, 1, 2]] * 3)
    branching = 1 if rule == "recursive" else None
    expected = batch.accept(chain_rule, logprobs="processed", backend="triton")
    verdict = batch.accept(rule, logprobs="processed", tree=tree, max_branching=branching, backend="triton")
    assert_same(verdict, expected)


@pytest.mark.parametrize("nodes", [65, 130])
def test_trees_of_many_words(nodes: int) -> None:
    arguments = tree_problem("coupled", make_sampling([0.0], seed=[1]), nodes=nodes, vocab_size=6, noise=0.2)
    verdict = assert_agrees(arguments, RowConfig(block_rows=64, block_vocab=16, block_sub=4, num_warps=4))
    assert verdict.num_emitted > 2


@on_rules
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p05_bad_rows(rule: Rule, temperature: float) -> None:
    """NaN, +inf and all -inf, on the path and off it."""
    sampling = make_sampling([temperature] * 6, seed=list(range(6)))
    arguments = tree_problem(rule, sampling, nodes=4, noise=0.2, seed=6, branching=2)
    logits = arguments["target_logits"].clone().view(6, 4, -1)
    for r, value in enumerate((NAN, INF, -INF)):
        logits[r, r, slice(None) if value == -INF else 5] = value
        logits[r + 3, 3 - r, slice(None) if value == -INF else 5] = value
    verdict = assert_agrees(arguments | {"target_logits": logits.flatten(0, 1)})
    assert set(verdict.status.tolist()) == {Status.OK, Status.BAD_LOGITS}


def test_p05_bad_draft_rows_and_a_degenerate_residual() -> None:
    sampling = make_sampling([1.0] * 4, seed=list(range(4)))
    arguments = tree_problem("recursive", sampling, parents=[-1, 0, 0, 1], noise=0.2, seed=6)
    logits = arguments["q"].logits.clone()
    for r, value in enumerate((NAN, INF, -INF)):
        logits[r, 0] = value
    q_row = arguments["target_logits"].view(4, 4, -1)[3, 0].clone()
    q_row[3] = -INF
    target = arguments["target_logits"].clone()
    target[12], logits[3, 0] = q_row, q_row
    tokens = arguments["tokens"].clone()
    tokens[13] = 3  # which neither p nor q could have given
    verdict = assert_agrees(arguments | {"q": DenseQ(logits), "target_logits": target, "tokens": tokens})
    assert verdict.num_emitted[:3].tolist() == [1, 1, 1]
    assert verdict.num_emitted[3] == 2


@on_rules
def test_p07_nodes_that_are_none_are_no_index(rule: Rule) -> None:
    arguments = tree_problem(rule, make_sampling([0.0, 1.0, 1.0], seed=1), parents=[-1, 0, 1, 2, 0], vocab_size=9)
    tokens, parents = arguments["tokens"].clone().view(3, 5), arguments["tree"].parents.clone()
    tokens[:, 1] = torch.tensor([-1, 9, 2**40])
    parents[:, 3] = torch.tensor([-(2**40), 3, 2**40])
    verdict = assert_agrees(
        arguments | {"tokens": tokens.flatten(), "tree": arguments["tree"]._replace(parents=parents)}
    )
    assert (verdict.num_emitted <= 2).all()


@on_two_rules
def test_a_request_is_bitwise_the_same_in_any_batch(rule: Rule) -> None:
    """Alone, permuted, and padded (contract C8)."""
    sampling = make_sampling([1.0, 0.0, 0.7], seed=[4, 5, 6])
    arguments = tree_problem(rule, sampling, nodes=5, vocab_size=20, seed=1)
    together = run(arguments)
    order, pad = [1, -1, 0], 3
    index = torch.tensor([max(r, 0) for r in order])
    counts = [5 if r >= 0 else 0 for r in order]
    rows = torch.tensor([r * 5 + i for r in order if r >= 0 for i in range(5)])
    some = arguments | {
        "target_logits": torch.cat([arguments["target_logits"][rows], torch.full((pad, 20), NAN)]),
        "tokens": torch.cat([arguments["tokens"][rows], torch.full((pad,), -1)]),
        "query_start": torch.tensor([0, *counts]).cumsum(0),
        "sampling": select(sampling, index),
        "position": arguments["position"][index],
        "q": None if arguments["q"] is None else DenseQ(arguments["q"].logits[index]),
        "tree": type(arguments["tree"])(*(field[index] for field in arguments["tree"])),
    }
    verdict = run(some)
    for i, r in enumerate(order):
        if r < 0:
            assert (verdict.num_emitted[i], verdict.status[i]) == (0, Status.OK)
            continue
        for field in Verdict._fields:
            assert torch.equal(getattr(verdict, field)[i], getattr(together, field)[r]), field


@on_two_rules
def test_a_request_is_bitwise_the_same_whatever_the_widest_tree(rule: Rule) -> None:
    """More places for nodes, of which nothing is verified, change nothing."""
    arguments = tree_problem(rule, make_sampling([1.0, 0.7], seed=[4, 5]), nodes=4, vocab_size=20, branching=2, seed=1)
    narrow, tree = run(arguments), arguments["tree"]
    wide = {f: torch.nn.functional.pad(getattr(tree, f), (0, 3), value=-1) for f in tree._fields}
    wide |= {"ancestors": torch.nn.functional.pad(tree.ancestors, (0, 3)), "num_nodes": tree.num_nodes}
    changes = {"tree": tree._replace(**wide), "max_query_len": 7}
    if rule == "recursive":
        changes["q"] = DenseQ(torch.nn.functional.pad(arguments["q"].logits, (0, 0, 0, 3), value=NAN))
    assert_same(run(arguments | changes), narrow, width=4)


@on_two_rules
def test_a_workspace_of_the_stated_size_serves_and_nothing_beyond_it_is_touched(rule: Rule) -> None:
    arguments = tree_problem(rule, make_sampling([1.0, 0.7], seed=[4, 5]), nodes=4, vocab_size=20, branching=2)
    needed = workspace_bytes(2, 4, 20, 20, rule, arguments["max_branching"] or 1, TINY)
    buffer = torch.full((needed + 64,), 0xA5, dtype=torch.uint8)
    assert_same(run(arguments, workspace=buffer[:needed]), run(arguments))
    assert (buffer[needed:] == 0xA5).all()
    with pytest.raises(ValueError, match=r"workspace: expected shape \"bytes\" with bytes >= "):
        run(arguments, workspace=buffer[: needed - 1])


@on_two_rules
def test_the_public_op_takes_the_kernels(rule: Rule) -> None:
    arguments = tree_problem(rule, make_sampling([1.0, 0.0], seed=[4, 5]), nodes=4, vocab_size=20, branching=2)
    branching = arguments["max_branching"]
    size = accept_workspace(2, 4, 20, rule=rule, tree=True, max_branching=branching)
    out = empty_verdict(2, 4)
    workspace = torch.empty(size, dtype=torch.uint8)
    assert verify(**arguments, out=out, workspace=workspace, backend="triton") is out
    expected = verify(**arguments, backend="reference")
    assert torch.equal(out.tokens, expected.tokens)


@pytest.mark.parametrize(
    ("rule", "greedy", "launches"),
    [("coupled", False, 3), ("match", False, 3), ("recursive", False, 4 + 2 * 3), ("recursive", True, 4 + 3)],
)
def test_launches_are_bounded_by_the_branching(rule: Rule, greedy: bool, launches: int) -> None:
    sampling = make_sampling([0.0 if greedy else 1.0], seed=[4])
    arguments = tree_problem(rule, sampling, nodes=8, vocab_size=20)
    with recorded_launches() as found:
        verify(**arguments, backend="triton")
    assert len(found) == launches


def test_p06_rows_beyond_32_bit_offsets() -> None:
    stride = 2**30
    arguments = tree_problem("coupled", make_sampling([1.0], seed=[1]), nodes=4, vocab_size=24, dtype=torch.float16)
    expected = run(arguments)
    # Never touched but in these few places, so the memory is not really there.
    far = torch.empty(3 * stride + 24, dtype=torch.float16).as_strided((4, 24), (stride, 1))
    far.copy_(arguments["target_logits"])
    assert_same(run(arguments | {"target_logits": far}), expected)


@pytest.mark.parametrize("rule", ["coupled", "recursive"])
def test_all_of_the_verdict_and_nothing_else_is_written(rule: Rule) -> None:
    """Inputs are rows between canaries; the outputs and the workspace lie between canaries of their own."""
    sampling = make_sampling([1.0, 0.0, 0.7], [0, 0, 3], seed=[1, 2, 3])
    arguments = tree_problem(rule, sampling, nodes=5, vocab_size=20, lengths=[5, 0, 4])
    rows = guarded(arguments["target_logits"], row_gap=4)
    arguments["target_logits"] = rows.tensor
    bands = [rows]
    if rule == "recursive":
        bands.append(guarded(arguments["q"].logits, row_gap=4))
        arguments["q"] = DenseQ(bands[-1].tensor)
    branching = arguments["max_branching"] or 1
    with poisoned_empty():
        written = {
            f: guarded(
                torch.empty(
                    (3,) if f in ("num_emitted", "status") else (3, 5),
                    dtype=torch.float32 if f == "logprobs" else torch.int64,
                )
            )
            for f in Verdict._fields
        }
        workspace = guarded(torch.empty(workspace_bytes(3, 5, 20, 20, rule, branching, TINY), dtype=torch.uint8))
        out = Verdict(**{name: band.tensor for name, band in written.items()})
        verify_cut(arguments, out, TINY, workspace.tensor)
    for band in (*bands, workspace, *written.values()):
        band.check()
    expected = verify(**arguments, backend="reference")
    for name in ("tokens", "num_emitted", "path", "status"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    assert out.logprobs.isfinite().all()
