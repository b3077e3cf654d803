"""Draft trees: several guesses for each next token, each scored after its own parent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.call import FLOATS, GroupArg, ScalarArg, TensorArg
from dspark.ops.draft import tree_launch as launch
from dspark.ops.draft.tree_reference import draft_tree_reference
from dspark.ops.groups import SAMPLING, check_ancestors, num_words
from dspark.ops.op import Op
from dspark.ops.types import (
    RULES_OF_TREES,
    Backend,
    GatedHead,
    MarkovHead,
    RNNHead,
    Rule,
    Sampling,
    SequentialHead,
    Tree,
    TreeDraft,
)

MAX_NODES = 256
"""Most nodes of a tree."""

MAX_BRANCHING = 16
"""Most children of a node."""


def _check(
    sizes: dict[str, int], base_logits: Tensor, head: SequentialHead | None, hidden: Tensor | None, rule: Rule,
    acceptance: Tensor | None, tree: Tree | None, logits: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    if sizes["G"] == 0:
        raise ValueError(f'base_logits: expected shape "R G V" with G >= 1, got {list(base_logits.shape)}')
    if hidden is None and isinstance(head, GatedHead | RNNHead):
        raise ValueError(f'hidden: {type(head).__name__} needs the block\'s hidden states "R G h", got None')
    if acceptance is not None and rule != "recursive":
        raise ValueError(f"acceptance: rule {rule!r} does not use it; pass None")
    if tree is not None:
        check_ancestors(tree)
        if logits is None and rule == "recursive":
            raise ValueError('logits: rule "recursive" writes scores "R N V" beside the tree, got None')
    if num_words(sizes["N"]) > 1:
        sizes["W"] = num_words(sizes["N"])


_MARKOV = {"w1": TensorArg("V r", FLOATS, layout="rows"), "w2": TensorArg("V r", FLOATS, layout="rows")}
_GATE = {"gate_weight": TensorArg("r h+r", FLOATS), "gate_bias": TensorArg("r", FLOATS)}
_JOINT = {"joint_weight": TensorArg("3r 2r+h", FLOATS), "joint_bias": TensorArg("3r", FLOATS)}
_SHAPES = {"tokens": "R N", "parents": "R N", "ancestors": "R N | R N W", "depth": "R N", "num_nodes": "R"}
_TREE = {name: TensorArg(x, (torch.int64,), written=True, layout="contiguous") for name, x in _SHAPES.items()}

_DRAFT_TREE = Op(
    "draft_tree",
    {
        "base_logits": TensorArg("R G V", FLOATS, layout="rows"),
        "anchor": TensorArg("R", (torch.int64,), layout="dense"),
        "head": GroupArg(
            {MarkovHead: _MARKOV, GatedHead: _MARKOV | _GATE, RNNHead: _MARKOV | _JOINT},
            optional=True,
        ),
        "hidden": TensorArg("R G h", FLOATS, optional=True),
        "sampling": SAMPLING,
        "position": TensorArg("R", (torch.int64,), layout="dense"),
        "rule": ScalarArg("str", choices=RULES_OF_TREES),
        "num_nodes": ScalarArg("SymInt", least=1, most=MAX_NODES, symbol="N"),
        "branching": ScalarArg("SymInt", least=1, most=MAX_BRANCHING, symbol="K"),
        "budget": TensorArg("R", (torch.int64,), optional=True, layout="dense"),
        "beam": ScalarArg("SymInt", least=1),
        "acceptance": TensorArg("G K | R G K", (torch.float32,), optional=True, layout="dense"),
        "tree": GroupArg({Tree: _TREE}, optional=True),
        "logits": TensorArg(
            "R N V", (torch.float32,), optional=True, written=True, layout="rows", when="rule=recursive"
        ),
    },
    reference=draft_tree_reference,
    plan=launch.plan,
    run=launch.run,
    results=["tree", "logits"],
    also=_check,
    empty="R",
    workspace=True,
)


def draft_tree(
    base_logits: Tensor,
    anchor: Tensor,
    *,
    head: SequentialHead | None,
    hidden: Tensor | None,
    sampling: Sampling,
    position: Tensor,
    rule: Rule,
    num_nodes: int,
    branching: int,
    budget: Tensor | None = None,
    beam: int | None = None,
    acceptance: Tensor | None = None,
    out: TreeDraft | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> TreeDraft:
    """Draft trees of ``G`` levels: a node of depth ``d`` is a guess for the ``d``-th token after the anchor.

    A node's children are drawn from ``U_{d+1} + B(its token)``, with the recurrent state of its own path (eq. 4 to 6),
    so q is true at each node. Level by level the ``beam`` best nodes get ``branching`` children each; of all these the
    best ``num_nodes`` make the tree. *Best* is by the product of what each node on the path is worth, so a node never
    beats its parent, and ties go to the smaller depth and then the earlier parent and rank.

    How children are chosen, and what they are worth, depends on the rule that will judge them:

    * ``match``: the most likely tokens, worth their probability;
    * ``coupled``: the largest scores plus the ``TARGET`` noise of their position, with which the target will draw too,
      worth the softmax of these sums (Gumbel-top-k; Kool et al., arXiv 1903.06059);
    * ``recursive``: the same with ``DRAFT`` noise, which is sampling without replacement from q, in the order of the
      sums; worth what ``acceptance`` says of their place. The shape of the tree is thus fixed before any token is
      drawn, which this rule needs: with places won by the tokens drawn in them its output would be biased. Nodes of
      one depth share their noise; on the one path that is judged no number is used twice.

    At temperature 0 the most likely tokens are chosen under every rule.

    Args:
        base_logits: ``[R, G, V]`` float32, float16 or bfloat16, ``U``; ``G >= 1``.
        anchor: ``[R]`` int64, ``x_0``, node 0; -1 is a padded request.
        head: what gives ``B``; None (a parallel drafter) is no bias.
        hidden: ``[R, G, h]`` float, the block's hidden states; gated and recurrent heads need it.
        sampling: the drafter's own parameters of the ``R`` requests.
        position: ``[R]`` int64, absolute position of the anchor.
        rule: ``"coupled"``, ``"match"`` or ``"recursive"``.
        num_nodes: ``N``, places for nodes, the anchor's included; at most 256.
        branching: ``K``, most children of a node; at most 16. With 1 the tree is a chain.
        budget: ``[R]`` int64, most nodes of each request, the anchor's included; None is ``N``. A smaller budget gives
            the first nodes of a larger one's tree.
        beam: most nodes of a level that get children; None is ``N - 1``, which makes the choice exact.
        acceptance: ``[G, K]`` or ``[R, G, K]`` float32 in [0, 1], rule ``"recursive"`` alone: the chance that the child
            of rank ``k`` of a node of depth ``d`` is the one accepted (Sequoia, arXiv 2402.12374, section 3.1), made
            non-increasing in ``k``. It must not depend on tokens of this draft. None is ``0.7 * 0.3 ** k``.
        out: trees whose tensors the result is written into, ``logits`` under ``"recursive"`` alone.
        workspace: ``[bytes]`` uint8, scratch memory of the kernels, :func:`draft_tree_workspace` bytes or more; None
            takes some from the allocator. The reference needs none.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``. The kernels serve ``head=None`` and ``MarkovHead`` without
            truncation. For other heads, and with ``sampling.any_truncation`` unless all requests are greedy, ``"auto"``
            takes the reference on every device, and ``"triton"`` is refused.

    Returns:
        The trees (``out`` if given), nodes in order of what they are worth (so the first ``n`` are a tree too), and
        under ``"recursive"`` the scores that children were sampled from. A node whose scores are bad (NaN, +inf or
        all -inf) has no children, and none has more than its scores have finite entries; under ``"recursive"`` such
        places stay empty.

    Raises:
        ValueError: a shape differs, ``hidden`` is missing, a size is out of range, an option is useless, or the backend
            is unknown or missing, or the kernels do not serve the call.
        TypeError: a dtype differs.

    Computed in float32; the kernels differ from the reference in the order of sums alone. Graph-safe; a request's tree
    depends on its own inputs only. Launches of the kernels: ``3 G + 1``, and one more under ``"recursive"``.
    """
    if out is not None and not isinstance(out, TreeDraft):
        raise TypeError(f"out: expected a TreeDraft, got {type(out).__name__}")
    unserved = _unserved(head, sampling)
    if unserved is not None and backend == "triton":
        raise ValueError(f"backend: the kernels of draft_tree do not serve {unserved}; use 'auto' or 'reference'")
    if unserved is not None and backend == "auto":
        backend = "reference"
    block = (base_logits, anchor, head, hidden, sampling, position)
    shape = (rule, num_nodes, branching, budget, _width(num_nodes, beam), acceptance)
    results = (None, None) if out is None else out
    found = TreeDraft(*_DRAFT_TREE(backend, *block, *shape, *results, workspace=workspace))
    return found if out is None else out


def draft_tree_workspace(
    base_logits: Tensor,
    *,
    head: SequentialHead | None,
    rule: Rule,
    num_nodes: int,
    branching: int,
    beam: int | None = None,
) -> int:
    """Bytes of ``workspace`` that the kernels of :func:`draft_tree` take for such arguments."""
    return 4 * sum(launch.sizes_of(base_logits, head, rule, num_nodes, branching, _width(num_nodes, beam)).regions)


def _width(num_nodes: int, beam: int | None) -> int:
    """Most nodes of a level that get children: no more than may be in the tree below the anchor."""
    most = max(num_nodes - 1, 1)
    return most if beam is None else min(beam, most)


def _unserved(head: SequentialHead | None, sampling: Sampling) -> str | None:
    """What of a call the kernels do not do, in words, or None."""
    if head is not None and not isinstance(head, MarkovHead):
        return f"a {type(head).__name__}"
    if isinstance(sampling, Sampling) and sampling.any_truncation and not sampling.all_greedy:
        return "truncation (sampling.any_truncation)"
    return None
