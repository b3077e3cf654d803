"""Acceptance of drafted chains and trees: which drafts the target keeps, and the token it adds after them.

Five rules (contract C4), all lossless:

* ``coupled`` (Daliri, Musco, Suresh, arXiv 2408.07978): the target draws every row as plain sampling would, and a draft
  is accepted while it is what the target drew. The output is the plain sampled sequence of that seed, bit for bit.
* ``match``: the same, but the target draws by inverse CDF, with one number per row, and draft and target share no
  noise. The output depends on the seed alone here, too.
* ``ratio`` (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): draft x is accepted with probability
  ``min(1, p(x) / q(x))``; the first rejected one is replaced by a draw from the residual ``(p - q)+``.
* ``block`` (Sun et al., arXiv 2403.10444): the drafts are judged as a block, and one may be kept for the sake of those
  after it; on average at least as many are accepted as by ``ratio``. Chains alone.
* ``recursive`` (SpecInfer, Miao et al., arXiv 2305.09781; Sequoia, Chen et al., arXiv 2402.12374): ``ratio`` for the
  children of a tree's node in turn, each judged by what the rejected ones before it left of p and q. On a chain it is
  ``ratio``.
"""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor

from dspark.ops.accept import launch, tree_launch
from dspark.ops.accept.reference import accept_reference
from dspark.ops.accept.tree_reference import accept_tree_reference
from dspark.ops.call import FLOATS, Arg, ScalarArg, TensorArg
from dspark.ops.groups import Q_OF_TREES, ROWS, SAMPLING, TREE, VERDICT, Q, check_ancestors
from dspark.ops.op import Op
from dspark.ops.types import (
    RULES_OF_TREES,
    Backend,
    DenseQ,
    DraftDistribution,
    Logprobs,
    Rows,
    Rule,
    Sampling,
    Tree,
    Verdict,
)

RULES_OF_Q: tuple[Rule, ...] = ("ratio", "block", "recursive")
"""Rules that divide by the draft's distribution; a policy must not know their drafts before it decides."""


def _check_q(sizes: dict[str, int], *, rule: Rule, q: DraftDistribution | None, **_: Any) -> None:
    drafts = sizes["N"] - 1
    if rule not in RULES_OF_Q:
        if q is not None:
            raise ValueError(f"q: rule {rule!r} does not use the draft's distribution; pass None")
    elif q is None and drafts > 0:
        raise ValueError(f"q: rule {rule!r} needs the draft's distribution (DenseQ, SparseQ, PointMass), got None")
    elif sizes.get("G", drafts) < drafts:
        got = sizes["G"]
        raise ValueError(f"q: expected G >= max_query_len - 1 = {drafts} drafts of each request, got {got}")
    elif isinstance(q, DenseQ) and q.draft_ids is None and sizes["Vd"] != sizes["V"]:
        known = f'"R G V" with V = {sizes["V"]}'
        raise ValueError(f"q.logits: expected shape {known} without draft_ids, got {list(q.logits.shape)}")


def _check_tree(sizes: dict[str, int], *, rule: Rule, tree: Tree, max_branching: int | None, **given: Any) -> None:
    _check_q(sizes, rule=rule, **given)
    check_ancestors(tree)
    if (max_branching is None) == (rule == "recursive"):
        needs = "needs the most children of a node" if rule == "recursive" else "does not use it; pass None"
        raise ValueError(f"max_branching: rule {rule!r} {needs}, got {max_branching}")


def _verified(rules: tuple[Rule, ...], q: Arg) -> dict[str, Arg]:
    """What is verified, and how."""
    return {
        "target_logits": TensorArg("T V", FLOATS, layout="rows"),
        "rows": ROWS,
        "rule": ScalarArg("str", choices=rules),
        "sampling": SAMPLING,
        "q": q,
        "logprobs": ScalarArg("str", choices=get_args(Logprobs)),
    }


_ACCEPT = Op(
    "accept",
    {**_verified(get_args(Rule), Q), "out": VERDICT},
    reference=accept_reference,
    plan=launch.plan,
    run=launch.run,
    results=["out"],
    also=_check_q,
    empty="R",
    workspace=True,
)
_ACCEPT_TREE = Op(
    "accept_tree",
    {
        **_verified(RULES_OF_TREES, Q_OF_TREES),
        "tree": TREE,
        "max_branching": ScalarArg("SymInt", least=1, optional=True),
        "out": VERDICT,
    },
    reference=accept_tree_reference,
    plan=tree_launch.plan,
    run=tree_launch.run,
    results=["out"],
    also=_check_tree,
    empty="R",
    workspace=True,
)


def accept(
    target_logits: Tensor,
    rows: Rows,
    *,
    rule: Rule,
    sampling: Sampling,
    q: DraftDistribution | None = None,
    logprobs: Logprobs = "raw",
    tree: Tree | None = None,
    max_branching: int | None = None,
    out: Verdict | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> Verdict:
    """Verify a ragged batch of drafted chains, or trees.

    Args:
        target_logits: ``[T, V]`` float32, float16 or bfloat16: the target's logits at each row.
        rows: the rows of ``R`` requests, at most ``N = max_query_len`` of each: its anchor, and then its drafts (the
            nodes of its tree in order). A request without rows emits nothing and its status is OK. The token that row
            ``i`` gives is at ``position + i + 1`` (a node of depth ``d``: ``position + d + 1``), and that position is
            the address of its random numbers.
        rule: ``"coupled"``, ``"ratio"``, ``"block"``, ``"match"`` or ``"recursive"``.
        sampling: parameters of the ``R`` requests, temperature 0 among them or not.
        q: what the drafts were sampled from, after all transforms, for ``G >= N - 1`` drafts of each request:
            :class:`DenseQ`, :class:`SparseQ` or :class:`PointMass`. ``ratio``, ``block`` and ``recursive`` need it
            unless ``N`` is 1; the others take none. On a tree: a :class:`DenseQ` whose row ``i`` is what the children
            of node ``i`` were sampled from, without replacement.
        logprobs: whether log-probabilities are those of the target before (``"raw"``) or after (``"processed"``) the
            sampling transforms.
        tree: None for chains. Else row ``i`` of a request is node ``i`` of its tree, and the rule is ``"coupled"``,
            ``"match"`` or ``"recursive"``. Its ``[R, N]`` fields are as wide as ``max_query_len``; ``parents``,
            ``ancestors`` and ``depth`` are read. A request may have fewer rows than its tree has nodes (the first
            ones). A node whose parent is not before it is never accepted.
        max_branching: most children of a node, ``"recursive"`` on trees alone, and needed there: the number of launches
            grows with it. Further children are never accepted.
        out: a verdict whose tensors the result is written into.
        workspace: ``[bytes]`` uint8, scratch memory of the kernels, :func:`accept_workspace` bytes or more; None takes
            some from the allocator. The reference needs none.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        A verdict over ``[R, N]``, ``out`` if that was given: ``accepted + 1`` tokens per request that has rows, except
        where a target row that the request reached is bad (NaN, +inf, all -inf): nothing is drawn from it, the tokens
        before it stand, and the status is ``BAD_LOGITS``. A draft row that is bad means that its drafts are rejected;
        the replacement is drawn from p. Of a tree, ``path`` names the nodes down to the deepest accepted one.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape, a word is unknown, or ``q`` is missing or
            useless.

    Graph-safe. A request's verdict depends on that request's inputs only, bit for bit: not on the other requests, on
    their number or order, or on ``max_query_len`` (given rows of one alignment, see ``docs/accept.md``).
    """
    verdict: Verdict
    if tree is None:
        if max_branching is not None:
            raise ValueError(f"max_branching: a chain has none; pass None without a tree, got {max_branching}")
        verdict = _ACCEPT(backend, target_logits, rows, rule, sampling, q, logprobs, out, workspace=workspace)
    else:
        given = (target_logits, rows, rule, sampling, q, logprobs, tree, max_branching)
        verdict = _ACCEPT_TREE(backend, *given, out, workspace=workspace)
    return verdict


def accept_workspace(
    num_requests: int,
    max_query_len: int,
    vocab_size: int,
    *,
    rule: Rule,
    draft_vocab_size: int | None = None,
    tree: bool = False,
    max_branching: int | None = None,
) -> int:
    """Bytes of ``workspace`` that :func:`accept` takes for so many requests.

    ``draft_vocab_size`` is the width of a :class:`DenseQ`, the target's vocabulary by default; ``tree`` says that trees
    are verified, and ``max_branching`` is as there.
    """
    shape = (num_requests, max_query_len, vocab_size, draft_vocab_size or vocab_size)
    if tree:
        return tree_launch.workspace_bytes(*shape, rule, max_branching or 1)
    return launch.workspace_bytes(*shape, rule)
