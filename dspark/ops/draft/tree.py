"""Draft trees: several guesses for each next token, each scored after its own parent."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import check_dtype, check_shape, check_workspace
from dspark.ops.draft.tree_inputs import TreeInputs, check_tree_out, copy_tree_draft, empty_tree_draft, unsupported
from dspark.ops.draft.tree_reference import draft_tree_reference
from dspark.ops.draft.walk_checks import check_walk
from dspark.ops.library import tree as library
from dspark.ops.types import RULES_OF_TREES, Backend, Rule, Sampling, SequentialHead, Stream, TreeDraft

MAX_NODES = 256
"""Most nodes of a tree."""

MAX_BRANCHING = 16
"""Most children of a node."""


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
    check_walk(base_logits, anchor, head, hidden, None, sampling, position, Stream.TARGET)
    _check(base_logits, rule, num_nodes, branching, budget, beam, acceptance)
    if out is not None:
        check_tree_out(out, base_logits, rule, num_nodes)
    check_workspace(workspace)
    left_out = unsupported(head, sampling)
    if left_out is not None and backend == "triton":
        raise ValueError(f"backend: the kernels of draft_tree do not serve {left_out}; use 'auto' or 'reference'")
    taken = resolve("draft_tree", "reference" if left_out is not None and backend == "auto" else backend, base_logits)
    inputs = TreeInputs(
        base_logits,
        anchor,
        head,
        hidden,
        sampling,
        position,
        rule,
        num_nodes,
        branching,
        budget,
        _width(num_nodes, beam),
        acceptance,
    )
    if torch.compiler.is_compiling():
        draft = empty_tree_draft(base_logits, anchor, rule, num_nodes) if out is None else out
        library.draft_tree_op(inputs, draft, workspace, taken)
        return draft
    if taken == "triton":
        from dspark.ops.draft.tree_launch import draft_tree_triton

        draft = empty_tree_draft(base_logits, anchor, rule, num_nodes) if out is None else out
        draft_tree_triton(inputs, draft, workspace)
        return draft
    draft = draft_tree_reference(
        base_logits,
        anchor,
        head,
        hidden,
        sampling,
        position,
        rule,
        num_nodes,
        branching,
        budget,
        inputs.beam,
        acceptance,
    )
    return draft if out is None else copy_tree_draft(draft, out)


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
    from dspark.ops.draft.tree_plan import workspace_bytes

    return workspace_bytes(base_logits, head, rule, num_nodes, branching, _width(num_nodes, beam))


def _width(num_nodes: int, beam: int | None) -> int:
    """Most nodes of a level that get children: no more than may be in the tree below the anchor."""
    most = max(num_nodes - 1, 1)
    return most if beam is None else min(beam, most)


def _check(
    base_logits: Tensor,
    rule: Rule,
    num_nodes: int,
    branching: int,
    budget: Tensor | None,
    beam: int | None,
    acceptance: Tensor | None,
) -> None:
    if rule not in RULES_OF_TREES:
        raise ValueError(f"rule: expected one of {', '.join(map(repr, RULES_OF_TREES))}, got {rule!r}")
    for name, value, most in (("num_nodes", num_nodes, MAX_NODES), ("branching", branching, MAX_BRANCHING)):
        if not 1 <= value <= most:
            raise ValueError(f"{name}: expected 1 to {most}, got {value}")
    if beam is not None and beam < 1:
        raise ValueError(f"beam: expected at least 1, got {beam}")
    sizes = {"R": base_logits.shape[0], "G": base_logits.shape[1], "K": branching}
    if budget is not None:
        check_shape("budget", budget, "R", sizes)
        check_dtype("budget", budget, (torch.int64,))
    if acceptance is not None:
        if rule != "recursive":
            raise ValueError(f"acceptance: rule {rule!r} does not use it; pass None")
        check_shape("acceptance", acceptance, "R G K" if acceptance.ndim == 3 else "G K", sizes)
        check_dtype("acceptance", acceptance, (torch.float32,))
