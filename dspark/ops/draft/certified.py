"""The certified walk: the tokens of :func:`dspark.ops.draft_walk`, without reading ``W2`` where that can be proven.

Under a Markov head the noise of a step depends on the request, the position and the token, but not on the token before
it. So the perturbed base scores ``P_k(v) = U_k(v) / T + g_k(v)`` of all steps are known before the walk. One pass keeps
the ``K`` largest of each step, and a table of the checkpoint holds the ``M`` largest biases of each previous token. A
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

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.ops.call import GroupArg, ScalarArg, TensorArg
from dspark.ops.draft import certified_launch, certified_reference
from dspark.ops.draft.certified_table import BiasTable
from dspark.ops.draft.walk import ANCHOR, BASE_LOGITS, BLOCK, TOKENS, check_block, numbers
from dspark.ops.draft.walk_reference import WalkInputs
from dspark.ops.groups import MARKOV_HEAD
from dspark.ops.op import Op
from dspark.ops.types import Backend, ConfidenceHead, Draft, MarkovHead, Sampling, Stream


class CertifiedDraft(NamedTuple):
    """A draft, and how much of it is proven.

    Attributes:
        draft: tokens and confidences. Without fallback, a step that is not certified is as if bad: its token and all
            later ones of the request are -1.
        certified: ``[R]`` int64, leading steps of each request that are certified; 0 for a padded one.
    """

    draft: Draft
    certified: Tensor


def _check(sizes: dict[str, int], table: BiasTable, top_k: int, fallback: bool, **given: Any) -> None:
    names = ("base_logits", "anchor", "head", *BLOCK)
    inputs = WalkInputs(**{name: given[name] for name in names})
    check_block(sizes, inputs)
    if inputs.sampling.any_truncation and not inputs.sampling.all_greedy:
        raise ValueError(
            "sampling: the certified walk does not truncate; promise any_truncation=False, or take draft_walk"
        )


_TABLE = GroupArg(
    {
        BiasTable: {
            "tokens": TensorArg("V M", (torch.int32,), layout="contiguous"),
            "biases": TensorArg("V M", (torch.float32,), layout="contiguous"),
            "bound": TensorArg("V", (torch.float32,), layout="contiguous"),
            "norm": TensorArg("V", (torch.float32,), layout="contiguous"),
        }
    }
)
_DRAFT_WALK_CERTIFIED = Op(
    "draft_walk_certified",
    {
        "base_logits": BASE_LOGITS,
        "anchor": ANCHOR,
        "head": MARKOV_HEAD,
        "table": _TABLE,
        **BLOCK,
        "top_k": ScalarArg("SymInt", least=1, most=1024),
        "fallback": ScalarArg("bool"),
        "tokens": replace(TOKENS, optional=True),
        "confidence": replace(numbers("confidence_head"), optional=True),
        "confidence_logits": replace(numbers("confidence_head"), optional=True),
        "certified": TensorArg("R", (torch.int64,), optional=True, written=True, layout="contiguous"),
    },
    reference=certified_reference.walk_certified,
    plan=certified_launch.plan,
    run=certified_launch.run,
    results=["tokens", "confidence", "confidence_logits", "certified"],
    also=_check,
    empty="R",
    workspace=True,
)


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
        top_k: ``K``, candidates of a step.
        fallback: draw the steps that are not certified by the exact walk, whose launches are always made: graph-safe
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
    tokens, confidence, confidence_logits, certified = _DRAFT_WALK_CERTIFIED(
        backend,
        base_logits,
        anchor,
        head,
        table,
        hidden,
        confidence_head,
        confidence_hidden,
        sampling,
        position,
        stream,
        top_k,
        fallback,
        *[None] * 4,
        workspace=workspace,
    )
    return CertifiedDraft(Draft(tokens, None, confidence, confidence_logits), certified)


def draft_walk_certified_workspace(
    base_logits: Tensor, *, head: MarkovHead, sampling: Sampling, top_k: int = 128
) -> int:
    """Bytes of ``workspace`` that :func:`draft_walk_certified` takes for such arguments."""
    return certified_launch.workspace_bytes(base_logits, head, sampling, top_k)
