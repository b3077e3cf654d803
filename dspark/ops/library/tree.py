"""``draft_tree`` as ``torch.ops.dspark.draft_tree``."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.draft.tree_inputs import TreeInputs
from dspark.ops.library.define import define
from dspark.ops.library.rows import SAMPLING, flat
from dspark.ops.types import (
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

_HEADS = {"MarkovHead": MarkovHead, "GatedHead": GatedHead, "RNNHead": RNNHead}
_SCHEMA = (
    f"(Tensor base_logits, Tensor anchor, str head_kind, Tensor[] head, Tensor? hidden, {SAMPLING}, Tensor position, "
    "str rule, int branching, Tensor? budget, int beam, Tensor? acceptance, Tensor(a!) out_tokens, "
    "Tensor(b!) out_parents, Tensor(c!) out_ancestors, Tensor(d!) out_depth, Tensor(e!) out_num_nodes, "
    "Tensor(f!)? out_logits, Tensor(g!)? workspace, str backend) -> ()"
)


def draft_tree_op(inputs: TreeInputs, out: TreeDraft, workspace: Tensor | None, backend: Backend) -> None:
    """:func:`dspark.ops.draft_tree` as ``torch.ops.dspark.draft_tree``; ``num_nodes`` is the width of ``out``."""
    torch.ops.dspark.draft_tree(*flat_tree_inputs(inputs), *flat_tree(out.tree), out.logits, workspace, backend)


def flat_head(head: SequentialHead | None) -> tuple[str, list[Tensor]]:
    """Its kind and its fields in order."""
    return ("none", []) if head is None else (type(head).__name__, list(head))


def head_of(kind: str, tensors: list[Tensor]) -> SequentialHead | None:
    """The head that was flattened."""
    head: SequentialHead | None = None if kind == "none" else _HEADS[kind](*tensors)
    return head


def flat_tree(tree: Tree) -> list[Tensor]:
    """The fields of a tree in order."""
    return [tree.tokens, tree.parents, tree.ancestors, tree.depth, tree.num_nodes]


def flat_tree_inputs(inputs: TreeInputs) -> tuple[object, ...]:
    """The op's arguments up to ``acceptance``."""
    return (
        inputs.base_logits,
        inputs.anchor,
        *flat_head(inputs.head),
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
    from dspark.ops.draft.tree import draft_tree

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


define("draft_tree", _SCHEMA, _draft_tree)
