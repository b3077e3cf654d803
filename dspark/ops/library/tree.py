"""The ops over trees as ``torch.ops.dspark.*``."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.library.define import define
from dspark.ops.library.rows import flat, flat_q, unflat_q
from dspark.ops.types import Backend, DraftDistribution, Logprobs, Rule, Sampling, Tree, Verdict

_SCHEMA = (
    "(Tensor target_logits, Tensor tokens, Tensor query_start, str rule, Tensor temperature, Tensor top_k, "
    "Tensor top_p, Tensor min_p, Tensor seed, bool all_greedy, bool any_truncation, Tensor position, str q_kind, "
    "Tensor? q_values, Tensor? q_tokens, str logprobs, Tensor[] tree, int? max_branching, Tensor(a!) out_tokens, "
    "Tensor(b!) out_num_emitted, Tensor(c!) out_path, Tensor(d!) out_logprobs, Tensor(e!) out_status, "
    "Tensor(f!)? workspace, str backend) -> ()"
)


def accept_tree_op(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    tree: Tree,
    max_branching: int | None,
    out: Verdict,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    """:func:`dspark.ops.accept` of trees as ``torch.ops.dspark.accept_tree``; ``max_query_len`` is ``out``'s width."""
    torch.ops.dspark.accept_tree(
        target_logits,
        tokens,
        query_start,
        rule,
        *flat(sampling),
        position,
        *flat_q(q),
        logprobs,
        flat_tree(tree),
        max_branching,
        out.tokens,
        out.num_emitted,
        out.path,
        out.logprobs,
        out.status,
        workspace,
        backend,
    )


def flat_tree(tree: Tree) -> list[Tensor]:
    """The fields of a tree in order."""
    return [tree.tokens, tree.parents, tree.ancestors, tree.depth, tree.num_nodes]


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
        tree=Tree(*tree),
        max_branching=max_branching,
        out=Verdict(out_tokens, out_num_emitted, out_path, out_logprobs, out_status),
        workspace=workspace,
        backend=backend,
    )


define("accept_tree", _SCHEMA, _accept_tree)
