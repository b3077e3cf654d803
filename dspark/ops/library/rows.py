"""The ops over rows of logits as ``torch.ops.dspark.*``."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.library.define import define
from dspark.ops.types import Backend, Processors, Sampling, Stream

SAMPLING = (
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, bool all_greedy, bool any_truncation"
)
_SCHEMAS = {
    "sample": f"(Tensor logits, {SAMPLING}, Tensor position, Tensor? request, int stream, Tensor? salt, "
    "Tensor(a!) out, Tensor(b!)? workspace, str backend) -> ()",
    "truncate": f"(Tensor logits, {SAMPLING}, Tensor? request, Tensor(a!) out, Tensor(b!)? workspace, str backend) "
    "-> ()",
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
    return list(processors)


def flat(s: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool]:
    return s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.all_greedy, s.any_truncation


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


def _process_logits(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    processors: list[Tensor | None],
    max_query_len: int,
    out: Tensor,
    backend: Backend,
) -> None:
    from dspark.ops.sample.process import process_logits

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
    ("process_logits", _process_logits),
):
    define(_name, _SCHEMAS[_name], _implementation)
