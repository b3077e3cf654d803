"""Trees by the kernels in Triton's interpreter, and what they may differ in from the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.draft import sequential_step
from dspark.ops.draft.tree_reference import draft_tree_reference
from dspark.ops.draft.walk_plan import WalkConfig
from dspark.ops.op import OPS
from dspark.ops.philox import gumbel
from dspark.ops.sample.reference import transform
from dspark.ops.types import Rule, Sampling, SequentialHead, Stream, Tree, TreeDraft
from tests.ops.draft.triton_walks import TINY
from tests.ops.draft.walks import Case
from tests.tolerances import LOGITS


class Inputs(NamedTuple):
    """The declared arguments of ``draft_tree``, in order."""

    base_logits: Tensor
    anchor: Tensor
    head: SequentialHead | None
    hidden: Tensor | None
    sampling: Sampling
    position: Tensor
    rule: Rule
    num_nodes: int
    branching: int
    budget: Tensor | None
    beam: int
    acceptance: Tensor | None


def inputs_of(case: Case, rule: Rule, num_nodes: int, branching: int, **changes: Any) -> Inputs:
    """A call without truncation, and without a beam that would change anything."""
    sampling, beam = case.sampling._replace(any_truncation=False), max(num_nodes - 1, 1)
    block = (case.base_logits, case.anchor, case.head, None, sampling, case.position)
    return Inputs(*block, rule, num_nodes, branching, None, beam, None)._replace(**changes)


def reference(inputs: Inputs) -> TreeDraft:
    return draft_tree_reference(*inputs)


def blank(inputs: Inputs) -> TreeDraft:
    """Memory that holds what no op would write."""
    requests, _, vocab_size = inputs.base_logits.shape
    places = (requests, inputs.num_nodes)
    words = () if inputs.num_nodes <= 64 else (-(-inputs.num_nodes // 64),)
    shapes = (places, places, (*places, *words), places, (requests,))
    tree = Tree(*(torch.full(shape, -77) for shape in shapes))
    scored = inputs.rule == "recursive"
    return TreeDraft(tree, torch.full((*places, vocab_size), float("nan")) if scored else None)


def run(inputs: Inputs, config: WalkConfig | None = TINY) -> TreeDraft:
    """What the kernels say, cut as ``config`` says."""
    return TreeDraft(*OPS["draft_tree"]("triton", *inputs, *blank(inputs), config=config))


def assert_agrees(inputs: Inputs, config: WalkConfig | None = TINY) -> TreeDraft:
    """The kernels make the reference's trees, up to ties that the order of a sum decides."""
    expected, out = reference(inputs), run(inputs, config)
    assert_same_trees(inputs, out.tree, expected.tree)
    assert (out.logits is None) == (expected.logits is None)
    if out.logits is not None and torch.equal(out.tree.tokens, expected.tree.tokens):
        torch.testing.assert_close(out.logits, expected.logits, rtol=0, atol=LOGITS, equal_nan=True)
    return out


def assert_same_trees(inputs: Inputs, tree: Tree, expected: Tree) -> None:
    """The same trees; or, up to near-ties, nodes worth the same in their places, each the child whose turn it was."""
    for r in range(len(inputs.anchor)):
        if all(torch.equal(getattr(tree, name)[r], getattr(expected, name)[r]) for name in Tree._fields):
            continue
        if inputs.rule == "recursive":
            assert torch.equal(tree.parents[r], expected.parents[r]), "the shape is static"
        mine, theirs = worths(inputs, tree, r), worths(inputs, expected, r)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=LOGITS * inputs.base_logits.shape[1])


def worths(inputs: Inputs, tree: Tree, r: int) -> Tensor:
    """What each node's path is worth, from the tokens on it; that they are the largest in turn is checked."""
    worth = [0.0]
    for node in range(1, int(tree.num_nodes[r])):
        parent = int(tree.parents[r, node])
        depth, token = int(tree.depth[r, parent]), int(tree.tokens[r, node])
        assert 0 <= depth < inputs.base_logits.shape[1], f"request {r}, node {node}"
        keys = keys_after(inputs, r, int(tree.tokens[r, parent]), depth)
        rank = int((tree.parents[r, :node] == parent).sum())
        assert abs(keys[token] - keys.topk(rank + 1).values[rank]) < LOGITS, f"request {r}, node {node}"
        worth.append(worth[parent] + float(keys.log_softmax(0)[token]))
    return torch.tensor(worth)


def keys_after(inputs: Inputs, r: int, token: int, depth: int) -> Tensor:
    """What the children of a node are chosen by, ``[V]``."""
    s, one = inputs.sampling, slice(r, r + 1)
    scores = inputs.base_logits[one, depth].float()
    if inputs.head is not None:
        scores = scores + sequential_step(inputs.head, torch.tensor([token]), None, None)[0]
    if s.temperature[r] == 0:
        return scores[0]
    sampling = s._replace(**{f: getattr(s, f)[one] for f in ("temperature", "top_k", "top_p", "min_p", "seed")})
    scores = transform(scores, sampling)
    if inputs.rule == "match":
        return scores[0]
    stream = Stream.TARGET if inputs.rule == "coupled" else Stream.DRAFT
    salt = None if inputs.rule == "coupled" else inputs.position[one]
    at = inputs.position[one] + depth + 1
    return (scores + gumbel(s.seed[one], at, scores.shape[1], stream, salt=salt))[0]


def assert_same_bits(a: TreeDraft, b: TreeDraft, rows: Any = slice(None), others: Any = slice(None)) -> None:
    for name in Tree._fields:
        assert torch.equal(getattr(a.tree, name)[rows], getattr(b.tree, name)[others]), name
    if a.logits is not None and b.logits is not None:
        assert torch.equal(a.logits[rows].view(torch.int32), b.logits[others].view(torch.int32))
