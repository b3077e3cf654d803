"""What drafting a tree reads and writes, as it travels between its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.checks import check_dtype, check_shape
from dspark.ops.groups import num_words
from dspark.ops.types import MarkovHead, Rule, Sampling, SequentialHead, Tree, TreeDraft


@dataclass(frozen=True)
class TreeInputs:
    """The inputs of :func:`dspark.ops.draft_tree`, by its names; ``beam`` is a number."""

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


def unsupported(head: SequentialHead | None, sampling: Sampling) -> str | None:
    """What of a call the kernels do not do, in words, or None."""
    if head is not None and not isinstance(head, MarkovHead):
        return f"a {type(head).__name__}"
    if sampling.any_truncation and not sampling.all_greedy:
        return "truncation (sampling.any_truncation)"
    return None


def empty_tree_draft(base_logits: Tensor, anchor: Tensor, rule: Rule, num_nodes: int) -> TreeDraft:
    """Trees to be written."""
    requests, _, vocab_size = base_logits.shape
    words = num_words(num_nodes)
    places = (requests, num_nodes)
    tree = Tree(
        tokens=anchor.new_empty(places),
        parents=anchor.new_empty(places),
        ancestors=anchor.new_empty(places if words == 1 else (*places, words)),
        depth=anchor.new_empty(places),
        num_nodes=anchor.new_empty(requests),
    )
    scored = rule == "recursive"
    logits = base_logits.new_empty((*places, vocab_size), dtype=torch.float32) if scored else None
    return TreeDraft(tree, logits)


def check_tree_out(out: TreeDraft, base_logits: Tensor, rule: Rule, num_nodes: int) -> None:
    """Check that ``out`` has the tensors of a call's result.

    Raises:
        TypeError, ValueError: it does not.
    """
    if not isinstance(out, TreeDraft):
        raise TypeError(f"out: expected a TreeDraft, got {type(out).__name__}")
    requests, _, vocab_size = base_logits.shape
    words = num_words(num_nodes)
    sizes = {"R": requests, "N": num_nodes, "W": words, "V": vocab_size}
    for field, pattern in (
        ("tokens", "R N"),
        ("parents", "R N"),
        ("ancestors", "R N" if words == 1 else "R N W"),
        ("depth", "R N"),
        ("num_nodes", "R"),
    ):
        check_shape(f"out.tree.{field}", getattr(out.tree, field), pattern, sizes)
        check_dtype(f"out.tree.{field}", getattr(out.tree, field), (torch.int64,))
    if rule != "recursive":
        if out.logits is not None:
            raise ValueError(f"out.logits: rule {rule!r} has none; expected None, got {list(out.logits.shape)}")
        return
    if out.logits is None:
        raise ValueError("out.logits: expected shape \"R N V\" under rule 'recursive', got None")
    check_shape("out.logits", out.logits, "R N V", sizes)
    check_dtype("out.logits", out.logits, (torch.float32,))


def copy_tree_draft(draft: TreeDraft, out: TreeDraft) -> TreeDraft:
    """Write trees into the tensors of others."""
    for field in ("tokens", "parents", "ancestors", "depth", "num_nodes"):
        getattr(out.tree, field).copy_(getattr(draft.tree, field))
    if out.logits is not None and draft.logits is not None:
        out.logits.copy_(draft.logits)
    return out
