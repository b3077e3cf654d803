"""The ops over trees as ``torch.ops.dspark.*``."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dspark.ops.library.define import define
from dspark.ops.library.rows import flat, flat_q, unflat_q
from dspark.ops.library.walk import head_of
from dspark.ops.tree_inputs import TreeInputs
from dspark.ops.types import Backend, DraftDistribution, Logprobs, Rule, Sampling, Tree, TreeDraft, Verdict

_SCHEMA = (
    "(Tensor target_logits, Tensor tokens, Tensor query_start, str rule, Tensor temperature, Tensor top_k, "
    "Tensor top_p, Tensor min_p, Tensor seed, bool all_greedy, bool any_truncation, Tensor position, str q_kind, "
    "Tensor? q_values, Tensor? q_tokens, str logprobs, Tensor[] tree, int? max_branching, Tensor(a!) out_tokens, "
    "Tensor(b!) out_num_emitted, Tensor(c!) out_path, Tensor(d!) out_logprobs, Tensor(e!) out_status, "
    "Tensor(f!)? workspace, str backend) -> ()"
)
_DRAFT_SCHEMA = (
    "(Tensor base_logits, Tensor anchor, str head_kind, Tensor[] head, Tensor? hidden, Tensor temperature, "
    "Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, bool all_greedy, bool any_truncation, Tensor position, "
    "str rule, int branching, Tensor? budget, int beam, Tensor? acceptance, Tensor(a!) out_tokens, "
    "Tensor(b!) out_parents, Tensor(c!) out_ancestors, Tensor(d!) out_depth, Tensor(e!) out_num_nodes, "
    "Tensor(f!)? out_logits, Tensor(g!)? workspace, str backend) -> ()"
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


def draft_tree_op(inputs: TreeInputs, out: TreeDraft, workspace: Tensor | None, backend: Backend) -> None:
    """:func:`dspark.ops.draft_tree` as ``torch.ops.dspark.draft_tree``; ``num_nodes`` is the width of ``out``."""
    torch.ops.dspark.draft_tree(*flat_tree_inputs(inputs), *flat_tree(out.tree), out.logits, workspace, backend)


def flat_tree_inputs(inputs: TreeInputs) -> tuple[object, ...]:
    """The op's arguments up to ``acceptance``."""
    head = inputs.head
    return (
        inputs.base_logits,
        inputs.anchor,
        "none" if head is None else type(head).__name__,
        [] if head is None else [getattr(head, field.name) for field in fields(head)],
        inputs.hidden,
        *flat(inputs.sampling),
        inputs.position,
        inputs.rule,
        inputs.branching,
        inputs.budget,
        inputs.beam,
        inputs.acceptance,
    )


def _draft_tree(
    base_logits: Tensor,
    anchor: Tensor,
    head_kind: str,
    head: list[Tensor],
    hidden: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    all_greedy: bool,
    any_truncation: bool,
    position: Tensor,
    rule: Rule,
    branching: int,
    budget: Tensor | None,
    beam: int,
    acceptance: Tensor | None,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_ancestors: Tensor,
    out_depth: Tensor,
    out_num_nodes: Tensor,
    out_logits: Tensor | None,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.tree import draft_tree

    draft_tree(
        base_logits,
        anchor,
        head=head_of(head_kind, head),
        hidden=hidden,
        sampling=Sampling(temperature, top_k, top_p, min_p, seed, all_greedy, any_truncation),
        position=position,
        rule=rule,
        num_nodes=out_tokens.shape[1],
        branching=branching,
        budget=budget,
        beam=beam,
        acceptance=acceptance,
        out=TreeDraft(Tree(out_tokens, out_parents, out_ancestors, out_depth, out_num_nodes), out_logits),
        workspace=workspace,
        backend=backend,
    )


define("accept_tree", _SCHEMA, _accept_tree)
define("draft_tree", _DRAFT_SCHEMA, _draft_tree)
