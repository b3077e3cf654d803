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

import torch
from torch import Tensor

from dspark.ops.accept.reference import accept_reference
from dspark.ops.accept.tree_reference import accept_tree_reference
from dspark.ops.backend import resolve
from dspark.ops.checks import (
    FLOAT_DTYPES,
    check_dtype,
    check_sampling,
    check_shape,
    check_workspace,
    fits,
    has_dimensions,
    sampling_fits,
)
from dspark.ops.library.accept import accept_op
from dspark.ops.tree_checks import check_tree, tree_fits
from dspark.ops.types import (
    Backend,
    DenseQ,
    DraftDistribution,
    Logprobs,
    PointMass,
    Rule,
    Sampling,
    SparseQ,
    Tree,
    Verdict,
)

_RULES: tuple[Rule, ...] = get_args(Rule)
RULES_OF_Q: tuple[Rule, ...] = ("ratio", "block", "recursive")
"""Rules that divide by the draft's distribution; a policy must not know their drafts before it decides."""

_LOGPROBS: tuple[Logprobs, ...] = get_args(Logprobs)
_VERDICT = {
    "tokens": ("R N", torch.int64),
    "num_emitted": ("R", torch.int64),
    "path": ("R N", torch.int64),
    "logprobs": ("R N", torch.float32),
    "status": ("R", torch.int64),
}


def accept(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    *,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
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
        tokens: ``[T]`` int64: the verified tokens, of each request its anchor and then its drafts (the nodes of its
            tree in order). An id outside ``[0, V)``, such as -1, is never accepted.
        query_start: ``[R + 1]`` int64, first row of each request. A request without rows is padding: it emits nothing
            and its status is OK. Rows past ``query_start[R]`` are padding too.
        rule: ``"coupled"``, ``"ratio"``, ``"block"``, ``"match"`` or ``"recursive"``.
        sampling: parameters of the ``R`` requests, temperature 0 among them or not.
        position: ``[R]`` int64, absolute position of the anchor; the token that row ``i`` gives is at
            ``position + i + 1`` (a node of depth ``d``: ``position + d + 1``), and that position is the address of its
            random numbers.
        max_query_len: ``N``, the most rows that a request has (1 is the anchor alone); further rows are ignored.
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
    if tree is None and rule == "recursive":
        rule = "ratio"
    arguments = (target_logits, tokens, query_start, rule, sampling, position, max_query_len, q, logprobs)
    chain = tree is None and max_branching is None
    if not (_fits(*arguments, out, workspace) and (chain or tree_fits(tree, max_branching, rule, *arguments[5:8]))):
        _check(*arguments, out, workspace)
        check_tree(tree, max_branching, rule, *arguments[5:8])
    taken = resolve("accept", backend, target_logits)
    if torch.compiler.is_compiling():
        verdict = _empty(position, max_query_len) if out is None else out
        accept_op(*arguments[:6], q, logprobs, tree, max_branching, verdict, workspace, taken)
        return verdict
    if taken == "triton":
        verdict = _empty(position, max_query_len) if out is None else out
        if tree is None:
            from dspark.ops.accept.launch import accept_triton

            accept_triton(*arguments, verdict, workspace)
        else:
            from dspark.ops.accept.tree_launch import accept_tree_triton

            accept_tree_triton(*arguments, tree, max_branching or 1, verdict, workspace)
        return verdict
    if tree is None:
        verdict = accept_reference(*arguments)
    else:
        verdict = accept_tree_reference(*arguments, tree, max_branching or 1)
    if out is None:
        return verdict
    for field in _VERDICT:
        getattr(out, field).copy_(getattr(verdict, field))
    return out


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
    draft_vocab_size = draft_vocab_size or vocab_size
    if tree:
        from dspark.ops.accept.tree_launch import workspace_bytes as tree_bytes

        return tree_bytes(num_requests, max_query_len, vocab_size, draft_vocab_size, rule, max_branching or 1)
    from dspark.ops.accept.launch import workspace_bytes

    rule = "ratio" if rule == "recursive" else rule
    return workspace_bytes(num_requests, max_query_len, vocab_size, draft_vocab_size, rule)


def _empty(position: Tensor, max_query_len: int) -> Verdict:
    """A verdict to be written."""
    device, per_request = position.device, position.shape[0]
    return Verdict(
        tokens=torch.empty(per_request, max_query_len, dtype=torch.int64, device=device),
        num_emitted=torch.empty(per_request, dtype=torch.int64, device=device),
        path=torch.empty(per_request, max_query_len, dtype=torch.int64, device=device),
        logprobs=torch.empty(per_request, max_query_len, dtype=torch.float32, device=device),
        status=torch.empty(per_request, dtype=torch.int64, device=device),
    )


def _fits(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict | None,
    workspace: Tensor | None,
) -> bool:
    """Whether all is as it should be, found out in a few microseconds. If not, :func:`_check` says what is wrong."""
    if not (has_dimensions(target_logits, 2) and has_dimensions(position, 1)):
        return False
    num_rows, vocab_size = target_logits.shape
    (num_requests,) = per_request = position.shape
    return (
        rule in _RULES
        and logprobs in _LOGPROBS
        and max_query_len >= 1
        and target_logits.dtype in FLOAT_DTYPES
        and position.dtype is torch.int64
        and fits(tokens, (num_rows,), torch.int64)
        and fits(query_start, (num_requests + 1,), torch.int64)
        and sampling_fits(sampling, per_request)
        and _q_fits(q, rule, num_requests, max_query_len, vocab_size)
        and (out is None or _verdict_fits(out, (num_requests, max_query_len)))
        and (workspace is None or (has_dimensions(workspace, 1) and fits(workspace, workspace.shape[:1], torch.uint8)))
    )


def _q_fits(q: DraftDistribution | None, rule: Rule, num_requests: int, max_query_len: int, vocab_size: int) -> bool:
    if q is None or rule not in RULES_OF_Q:
        return q is None and (rule not in RULES_OF_Q or max_query_len == 1)
    if isinstance(q, PointMass):
        return True
    values: Any = getattr(q, "logits" if isinstance(q, DenseQ) else "logprobs", None)
    if not has_dimensions(values, 3):
        return False
    shape = values.shape
    if shape[0] != num_requests or shape[1] < max_query_len - 1:
        return False
    if isinstance(q, SparseQ):
        return values.dtype is torch.float32 and fits(q.tokens, shape, torch.int64)
    if values.dtype not in FLOAT_DTYPES:
        return False
    return shape[2] == vocab_size if q.draft_ids is None else fits(q.draft_ids, (vocab_size,), torch.int32)


def _verdict_fits(out: Verdict, shape: tuple[int, int]) -> bool:
    return (
        isinstance(out, Verdict)
        and fits(out.tokens, shape, torch.int64)
        and fits(out.num_emitted, shape[:1], torch.int64)
        and fits(out.path, shape, torch.int64)
        and fits(out.logprobs, shape, torch.float32)
        and fits(out.status, shape[:1], torch.int64)
    )


def _check(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    max_query_len: int,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict | None,
    workspace: Tensor | None,
) -> None:
    """Raise an error that says what is wrong."""
    if rule not in _RULES:
        raise ValueError(f"rule: expected one of {', '.join(map(repr, _RULES))}, got {rule!r}")
    if logprobs not in _LOGPROBS:
        raise ValueError(f"logprobs: expected one of {', '.join(map(repr, _LOGPROBS))}, got {logprobs!r}")
    if max_query_len < 1:
        raise ValueError(f"max_query_len: expected at least 1, got {max_query_len}")
    sizes: dict[str, int] = {}
    check_shape("target_logits", target_logits, "T V", sizes)
    check_dtype("target_logits", target_logits, FLOAT_DTYPES)
    check_shape("position", position, "R", sizes)
    check_shape("tokens", tokens, "T", sizes)
    check_shape("query_start", query_start, "R+1", sizes)
    for name, tensor in (("tokens", tokens), ("query_start", query_start), ("position", position)):
        check_dtype(name, tensor, (torch.int64,))
    check_sampling(sampling, sizes)
    _check_q(q, rule, max_query_len, sizes)
    if out is not None:
        if not isinstance(out, Verdict):
            raise TypeError(f"out: expected a Verdict, got {type(out).__name__}")
        sizes["N"] = max_query_len
        for field, (pattern, dtype) in _VERDICT.items():
            check_shape(f"out.{field}", getattr(out, field), pattern, sizes)
            check_dtype(f"out.{field}", getattr(out, field), (dtype,))
    check_workspace(workspace)


def _check_q(q: DraftDistribution | None, rule: Rule, max_query_len: int, sizes: dict[str, int]) -> None:
    if rule not in RULES_OF_Q:
        if q is not None:
            raise ValueError(f"q: rule {rule!r} does not use the draft's distribution; pass None")
        return
    if q is None:
        if max_query_len > 1:
            raise ValueError(f"q: rule {rule!r} needs the draft's distribution (DenseQ, SparseQ, PointMass), got None")
        return
    if isinstance(q, DenseQ):
        width = "V" if q.draft_ids is None else "Vd"
        check_shape("q.logits", q.logits, f"R G {width}", sizes)
        check_dtype("q.logits", q.logits, FLOAT_DTYPES)
        if q.draft_ids is not None:
            check_shape("q.draft_ids", q.draft_ids, "V", sizes)
            check_dtype("q.draft_ids", q.draft_ids, (torch.int32,))
    elif isinstance(q, SparseQ):
        check_shape("q.tokens", q.tokens, "R G K", sizes)
        check_dtype("q.tokens", q.tokens, (torch.int64,))
        check_shape("q.logprobs", q.logprobs, "R G K", sizes)
        check_dtype("q.logprobs", q.logprobs, (torch.float32,))
    elif not isinstance(q, PointMass):
        raise TypeError(f"q: expected DenseQ, SparseQ, PointMass or None, got {type(q).__name__}")
    if sizes.get("G", max_query_len) < max_query_len - 1:
        raise ValueError(
            f"q: expected G >= max_query_len - 1 = {max_query_len - 1} drafts of each request, got {sizes['G']}"
        )
