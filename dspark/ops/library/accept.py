"""``accept`` as ``torch.ops.dspark.accept`` over chains and ``torch.ops.dspark.accept_tree`` over trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.library.define import define
from dspark.ops.library.rows import SAMPLING, flat
from dspark.ops.library.tree import flat_tree
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

_READ = (
    f"Tensor target_logits, Tensor tokens, Tensor query_start, str rule, {SAMPLING}, Tensor position, str q_kind, "
    "Tensor? q_values, Tensor? q_tokens, str logprobs"
)
_WRITTEN = (
    "Tensor(a!) out_tokens, Tensor(b!) out_num_emitted, Tensor(c!) out_path, Tensor(d!) out_logprobs, "
    "Tensor(e!) out_status, Tensor(f!)? workspace, str backend"
)


def accept_op(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    tree: Tree | None,
    max_branching: int | None,
    out: Verdict,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    """:func:`dspark.ops.accept` as an op; ``max_query_len`` is the width of ``out``."""
    read = (target_logits, tokens, query_start, rule, *flat(sampling), position, *flat_q(q), logprobs)
    written = (out.tokens, out.num_emitted, out.path, out.logprobs, out.status, workspace, backend)
    if tree is None:
        torch.ops.dspark.accept(*read, *written)
    else:
        torch.ops.dspark.accept_tree(*read, flat_tree(tree), max_branching, *written)


def flat_q(q: DraftDistribution | None) -> tuple[str, Tensor | None, Tensor | None]:
    if isinstance(q, DenseQ):
        return "dense", q.logits, q.draft_ids
    if isinstance(q, SparseQ):
        return "sparse", q.logprobs, q.tokens
    return "none" if q is None else "point", None, None


def unflat_q(kind: str, values: Tensor | None, tokens: Tensor | None) -> DraftDistribution | None:
    if kind == "dense" and values is not None:
        return DenseQ(values, tokens)
    if kind == "sparse" and values is not None and tokens is not None:
        return SparseQ(tokens, values)
    return PointMass() if kind == "point" else None


def _accept(*given: Any) -> None:
    given = (*given[:-7], [], None, *given[-7:])  # no tree, before what is written
    _accept_tree(*given)


def _accept_tree(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    all_greedy: bool,
    any_truncation: bool,
    position: Tensor,
    q_kind: str,
    q_values: Tensor | None,
    q_tokens: Tensor | None,
    logprobs: Logprobs,
    tree: list[Tensor],
    max_branching: int | None,
    out_tokens: Tensor,
    out_num_emitted: Tensor,
    out_path: Tensor,
    out_logprobs: Tensor,
    out_status: Tensor,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.accept import accept

    accept(
        target_logits,
        tokens,
        query_start,
        rule=rule,
        sampling=Sampling(temperature, top_k, top_p, min_p, seed, all_greedy, any_truncation),
        position=position,
        max_query_len=out_tokens.shape[1],
        q=unflat_q(q_kind, q_values, q_tokens),
        logprobs=logprobs,
        tree=Tree(*tree) if tree else None,
        max_branching=max_branching,
        out=Verdict(out_tokens, out_num_emitted, out_path, out_logprobs, out_status),
        workspace=workspace,
        backend=backend,
    )


define("accept", f"({_READ}, {_WRITTEN}) -> ()", _accept)
define("accept_tree", f"({_READ}, Tensor[] tree, int? max_branching, {_WRITTEN}) -> ()", _accept_tree)
