"""The ops over rows of logits as ``torch.ops.dspark.*``."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dspark.ops.library.define import define
from dspark.ops.types import (
    Backend,
    DenseQ,
    DraftDistribution,
    Logprobs,
    PointMass,
    Processors,
    Rule,
    Sampling,
    SparseQ,
    Stream,
    Verdict,
)

_SAMPLING = (
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, bool all_greedy, bool any_truncation"
)
_SCHEMAS = {
    "sample": f"(Tensor logits, {_SAMPLING}, Tensor position, Tensor? request, int stream, Tensor? salt, "
    "Tensor(a!) out, Tensor(b!)? workspace, str backend) -> ()",
    "truncate": f"(Tensor logits, {_SAMPLING}, Tensor? request, Tensor(a!) out, Tensor(b!)? workspace, str backend) "
    "-> ()",
    "accept": f"(Tensor target_logits, Tensor tokens, Tensor query_start, str rule, {_SAMPLING}, Tensor position, "
    "str q_kind, Tensor? q_values, Tensor? q_tokens, str logprobs, Tensor(a!) out_tokens, Tensor(b!) out_num_emitted, "
    "Tensor(c!) out_path, Tensor(d!) out_logprobs, Tensor(e!) out_status, Tensor(f!)? workspace, str backend) -> ()",
    "process_logits": "(Tensor logits, Tensor tokens, Tensor query_start, Tensor?[] processors, int max_query_len, "
    "Tensor(a!) out, str backend) -> ()",
}


def sample_op(
    logits: Tensor,
    sampling: Sampling,
    position: Tensor,
    request: Tensor | None,
    stream: Stream,
    salt: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    """:func:`dspark.ops.sample` as ``torch.ops.dspark.sample``; the backend is "reference" or "triton"."""
    torch.ops.dspark.sample(
        logits, *flat(sampling), position, request, int(stream), salt, out, workspace, backend
    )  # fmt: skip


def truncate_op(
    logits: Tensor, sampling: Sampling, request: Tensor | None, out: Tensor, workspace: Tensor | None, backend: Backend
) -> None:
    """:func:`dspark.ops.truncate` as ``torch.ops.dspark.truncate``."""
    torch.ops.dspark.truncate(logits, *flat(sampling), request, out, workspace, backend)


def accept_op(
    target_logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    rule: Rule,
    sampling: Sampling,
    position: Tensor,
    q: DraftDistribution | None,
    logprobs: Logprobs,
    out: Verdict,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    """:func:`dspark.ops.accept` as ``torch.ops.dspark.accept``; ``max_query_len`` is the width of ``out``."""
    torch.ops.dspark.accept(
        target_logits,
        tokens,
        query_start,
        rule,
        *flat(sampling),
        position,
        *flat_q(q),
        logprobs,
        out.tokens,
        out.num_emitted,
        out.path,
        out.logprobs,
        out.status,
        workspace,
        backend,
    )


def process_logits_op(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    processors: Processors,
    max_query_len: int,
    out: Tensor,
    backend: Backend,
) -> None:
    """:func:`dspark.ops.process_logits` as ``torch.ops.dspark.process_logits``."""
    given = _flat_processors(processors)
    torch.ops.dspark.process_logits(logits, tokens, query_start, given, max_query_len, out, backend)


def _flat_processors(processors: Processors) -> list[Tensor | None]:
    return [getattr(processors, field.name) for field in fields(processors)]


def flat(s: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool]:
    return s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.all_greedy, s.any_truncation


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


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    all_greedy: bool,
    any_truncation: bool,
    position: Tensor,
    request: Tensor | None,
    stream: int,
    salt: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.sample import sample

    sampling = Sampling(temperature, top_k, top_p, min_p, seed, all_greedy, any_truncation)
    sample(
        logits,
        sampling,
        position,
        request=request,
        stream=Stream(stream),
        salt=salt,
        out=out,
        workspace=workspace,
        backend=backend,
    )


def _truncate(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    all_greedy: bool,
    any_truncation: bool,
    request: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.sample import truncate

    sampling = Sampling(temperature, top_k, top_p, min_p, seed, all_greedy, any_truncation)
    truncate(logits, sampling, request, out=out, workspace=workspace, backend=backend)


def _accept(
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
        out=Verdict(out_tokens, out_num_emitted, out_path, out_logprobs, out_status),
        workspace=workspace,
        backend=backend,
    )


def _process_logits(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    processors: list[Tensor | None],
    max_query_len: int,
    out: Tensor,
    backend: Backend,
) -> None:
    from dspark.ops.process import process_logits

    process_logits(
        logits,
        tokens,
        query_start,
        processors=Processors(*processors),
        max_query_len=max_query_len,
        out=out,
        backend=backend,
    )


for _name, _implementation in (
    ("sample", _sample),
    ("truncate", _truncate),
    ("accept", _accept),
    ("process_logits", _process_logits),
):
    define(_name, _SCHEMAS[_name], _implementation)
