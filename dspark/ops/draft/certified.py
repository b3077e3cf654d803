"""The certified walk: the tokens of :func:`dspark.ops.draft_walk`, without reading ``W2`` where that can be proven.

Under a Markov head the noise of a slot depends on the request, the position and the token, but not on the token before
it. So the perturbed base scores ``P_k(v) = U_k(v) / T + g_k(v)`` of all slots are known before the walk. One pass keeps
the ``K`` largest of each slot, and a table of the checkpoint holds the ``M`` largest biases of each previous token. A
step then looks at ``K + M`` candidates. Any other token scores at most

    bound = (the (K+1)-th largest P_k) + (the (M+1)-th largest B(x)) / T.

Both walks compute a score in float32, and may round differently: in the order of the dot product's sum, and in three
more operations. With ``N(x) = |W1[x]| max_v |W2[v]|``, a dot product of ``r`` terms is off by at most ``r 2^-22 N``
(four times the textbook bound ``r 2^-24`` of any order, since matrix units truncate), and each other rounding by
``2^-24`` of its result. Rounding is monotonic, so for a token under the bound the worst case lies at the bound. Hence
with

    margin = (2 r + 32) 2^-22 N / T + 2^-20 (|best| + |bound| + 32),

in which 32 covers the noise, a best candidate that beats the bound and every other candidate by more than the margin is
the token that the exact walk draws, bit for bit. The step is *certified*. A near-tie, a bad row or a bound that is too
high is not, and the request's walk goes on exactly from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.backend import resolve
from dspark.ops.checks import check_dtype, check_shape, check_workspace
from dspark.ops.draft.certified_reference import walk_certified_reference
from dspark.ops.draft.certified_table import BiasTable
from dspark.ops.draft.walk_checks import check_walk
from dspark.ops.draft.walk_inputs import WalkOutputs, empty_draft
from dspark.ops.types import Backend, ConfidenceHead, Draft, MarkovHead, Sampling, Stream


@dataclass(frozen=True)
class CertifiedDraft:
    """A draft, and how much of it is proven.

    Attributes:
        draft: tokens and confidences. Without fallback, a slot that is not certified is as if bad: its token and all
            later ones of the request are -1.
        certified: ``[R]`` int64, leading slots of each request that are certified; 0 for a padded one.
    """

    draft: Draft
    certified: Tensor


def draft_walk_certified(
    base_logits: Tensor,
    anchor: Tensor,
    *,
    head: MarkovHead,
    table: BiasTable,
    hidden: Tensor | None,
    confidence_head: ConfidenceHead | None,
    sampling: Sampling,
    position: Tensor,
    stream: Stream,
    top_k: int = 128,
    fallback: bool = True,
    confidence_hidden: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: Backend = "auto",
) -> CertifiedDraft:
    """Draw a block as :func:`dspark.ops.draft_walk` does, over candidates while each step is certified.

    For the rules that need no q: ``coupled`` and ``match``, at any temperature, without truncation. Gated and recurrent
    heads, reduced vocabularies and returned logits belong to the exact walk.

    Args:
        base_logits, anchor, hidden, confidence_head, sampling, position, stream, confidence_hidden: as for
            ``draft_walk``.
        head: a Markov head.
        table: of that head, see :func:`~dspark.ops.draft.certified_table.build_bias_table`.
        top_k: ``K``, candidates of a slot.
        fallback: draw the slots that are not certified by the exact walk, whose launches are always made: graph-safe
            without a decision by the host, and programs with nothing left to draw end at once. False leaves the
            decision to the caller, who reads ``certified``; a shorter draft is as lossless as a longer one.
        workspace: ``[bytes]`` uint8, scratch memory of the kernels; None takes some from the allocator.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.

    Returns:
        The draft and how much of it is certified. With ``fallback``, the tokens are bitwise those of ``draft_walk`` by
        the same backend on every input; without, those that are certified are.

    Raises:
        TypeError, ValueError: as ``draft_walk``; another head, a table of other sizes, or ``sampling`` may truncate.

    Graph-safe. Launches of the kernels: 3 without fallback, ``G + 4`` with it.
    """
    inputs = check_walk(
        base_logits,
        anchor,
        head,
        hidden,
        confidence_head,
        sampling,
        position,
        stream,
        confidence_hidden=confidence_hidden,
    )
    _check(base_logits, head, table, sampling, top_k, workspace)
    if resolve("draft_walk_certified", backend, base_logits) == "reference":
        return CertifiedDraft(*walk_certified_reference(inputs, table, top_k, fallback))
    from dspark.ops.draft.certified_launch import walk_certified_triton

    result = CertifiedDraft(empty_draft(inputs, WalkOutputs(False)), torch.empty_like(anchor))
    walk_certified_triton(inputs, table, top_k, fallback, result.draft, result.certified, workspace)
    return result


def draft_walk_certified_workspace(
    base_logits: Tensor, *, head: MarkovHead, sampling: Sampling, top_k: int = 128
) -> int:
    """Bytes of ``workspace`` that :func:`draft_walk_certified` takes for such arguments."""
    from dspark.ops.draft.certified_launch import certified_workspace_bytes

    return certified_workspace_bytes(base_logits, head, sampling, top_k)


def _check(
    base_logits: Tensor, head: MarkovHead, table: BiasTable, sampling: Sampling, top_k: int, workspace: Tensor | None
) -> None:
    if not isinstance(head, MarkovHead):
        raise TypeError(f"head: expected a MarkovHead, got {type(head).__name__}; other heads take the exact walk")
    if sampling.any_truncation and not sampling.all_greedy:
        raise ValueError(
            "sampling: the certified walk does not truncate; promise any_truncation=False, or take draft_walk"
        )
    if not 1 <= top_k <= 1024:
        raise ValueError(f"top_k: expected 1 to 1024, got {top_k}")
    if not isinstance(table, BiasTable):
        raise TypeError(f"table: expected a BiasTable, got {type(table).__name__}")
    sizes = {"V": base_logits.shape[2]}
    for name, pattern, dtype in (
        ("tokens", "V M", torch.int32),
        ("biases", "V M", torch.float32),
        ("bound", "V", torch.float32),
        ("norm", "V", torch.float32),
    ):
        check_shape(f"table.{name}", getattr(table, name), pattern, sizes)
        check_dtype(f"table.{name}", getattr(table, name), (dtype,))
    check_workspace(workspace)
